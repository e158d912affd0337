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
  const known = new Set([...classes.flatMap((each) => each.photos), ...photos].map((each) => each.id));
  return [...store.selected].filter((id) => known.has(id));
}

export function toggle(id) {
  anchor = id;
  set(isSelected(id) ? selectedIds().filter((each) => each !== id) : [...store.selected, id]);
}

export function selectRange(list, id) {
  const [a, b] = [list.findIndex((each) => each.id === anchor), list.findIndex((each) => each.id === id)];
  if (a < 0) return toggle(id);
  set([...store.selected, ...list.slice(Math.min(a, b), Math.max(a, b) + 1).map((each) => each.id)]);
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
  if (all) set([...store.selected, ...list.map((each) => each.id)]);
  else if (event.key.toLowerCase() === "x" && !event.ctrlKey && !event.metaKey) toggle(id);
  else if (event.key === "Delete") remove(idsWith(id));
  else return false;
  event.preventDefault();
  return true;
}

export const moveSelected = async (ids, to, more) => (await move(ids, to, more)) && clearSelection();

// Names to choose from, with none of these and a new class.
const NONE = "\n none";
const NEW = "\n new";
export function ClassChoice({ label, empty, onChoose, newLabel, tab = 0, back = false }) {
  const { classes, other } = store.state;
  const [naming, setNaming] = useState(false);
  const choose = (event) => {
    const value = event.target.value;
    event.target.value = "";
    if (value === NEW) setNaming(true);
    else if (value === NONE) onChoose(other, { create: true });
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
      ${classes.filter((each) => each.name !== other).map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
      ${other && html`<option value=${NONE}>${t.none}</option>`}
      <option value=${NEW}>${t.newClassChoice}</option>
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
      <button type="button" class="button danger" onClick=${async () => (await remove(ids)) && clearSelection()}>
        <${Icon} name="trash" /> ${t.deleteSelected}
      </button>
      <${IconButton} icon="close" label=${t.clearSelection} onClick=${clearSelection} />
    </div>
  `;
}

// Dragging with a finger: hold a photo until it is selected, then drag it to a class.
const HOLD = 350; // milliseconds
const SLIP = 10; // pixels that a finger may move meanwhile
let touch = null;

export function touchStart(event, id) {
  if (event.touches.length > 1) return touchEnd();
  const { clientX: x, clientY: y } = event.touches[0];
  touch = { id, x, y, held: false, ghost: null };
  touch.timer = setTimeout(() => {
    touch.held = true;
    navigator.vibrate?.(15);
    if (!isSelected(id)) toggle(id);
  }, HOLD);
}

function touchMove(event) {
  if (!touch) return;
  const { clientX: x, clientY: y } = event.touches[0];
  if (!touch.held) {
    if (Math.hypot(x - touch.x, y - touch.y) > SLIP) cancelTouch(); // the finger scrolls
    return;
  }
  event.preventDefault();
  if (!touch.ghost) {
    touch.ghost = document.body.appendChild(document.createElement("div"));
    touch.ghost.className = "ghost";
    touch.ghost.textContent = selectedIds().length;
  }
  touch.ghost.style.transform = `translate(${x}px, ${y}px)`;
  if (y < 70 || y > innerHeight - 70) scrollBy(0, y < 70 ? -14 : 14);
  mark(document.elementFromPoint(x, y)?.closest("[data-class]"));
}

function mark(card) {
  if (touch.card !== card) {
    touch.card?.classList.remove("over");
    card?.classList.add("over");
    touch.card = card;
  }
}

function touchEnd(event) {
  if (!touch) return;
  const { card, held, ghost } = touch;
  cancelTouch();
  if (held) event?.preventDefault(); // it is not a click
  if (ghost && card) moveSelected(selectedIds(), card.dataset.class);
}

function cancelTouch() {
  clearTimeout(touch?.timer);
  touch?.ghost?.remove();
  touch?.card?.classList.remove("over");
  touch = null;
}

addEventListener("touchmove", touchMove, { passive: false });
addEventListener("touchend", touchEnd, { passive: false });
addEventListener("touchcancel", cancelTouch);
