"use strict";
// Everything that comes from the user's files is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const corrections = new Map(); // item to the right name
const state = { group: "all", name: "", text: "" };
const FEW = { guessed: 5, unknown: 10 }; // classes that all have a button

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
  if (text !== undefined) node.textContent = plain(text);
  return node;
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

// Names to click: the most probable classes, or all if there are few.
function choicesOf(item) {
  const chances = new Map(item.top);
  const near = chances.size ? [...chances.keys()] : [item.label];
  const few = chances.size ? FEW.guessed : FEW.unknown;
  const names = data.classes.length > few ? near : [...near, ...data.classes];
  return [...new Set(names)].filter((name) => data.classes.includes(name)).map((name) => [name, item.group === "none" ? undefined : chances.get(name)]);
}

function addImage(parent, source, alt) {
  if (!source) return;
  const image = make("img");
  image.alt = alt;
  image.src = source;
  parent.append(image);
}

function addReasons(text, item) {
  if (!item.why && !item.near.length) return;
  const details = make("details", "why");
  details.append(make("summary", "", "why?"));
  if (item.why) details.append(make("p", "", item.why));
  const near = make("div", "near");
  for (const [place, weight] of item.near) {
    const shot = data.shots[place];
    const box = make("div", shot.label === item.label ? "" : "other");
    box.title = shot.label + ": " + shot.file;
    addImage(box, shot.src, box.title);
    box.append(weight === null ? shot.label : percent(weight));
    near.append(box);
  }
  if (item.rest >= 0.005) near.insertBefore(make("div", "rest", "others " + percent(item.rest)), near.querySelector(".other"));
  if (item.near.length) details.append(make("p", "", "Compared with:"), near);
  text.append(details);
}

function fill(card) {
  const item = card.item;
  const figure = make("figure");
  const frame = make("div");
  addImage(frame, item.src, item.file);
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
  const choices = make("div", "choices");
  const typed = make("input", "fix");
  const buttons = [...choicesOf(item), [NONE]].map(([label, chance]) => {
    const button = make("button", "", label);
    button.type = "button";
    if (chance !== undefined) button.append(make("small", "", " " + percent(chance)));
    button.addEventListener("click", () => correct(corrections.get(item) === label ? "" : label));
    return [label, button];
  });
  typed.setAttribute("list", "classes");
  typed.placeholder = "other…";
  typed.setAttribute("aria-label", "another class for " + item.file);
  typed.addEventListener("input", () => correct(typed.value.trim(), true));
  choices.append(...buttons.map(([, button]) => button), typed);
  const file = make("div", "file", item.file.split("/").pop());
  file.title = item.file;
  text.append(name, choices);
  addReasons(text, item);
  text.append(file);
  card.replaceChildren(figure, text);

  function correct(label, isTyped) {
    if (label) corrections.set(item, label);
    else corrections.delete(item);
    remember();
    count();
    mark(isTyped);
  }
  function mark(isTyped) {
    const label = corrections.get(item) || "";
    card.classList.toggle("corrected", Boolean(label));
    for (const [of, button] of buttons) button.setAttribute("aria-pressed", String(of === label));
    if (!isTyped) typed.value = buttons.some(([of]) => of === label) ? "" : label;
  }
  mark();
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
  if (!shown.length) main.append(make("p", "empty", data.items.length ? "Nothing fits the filters." : "There are no photos."));
  for (const card of shown) if (!card.childElementCount) watcher.observe(card);
}

const buttons = [["all", "all"], ...Object.entries(data.groups), ["corrected", "corrected"]].map(([group, label]) => {
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
  return /^([\\/]|\w:)/.test(file) ? file : data.folder + "/" + file;
}

save.addEventListener("click", () => {
  const rows = ["path,label"];
  for (const [item, label] of corrections) rows.push([quoted(located(item.file)), quoted(label)].join(","));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([rows.join("\n") + "\n"], { type: "text/csv" }));
  link.download = "corrections.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  const told = document.querySelector("header p");
  told.setAttribute("role", "status");
  told.replaceChildren("Your browser saved corrections.csv. Put its path into this line in a terminal, and the model learns from it: ", make("code", "", data.learn));
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
bar.append(...buttons.map(({ button }) => button), names, search);
if (data.items.some((item) => item.heat)) {
  const label = make("label", "", "where it looked ");
  const box = make("input");
  box.type = "checkbox";
  box.addEventListener("change", () => main.classList.toggle("looked", box.checked));
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
