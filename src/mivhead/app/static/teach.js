// The page Teach: a card per class, and how good the model is.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { change, dismissProblems, fromInput, move, newBatch, store, toast, undoable, upload } from "./api.js";
import { Live } from "./camera.js";
import { Bar, FileButton, Icon, IconButton, IDS, Thumbnail, useDrop, VirtualGrid } from "./parts.js";
import { clicked, extend, idsWith, isSelected, moveSelected, selectionKey, toggle, touchStart } from "./selection.js";
import { percent } from "./shared.js";
import { t } from "./strings.js";

export function Teach({ open, camera, setTarget }) {
  const { classes, estimate } = store.state;
  const [over, drop] = useDrop(addFolders);
  if (!classes.length) return html`<${Welcome} />`;
  const suspects = new Map((estimate?.suspects ?? []).map((shot) => [shot.id, shot]));
  return html`
    <div class="teach">
      <h1 class="unseen">${t.teach}</h1>
      <section class="cards ${over ? "over" : ""}" tabindex="-1" aria-label=${t.teach} ...${drop}>
        ${classes.map(
          (group) => html`
            <${ClassCard}
              key=${group.name} name=${group.name} photos=${group.photos} suspects=${suspects}
              score=${estimate?.classes[group.name]} open=${open} camera=${camera} setTarget=${setTarget}
            />
          `,
        )}
        <${NewClass} />
      </section>
      <${Insights} open=${open} />
    </div>
  `;
}

// Folders become classes; the last folder above a photo names its class.
async function addFolders(files) {
  const named = new Map();
  for (const item of files) {
    const name = item.folders.at(-1);
    if (name) named.set(name, [...(named.get(name) ?? []), item]);
  }
  if (!named.size) {
    toast(files.length ? t.dropWhere : t.noImages);
    return;
  }
  const batch = newBatch(); // one step to undo
  for (const [name, photos] of named) {
    const known = store.state.classes.find((group) => group.name.toLowerCase() === name.toLowerCase());
    if (known || (await change("add class", { name, batch }))) upload(photos, known?.name ?? name, batch);
  }
}

function Welcome() {
  const [over, drop] = useDrop(addFolders);
  const [names, setNames] = useState(["", ""]);
  const submit = async (event) => {
    event.preventDefault();
    for (const name of names) if (name.trim()) await change("add class", { name });
  };
  const field = (i, label) => html`
    <label class="field">
      <span>${label}</span>
      <input
        type="text" maxlength="80" value=${names[i]} placeholder=${t.examples[i]}
        onInput=${(event) => setNames(names.map((old, at) => (at === i ? event.target.value : old)))}
      />
    </label>
  `;
  return html`
    <section class="welcome ${over ? "over" : ""}" ...${drop}>
      <img src="/static/icon.svg" alt="" width="56" height="56" />
      <h1>${t.welcome}</h1>
      <p>${t.welcomeText}</p>
      <form onSubmit=${submit}>
        ${field(0, t.firstClass)} ${field(1, t.secondClass)}
        <button class="button primary" disabled=${!names.some((name) => name.trim())}>${t.start}</button>
      </form>
      <p class="quiet"><${Icon} name="folder" /> ${t.orDropFolder}</p>
      <div class="row">
        <${FileButton} folder onFiles=${(files) => addFolders(fromInput(files))}>
          <${Icon} name="folder" /> ${t.chooseFolderOfClasses}
        <//>
        <button type="button" class="button" onClick=${() => change("example")}><${Icon} name="photos" /> ${t.example}</button>
      </div>
    </section>
  `;
}

function ClassCard({ name, photos, score, suspects, open, camera, setTarget }) {
  const [naming, setNaming] = useState(false);
  const add = (files) => (files.length ? upload(files, name) : toast(t.noImages));
  const [over, drop] = useDrop(add, (ids) => moveSelected(ids, name));
  const remove = async () => {
    const box = document.querySelector(".cards");
    if (await undoable("delete class", { name }, t.deletedClass(name, photos.length))) box.focus();
  };
  const problems = store.problems.filter((problem) => problem.target === name);
  const target = () => setTarget(name);
  const tested = score?.[1] ?? 0;
  return html`
    <article
      class="card ${over ? "over" : ""}" aria-label=${name} data-class=${name} onPointerEnter=${target} onfocusin=${target} ...${drop}
    >
      <header>
        ${naming
          ? html`<${NameField} name=${name} onDone=${() => setNaming(false)} />`
          : html`
              <h2 title=${name} onDblClick=${() => setNaming(true)}>${name}</h2>
              <${IconButton} icon="pencil" label=${t.rename(name)} onClick=${() => setNaming(true)} />
              <${IconButton} icon="trash" label=${t.deleteClass(name)} title=${`${t.deleteClass(name)}. ${t.trash(photos.length)}`} onClick=${remove} />
            `}
      </header>
      <p class="meta">
        <span>${t.photos(photos.length)}</span>
        ${tested > 0 &&
        html`<span class="score"><${Bar} value=${score[2] / tested} /> ${t.rightOf(score[2], tested)}</span>`}
      </p>
      ${name === store.state.other && html`<p class="note">${t.otherNote}</p>`}
      ${photos.length
        ? html`
            <${VirtualGrid}
              scrolls items=${photos} cell=${72} gap=${6} label=${t.photosOf(name)} onExtend=${extend}
              render=${(photo, _, tab) => html`
                <${Thumb}
                  photo=${photo} photos=${photos} suspect=${suspects.get(photo.id)} label=${name} tab=${tab}
                  onOpen=${() => open(photo.id, photos)}
                />
              `}
            />
          `
        : html`<div class="empty"><${Icon} name="photos" /><span>${t.dropHere}</span><small>${t.pasteHint}</small></div>`}
      <${Problems} problems=${problems} />
      <footer>
        <${FileButton} label=${t.addPhotosTo(name)} onFiles=${(files) => add(fromInput(files))}>
          <${Icon} name="plus" /> ${t.addPhotos}
        <//>
        <button type="button" class="button" aria-label=${t.cameraFor(name)} onClick=${() => camera(name)}>
          <${Icon} name="camera" /> ${t.camera}
        </button>
      </footer>
      ${over && html`<div class="veil" aria-hidden="true">${t.dropOn(name)}</div>`}
    </article>
  `;
}

function NameField({ name, onDone }) {
  const input = useRef();
  const closing = useRef(false);
  useEffect(() => (input.current.focus(), input.current.select()), []);
  const save = async () => {
    if (closing.current) return;
    closing.current = true;
    const to = input.current.value.trim();
    onDone();
    if (!to || to === name) return;
    const into = store.state.classes.find((group) => group.name.toLowerCase() === to.toLowerCase() && group.name !== name);
    if (into) await undoable("rename class", { name, to }, t.merged(name, into.name));
    else await change("rename class", { name, to });
  };
  const onKey = (event) => {
    if (event.key === "Enter") save();
    if (event.key === "Escape") {
      closing.current = true;
      onDone();
    }
  };
  return html`
    <input
      ref=${input} type="text" class="name-field" maxlength="80" aria-label=${t.className} defaultValue=${name}
      value=${name} onBlur=${save} onKeyDown=${onKey}
    />
  `;
}

function Thumb({ photo, photos, suspect, label, tab, onOpen }) {
  const wrong = suspect && suspect.label === label && !isKept(photo.id);
  const text = wrong ? `${photo.name}. ${t.suspicious(suspect.predicted)}` : photo.problem || photo.name;
  const chosen = isSelected(photo.id);
  return html`
    <button
      type="button" class="thumb ${wrong ? "suspect" : ""} ${photo.problem ? "bad" : ""} ${chosen ? "chosen" : ""}"
      data-focus data-photo=${photo.id} draggable tabindex=${tab} title=${text} aria-label=${text}
      aria-pressed=${store.selected.size ? chosen : null}
      onClick=${(event) => clicked(event, photo.id, photos) || onOpen()}
      onDragStart=${(event) => {
        event.dataTransfer.setData(IDS, JSON.stringify(idsWith(photo.id)));
        event.dataTransfer.effectAllowed = "move";
      }}
      ontouchstart=${(event) => touchStart(event, photo.id)}
      onContextMenu=${(event) => event.preventDefault()}
      onKeyDown=${(event) => selectionKey(event, photo.id, photos)}
    >
      ${photo.problem
        ? html`<${Icon} name="warn" />`
        : html`<${Thumbnail} id=${photo.id} draggable=${false} />`}
      <span class="tick" aria-hidden="true" onClick=${(event) => (event.stopPropagation(), toggle(photo.id))}><${Icon} name="check" /></span>
    </button>
  `;
}

const MAX_SHOWN = 4;
export function Problems({ problems }) {
  if (!problems.length) return null;
  const keys = new Set(problems.map((problem) => problem.key));
  return html`
    <ul class="problems" role="alert">
      ${problems.slice(0, MAX_SHOWN).map(
        (problem) => html`
          <li key=${problem.key}>
            <${Icon} name="warn" /> <span>${problem.message}</span>
            <${IconButton} icon="close" label=${t.dismiss} onClick=${() => dismissProblems((p) => p.key === problem.key)} />
          </li>
        `,
      )}
      ${problems.length > 1 &&
      html`
        <li class="all">
          <span>${problems.length > MAX_SHOWN ? t.moreProblems(problems.length - MAX_SHOWN) : ""}</span>
          <button type="button" class="link" onClick=${() => dismissProblems((p) => keys.has(p.key))}>${t.dismissAll}</button>
        </li>
      `}
    </ul>
  `;
}

function NewClass() {
  const [name, setName] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    if (name.trim() && (await change("add class", { name }))) setName("");
  };
  return html`
    <form class="card new-class" onSubmit=${submit}>
      <label class="field">
        <span><${Icon} name="plus" /> ${t.newClass}</span>
        <input
          type="text" maxlength="80" value=${name} aria-label=${t.newClassName}
          onInput=${(event) => setName(event.target.value)}
        />
      </label>
      <button class="button" disabled=${!name.trim()}>${t.create}</button>
      <p class="quiet">${t.orDropFolder}</p>
      <${FileButton} folder onFiles=${(files) => addFolders(fromInput(files))}>
        <${Icon} name="folder" /> ${t.chooseFolderOfClasses}
      <//>
      <p class="quiet">${t.selectHint}</p>
    </form>
  `;
}

// Photos that the user has confirmed are no longer suspicious.
const KEPT = "miv-kept";
const isKept = (id) => (localStorage.getItem(KEPT) ?? "").includes(id);
const keepPhoto = (id) => localStorage.setItem(KEPT, `${localStorage.getItem(KEPT) ?? ""} ${id}`.slice(-20000));

// What would help, the most important first; classes are [photos, tested, right] by name.
const [ENOUGH, GOOD, MAX_WEAK] = [5, 0.8, 2];
function adviceOf({ classes, tested, right }, suspects) {
  const rows = Object.entries(classes).filter(([name]) => name !== store.state.other);
  const score = ([, [, tested, right]]) => right / tested;
  const single = rows.filter(([, [photos]]) => photos === 1);
  const weak = rows.filter((row) => score(row) < GOOD).sort((a, b) => score(a) - score(b)).slice(0, MAX_WEAK);
  const few = rows.filter((row) => row[1][0] < ENOUGH && !single.includes(row) && !weak.includes(row));
  const names = (some) => some.map(([name]) => name);
  const texts = [];
  if (suspects.length) texts.push(t.adviceCheck(suspects.length));
  if (single.length) texts.push(t.adviceSingle(names(single)));
  if (weak.length) texts.push(t.adviceErrors(weak));
  if (few.length) texts.push(t.adviceFew(names(few)));
  if (!texts.length) texts.push(right === tested ? t.adviceTry : t.adviceNone);
  return texts;
}

function Insights({ open }) {
  const { classes, errors, estimate, learner } = store.state;
  const [, again] = useState(0);
  const stale = !["ready", "waiting", "failed"].includes(learner.stage);
  const [right, wrong] = (estimate?.names[errors.step] ?? []).map((share) => Math.round(100 * share));
  const owner = new Map(classes.flatMap((group) => group.photos.map((photo) => [photo.id, group.name])));
  const suspects = (estimate?.suspects ?? []).filter((s) => owner.get(s.id) === s.label && !isKept(s.id));
  return html`
    <aside class="insights" aria-label=${t.howGood}>
      <${Live} />
      <h2>${t.howGood}</h2>
      ${learner.problem && html`<p class="note ${learner.stage === "failed" ? "warn" : ""}">${learner.problem}</p>`}
      ${estimate?.accuracy != null
        ? html`
            <div class="headline ${stale ? "stale" : ""}">
              <${Ring} value=${right / 100} />
              <p>${stale ? t.outdated : t.accuracyText(right, wrong, Math.max(0, 100 - right - wrong))}</p>
            </div>
            ${!stale && right + wrong < 10 && html`<p class="note warn">${t.almostNothing}</p>`}
            <${Fold} title=${t.whatHelps}>
              <ul class="plain">
                ${adviceOf(estimate, suspects).map((text) => html`<li key=${text}>${text}</li>`)}
              </ul>
              <p class="quiet">${t.intervalText(estimate.accuracy, ...estimate.interval, estimate.right, estimate.tested)}</p>
            <//>
          `
        : html`<p class="quiet">${stale ? t.stages[learner.stage] : t.noEstimateYet}</p>`}
      ${suspects.length > 0 &&
      html`
        <${Fold} title="${t.suspects} (${suspects.length})">
        <ul class="suspects">
          ${suspects.slice(0, 5).map((suspect) => {
            const photo = classes.find((c) => c.name === suspect.label).photos.find((p) => p.id === suspect.id);
            return html`
              <li key=${suspect.id}>
                <button type="button" class="thumb" data-photo=${suspect.id} aria-label=${photo.name} onClick=${() => open(suspect.id, [photo])}>
                  <${Thumbnail} id=${suspect.id} />
                </button>
                <div>
                  <p>${t.suspectText(suspect)} <span class="quiet">${percent(suspect.probability)}</span></p>
                  <button type="button" class="link" onClick=${() => move([suspect.id], suspect.predicted)}>
                    ${t.moveTo(suspect.predicted)}
                  </button>
                  <button
                    type="button" class="link" aria-label=${t.keepPhoto(photo.name)}
                    onClick=${() => (keepPhoto(suspect.id), again((n) => n + 1))}
                  >
                    ${t.keep}
                  </button>
                </div>
              </li>
            `;
          })}
        </ul>
        <//>
      `}
      ${estimate?.accuracy != null &&
      html`
        <${Fold} title=${t.confusions}>
          ${estimate.confusions.length
            ? html`
                <ul class="plain confusions">
                  ${estimate.confusions.slice(0, 6).map(
                    ([n, label, best]) => html`
                      <li key=${label + "\n" + best}><b>${n} ×</b> <span>${t.confusion(n, label, best)}</span></li>
                    `,
                  )}
                </ul>
              `
            : html`<p class="quiet">${t.noConfusions}</p>`}
        <//>
      `}
    </aside>
  `;
}

// Details that are folded where they would push the classes out of sight.
const Fold = ({ title, children }) => html`
  <details class="fold" open=${innerWidth > 1000}>
    <summary><h3>${title}</h3></summary>
    ${children}
  </details>
`;

function Ring({ value }) {
  const round = 2 * Math.PI * 42;
  return html`
    <svg class="ring" viewBox="0 0 100 100" role="img" aria-label=${percent(value)}>
      <circle cx="50" cy="50" r="42" class="track" />
      <circle cx="50" cy="50" r="42" class=${value > 0 ? "value" : ""} stroke-dasharray="${round * value} ${round}" transform="rotate(-90 50 50)" />
      <text x="50" y="57" text-anchor="middle">${percent(value)}</text>
    </svg>
  `;
}
