// Classifies images in the browser with onnxruntime-web. Nothing is sent anywhere, and nothing is
// loaded: the model and the runtime are parts of the page, so that it can be double-clicked, too.

const MAX_PIXELS = 64 * 2 ** 20;
const SHOWN = 3; // classes per image
const PAUSE = 60; // milliseconds between two frames of the camera
const byId = (id) => document.getElementById(id);
const model = {};
const results = []; // rows of the CSV file

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
  if (text !== undefined) element.textContent = plain(text);
  if (className) element.className = className;
  return element;
}

// The bytes of a part of the page: base64 of gzip.
async function partOf(name) {
  const element = byId(`part-${name}`);
  const packed = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  element.remove(); // the text is large
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function start() {
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = t[element.dataset.text];
  for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", t[element.dataset.label]);
  Object.assign(model, JSON.parse(byId("data").textContent));
  byId("title").textContent = document.title;
  byId("about").textContent = t.facts(model.classes.length, model.backbone, model.version);
  for (const name of model.classes) add(byId("classes"), "li", name);
  if (!("DecompressionStream" in window)) {
    say("failed", t.failed);
    return complain(t.tooOld);
  }
  try {
    const glue = new Blob([await partOf("glue")], { type: "text/javascript" });
    ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(glue) };
    ort.env.wasm.wasmBinary = await partOf("wasm");
    ort.env.wasm.numThreads = 1; // several need headers that static hosts do not send
    model.session = await ort.InferenceSession.create(await partOf("model"), { executionProviders: ["wasm"] });
    say("ready", t.ready);
  } catch (error) {
    say("failed", t.failed);
    complain(t.cannotLoad);
    throw error;
  }
}

// RGB pixels of what can be drawn: upright, on white.
function pixelsOf(source, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0);
  const rgba = context.getImageData(0, 0, width, height).data;
  const pixels = new Uint8Array(width * height * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4) {
    pixels[to++] = rgba[from];
    pixels[to++] = rgba[from + 1];
    pixels[to++] = rgba[from + 2];
  }
  return { pixels, width, height };
}

async function decode(blob) {
  const bitmap = await createImageBitmap(blob, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  const { width, height } = bitmap;
  if (width * height > MAX_PIXELS) throw new Error(t.tooLarge);
  const picture = pixelsOf(bitmap, width, height);
  bitmap.close();
  return picture;
}

async function classify(blob) {
  return recognise(await decode(blob));
}

async function recognise({ pixels, width, height }) {
  await ready;
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
  const ranking = model.classes.map((label, i) => ({ name: label, probability: probabilities[i] }));
  ranking.sort((a, b) => b.probability - a.probability);
  const { thresholds } = model;
  const other = thresholds?.other == null ? null : model.classes[thresholds.other]; // everything else
  const best = ranking.find((candidate) => candidate.name !== other);
  let decision = best.name;
  if (thresholds && unknown !== null && thresholds.unknown !== null && unknown > thresholds.unknown) decision = NONE;
  else if (ranking[0].name === other) decision = NONE;
  else if (thresholds?.probability.length && best.probability < thresholds.probability[model.classes.indexOf(best.name)]) decision = "unsure";
  return { label: best.name, probability: best.probability, decision, unknown, probabilities, ranking };
}

const titleOf = (prediction) => (prediction.decision === prediction.label ? prediction.label : t[prediction.decision]);

function showRanking(list, prediction) {
  list.replaceChildren();
  if (prediction.decision === NONE) return add(list, "li", t.unlike(prediction.label));
  for (const candidate of prediction.ranking.slice(0, SHOWN)) {
    const row = add(list, "li");
    add(row, "span", candidate.name);
    add(row, "span", percent(candidate.probability));
    add(add(row, "span", undefined, "bar"), "span").style.setProperty("width", `${100 * candidate.probability}%`);
  }
}

const isHeic = (file) => /\.hei[cf]$/i.test(file);

async function show(blob, file) {
  const card = document.createElement("article");
  card.className = "card";
  const image = add(card, "img");
  image.alt = file;
  image.src = URL.createObjectURL(blob);
  const text = add(card, "div", undefined, "text");
  const heading = add(text, "h2", "…");
  byId("results").prepend(card);
  let prediction = null;
  let problem = t.failed; // the model, if not the photo
  try {
    const picture = await decode(blob).catch((error) => {
      image.remove();
      add(text, "p", error.message === t.tooLarge ? t.tooLarge : isHeic(file) ? t.heic : t.damaged, "quiet");
      problem = t.notReadable;
      throw error;
    });
    prediction = await recognise(picture);
    showRanking(add(text, "ul", undefined, "ranking"), prediction);
  } catch (error) {
    console.warn(file, error);
  }
  heading.textContent = prediction ? titleOf(prediction) : problem;
  heading.className = kindOf(prediction ? prediction.decision : "unsure");
  const { decision, label, probability, unknown } = prediction ?? { decision: problem.toLowerCase(), label: "" };
  results.push([file, decision, label, probability?.toFixed(4) ?? "", unknown?.toFixed(4) ?? ""]);
  add(text, "p", file, "quiet file");
  byId("save").hidden = false;
}

async function showAll(files) {
  complain("");
  const images = [...files].filter((file) => file.type.startsWith("image/") || isHeic(file.name));
  const others = [...files].filter((file) => !images.includes(file));
  if (others.length) complain(t.noImages(others.map((file) => file.name)));
  if (model.session) say("busy", t.looking);
  for (const file of images) await show(file, file.name);
  if (model.session) say("ready", t.ready);
}

function save() {
  const quote = (cell) => `"${(isNaN(cell) ? cell.replace(/^[=+\-@]/, "'$&") : cell).replaceAll('"', '""')}"`; // no formulas
  const rows = [["file", "decision", "closest", "probability", "unknown"], ...results];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(["\ufeff", rows.map((row) => row.map(quote).join(",") + "\r\n").join("")], { type: "text/csv" }));
  link.download = "results.csv";
  link.click();
}

// The camera: what it sees is named all the time.

function stopCamera() {
  for (const track of byId("video").srcObject?.getTracks() ?? []) track.stop();
  byId("video").srcObject = null;
  byId("viewfinder").hidden = true;
  byId("camera").focus();
}

async function startCamera() {
  complain("");
  if (!navigator.mediaDevices) return complain(t.noCamera(t.notSecure));
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    byId("video").srcObject = stream;
    await byId("video").play();
    byId("viewfinder").hidden = false;
    byId("shoot").focus();
    follow(stream);
  } catch (error) {
    complain(t.noCamera(t[error.name] ?? t.cameraBusy));
  }
}

async function follow(stream) {
  const video = byId("video");
  let last = "";
  let since = 0;
  while (video.srcObject === stream) {
    if (model.session && video.videoWidth && !document.hidden) {
      const prediction = await recognise(pixelsOf(video, video.videoWidth, video.videoHeight));
      if (video.srcObject !== stream) return;
      const title = titleOf(prediction);
      byId("name").textContent = title;
      byId("name").className = `name ${kindOf(prediction.decision)}`;
      showRanking(byId("live"), prediction);
      if (title !== last) since = Date.now();
      else if (Date.now() - since > 1000) byId("spoken").textContent = title; // not every flicker is read out
      last = title;
    }
    await new Promise((done) => setTimeout(done, PAUSE));
  }
}

async function shoot() {
  const video = byId("video");
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  canvas.getContext("2d").drawImage(video, 0, 0);
  await show(await canvas.convertToBlob({ type: "image/png" }), t.fromCamera);
}

byId("choose").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", (event) => showAll(event.target.files));
byId("camera").addEventListener("click", startCamera);
byId("save").addEventListener("click", save);
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

const ready = start();
