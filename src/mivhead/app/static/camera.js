// The camera: photos for a class, one or many, and names while you hold something up.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { fromInput, nameFrame, newBatch, store, toast, upload } from "./api.js";
import { Dialog, FileButton, Icon, Ranking, titleOf } from "./parts.js";
import { kindOf } from "./shared.js";
import { t } from "./strings.js";

const FIRST = 400; // milliseconds that the button is held before more photos are taken
const EVERY = 200;
const MOST = 60; // photos while it is held
const SEEN = 448; // pixels of the width of a frame that is only named

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// A video element's stream. `several` cameras can be turned through.
function useCamera() {
  const video = useRef();
  const [problem, setProblem] = useState(navigator.mediaDevices ? "" : "insecure");
  const [cameras, setCameras] = useState([]);
  const [chosen, choose] = useState(null);
  useEffect(() => {
    if (!navigator.mediaDevices) return;
    let stream = null;
    let closed = false;
    const which = chosen ? { deviceId: { exact: chosen } } : { facingMode: "environment" };
    navigator.mediaDevices
      .getUserMedia({ video: { ...which, width: { ideal: 1280 } } })
      .then(async (opened) => {
        stream = opened;
        if (closed) return stop(stream);
        video.current.srcObject = stream;
        const devices = await navigator.mediaDevices.enumerateDevices();
        if (!closed) setCameras(devices.filter((device) => device.kind === "videoinput").map((device) => device.deviceId));
      })
      .catch(() => closed || setProblem("refused"));
    return () => ((closed = true), stop(stream));
  }, [chosen]);
  const turn = () => {
    const now = video.current.srcObject?.getVideoTracks()[0]?.getSettings().deviceId;
    choose(cameras[(cameras.indexOf(now) + 1) % cameras.length]);
  };
  return { video, problem, several: cameras.length > 1, turn };
}

const stop = (stream) => stream?.getTracks().forEach((track) => track.stop());

function frameOf(video, most = Infinity, quality = 0.92) {
  const { videoWidth: width, videoHeight: height } = video;
  if (!width) return Promise.resolve(null);
  const scale = Math.min(1, most / width);
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", quality));
}

const named = (file) => {
  const when = new Date().toISOString().slice(0, 19).replace(/[T:]/g, "-");
  return { file, name: `camera ${when}.jpg` };
};

const NoCamera = ({ problem, onFiles }) => html`
  <p class="note warn"><${Icon} name="warn" /> ${problem === "insecure" ? t.noCameraHere : t.noCamera}</p>
  ${problem === "insecure" &&
  html`<div class="row"><${FileButton} camera className="button primary" onFiles=${onFiles}><${Icon} name="camera" /> ${t.take}<//></div>`}
`;

const TurnButton = ({ several, turn }) =>
  several && html`<button type="button" class="button" onClick=${turn}><${Icon} name="turn" /> ${t.otherCamera}</button>`;

export function CameraDialog({ name, onClose }) {
  const { video, problem, several, turn } = useCamera();
  const held = useRef(null);
  const button = useRef();
  const [taken, setTaken] = useState(0);
  const end = () => {
    clearTimeout(held.current?.timer);
    held.current = null;
  };
  useEffect(() => (button.current?.focus(), end), []);
  const take = async () => {
    const { batch } = held.current;
    const file = await frameOf(video.current);
    if (!file) return;
    upload([named(file)], name, batch);
    setTaken((n) => n + 1);
  };
  // The first photo at once; more of them as long as the button is held.
  const begin = () => {
    if (held.current) return;
    held.current = { batch: newBatch(), count: 0 };
    const next = () => {
      if (held.current.count++ >= MOST) return;
      take();
      held.current.timer = setTimeout(next, held.current.count === 1 ? FIRST : EVERY);
    };
    next();
  };
  const isKey = (event) => event.key === "Enter" || event.key === " ";
  const onFiles = (files) => upload(fromInput(files), name);
  return html`
    <${Dialog} title=${t.cameraTitle(name)} onClose=${onClose}>
      ${problem
        ? html`<${NoCamera} problem=${problem} onFiles=${onFiles} />`
        : html`
            <video ref=${video} autoplay playsinline muted aria-label=${t.camera}></video>
            <div class="row">
              <button
                type="button" class="button primary" ref=${button}
                onPointerDown=${(event) => event.button === 0 && begin()} onPointerUp=${end} onPointerLeave=${end} onPointerCancel=${end}
                onContextMenu=${(event) => event.preventDefault()}
                onKeyDown=${(event) => isKey(event) && (event.preventDefault(), event.repeat || begin())}
                onKeyUp=${(event) => isKey(event) && (event.preventDefault(), end())} onBlur=${end}
                onClick=${(event) => event.detail === 0 && (begin(), end())}
              >
                <${Icon} name="camera" /> ${t.take}
              </button>
              <${TurnButton} several=${several} turn=${turn} />
              <span aria-live="polite">${taken > 0 && t.taken(taken)}</span>
            </div>
            <p class="quiet">${t.takeHint}</p>
          `}
    <//>
  `;
}

// A button that shows names of what the camera sees.
export function Live() {
  const [on, setOn] = useState(false);
  const button = useRef();
  return html`
    <button ref=${button} type="button" class="button live-button" aria-label=${t.live} aria-expanded=${on} onClick=${() => setOn(!on)}>
      <${Icon} name="live" /> <span>${t.live}</span>
    </button>
    ${on && html`<${LivePanel} onClose=${() => (setOn(false), button.current.focus())} />`}
  `;
}

function LivePanel({ onClose }) {
  const { video, problem, several, turn } = useCamera();
  const [prediction, setPrediction] = useState(null);
  const [spoken, setSpoken] = useState("");
  const box = useRef();
  useEffect(() => {
    box.current.focus();
    let on = true;
    let last = "";
    let since = 0;
    (async () => {
      while (on) {
        const frame = video.current && store.state.model && !document.hidden ? await frameOf(video.current, SEEN) : null;
        const answer = frame && (await nameFrame(frame));
        if (!on) return;
        if (answer) {
          setPrediction(answer);
          if (answer.decision !== last) since = Date.now();
          else if (Date.now() - since > 1000) setSpoken(titleOf(answer)); // not every flicker is read out
          last = answer.decision;
        }
        await pause(answer ? 60 : 500);
      }
    })();
    return () => (on = false);
  }, []);
  const keep = async () => {
    const file = await frameOf(video.current);
    if (file) upload([named(file)], null), toast(t.keptFrame);
  };
  return html`
    <section class="live" ref=${box} tabindex="-1" aria-label=${t.live}>
      ${problem
        ? html`<div><${NoCamera} problem=${problem} onFiles=${(files) => upload(fromInput(files), null)} /></div>`
        : html`
            <div class="seen">
              <video ref=${video} autoplay playsinline muted aria-label=${t.camera}></video>
              ${prediction && html`<p class="live-name ${kindOf(prediction.decision)}">${titleOf(prediction)}</p>`}
            </div>
          `}
      <div class="live-facts">
        ${!problem && html`<h2>${t.liveTitle}</h2>`}
        <p class="unseen" role="status">${spoken}</p>
        ${!store.state.model && html`<p class="quiet">${t.tryFirst}</p>`}
        ${prediction && html`<${Ranking} prediction=${prediction} />`}
        <div class="row">
          ${!problem && html`<button type="button" class="button primary" onClick=${keep}><${Icon} name="camera" /> ${t.keepFrame}</button>`}
          <${TurnButton} several=${several} turn=${turn} />
          <button type="button" class="button" onClick=${onClose}>${problem ? t.close : t.stopLive}</button>
        </div>
      </div>
    </section>
  `;
}
