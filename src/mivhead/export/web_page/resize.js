// Pillow's bicubic resizing of 8-bit images, so that the page sees what mivhead saw in training.
// A canvas resizes differently. Like Pillow: the width first, then the height, in fixed-point
// arithmetic, each rounded to 8 bits.

const BITS = 22;
const ONE = 2 ** BITS;

function cubic(x) {
  const a = -0.5;
  x = Math.abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

// For every output place: the first input place, and the weights from there on.
function weights(length, size) {
  const scale = length / size;
  const stretch = Math.max(scale, 1);
  const support = 2 * stretch;
  const table = [];
  for (let i = 0; i < size; i++) {
    const centre = (i + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - support + 0.5), 0);
    const end = Math.min(Math.trunc(centre + support + 0.5), length);
    const values = [];
    let total = 0;
    for (let x = first; x < end; x++) {
      const value = cubic((x - centre + 0.5) / stretch);
      values.push(value);
      total += value;
    }
    table.push([first, values.map((v) => Math.trunc((v / total) * ONE + (v / total < 0 ? -0.5 : 0.5)))]);
  }
  return table;
}

// Resize one axis of RGB pixels. Places along it are `step` values apart, lines `lineStep`.
function resizeAxis(pixels, out, length, size, lines, [step, lineStep], [outStep, outLineStep]) {
  const table = weights(length, size);
  for (let line = 0; line < lines; line++) {
    for (let i = 0; i < size; i++) {
      const [first, values] = table[i];
      const start = line * lineStep + first * step;
      const end = line * outLineStep + i * outStep;
      for (let c = 0; c < 3; c++) {
        let sum = ONE / 2;
        for (let k = 0; k < values.length; k++) sum += pixels[start + k * step + c] * values[k];
        out[end + c] = Math.min(Math.max(Math.floor(sum / ONE), 0), 255);
      }
    }
  }
}

// RGB pixels (height, width, 3) to (size, size, 3).
function resize(pixels, width, height, size) {
  if (width !== size) {
    const out = new Uint8Array(height * size * 3);
    resizeAxis(pixels, out, width, size, height, [3, 3 * width], [3, 3 * size]);
    pixels = out;
  }
  if (height === size) return pixels;
  const out = new Uint8Array(size * size * 3);
  resizeAxis(pixels, out, height, size, size, [3 * size, 3], [3 * size, 3]);
  return out;
}
