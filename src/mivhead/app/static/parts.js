// Building blocks: icons, virtual lists, drop areas, dialogs.
import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { filesOf, store } from "./api.js";
import { NONE, percent } from "./shared.js";
import { t } from "./strings.js";

const PATHS = {
  undo: "M9 14 4 9l5-5M4 9h10a6 6 0 0 1 0 12h-3",
  redo: "m15 14 5-5-5-5M20 9H10a6 6 0 0 0 0 12h3",
  plus: "M12 5v14M5 12h14",
  camera: "M4 8h3l2-3h6l2 3h3v11H4zM12 16.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7z",
  pencil: "m4 20 1-4L16 5l3 3L8 19z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  close: "M6 6l12 12M18 6 6 18",
  left: "m14 6-6 6 6 6",
  right: "m10 6 6 6-6 6",
  photos: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.5h.01",
  folder: "M3 6h6l2 2h10v11H3z",
  check: "m5 12.5 4.5 4.5L19 7.5",
  live: "M3 7h11v10H3zM14 11l6-3v8l-6-3",
  turn: "M4 9a8 8 0 0 1 14-3l2 2M20 4v4h-4M20 15a8 8 0 0 1-14 3l-2-2M4 20v-4h4",
  warn: "M12 4 2.8 20h18.4zM12 10v4.5M12 17.3h.01",
};
export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>
`;

export const IconButton = ({ icon, label, ...rest }) => html`
  <button type="button" class="icon-button" aria-label=${label} title=${label} ...${rest}>
    <${Icon} name=${icon} />
  </button>
`;

// A thumbnail. One that could not be loaded is asked for again as soon as the app is back.
export const Thumbnail = ({ id, ...rest }) => html`
  <img
    key=${store.connection} src="/thumb/${id}" alt="" loading="lazy" decoding="async" fetchpriority="low"
    onError=${(event) => (event.target.hidden = true)} ...${rest}
  />
`;

// A button that chooses files.
export function FileButton({ children, onFiles, folder = false, camera = false, label, className = "button" }) {
  const input = useRef();
  const attributes = folder ? { webkitdirectory: true } : { accept: "image/*" };
  if (camera) attributes.capture = "environment";
  return html`
    <button type="button" class=${className} aria-label=${label} onClick=${() => input.current.click()}>
      ${children}
    </button>
    <input
      ref=${input} type="file" multiple hidden tabindex="-1" aria-hidden="true" ...${attributes}
      onChange=${(event) => {
        onFiles(event.target.files);
        event.target.value = "";
      }}
    />
  `;
}

// Only the rows in sight are in the document. One item at a time can be reached by Tab, the others
// by arrow keys; `onExtend` is called with the items that Shift and an arrow key pass.
export function VirtualGrid({ items, cell, height, gap = 8, scrolls = false, label, render, onExtend, role = "list" }) {
  const box = useRef();
  const focused = useRef(false);
  const [active, setActive] = useState(0);
  const [view, setView] = useState({ width: 0, top: 0, tall: 800 });
  useLayoutEffect(() => {
    const element = box.current;
    const look = () => {
      const top = scrolls ? element.scrollTop : Math.max(0, -element.getBoundingClientRect().top);
      const tall = scrolls ? element.clientHeight : innerHeight;
      const width = element.firstChild.clientWidth;
      setView((old) =>
        old.width === width && old.tall === tall && Math.abs(old.top - top) < 20 ? old : { width, top, tall },
      );
    };
    const observer = new ResizeObserver(look);
    observer.observe(element);
    const scroller = scrolls ? element : window;
    scroller.addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    look();
    return () => {
      observer.disconnect();
      scroller.removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, []);
  const columns = Math.max(1, Math.floor((view.width + gap) / (cell + gap)));
  const wide = (view.width - gap * (columns - 1)) / columns;
  const rowHeight = (height || wide) + gap;
  const rows = Math.ceil(items.length / columns);
  const first = Math.max(0, Math.floor(view.top / rowHeight) - 2);
  const last = Math.min(rows, Math.ceil((view.top + view.tall) / rowHeight) + 2);
  const shown = view.width ? items.slice(first * columns, last * columns) : [];
  const from = first * columns;
  const stop = active >= from && active < from + shown.length ? active : from;
  // Arrow keys move between the items, by their places in the grid.
  const move = (event) => {
    const end = items.length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -end, End: end }[event.key];
    const at = placeOf(event);
    if (!step || Number.isNaN(at) || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    event.preventDefault();
    const to = Math.min(items.length - 1, Math.max(0, at + step));
    if (event.shiftKey) onExtend?.(items[at], items[to]);
    focusPlace(box.current, to);
  };
  const placeOf = (event) => Number(event.target.closest("[data-place]")?.dataset.place);
  const onFocus = (event) => {
    focused.current = true;
    if (!Number.isNaN(placeOf(event))) setActive(placeOf(event));
  };
  // Browsers differ in whether an item that is removed loses the focus first: it is still ours.
  const onBlur = ({ target }) => queueMicrotask(() => target.isConnected && (focused.current = box.current?.contains(document.activeElement)));
  // An item that had the focus and is gone leaves it to the one that took its place.
  useLayoutEffect(() => {
    if (focused.current && document.activeElement === document.body && items.length)
      focusPlace(box.current, Math.min(stop, items.length - 1));
  }, [items]);
  return html`
    <div
      ref=${box} class=${scrolls ? "virtual scrolls" : "virtual"} onKeyDown=${move}
      onfocusin=${onFocus} onfocusout=${onBlur}
    >
      <div
        role=${role} aria-label=${label} class="virtual-inner"
        style=${{ height: `${Math.max(0, rows * rowHeight - gap)}px` }}
      >
        ${shown.map((item, i) => {
          const place = first * columns + i;
          const style = {
            width: `${wide}px`,
            height: `${rowHeight - gap}px`,
            transform: `translate(${(place % columns) * (wide + gap)}px, ${Math.floor(place / columns) * rowHeight}px)`,
          };
          return html`
            <div key=${item.id} role="listitem" class="cell" style=${style} data-place=${place}>
              ${render(item, place, place === stop ? 0 : -1)}
            </div>
          `;
        })}
      </div>
    </div>
  `;
}

export function focusPlace(box, place, tries = 5) {
  const cell = box.querySelector(`[data-place="${place}"]`);
  const target = cell?.querySelector("[data-focus]");
  if (target) {
    target.focus();
    cell.scrollIntoView({ block: "nearest" });
  } else if (tries) requestAnimationFrame(() => focusPlace(box, place, tries - 1));
}

// An area that takes files, and photos dragged from elsewhere on the page.
export const IDS = "application/x-miv-photos";
export function useDrop(onFiles, onIds) {
  const [over, setOver] = useState(false);
  const depth = useRef(0);
  const on = (act) => (event) => {
    const types = [...event.dataTransfer.types];
    if (!(onFiles && types.includes("Files")) && !(onIds && types.includes(IDS))) return;
    event.preventDefault();
    event.stopPropagation();
    act(event);
    setOver(depth.current > 0);
  };
  const drop = async ({ dataTransfer }) => {
    depth.current = 0;
    const ids = dataTransfer.getData(IDS);
    if (ids && onIds) onIds(JSON.parse(ids));
    else if (onFiles) onFiles(await filesOf(dataTransfer));
  };
  const leave = () => (depth.current = Math.max(0, depth.current - 1));
  return [over, { onDragEnter: on(() => depth.current++), onDragOver: on(() => {}), onDragLeave: on(leave), onDrop: on(drop) }];
}

export function Dialog({ title, onClose, onKey, restore, children, wide = false }) {
  const box = useRef();
  useLayoutEffect(() => { // at once: keys that are pressed now are meant for the dialog
    const dialog = box.current;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close(); // what is behind it takes the focus only then
      const target = restore?.() ?? (before?.isConnected ? before : null);
      (target ?? document.querySelector("main")).focus();
    };
  }, []);
  return html`
    <dialog
      ref=${box} class=${wide ? "wide" : ""} aria-label=${title} onKeyDown=${onKey}
      onCancel=${(event) => (event.preventDefault(), onClose())}
      onClick=${(event) => event.target === box.current && onClose()}
    >
      <div class="dialog">
        <header>
          <h2>${title}</h2>
          <${IconButton} icon="close" label=${t.close} onClick=${onClose} />
        </header>
        ${children}
      </div>
    </dialog>
  `;
}

export const Bar = ({ value, kind = "" }) => html`
  <span class="bar ${kind}"><span style=${{ width: `${100 * value}%` }} /></span>
`;

export const titleOf = (prediction) =>
  prediction.decision === prediction.closest ? prediction.closest : prediction.decision === NONE ? t.none : t.perhaps(prediction.closest);

// Classes with their probabilities, which say nothing about a photo that is none of these.
export const Ranking = ({ prediction }) => prediction.decision === NONE ? html`<p class="quiet">${t.unlike(prediction.closest)}</p>` : html`
  <ul class="ranking">
    ${prediction.top.map(
      ({ label, probability: p }) => html`
        <li key=${label}><span class="name">${label}</span> <span>${percent(p)}</span> <${Bar} value=${p} /></li>
      `,
    )}
  </ul>
`;
