// The page Try it: new photos, what they were named, and corrections.
import { html, useRef, useState } from "./vendor/htm-preact.js";
import { change, fromInput, remove, store, toast, undoable, upload } from "./api.js";
import { LivePanel } from "./camera.js";
import { Bar, FileButton, focusPlace, Icon, IconButton, Thumbnail, useDrop, VirtualGrid } from "./parts.js";
import { ClassChoice, clicked, extend, isSelected, selectionKey, toggle, touchStart } from "./selection.js";
import { Problems } from "./teach.js";
import { percent, t } from "./strings.js";

const UNSURE = "unsure";
const NONE = "none of these";
const kindOf = (found) =>
  !found ? "notYet" : found.decision === UNSURE ? "unsure" : found.decision === NONE ? "none" : "sure";

// The photos that the model would learn most from: as the server suggests, then those whose two most
// probable names are close.
const margin = (found) => (found ? found.top[0][1] - (found.top[1]?.[1] ?? 0) : 2);
const usefulness = (each) => {
  const place = store.state.suggested.indexOf(each.id);
  return place < 0 ? margin(each.found) : place - 1000;
};
const SORTS = {
  newest: null,
  useful: (a, b) => usefulness(a) - usefulness(b),
  sure: (a, b) => (b.found?.top[0][1] ?? 0) - (a.found?.top[0][1] ?? 0),
  name: (a, b) => a.photo.name.localeCompare(b.photo.name, "en", { numeric: true }),
};

export function TryIt({ open }) {
  const { classes, new: photos, predictions, unlabelled, learner } = store.state;
  const [live, setLive] = useState(false);
  const liveButton = useRef();
  const [filter, setFilter] = useState("all");
  const [sort, setSort] = useState("newest");
  const box = useRef();
  const add = (files) => (files.length ? upload(files, null) : toast(t.noImages));
  const [over, drop] = useDrop(add);
  const items = photos.map((photo) => ({ id: photo.id, photo, found: predictions[photo.id] }));
  const counts = { all: items.length, sure: 0, unsure: 0, none: 0, notYet: 0 };
  for (const each of items) counts[kindOf(each.found)]++;
  let shown = filter === "all" ? items : items.filter((each) => kindOf(each.found) === filter);
  if (SORTS[sort]) shown = [...shown].sort(SORTS[sort]);
  const list = shown.map((each) => each.photo);
  const learned = unlabelled.used ? t.learnedUnlabelled(unlabelled.used) : t.unlabelledLeftOut;
  const outcome = unlabelled.on && learner.stage === "ready" ? learned : t.learnUnlabelledHint;
  const teachable = store.state.model || classes.filter((each) => each.photos.length).length > 1;
  return html`
    <section class="try ${over ? "over" : ""}" ...${drop}>
      <div class="drop-line">
        <div>
          <h1>${t.tryTitle}</h1>
          <p class="quiet">${teachable ? t.tryText : t.tryFirst}</p>
        </div>
        <div class="row">
          <${FileButton} className="button primary" onFiles=${(files) => add(fromInput(files))}>
            <${Icon} name="photos" /> ${t.choosePhotos}
          <//>
          <${FileButton} folder onFiles=${(files) => add(fromInput(files))}>
            <${Icon} name="folder" /> ${t.chooseFolder}
          <//>
          <button ref=${liveButton} type="button" class="button" aria-expanded=${live} onClick=${() => setLive(!live)}>
            <${Icon} name="live" /> ${t.live}
          </button>
        </div>
      </div>
      ${live && html`<${LivePanel} onClose=${() => (setLive(false), liveButton.current.focus())} />`}
      <${Problems} problems=${store.problems.filter((each) => each.target === null)} />
      ${items.length > 0 &&
      html`
        <div class="tools">
          <div class="filters" role="group" aria-label=${t.filter}>
            ${["all", "sure", "unsure", "none", "notYet"].map(
              (name) =>
                (name !== "notYet" || counts.notYet > 0) &&
                html`
                  <button
                    key=${name} type="button" class="chip ${name}" aria-pressed=${filter === name}
                    onClick=${() => setFilter(name)}
                  >
                    ${t[name]} <span>${counts[name]}</span>
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
          <button type="button" class="button" onClick=${() => remove(list.map((each) => each.id))}>
            <${Icon} name="trash" /> ${t.clearNew}
          </button>
        </div>
        ${unlabelled.possible &&
        html`
          <label class="check">
            <input
              type="checkbox" checked=${unlabelled.on}
              onChange=${(event) => change("settings", { unlabelled: event.target.checked })}
            />
            <span>${t.learnUnlabelled} <span class="quiet">${outcome}</span></span>
          </label>
        `}
        ${counts.unsure > Math.max(2, counts.sure) && html`<p class="quiet hint">${t.unsureHint}</p>`}
        <p class="quiet hint">${t.confirmHint} <span class="keys">${t.keysHint}</span></p>
        <div ref=${box}>
          <${VirtualGrid}
            items=${shown} cell=${216} height=${372} gap=${14} label=${t.results} onExtend=${extend}
            render=${(item, place, tab) => html`
              <${Result}
                item=${item} items=${shown} tab=${tab} open=${() => open(item.id, list)}
                onDone=${() => setTimeout(() => box.current && focusPlace(box.current, place), 250)}
              />
            `}
          />
        </div>
        ${!shown.length && html`<p class="quiet center">${t.noneLeft}</p>`}
      `}
      ${over && html`<div class="veil" aria-hidden="true">${t.tryTitle}</div>`}
    </section>
  `;
}

function Result({ item, items, tab, open, onDone }) {
  const { photo, found } = item;
  const { other } = store.state;
  const kind = kindOf(found);
  const chosen = isSelected(photo.id);
  const assign = async (name, more = {}) => {
    const text = t.added(name === other ? t.none : name);
    if (await undoable("move", { ids: [photo.id], to: name, ...more }, text)) onDone();
  };
  const isNone = () => assign(other, { create: true });
  const discard = async () => (await remove([photo.id])) && onDone();
  const onKey = (event) => {
    if (/^(SELECT|INPUT)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey) return;
    const choice = found?.top[Number(event.key) - 1];
    if (choice) assign(choice[0]);
    else if (event.key === "0" && other) isNone();
    else return;
    event.preventDefault();
  };
  const title = photo.problem
    ? ""
    : { sure: found?.label, unsure: t.perhaps(found?.label), none: t.none, notYet: t.naming }[kind];
  const named = (found?.top ?? []).filter(([name]) => name !== other).slice(0, kind === "none" && other ? 1 : 2);
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
      <${IconButton} icon="close" label=${t.remove(photo.name)} tabindex=${tab} onClick=${discard} />
      <div class="verdict">
        <strong title=${title}>${title}</strong>
        ${kind === "unsure" && html`<span class="badge">${t.unsure}</span>`}
        ${kind === "sure" && html`<span>${percent(found.top[0][1])}</span>`}
      </div>
      <small title=${photo.name}>${photo.name}</small>
      <div class="choices">
        ${kind === "none" &&
        other &&
        html`
          <button type="button" class="choice" tabindex=${tab} title=${t.isNone} onClick=${isNone}>
            <span class="name">${t.isNone}</span>
          </button>
        `}
        ${named.map(
          ([name, p]) => html`
            <button
              key=${name} type="button" class="choice" tabindex=${tab} aria-label=${t.isIt(name)} title=${t.isIt(name)}
              onClick=${() => assign(name)}
            >
              <span class="name">${name}</span><span>${percent(p)}</span><${Bar} value=${p} />
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
