"use strict";
// Everything that comes from the user's files is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const corrections = new Map(); // item to the right name
const state = { group: "all", name: "", text: "" };

// Corrections are kept by the browser, so that they survive a reload. Where it keeps nothing, as for
// some files, they last as long as the page.
const KEY = "mivhead corrections " + data.key;
function remember() {
  try {
    localStorage.setItem(KEY, JSON.stringify([...corrections].map(([item, label]) => [item.file, label])));
  } catch { /* it is full or switched off */ }
}
try {
  const places = new Map(data.items.map((item) => [item.file, item]));
  for (const [file, label] of JSON.parse(localStorage.getItem(KEY) || "[]")) {
    if (places.has(file)) corrections.set(places.get(file), String(label));
  }
} catch { /* nothing was kept, or it is damaged */ }
const main = document.querySelector("main");

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function percent(p) {
  if (p >= 0.995 && p < 1) return ">99 %";
  return p > 0 && p < 0.005 ? "<1 %" : Math.round(100 * p) + " %";
}

function drawHeat(canvas, item) {
  const [height, width] = item.grid;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const bytes = atob(item.heat);
  for (let i = 0; i < bytes.length; i++) {
    const light = Math.sqrt(bytes.charCodeAt(i) / 255); // a spotlight, not too narrow
    pixels.data.set([16, 22, 28, 120 * (1 - light)], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

function probability(name, p) {
  const row = make("div", "row");
  const label = make("span", "", name);
  label.title = name;
  const track = make("i");
  const fill = make("b");
  fill.style.width = 100 * p + "%";
  track.append(fill);
  row.append(label, track, make("span", "", percent(p)));
  return row;
}

function fill(card) {
  const item = card.item;
  const figure = make("figure");
  const frame = make("div");
  if (item.src) {
    const image = make("img");
    image.alt = item.file;
    image.src = item.src;
    frame.append(image);
  }
  if (item.heat) {
    const canvas = make("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "where the model looked");
    drawHeat(canvas, item);
    frame.append(canvas);
  }
  figure.append(frame);
  const text = make("div", "text");
  const name = make("div", "name " + item.group, item.title);
  if (item.note) name.append(make("small", "", " " + item.note));
  text.append(make("div", "file", item.file), name);
  for (const [label, p] of item.top) text.append(probability(label, p));
  if (item.near.length) {
    const near = make("div", "near");
    for (const [place, weight] of item.near) {
      const shot = data.shots[place];
      const box = make("div", shot.label === item.label ? "" : "other");
      box.title = shot.label + ": " + shot.file;
      if (shot.src) {
        const image = make("img");
        image.alt = box.title;
        image.src = shot.src;
        box.append(image);
      }
      box.append(weight === null ? shot.label : percent(weight));
      near.append(box);
    }
    if (item.rest >= 0.005) near.insertBefore(make("div", "rest", "others " + percent(item.rest)), near.querySelector(".other"));
    text.append(near);
  }
  if (item.why) text.append(make("div", "why", item.why));
  if (item.votes) {
    const details = make("details", "why");
    details.append(make("summary", "", "details"), make("div", "", item.votes));
    text.append(details);
  }
  const fix = make("input", "fix");
  fix.setAttribute("list", "classes");
  fix.placeholder = data.ask;
  fix.setAttribute("aria-label", data.ask + ": " + item.file);
  fix.value = corrections.get(item) || "";
  fix.addEventListener("input", () => {
    const value = fix.value.trim();
    if (value) corrections.set(item, value);
    else corrections.delete(item);
    card.classList.toggle("corrected", Boolean(value));
    remember();
    count();
  });
  text.append(fix);
  card.classList.toggle("corrected", corrections.has(item));
  card.replaceChildren(figure, text);
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      watcher.unobserve(entry.target);
      fill(entry.target);
    }
  }
}, { rootMargin: "800px" });

const cards = data.items.map((item) => {
  const card = make("article");
  card.item = item;
  return card;
});

function fits(item) {
  if (state.group === "corrected" ? !corrections.has(item) : state.group !== "all" && item.group !== state.group) return false;
  if (state.name && item.label !== state.name) return false;
  return !state.text || item.file.toLowerCase().includes(state.text);
}

function show() {
  const shown = cards.filter((card) => fits(card.item));
  main.replaceChildren(...shown);
  if (!shown.length) main.append(make("p", "empty", data.items.length ? "Nothing fits the filters." : data.nothing));
  for (const card of shown) if (!card.childElementCount) watcher.observe(card);
}

const buttons = data.groups.concat([["corrected", "corrected"]]).map(([group, label]) => {
  const button = make("button");
  button.type = "button";
  button.addEventListener("click", () => {
    state.group = group;
    count();
    show();
  });
  return { group, label, button };
});
const save = make("button", "save");
save.type = "button";

function count() {
  for (const { group, label, button } of buttons) {
    const n = group === "all" ? data.items.length
      : group === "corrected" ? corrections.size
      : data.items.filter((item) => item.group === group).length;
    button.textContent = label + " " + n;
    button.setAttribute("aria-pressed", String(group === state.group));
  }
  save.textContent = "Download " + (corrections.size || "") + (corrections.size === 1 ? " correction" : " corrections");
  save.disabled = corrections.size === 0;
}

function quoted(text) {
  return '"' + text.replaceAll('"', '""') + '"';
}

// A path that does not depend on where the saved file is.
function located(file) {
  return data.folder && !/^([\\/]|\w:)/.test(file) ? data.folder + "/" + file : file;
}

save.addEventListener("click", () => {
  const rows = [data.columns];
  for (const [item, label] of corrections) rows.push([quoted(located(item.file)), quoted(label)].join(","));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([rows.join("\n") + "\n"], { type: "text/csv" }));
  link.download = "corrections.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});

const bar = document.querySelector(".bar > div");
const names = make("select");
names.setAttribute("aria-label", "class");
names.append(new Option("all classes", ""));
for (const name of data.classes) names.append(new Option(name, name));
names.addEventListener("change", () => { state.name = names.value; show(); });
const search = make("input");
search.type = "search";
search.placeholder = "file name";
search.setAttribute("aria-label", "file name");
search.addEventListener("input", () => { state.text = search.value.toLowerCase(); show(); });
bar.append(...buttons.map((each) => each.button), names, search);
if (data.items.some((item) => item.heat)) {
  const label = make("label", "", "where it looked ");
  const box = make("input");
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => main.classList.toggle("plain", !box.checked));
  label.prepend(box);
  bar.append(label);
}
bar.append(make("span", "grow"), save);
const list = make("datalist");
list.id = "classes";
for (const name of data.classes) list.append(new Option(name));
document.body.append(list);
count();
show();
