// Several photos at once: which ones are selected, and what can be done with them.
import { html, useState } from "./vendor/htm-preact.js";
import { changed, move, remove, store } from "./api.js";
import { Icon, IconButton } from "./parts.js";
import { t } from "./strings.js";

let anchor = null; // where a range starts

const set = (ids) => ((store.selected = new Set(ids)), changed());
export const isSelected = (id) => store.selected.has(id);
export const clearSelection = () => store.selected.size && set([]);
// What an action on a photo is about: the selection, if the photo is part of it.
export const idsWith = (id) => (isSelected(id) ? selectedIds() : [id]);

export function selectedIds() {
  const { classes, new: photos } = store.state;
  const known = new Set([...classes.flatMap((group) => group.photos), ...photos].map((photo) => photo.id));
  return [...store.selected].filter((id) => known.has(id));
}

export function toggle(id) {
  anchor = id;
  set(isSelected(id) ? selectedIds().filter((other) => other !== id) : [...store.selected, id]);
}

export function selectRange(list, id) {
  const [a, b] = [list.findIndex((photo) => photo.id === anchor), list.findIndex((photo) => photo.id === id)];
  if (a < 0) return toggle(id);
  set([...store.selected, ...list.slice(Math.min(a, b), Math.max(a, b) + 1).map((photo) => photo.id)]);
}

export const extend = (old, now) => ((anchor ??= old.id), set([...store.selected, old.id, now.id]));

// What a click on a photo means: selecting, if a key is held or something is selected already.
export function clicked(event, id, list) {
  if (event.shiftKey) selectRange(list, id);
  else if (event.ctrlKey || event.metaKey || selectedIds().length) toggle(id);
  else return false;
  return true;
}

// Keys on a photo; returns whether it was one of them.
export function selectionKey(event, id, list) {
  const all = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "a";
  if (all) set([...store.selected, ...list.map((photo) => photo.id)]);
  else if (event.key.toLowerCase() === "x" && !event.ctrlKey && !event.metaKey) toggle(id);
  else if (event.key === "Delete") remove(idsWith(id));
  else return false;
  event.preventDefault();
  return true;
}

export const moveSelected = async (ids, to, more) => (await move(ids, to, more)) && clearSelection();

// Names to choose from, with none of these and a new class.
const NONE_OPTION = "\n none";
const NEW_OPTION = "\n new";
export function ClassChoice({ label, empty, onChoose, newLabel, tab = 0 }) {
  const { classes, other } = store.state;
  const [naming, setNaming] = useState(false);
  const choose = (event) => {
    const value = event.target.value;
    event.target.value = "";
    if (value === NEW_OPTION) setNaming(true);
    else if (value === NONE_OPTION) onChoose(other, { create: true });
    else if (value) onChoose(value);
  };
  const submit = (event) => {
    event.preventDefault();
    const name = event.target.elements[0].value;
    setNaming(false);
    if (name.trim()) onChoose(name, { create: true });
  };
  if (naming)
    return html`
      <form class="name-choice" onSubmit=${submit}>
        <input
          type="text" maxlength="80" aria-label=${newLabel} placeholder=${t.newClassName} ref=${(input) => input?.focus()}
          onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), setNaming(false))}
        />
        <button class="button">${t.create}</button>
      </form>
    `;
  return html`
    <select aria-label=${label} value="" onChange=${choose} tabindex=${tab}>
      <option value="">${empty}</option>
      ${classes.filter((group) => group.name !== other).map((group) => html`<option key=${group.name} value=${group.name}>${group.name}</option>`)}
      ${other && html`<option value=${NONE_OPTION}>${t.none}</option>`}
      <option value=${NEW_OPTION}>${t.newClassChoice}</option>
    </select>
  `;
}

export function SelectionBar() {
  const ids = selectedIds();
  if (!ids.length) return null;
  return html`
    <div class="selection" role="region" aria-label=${t.selection}>
      <span aria-live="polite">${t.selected(ids.length)}</span>
      <${ClassChoice}
        label=${t.moveSelected} empty=${t.moveSelected} newLabel=${t.newClassName}
        onChoose=${(name, more) => moveSelected(ids, name, more)}
      />
      <button type="button" class="button danger" title=${t.trash(ids.length)} onClick=${async () => (await remove(ids)) && clearSelection()}>
        <${Icon} name="trash" /> ${t.deleteSelected}
      </button>
      <${IconButton} icon="close" label=${t.clearSelection} onClick=${clearSelection} />
    </div>
  `;
}

// On a touch screen, holding a photo selects it.
const HOLD = 350; // milliseconds

export function touchStart(event, id) {
  const photo = event.currentTarget;
  const timer = setTimeout(() => {
    navigator.vibrate?.(15);
    if (!isSelected(id)) toggle(id);
    photo.addEventListener("touchend", (end) => end.preventDefault(), { once: true }); // it is not a click
  }, HOLD);
  for (const kind of ["touchmove", "touchend", "touchcancel"])
    photo.addEventListener(kind, () => clearTimeout(timer), { once: true, passive: true });
}
