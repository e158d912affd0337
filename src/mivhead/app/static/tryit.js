// The page Try it: new photos, what they were named, and corrections.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { change, fromInput, remove, store, suggestions, toast, undoable, upload } from "./api.js";
import { Live } from "./camera.js";
import { Bar, FileButton, Icon, IconButton, Thumbnail, titleOf, useDrop, VirtualGrid } from "./parts.js";
import { ClassChoice, clicked, extend, isSelected, selectionKey, toggle, touchStart } from "./selection.js";
import { kindOf, percent } from "./shared.js";
import { t } from "./strings.js";
import { Problems } from "./teach.js";

const KINDS = ["all", "named", "unsure", "none", "notYet"];
const kindIn = (item) => (item.prediction ? kindOf(item.prediction.decision) : "notYet");

const SORTS = {
  sure: (a, b) => (b.prediction?.probability ?? 0) - (a.prediction?.probability ?? 0),
  name: (a, b) => a.photo.name.localeCompare(b.photo.name, "en", { numeric: true }),
};

export function TryIt({ open }) {
  const { classes, new: photos, predictions } = store.state;
  const [filter, setFilter] = useState("all");
  const [sort, setSort] = useState("newest");
  const [reasons, setReasons] = useState({}); // why to label photos next, by id, the best ones first
  const [asking, setAsking] = useState(false);
  const ready = store.state.learner.stage === "ready";
  useEffect(() => {
    if (sort !== "useful" || !ready) return;
    setAsking(true);
    suggestions().then((answer) => (setReasons(answer), setAsking(false)));
  }, [sort, ready]);
  const add = (files) => (files.length ? upload(files, null) : toast(t.noImages));
  const [over, drop] = useDrop(add);
  const items = photos.map((photo) => ({ id: photo.id, photo, prediction: predictions[photo.id] }));
  const of = (kind) => (kind === "all" ? items : items.filter((item) => kindIn(item) === kind));
  const counts = Object.fromEntries(KINDS.map((kind) => [kind, of(kind).length]));
  let shown = of(filter);
  if (SORTS[sort]) shown = [...shown].sort(SORTS[sort]);
  if (sort === "useful") {
    const first = Object.keys(reasons).map((id) => shown.find((item) => item.id === id)).filter(Boolean);
    shown = [...first, ...shown.filter((item) => !reasons[item.id])];
  }
  const list = shown.map((item) => item.photo);
  const teachable = store.state.model || classes.filter((group) => group.photos.length).length > 1;
  return html`
    <section class="try ${over ? "over" : ""}" ...${drop}>
      <div class="drop-line ${items.length && teachable ? "brief" : ""}">
        <div>
          <h1>${t.tryTitle}</h1>
          <p class="quiet">${teachable ? t.tryText : t.tryFirst}</p>
        </div>
        <${FileButton} className="button primary" onFiles=${(files) => add(fromInput(files))}>
          <${Icon} name="photos" /> ${t.choosePhotos}
        <//>
        <${FileButton} folder label=${t.chooseFolder} onFiles=${(files) => add(fromInput(files))}>
          <${Icon} name="folder" /> <span>${t.chooseFolder}</span>
        <//>
        <${Live} />
      </div>
      <${Problems} problems=${store.problems.filter((problem) => problem.target === null)} />
      ${teachable && html`<${Strictness} />`}
      ${items.length > 0 &&
      html`
        <div class="tools">
          <div class="filters" role="group" aria-label=${t.filter}>
            ${KINDS.filter((kind) => kind !== "notYet" || counts.notYet).map(
              (kind) =>
                html`
                  <button
                    key=${kind} type="button" class="chip ${kind}" aria-pressed=${filter === kind}
                    onClick=${() => setFilter(kind)}
                  >
                    ${t[kind]} <span>${counts[kind]}</span>
                  </button>
                `,
            )}
          </div>
          <label class="sort">
            <span>${t.sort}</span>
            <select value=${sort} onChange=${(event) => setSort(event.target.value)}>
              ${Object.entries(t.sorts).map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}
            </select>
          </label>
          <button
            type="button" class="button" aria-label=${t.clearNew} title=${t.trash(list.length)}
            onClick=${() => remove(list.map((photo) => photo.id))}
          >
            <${Icon} name="trash" /> <span>${t.clearNew}</span>
          </button>
        </div>
        ${sort === "useful" && asking && html`<p class="quiet asking" role="status"><i></i> ${t.suggesting}</p>`}
        ${counts.unsure > Math.max(2, counts.named) && html`<p class="quiet hint">${t.unsureHint}</p>`}
        <p class="quiet hint">${t.confirmHint} <span class="keys">${t.keysHint}</span></p>
        <${VirtualGrid}
          items=${shown} cell=${216} height=${372} gap=${14} label=${t.results} onExtend=${extend}
          render=${(item, _, tab) => html`
            <${Result} item=${item} items=${shown} reason=${sort === "useful" && reasons[item.id]} tab=${tab} open=${() => open(item.id, list)} />
          `}
        />
        ${!shown.length && html`<p class="quiet center">${t.noneLeft}</p>`}
      `}
      ${over && html`<div class="veil" aria-hidden="true">${t.tryTitle}</div>`}
    </section>
  `;
}

// How many of the names may be wrong: decisions follow at once, also those of the camera and of downloads.
function Strictness() {
  const { steps, step } = store.state.errors;
  const [chosen, choose] = useState(step);
  useEffect(() => choose(step), [step]);
  const onInput = (event) => {
    choose(Number(event.target.value));
    change("allow errors", { max_errors: steps[event.target.value] });
  };
  const text = t.allowed(steps[chosen]);
  return html`
    <label class="strictness">
      <span>${t.fewerMistakes}</span>
      <input type="range" max=${steps.length - 1} value=${chosen} aria-valuetext=${text} onInput=${onInput} />
      <span>${t.moreNames}</span>
      <small class="quiet">${text}</small>
    </label>
  `;
}

function Result({ item, items, reason, tab, open }) {
  const { photo, prediction } = item;
  const { other } = store.state;
  const kind = kindIn(item);
  const chosen = isSelected(photo.id);
  const assign = (name, more = {}) =>
    undoable("move", { ids: [photo.id], to: name, ...more }, t.added(name === other ? t.none : name));
  const isNone = () => assign(other, { create: true });
  const onKey = (event) => {
    if (/^(SELECT|INPUT)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey) return;
    const choice = prediction?.top[Number(event.key) - 1];
    if (choice) assign(choice.label);
    else if (event.key === "0" && other) isNone();
    else return;
    event.preventDefault();
  };
  const title = photo.problem ? "" : prediction ? titleOf(prediction) : t.naming;
  const unlike = kind === "none" && t.unlike(prediction.closest);
  const named = (prediction?.top ?? []).filter((choice) => choice.label !== other).slice(0, kind === "none" ? 1 : 2);
  return html`
    <article
      class="result ${kind} ${chosen ? "chosen" : ""}" onKeyDown=${onKey} aria-label="${photo.name}: ${title || photo.problem}"
    >
      <button
        type="button" class="picture" data-focus data-photo=${photo.id} tabindex=${tab} aria-label=${t.details(photo.name)}
        aria-pressed=${store.selected.size ? chosen : null}
        onClick=${(event) => clicked(event, photo.id, items) || open()}
        ontouchstart=${(event) => touchStart(event, photo.id)}
        onContextMenu=${(event) => event.preventDefault()}
        onKeyDown=${(event) => selectionKey(event, photo.id, items)}
      >
        ${!photo.problem && html`<${Thumbnail} id=${photo.id} />`}
        ${photo.problem && html`<span class="problem"><${Icon} name="warn" /> ${photo.problem}</span>`}
        <span class="tick" aria-hidden="true" onClick=${(event) => (event.stopPropagation(), toggle(photo.id))}><${Icon} name="check" /></span>
      </button>
      <${IconButton} icon="close" label=${t.remove(photo.name)} tabindex=${tab} onClick=${() => remove([photo.id])} />
      <div class="verdict">
        <strong title=${title}>${title}</strong>
        ${kind === "unsure" && html`<span class="badge">${t.unsure}</span>`}
        ${kind === "named" && html`<span>${percent(prediction.probability)}</span>`}
      </div>
      <small class=${reason || unlike ? "reason" : ""} title=${photo.name}>${reason || unlike || photo.name}</small>
      <div class="choices">
        ${kind === "none" &&
        other &&
        html`
          <button type="button" class="choice" tabindex=${tab} title=${t.isNone} onClick=${isNone}>
            <span class="name">${t.isNone}</span>
          </button>
        `}
        ${named.map(
          ({ label: name, probability: p }) => html`
            <button
              key=${name} type="button" class="choice" tabindex=${tab} aria-label=${t.isIt(name)} title=${t.isIt(name)}
              onClick=${() => assign(name)}
            >
              <span class="name">${unlike ? t.isIt(name) : name}</span>
              ${!unlike && html`<span>${percent(p)}</span><${Bar} value=${p} />`}
            </button>
          `,
        )}
        <${ClassChoice}
          label=${t.otherClassFor(photo.name)} empty=${t.otherClass} newLabel=${t.newClassFor(photo.name)} tab=${tab}
          onChoose=${assign}
        />
      </div>
    </article>
  `;
}
