"use strict";

// The script of report.html: it classifies what is drawn, and shows the latent space. `data` is
// written by `mnist/report.py`.
const data = JSON.parse(document.getElementById("data").textContent);
const element = (name) => document.getElementById(name);
const percent = (share) => `${(Math.floor(1000 * share) / 10).toFixed(1)}%`; // as on the console

// --- The model: a chain of linear layers and ReLU.

function numbersOf(text) { // float32 in base64
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

const layers = (data.layers || []).map((layer) =>
  layer === "relu" ? layer : { weight: numbersOf(layer.weight), bias: layer.bias });

function softmax(values) {
  const greatest = Math.max(...values);
  const exponentials = values.map((v) => Math.exp(v - greatest));
  const total = exponentials.reduce((a, b) => a + b, 0);
  return exponentials.map((v) => v / total);
}

// Classifies an image of 784 numbers from 0 to 255, in the form of the training images: ink on 0.
// The latent point is the input of the last layer.
function classify(image) {
  let x = Array.from(image, (pixel) => pixel / 255), latent = x;
  for (const layer of layers) {
    if (layer === "relu") {
      x = x.map((v) => Math.max(v, 0));
      continue;
    }
    latent = x;
    x = layer.bias.map((bias, row) =>
      latent.reduce((sum, v, k) => sum + v * layer.weight[row * latent.length + k], bias));
  }
  return { latent, probabilities: softmax(x) };
}

// --- The drawing in the form of the training images: 28x28 pixels, the digit 20 pixels long, with
// its centre of mass in the middle.

const SIDE = 28, BOX = 20, FAINT = 32;

// `pixels` are side x side numbers, dark ink on 255. Returns null if there is no ink.
function toTrainingForm(pixels, side) {
  const ink = Array.from(pixels, (pixel) => (255 - pixel < FAINT ? 0 : 255 - pixel));
  const inked = [...ink.keys()].filter((i) => ink[i]);
  if (!inked.length) return null;
  const mass = inked.reduce((sum, i) => sum + ink[i], 0);

  // Where the ink begins along an axis, its length, and its centre of mass.
  function along(place) {
    const places = inked.map(place);
    const first = places.reduce((a, b) => Math.min(a, b));
    const size = places.reduce((a, b) => Math.max(a, b)) - first + 1;
    const center = inked.reduce((sum, i) => sum + ink[i] * (place(i) + 0.5 - first), 0) / mass;
    return { first, size, center };
  }
  const axes = [along((i) => Math.floor(i / side)), along((i) => i % side)];
  const scale = Math.max(axes[0].size, axes[1].size) / BOX; // old pixels in a new one
  for (const axis of axes) {
    const start = Math.round(SIDE / 2 + 0.5 - axis.center / scale);
    axis.start = Math.min(Math.max(start, 0), SIDE - Math.round(axis.size / scale));
  }
  const old = ({ first, start }, place) => Math.floor(first + (place - start) * scale);

  // A new pixel is the mean of 8 x 8 points in it.
  const points = Array.from({ length: 8 }, (_, k) => (k + 0.5) / 8);
  const means = Array.from({ length: SIDE * SIDE }, (_, i) => {
    let sum = 0;
    for (const down of points) {
      const y = old(axes[0], Math.floor(i / SIDE) + down);
      for (const right of points) {
        const x = old(axes[1], (i % SIDE) + right);
        if (x >= 0 && x < side && y >= 0 && y < side) sum += ink[y * side + x];
      }
    }
    return sum;
  });
  const greatest = Math.max(...means);
  return means.map((value) => Math.round((255 * value) / greatest));
}

// --- The canvas, and the elements that show the prediction.

const greyOf = (context, side) => // all pixels are grey, so one channel is enough
  Array.from(context.getImageData(0, 0, side, side).data.filter((_, i) => i % 4 === 0));

function show(image) {
  const found = image && classify(image);
  const context = element("seen").getContext("2d"), picture = context.createImageData(SIDE, SIDE);
  for (let i = 0; i < SIDE * SIDE; i++) {
    const grey = 255 - (image ? image[i] : 0);
    picture.data.set([grey, grey, grey, 255], 4 * i);
  }
  context.putImageData(picture, 0, 0);
  const likeliest = found ? found.probabilities.indexOf(Math.max(...found.probabilities)) : -1;
  element("bars").hidden = !found;
  [...element("bars").children].forEach((bar, k) => {
    const share = found ? found.probabilities[k] : 0;
    bar.style.setProperty("--share", share);
    bar.classList.toggle("likeliest", k === likeliest);
    bar.lastChild.textContent = found ? percent(share) : "";
  });
  const answer = `Answer: ${found ? likeliest : "none yet"}`;
  // Equal text is not set again, because screen readers would repeat the text for each stroke.
  if (element("answer").textContent !== answer) element("answer").textContent = answer;
  element("share").textContent =
    found ? `${percent(found.probabilities[likeliest])} probability` : "";
  if (data.space) pointAt(found && found.latent);
}

function startDrawing() {
  const pad = element("pad"), pen = pad.getContext("2d", { willReadFrequently: true });
  let lastPoint = null, isScheduled = false;

  function drawTo(event) {
    const box = pad.getBoundingClientRect();
    const point = [((event.clientX - box.left) / box.width) * pad.width,
      ((event.clientY - box.top) / box.height) * pad.height];
    Object.assign(pen, { lineWidth: 22, lineCap: "round", lineJoin: "round", strokeStyle: "#000" });
    pen.beginPath();
    pen.moveTo(...(lastPoint || point));
    pen.lineTo(...point);
    pen.stroke();
    lastPoint = point;
    if (isScheduled) return; // classify at most once per frame
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      show(toTrainingForm(greyOf(pen, pad.width), pad.width));
    });
  }

  function clear() {
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, pad.width, pad.height);
    show(null);
  }

  clear();
  pad.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !event.isPrimary) return; // ignore further fingers
    event.preventDefault();
    if (event.isTrusted) pad.setPointerCapture(event.pointerId); // a stroke may leave the canvas
    lastPoint = null;
    drawTo(event);
  });
  pad.addEventListener("pointermove", (event) => {
    if (!lastPoint || !event.isPrimary) return;
    for (const each of event.getCoalescedEvents?.() || []) drawTo(each);
    drawTo(event);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    pad.addEventListener(end, () => { lastPoint = null; });
  }
  element("clear").addEventListener("click", clear);
  for (const button of document.querySelectorAll(".samples button")) {
    button.addEventListener("click", () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: SIDE, height: SIDE });
      const context = canvas.getContext("2d");
      context.drawImage(button.firstChild, 0, 0);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(canvas, 0, 0, pad.width, pad.height);
      show(greyOf(context, SIDE).map((pixel) => 255 - pixel)); // it has the form already
    });
  }
}

// --- The latent space: one colour for each digit, and an arrow at the drawing's point.

const solid = ([x, y = 0, z = 0]) => ({ x, y, z });

function drawSpace() {
  const traces = Object.entries(data.space.points).map(([digit, points]) => {
    const [x, y, z] = [0, 1, 2].map((axis) => points.map((point) => point[axis]));
    const marker = { size: 2, color: data.colors[digit] };
    return { type: "scatter3d", mode: "markers", name: digit, hoverinfo: "name", x, y, z, marker };
  });
  const axis = { title: { text: "" }, showticklabels: false, showbackground: false,
    gridcolor: "#d8dee4", zerolinecolor: "#7d8590", showspikes: false };
  // Names at the middles of the classes help readers who cannot distinguish the colours.
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const annotations = traces.map(({ name, x, y, z }) => ({ text: `<b>${name}</b>`,
    showarrow: false, bgcolor: "rgba(255,255,255,.85)",
    x: median(x), y: median(y), z: median(z) }));
  traces.push({ type: "scatter3d", mode: "markers", x: [null], y: [null], z: [null],
    name: "your digit", showlegend: false, hoverinfo: "name",
    marker: { size: 7, color: "#1f2328", symbol: "diamond" } });
  const eye = solid(data.space.eye.map((value) => 1.6 * value));
  const layout = { paper_bgcolor: "rgba(0,0,0,0)", margin: { l: 0, r: 0, t: 0, b: 0 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "#24292f" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemsizing: "constant" },
    scene: { xaxis: axis, yaxis: axis, zaxis: axis, aspectmode: "cube", annotations,
      camera: { eye } } };
  const chart = element("space");
  Plotly.newPlot(chart, traces, layout, { displayModeBar: false, responsive: true });

  // The buttons and keys move the camera around the centre: to the right and up in steps of 15
  // degrees, nearer in steps of 15%.
  const look = (from) => Plotly.relayout(chart, { "scene.camera.eye": from });
  function turn(right, up, near) {
    const { x, y, z } = chart.layout.scene.camera.eye;
    const step = Math.PI / 12, radius = Math.hypot(x, y, z), around = Math.atan2(y, x) + right * step;
    const height = Math.min(Math.max(Math.asin(z / radius) + up * step, -1.5), 1.5);
    const [far, flat] = [radius * 0.85 ** near, Math.cos(height)];
    look({ x: far * flat * Math.cos(around), y: far * flat * Math.sin(around),
      z: far * Math.sin(height) });
  }
  for (const button of document.querySelectorAll(".turns button")) {
    const way = button.dataset.turn.split(" ").map(Number);
    button.addEventListener("click", () => (way.length > 1 ? turn(...way) : look({ ...eye })));
  }
}

// Marks a point: the arrow is in front of all points, the diamond is among them.
function pointAt(latent) {
  const chart = element("space"), { x, y, z } = solid(latent || [null, null, null]);
  const names = chart.layout.scene.annotations.filter(({ name }) => name !== "yours");
  if (latent) {
    names.push({ name: "yours", text: "<b>your digit</b>", bgcolor: "#ffffff",
      bordercolor: "#1f2328", borderpad: 3, arrowwidth: 2, arrowcolor: "#1f2328",
      ax: 0, ay: z > 0 ? 130 : -130, // towards the middle, away from the legend above the chart
      x, y, z });
  }
  const trace = { x: [[x]], y: [[y]], z: [[z]] };
  Plotly.update(chart, trace, { "scene.annotations": names }, [chart.data.length - 1]);
}

if (data.space) drawSpace();
if (data.layers) startDrawing();
