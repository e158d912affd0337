// Dialogs: one photo in large, and the camera.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { change, store, upload } from "./api.js";
import { Bar, Dialog, Icon, IconButton } from "./parts.js";
import { percent, t } from "./strings.js";

export function PhotoDialog({ id, list, onOpen, onClose }) {
  const { classes, predictions, estimate } = store.state;
  const place = list.findIndex((each) => each.id === id);
  const photo = list[place];
  const [looked, setLooked] = useState(false);
  const [reasons, setReasons] = useState(null);
  const owner = classes.find((each) => each.photos.some((p) => p.id === id));
  const found = predictions[id];
  const suspect = estimate?.suspects.find((each) => each.id === id && each.label === owner?.name);
  useEffect(() => {
    setReasons(null);
    setLooked(false);
    if (!found) return;
    let current = true;
    fetch(`/api/explain/${id}`)
      .then((answer) => (answer.ok ? answer.json() : null))
      .then((document) => current && setReasons(document))
      .catch(() => {});
    return () => (current = false);
  }, [id]);
  useEffect(() => {
    if (!photo) onClose();
  });
  if (!photo) return null;
  const go = (step) => list[place + step] && onOpen(list[place + step].id);
  const onKey = (event) => {
    if (/^(SELECT|INPUT)$/.test(event.target.tagName)) return;
    if (event.key === "ArrowLeft") go(-1);
    else if (event.key === "ArrowRight") go(1);
    else if (event.key === "Delete") change("delete", { ids: [id] });
  };
  return html`
    <${Dialog} title=${photo.name} wide onClose=${onClose}>
      <div class="photo-dialog" onKeyDown=${onKey}>
        <div class="stage">
          ${photo.problem
            ? html`<p class="problem"><${Icon} name="warn" /> ${photo.problem}</p>`
            : html`<img src=${looked ? `/look/${id}` : `/photo/${id}`} alt=${photo.name} />`}
          <${IconButton} icon="left" label=${t.previous} disabled=${place < 1} onClick=${() => go(-1)} />
          <${IconButton}
            icon="right" label=${t.next} disabled=${place > list.length - 2} onClick=${() => go(1)}
          />
        </div>
        <div class="facts">
          ${suspect && html`<p class="note warn"><${Icon} name="warn" /> ${t.suspicious(suspect.predicted)}</p>`}
          ${found &&
          html`
            <ul class="ranking">
              ${found.top.map(
                ([name, p]) => html`
                  <li key=${name}><span class="name">${name}</span> <span>${percent(p)}</span> <${Bar} value=${p} /></li>
                `,
              )}
            </ul>
            <label class="check">
              <input type="checkbox" checked=${looked} onChange=${(event) => setLooked(event.target.checked)} />
              ${t.whereItLooked}
            </label>
            ${reasons?.shots?.length > 0 &&
            html`
              <h3>${t.closest}</h3>
              <div class="closest">
                ${reasons.shots.map(
                  (each) => html`<img key=${each.id} src="/thumb/${each.id}" alt=${each.class} title=${each.class} />`,
                )}
              </div>
            `}
          `}
          <label class="field">
            <span>${t.inClass}</span>
            <select
              value=${owner?.name ?? ""}
              onChange=${(event) => event.target.value && change("move", { ids: [id], to: event.target.value })}
            >
              ${!owner && html`<option value="">–</option>`}
              ${classes.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
            </select>
          </label>
          <button type="button" class="button danger" onClick=${() => change("delete", { ids: [id] })}>
            <${Icon} name="trash" /> ${t.deletePhoto}
          </button>
        </div>
      </div>
    <//>
  `;
}

export function CameraDialog({ name, onClose }) {
  const video = useRef();
  const timer = useRef();
  const [failed, setFailed] = useState(false);
  const [taken, setTaken] = useState(0);
  useEffect(() => {
    let stream = null;
    let closed = false;
    const wanted = { video: { facingMode: "environment", width: { ideal: 1280 } } };
    Promise.resolve()
      .then(() => navigator.mediaDevices.getUserMedia(wanted))
      .then((found) => {
        stream = found;
        if (closed) stream.getTracks().forEach((track) => track.stop());
        else video.current.srcObject = stream;
      })
      .catch(() => setFailed(true));
    return () => {
      closed = true;
      clearInterval(timer.current);
      stream?.getTracks().forEach((track) => track.stop());
    };
  }, []);
  const take = () => {
    const { videoWidth: width, videoHeight: height } = video.current;
    if (!width) return;
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width, height });
    canvas.getContext("2d").drawImage(video.current, 0, 0);
    const when = new Date().toISOString().slice(0, 19).replace(/[T:]/g, "-");
    canvas.toBlob(
      (file) => {
        upload([{ file, name: `camera ${when}.jpg` }], name);
        setTaken((n) => n + 1);
      },
      "image/jpeg",
      0.92,
    );
  };
  return html`
    <${Dialog} title=${t.cameraTitle(name)} onClose=${onClose}>
      ${failed
        ? html`<p class="note warn"><${Icon} name="warn" /> ${t.noCamera}</p>`
        : html`
            <video ref=${video} autoplay playsinline muted aria-label=${t.camera}></video>
            <div class="row">
              <button type="button" class="button primary" onClick=${take}>
                <${Icon} name="camera" /> ${t.take}
              </button>
              <span aria-live="polite">${taken > 0 && t.taken(taken)}</span>
            </div>
          `}
    <//>
  `;
}
