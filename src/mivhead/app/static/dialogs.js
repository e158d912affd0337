// Dialogs: one photo in large, code to copy.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { move, remove, store, toast } from "./api.js";
import { Dialog, Icon, IconButton, Ranking, titleOf } from "./parts.js";
import { ClassChoice } from "./selection.js";
import { kindOf, NONE, percent } from "./shared.js";
import { t } from "./strings.js";

export function PhotoDialog({ id, list, onOpen, onClose }) {
  const { classes, predictions, estimate } = store.state;
  const index = list.findIndex((item) => item.id === id);
  const last = useRef(index);
  const photo = list[index];
  const [looked, setLooked] = useState(false);
  const [reasons, setReasons] = useState(null);
  const owner = classes.find((group) => group.photos.some((p) => p.id === id));
  const prediction = predictions[id];
  const suspect = estimate?.suspects.find((shot) => shot.id === id && shot.label === owner?.name);
  const shown = useRef(id);
  shown.current = id;
  useEffect(() => {
    setReasons(null);
    setLooked(false);
    if (!prediction) return;
    let current = true;
    fetch(`/api/explain/${id}`)
      .then((answer) => (answer.ok ? answer.json() : null))
      .then((document) => current && setReasons(document))
      .catch(() => {});
    return () => (current = false);
  }, [id]);
  useEffect(() => {
    if (photo) last.current = index;
    else if (list.length) onOpen(list[Math.min(last.current, list.length - 1)].id); // the next one
    else onClose();
  });
  const place = photo ? index : Math.min(last.current, list.length - 1);
  const go = (step) => list[place + step] && onOpen(list[place + step].id);
  const onKey = (event) => {
    if (/^(SELECT|INPUT)$/.test(event.target.tagName) && event.target.type !== "checkbox") return;
    if (event.key === "ArrowLeft") go(-1);
    else if (event.key === "ArrowRight") go(1);
    else if (event.key === "Delete") remove([id]);
  };
  const restore = () => document.querySelector(`[data-photo="${shown.current}"]`);
  if (!photo) return null;
  return html`
    <${Dialog} title=${photo.name} wide onClose=${onClose} onKey=${onKey} restore=${restore}>
      <div class="photo-dialog">
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
          ${prediction &&
          html`
            <h3 class="decision ${kindOf(prediction.decision)}">${titleOf(prediction)}</h3>
            ${prediction.decision !== NONE && html`<p class="quiet">${t.decided(prediction)} ${reasons?.reason}</p>`}
            <${Ranking} prediction=${prediction} />
            <label class="check">
              <input type="checkbox" checked=${looked} onChange=${(event) => setLooked(event.target.checked)} />
              ${t.whereItLooked}
            </label>
            ${reasons?.shots?.length > 0 &&
            html`
              <h3>${t.closest}</h3>
              <div class="closest">
                ${reasons.shots.map(
                  (shot) => html`<img key=${shot.id} src="/thumb/${shot.id}" alt=${shot.class} title=${shot.class} />`,
                )}
              </div>
            `}
          `}
          <div class="field">
            <span>${t.inClass}${owner && html`: <b>${owner.name}</b>`}</span>
            <${ClassChoice}
              key=${id} label=${t.inClass} empty=${t.moveSelected} newLabel=${t.newClassFor(photo.name)}
              onChoose=${(name, more) => name !== owner?.name && move([id], name, more)}
            />
          </div>
          <button type="button" class="button danger" title=${t.trash(1)} onClick=${() => remove([id])}>
            <${Icon} name="trash" /> ${t.deletePhoto}
          </button>
        </div>
      </div>
    <//>
  `;
}

const quoted = (path) => (/^[\w./~-]+$/.test(path) ? path : JSON.stringify(path));

function Code({ text }) {
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    toast(t.copied);
  };
  return html`
    <div class="code">
      <pre tabindex="0"><code>${text}</code></pre>
      ${navigator.clipboard && html`<button type="button" class="button" onClick=${copy}>${t.copy}</button>`}
    </div>
  `;
}

export function CodeDialog({ onClose }) {
  const path = store.state.model ?? `${store.state.folder}/model.miv`;
  const { steps, step } = store.state.errors;
  const texts = [
    `miv predict ${quoted(path)} new-photos/ --sort-into sorted/ --max-errors ${percent(steps[step])}`,
    `import mivhead

model = mivhead.load(${JSON.stringify(path)})
for photo in model.classify("new-photos/", max_errors=${steps[step]}):
    print(photo.id, photo.decision)`,
    `miv serve ${quoted(path)}
curl -F images=@photo.jpg 127.0.0.1:8765/v1/predict`,
  ];
  return html`
    <${Dialog} title=${t.code} wide onClose=${onClose}>
      ${t.codeParts.map(
        ([title, text], i) => html`<h3 key=${title}>${title}</h3><p class="quiet">${text}</p><${Code} text=${texts[i]} />`,
      )}
    <//>
  `;
}
