// Classifies images in the browser with onnxruntime-web. Nothing is sent anywhere.

import { resize } from "./resize.js";

const MAX_PIXELS = 64 * 2 ** 20;
const SHOWN = 3; // classes per image
const byId = (id) => document.getElementById(id);
const model = {};

function say(state, text) {
  const status = byId("status");
  status.className = `status ${state}`;
  status.lastElementChild.textContent = text;
}

function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function add(parent, kind, text, className) {
  const element = parent.appendChild(document.createElement(kind));
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

async function start() {
  if (location.protocol === "file:") {
    say("failed", "Not loaded");
    complain("Browsers do not load models from files: open this folder through a web server, for example with `python -m http.server`.");
    return;
  }
  try {
    Object.assign(model, await (await fetch("model.json")).json());
    document.title = byId("title").textContent = model.title;
    byId("about").textContent = `${model.classes.length} classes. Backbone: ${model.backbone}. Made with mivhead ${model.version}.`;
    for (const name of model.classes) add(byId("classes"), "li", name);
    ort.env.wasm.wasmPaths = new URL("runtime/", location.href).href;
    ort.env.wasm.numThreads = 1; // several need headers that static hosts do not send
    model.session = await ort.InferenceSession.create("model.onnx", { executionProviders: ["wasm"] });
    say("ready", "Ready");
  } catch (error) {
    say("failed", "Not loaded");
    complain(`The model could not be loaded: ${error.message}`);
    throw error;
  }
}

// Decode to RGB pixels: upright, on white.
async function decode(blob) {
  const bitmap = await createImageBitmap(blob, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  const { width, height } = bitmap;
  if (width * height > MAX_PIXELS) throw new Error("the image has more than 64 megapixels");
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const rgba = context.getImageData(0, 0, width, height).data;
  const pixels = new Uint8Array(width * height * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4) {
    pixels[to++] = rgba[from];
    pixels[to++] = rgba[from + 1];
    pixels[to++] = rgba[from + 2];
  }
  return { pixels, width, height };
}

export async function classify(blob) {
  await ready;
  const { pixels, width, height } = await decode(blob);
  const { size, mean, std } = model.preprocessing;
  const small = resize(pixels, width, height, size);
  const x = new Float32Array(3 * size * size);
  for (let c = 0; c < 3; c++) {
    for (let i = 0; i < size * size; i++) {
      x[c * size * size + i] = (small[3 * i + c] / 255 - mean[c]) / std[c];
    }
  }
  const output = await model.session.run({ [model.session.inputNames[0]]: new ort.Tensor("float32", x, [1, 3, size, size]) });
  const probabilities = Array.from(output.probabilities.data);
  const unknown = output.unknown ? output.unknown.data[0] : null;
  const ranking = model.classes.map((name, i) => ({ name, probability: probabilities[i] }));
  ranking.sort((a, b) => b.probability - a.probability);
  const { thresholds } = model;
  const other = thresholds?.other == null ? null : model.classes[thresholds.other]; // everything else
  const best = ranking.find((each) => each.name !== other);
  let decision = best.name;
  if (thresholds && unknown !== null && thresholds.unknown !== null && unknown > thresholds.unknown) decision = "none of these";
  else if (ranking[0].name === other) decision = "none of these";
  else if (thresholds && best.probability < thresholds.probability) decision = "unsure";
  return { label: best.name, probability: best.probability, decision, unknown, probabilities, ranking };
}

// 100 % and 0 % only if it is exactly that, as on the command line.
function percent(share) {
  if (share >= 0.995 && share < 1) return ">99 %";
  return share > 0 && share < 0.005 ? "<1 %" : `${Math.round(100 * share)} %`;
}

async function show(blob, name) {
  const card = document.createElement("article");
  card.className = "card";
  const image = add(card, "img");
  image.alt = name;
  image.src = URL.createObjectURL(blob);
  const text = add(card, "div", undefined, "text");
  const heading = add(text, "h2", "…");
  byId("results").prepend(card);
  try {
    const found = await classify(blob);
    heading.textContent = found.decision;
    if (found.decision !== found.label) heading.className = "doubt";
    const list = add(text, "ul", undefined, "ranking");
    for (const each of found.ranking.slice(0, SHOWN)) {
      const row = add(list, "li");
      add(row, "span", each.name);
      add(row, "span", percent(each.probability));
      add(add(row, "span", undefined, "bar"), "span").style.setProperty("width", `${100 * each.probability}%`);
    }
  } catch (error) {
    heading.textContent = "Not readable";
    heading.className = "doubt";
    add(text, "p", error.message, "quiet");
  }
  add(text, "p", name, "quiet file");
}

async function showAll(files) {
  complain("");
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) complain("There is no image among these files.");
  say("busy", "Looking");
  for (const file of images) await show(file, file.name);
  if (model.session) say("ready", "Ready");
}

function stopCamera() {
  for (const track of byId("video").srcObject?.getTracks() ?? []) track.stop();
  byId("video").srcObject = null;
  byId("viewfinder").hidden = true;
}

async function startCamera() {
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    byId("video").srcObject = stream;
    await byId("video").play();
    byId("viewfinder").hidden = false;
  } catch (error) {
    complain(`The camera cannot be used: ${error.message}`);
  }
}

async function shoot() {
  const video = byId("video");
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  canvas.getContext("2d").drawImage(video, 0, 0);
  await show(await canvas.convertToBlob({ type: "image/png" }), "camera");
}

byId("files").addEventListener("change", (event) => showAll(event.target.files));
byId("camera").addEventListener("click", startCamera);
byId("shoot").addEventListener("click", shoot);
byId("stop").addEventListener("click", stopCamera);
for (const kind of ["dragenter", "dragover"]) {
  addEventListener(kind, (event) => { event.preventDefault(); document.body.classList.add("over"); });
}
addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  showAll(event.dataTransfer.files);
});
addEventListener("paste", (event) => event.clipboardData.files.length && showAll(event.clipboardData.files));

export const ready = start();
