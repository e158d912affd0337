// Everything that passes between the page and the server: the state, changes, photos.
import { t } from "./strings.js";

export const store = {
  state: null, // what the server told last
  offline: false,
  connection: 0, // counts how often the app came back
  expired: false,
  uploads: { done: 0, all: 0, waiting: false },
  problems: [], // {key, target, name, message}: photos that were not added
  toasts: [],
  selected: new Set(), // ids of photos
};
const listeners = new Set();
export const subscribe = (listener) => (listeners.add(listener), () => listeners.delete(listener));
export const changed = () => listeners.forEach((listener) => listener());

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

export async function follow() {
  for (;;) {
    try {
      const since = store.state && !store.offline ? `?since=${store.state.version}` : "";
      const answer = await fetch(`/api/state${since}`, { cache: "no-store" });
      if (answer.status === 401) {
        store.expired = true;
        changed();
        await pause(3000);
        continue;
      }
      if (!answer.ok) throw new Error(answer.status);
      store.state = await answer.json();
      if (store.offline) store.connection++;
      store.offline = store.expired = false;
      changed();
    } catch {
      store.offline = true;
      changed();
      await pause(1000);
    }
  }
}

async function message(answer) {
  try {
    return (await answer.json()).error || answer.statusText;
  } catch {
    return answer.statusText;
  }
}

export function change(action, more = {}) {
  last = last.then(() => ask(action, more)); // in the order of the user's actions, as on a slider that is dragged
  return last;
}

let last = Promise.resolve();

async function ask(action, more) {
  try {
    const answer = await fetch("/api/change", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ action, ...more }),
    });
    if (answer.ok) {
      store.toasts = store.toasts.filter((shown) => !shown.action); // there is a later change now
      return await answer.json();
    }
    const why = await message(answer);
    if (answer.status !== 409) toast(why, "error");
    else if (confirm(t.anyway(why))) return await ask(action, { ...more, sure: true });
  } catch {
    store.offline = true;
    changed();
  }
  return null;
}

// A change with a message that offers to undo it, until the next change.
export async function undoable(action, more, text) {
  const made = await change(action, more);
  if (made) toast(text, "info", { text: t.undo, run: () => change("undo") });
  return made;
}

export const remove = (ids) => undoable("delete", { ids }, t.deletedPhotos(ids.length));
export const move = (ids, to, more = {}) =>
  undoable("move", { ids, to, ...more }, t.movedPhotos(ids.length, to ?? t.newPhotos));

let toastId = 0;
export function toast(text, kind = "info", action = null) {
  const id = ++toastId;
  store.toasts = [...store.toasts.slice(-2), { id, text, kind, action }];
  changed();
  setTimeout(() => dismissToast(id), kind === "error" || action ? 9000 : 5000);
}
export function dismissToast(id) {
  store.toasts = store.toasts.filter((shown) => shown.id !== id);
  changed();
}

// Photos are sent a few at a time. When the server is away, they wait for it.
const queue = [];
let senders = 0;
let batches = 0;

export const newBatch = () => `${Date.now().toString(36)}-${++batches}`;

export function upload(files, target, batch = newBatch()) {
  for (const { file, name } of files) queue.push({ file, name, target, batch });
  if (store.uploads.done === store.uploads.all) store.uploads = { done: 0, all: 0, waiting: false };
  store.uploads.all += files.length;
  changed();
  while (senders < 3 && senders < queue.length) send();
}

async function send() {
  senders++;
  for (let item; (item = queue.shift()); ) {
    const label = item.target === null ? "" : `&class=${encodeURIComponent(item.target)}`;
    const address = `/api/photos?name=${encodeURIComponent(item.name)}&batch=${item.batch}${label}`;
    for (;;) {
      try {
        const answer = await fetch(address, { method: "POST", body: item.file });
        if (answer.status === 503 || answer.status === 408) {
          await pause(1500);
          continue;
        }
        if (!answer.ok) addProblem(item, await message(answer));
        break;
      } catch (error) {
        if (await unreadable(item.file)) {
          addProblem(item, t.unreadable(item.name));
          break;
        }
        store.uploads.waiting = true;
        changed();
        await pause(1500);
      }
    }
    store.uploads = { ...store.uploads, done: store.uploads.done + 1, waiting: false };
    changed();
  }
  senders--;
}

// What the model says about a picture that is not kept; null if it cannot say anything now.
export const nameFrame = (picture) =>
  fetch("/api/name", { method: "POST", body: picture }).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);

// Why to label new photos next, by id, the best ones first.
export const suggestions = () =>
  fetch("/api/suggestions").then((answer) => (answer.ok ? answer.json() : {})).catch(() => ({}));

async function unreadable(file) {
  try {
    await file.slice(0, 1).arrayBuffer();
    return false;
  } catch {
    return true;
  }
}

let problemId = 0;
function addProblem(item, text) {
  store.problems = [
    ...store.problems,
    { key: ++problemId, target: item.target, name: item.name, message: text },
  ];
}
export function dismissProblems(test) {
  store.problems = store.problems.filter((problem) => !test(problem));
  changed();
}

// Files of a drop, a paste or an input: [{file, name, folders}].
const LITTER = /^(\.|thumbs\.db$|desktop\.ini$|__macosx$)/i;
const IMAGE = /\.(jpe?g|jpe|jfif|png|webp|gif|bmp|tiff?|ppm|pgm|pbm|pnm|heic|heif|avif|jxl|jp2)$/i;

export async function filesOf(data) {
  const items = [...(data.items || [])].filter((item) => item.kind === "file");
  const entries = items.map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry());
  if (entries.length && entries.every(Boolean)) {
    const files = [];
    for (const entry of entries) await walk(entry, [], files);
    return files;
  }
  return fromInput(data.files);
}

export function fromInput(files) {
  return [...files]
    .map((file) => {
      const folders = (file.webkitRelativePath || "").split("/").slice(0, -1);
      return { file, name: file.name || "photo", folders };
    })
    .filter((file) => keep(file));
}

function keep({ file, name, folders }) {
  if (LITTER.test(name)) return false;
  return folders.length === 0 ? true : IMAGE.test(name) || file.type.startsWith("image/");
}

async function walk(entry, folders, files) {
  if (LITTER.test(entry.name)) return;
  if (entry.isFile) {
    try {
      const file = await new Promise((done, fail) => entry.file(done, fail));
      const item = { file, name: file.name, folders };
      if (keep(item)) files.push(item);
    } catch {
      // The file disappeared while it was dropped.
    }
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const part = await new Promise((done, fail) => reader.readEntries(done, fail));
    if (!part.length) break;
    for (const child of part) await walk(child, [...folders, entry.name], files);
  }
}
