"use strict";

// Draws the charts of the page with plotly, in the colour scheme of the browser.

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const pageColors = JSON.parse(document.getElementById("page-colors").textContent);

// Returns a copy of a part of a chart. Colours of the page become those of the current scheme.
function inScheme(value) {
  if (typeof value === "string") {
    const pair = pageColors.find((colors) => colors.includes(value));
    return pair ? pair[darkScheme.matches ? 1 : 0] : value;
  }
  if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(inScheme) : value;
  if (!value || Object.getPrototypeOf(value) !== Object.prototype) return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, inScheme(part)]));
}

const colorOf = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();
const START = { x: 1.05, y: 1.05, z: 0.6 }; // where the camera is at first

function drawChart(element) {
  const { data, layout } = JSON.parse(element.textContent);
  const isSpace = data.some((trace) => trace.type === "scatter3d");
  const [ink, card, line, edge] = ["ink", "card", "line", "edge"].map(colorOf);
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  const axis3d = { title: { text: "" }, showticklabels: false, backgroundcolor: card,
    gridcolor: line, zerolinecolor: edge, showspikes: false };
  const shared = {
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
    margin: isSpace ? { l: 0, r: 0, t: 0, b: 0 } : { l: 48, r: 12, t: 44, b: 44 },
    paper_bgcolor: card, plot_bgcolor: card,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    scene: { xaxis: axis3d, yaxis: axis3d, zaxis: axis3d, aspectmode: "cube",
      camera: { eye: { ...START } } },
  };
  const merged = { ...shared, ...layout, legend: { ...shared.legend, ...layout.legend },
    scene: { ...shared.scene, ...layout.scene } };
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
    merged[name] = { ...axis, ...layout[name] };
  }
  element.replaceChildren();
  Plotly.newPlot(element, inScheme(data), inScheme(merged),
    { responsive: true, displayModeBar: false });
}

// Moves the camera around the centre: `right` and `up` in steps of 15 degrees, `near` in steps of 15%.
function turn(chart, right, up, near) {
  const { x, y, z } = chart.layout.scene.camera.eye;
  const step = Math.PI / 12, radius = Math.hypot(x, y, z) * 0.85 ** near;
  const around = Math.atan2(y, x) + right * step;
  const height = Math.min(Math.max(Math.asin(z / Math.hypot(x, y, z)) + up * step, -1.5), 1.5);
  const flat = radius * Math.cos(height);
  look(chart, { x: flat * Math.cos(around), y: flat * Math.sin(around),
    z: radius * Math.sin(height) });
}

const look = (chart, eye) => Plotly.relayout(chart, { "scene.camera.eye": eye });

const KEYS = { ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, 1, 0],
  ArrowDown: [0, -1, 0], "+": [0, 0, 1], "-": [0, 0, -1] };

for (const element of document.querySelectorAll(".chart")) drawChart(element);

for (const space of document.querySelectorAll(".space")) {
  const chart = space.querySelector(".chart");
  for (const button of space.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const { turn: way } = button.dataset;
      if (way) turn(chart, ...way.split(" ").map(Number));
      else look(chart, { ...START });
    });
  }
  space.querySelector(".turns").addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault(); // the arrow keys would scroll the page
    turn(chart, ...KEYS[event.key]);
  });
}

darkScheme.addEventListener("change", () => {
  for (const chart of document.querySelectorAll(".chart")) {
    Plotly.react(chart, inScheme(chart.data), inScheme(chart.layout));
  }
});
