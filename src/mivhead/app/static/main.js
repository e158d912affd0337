// The frame of the page: header, the two views, dialogs, messages, keys.
import { html, render, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { change, dismissToast, filesOf, follow, store, subscribe, toast, upload } from "./api.js";
import { CameraDialog } from "./camera.js";
import { CodeDialog, PhotoDialog } from "./dialogs.js";
import { Icon, IconButton } from "./parts.js";
import { clearSelection, SelectionBar } from "./selection.js";
import { past, say, t } from "./strings.js";
import { Teach } from "./teach.js";
import { TryIt } from "./tryit.js";

const viewOf = () => (location.hash === "#try" ? "try" : "teach");

function App() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  const [view, setView] = useState(viewOf());
  const [photo, setPhoto] = useState(null); // {id, list} of the open photo
  const [camera, setCamera] = useState(null); // the class that photos are taken of
  const [code, showCode] = useState(false);
  const target = useRef(null); // the class that a paste goes to
  useLayoutEffect(() => { // at once: the first state may be here before an effect runs
    let asked = false;
    return subscribe(() => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => ((asked = false), redraw()));
    });
  }, []);
  useEffect(() => {
    const go = () => (clearSelection(), setView(viewOf()), scrollTo(0, 0));
    const onKey = (event) => {
      const writing = /^(INPUT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
      if (event.key === "Escape" && !writing && !event.target.closest("dialog")) clearSelection();
      if (writing || !(event.ctrlKey || event.metaKey)) return;
      const key = event.key.toLowerCase();
      if (key === "z" || key === "y") {
        event.preventDefault();
        step(key === "y" || event.shiftKey ? "redo" : "undo");
      }
    };
    const onPaste = async (event) => {
      const { files: pasted, types } = event.clipboardData;
      const writing = /^(INPUT|TEXTAREA)$/.test(event.target.tagName) && types.includes("text/plain");
      if (writing || !pasted.length) return;
      event.preventDefault();
      const files = await filesOf(event.clipboardData);
      const name = target.current;
      if (viewOf() === "try") upload(files, null);
      else if (store.state?.classes.some((group) => group.name === name)) upload(files, name);
      else toast(t.pasteWhere);
    };
    const block = (event) => event.preventDefault(); // a file beside the areas must not be opened
    const listeners = { hashchange: go, keydown: onKey, paste: onPaste, dragover: block, drop: block };
    for (const [kind, listener] of Object.entries(listeners)) addEventListener(kind, listener);
  }, []);
  const { state, offline, expired } = store;
  if (!state) return expired || offline ? html`<${Banner} />` : null;
  document.title = `${state.project} · mivhead`;
  const open = (id, list) => setPhoto({ id, list });
  // The list follows the project: photos that were moved or deleted leave it.
  const known = photo && new Map([...state.classes.flatMap((c) => c.photos), ...state.new].map((p) => [p.id, p]));
  return html`
    <${Header} view=${view} showCode=${showCode} />
    <${Banner} />
    <main tabindex="-1">
      ${view === "try"
        ? html`<${TryIt} open=${open} />`
        : html`<${Teach} open=${open} camera=${setCamera} setTarget=${(name) => (target.current = name)} />`}
    </main>
    ${photo &&
    html`
      <${PhotoDialog}
        id=${photo.id} list=${photo.list.map((old) => known.get(old.id)).filter(Boolean)}
        onOpen=${(id) => setPhoto({ ...photo, id })} onClose=${() => setPhoto(null)}
      />
    `}
    ${camera && html`<${CameraDialog} name=${camera} onClose=${() => setCamera(null)} />`}
    ${code && html`<${CodeDialog} onClose=${() => showCode(false)} />`}
    <footer class="foot">
      <span>${!state.shared && t.stays} ${t.trash(2)}</span>
      <span>${state.message}</span>
    </footer>
    <${SelectionBar} />
    <${Messages} />
  `;
}

async function step(kind) {
  const what = say(store.state[kind]);
  if (what && (await change(kind))) toast(kind === "undo" ? t.undone(past(what)) : t.redone(past(what)));
}

function Header({ view, showCode }) {
  const { project, folder, undo, redo, learner, new: photos } = store.state;
  const stage = store.offline ? "offline" : learner.stage;
  const busy = !["ready", "waiting", "failed", "offline"].includes(stage);
  return html`
    <header class="top">
      <a class="brand" href="#teach" title=${folder}><img src="/static/icon.svg" alt="" width="26" height="26" /><span>${project}</span></a>
      <nav class="tabs" aria-label=${t.views}>
        <a href="#teach" aria-current=${view === "teach" ? "page" : null}>${t.teach}</a>
        <a href="#try" aria-current=${view === "try" ? "page" : null}>
          ${t.tryIt}${photos.length > 0 && html` <span class="count">${photos.length}</span>`}
        </a>
      </nav>
      <span class="status ${stage} ${busy ? "busy" : ""}" role="status"><i></i>${t.stages[stage]}</span>
      <div class="tools-right">
        <${IconButton}
          icon="undo" label=${undo ? t.undoWhat(say(undo)) : t.nothingToUndo} disabled=${!undo} onClick=${() => step("undo")}
        />
        <${IconButton}
          icon="redo" label=${redo ? t.redoWhat(say(redo)) : t.nothingToRedo} disabled=${!redo} onClick=${() => step("redo")}
        />
        <${Downloads} showCode=${showCode} />
      </div>
    </header>
  `;
}

// Why something cannot be downloaded now, or nothing.
function lackingFor(what) {
  const { webExports, model } = store.state;
  if (what === "web" && !webExports) return t.downloadRuntime;
  return ["model", "onnx", "web"].includes(what) && !model ? t.downloadModelLater : "";
}

function Downloads({ showCode }) {
  const box = useRef();
  const shut = () => {
    box.current.open = false;
    box.current.firstElementChild.focus(); // where a dialog returns to
  };
  useEffect(() => {
    const close = (event) => {
      const outside = event.type === "click" ? !box.current.contains(event.target) : event.key === "Escape";
      if (outside && box.current.open) {
        box.current.open = false;
        if (event.key) box.current.firstElementChild.focus();
      }
    };
    addEventListener("click", close);
    addEventListener("keydown", close);
  }, []);
  return html`
    <details class="menu" ref=${box}>
      <summary class="button" aria-label=${t.download}><${Icon} name="download" /><span>${t.download}</span></summary>
      <div class="menu-items">
        ${t.downloads.map(([what, title, text]) =>
          lackingFor(what)
            ? html`<span key=${what} class="item off"><b>${title}</b><small>${lackingFor(what)}</small></span>`
            : html`
                <a key=${what} class="item" href="/download/${what}" download onClick=${shut}>
                  <b>${title}</b><small>${text}</small>
                </a>
              `,
        )}
        <button type="button" class="item" onClick=${() => (shut(), showCode(true))}>
          <b>${t.useInCode[0]}</b><small>${t.useInCode[1]}</small>
        </button>
      </div>
    </details>
  `;
}

function Banner() {
  const text = store.expired ? t.expired : store.offline ? t.offline : "";
  return text && html`<p class="banner" role="alert"><${Icon} name="warn" /> ${text}</p>`;
}

function Messages() {
  const { uploads, toasts } = store;
  return html`
    <div class="messages">
      ${uploads.done < uploads.all &&
      html`
        <div class="toast progress">
          <span>${t.adding(uploads.done, uploads.all)}${uploads.waiting ? ` (${t.waitingForApp})` : ""}</span>
          <progress value=${uploads.done} max=${uploads.all} aria-label=${t.adding(uploads.done, uploads.all)}></progress>
        </div>
      `}
      <div aria-live="polite">
        ${toasts.map(
          (message) => html`
            <div key=${message.id} class="toast ${message.kind}">
              <span>${message.text}</span>
              ${message.action &&
              html`<button type="button" class="link" onClick=${() => (message.action.run(), dismissToast(message.id))}>${message.action.text}</button>`}
              <${IconButton} icon="close" label=${t.dismiss} onClick=${() => dismissToast(message.id)} />
            </div>
          `,
        )}
      </div>
    </div>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
follow();
