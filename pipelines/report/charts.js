// Draws the page's charts by Vega-Lite, which the page holds compressed, and shows their values at the pointer. Of each
// chart with named lines: its values as a CSV file. Of the learning curves: a slider that smooths them.
const charts = [];  // {figure, spec, view, lines: those with a name, as they are drawn just now}
const named = ({ lines = [] }) => lines.filter(({ line }) => line);
const nearest = (values, wanted) => values.reduce((best, value, at) => Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? at : best, 0);
const brief = (value) => Number(value.toPrecision(4));

async function loadLibrary() {
  const bytes = Uint8Array.from(atob(document.getElementById("vega").textContent), (letter) => letter.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(Object.assign(document.createElement("script"), { textContent: `(() => { "use strict"; ${text} })()` }));
}

function placeAt({ figure, view }, event) {
  const svg = figure.querySelector("svg"), frame = svg.getBoundingClientRect();
  return view.scale("x").invert((event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width - view.padding().left - view.origin()[0]);
}

function follow(chart, event, item) {
  const { figure, view } = chart, svg = figure.querySelector("svg"), x = placeAt(chart, event);
  const left = view.padding().left + view.origin()[0], top = view.padding().top + view.origin()[1];
  const values = chart.lines.map((line) => ({ line, at: nearest(line.x, x) }));
  const texts = values.map(({ line, at }) => `${line.line}: ${brief(line.y[at])} at ${brief(line.x[at])}`);
  if (item?.tooltip) texts.push(item.tooltip);
  if (!texts.length) return leave(chart);
  show(event, texts);
  if (!values.length) return;
  const places = values.map(({ line, at }) => line.x[at]), pixel = left + view.scale("x")(places[nearest(places, x)]);
  for (const [name, value] of Object.entries({ x1: pixel, x2: pixel, y1: top, y2: top + view.height() })) chart.cursor.setAttribute(name, value);
  svg.append(chart.cursor);
}

function leave(chart) {
  box.style.display = "none";
  chart.cursor.remove();
}

function download({ spec }) {
  // An apostrophe before what a spreadsheet would take for a formula.
  const quoted = (text) => `"${text.replace(/^[=+\-@\t\r\n＝＋－＠]/, "'$&").replaceAll('"', '""')}"`;
  const rows = named(spec.datasets).flatMap(({ line, x, y }) => x.map((place, at) => [quoted(line), place, y[at]].join(",")));
  const text = [`line,${quoted(spec.encoding.x.title)},value`, ...rows, ""].join("\n");
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })) });
  link.download = `${spec.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "")}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// A title in lines that are no wider than the chart.
function wrapped(title, width) {
  const most = Math.max(12, Math.floor(width / 7)), lines = [""];
  for (const word of title.split(" ")) {
    const last = lines.length - 1;
    if (lines[last] && lines[last].length + word.length >= most) lines.push(word); else lines[last] = `${lines[last]} ${word}`.trim();
  }
  return lines;
}

// Draws a chart by its description; again after a change of that.
async function embed(chart) {
  chart.view?.finalize();
  chart.isFilled = false;
  const spec = { ...chart.spec, title: wrapped(chart.spec.title, chart.place.clientWidth) };
  ({ view: chart.view } = await vegaEmbed(chart.place, spec, { ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip: () => {} }));
  for (const type of ["pointermove", "click"]) chart.view.addEventListener(type, (event, item) => follow(chart, event, item));
}

async function draw(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent), place = document.createElement("div");
  figure.append(place);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  const chart = { figure, spec, place, cursor, lines: named(spec.datasets) };
  await embed(chart);
  figure.addEventListener("pointerleave", () => leave(chart));
  charts.push(chart);
  if (!chart.lines.length) return chart;
  const button = Object.assign(document.createElement("button"), { className: "download", textContent: "CSV", title: "The values that are drawn" });
  button.addEventListener("click", () => download(chart));
  figure.after(button);
  return chart;
}

// An exponential mean by steps, not by points: of a long curve only the points that make its shape are drawn.
function smoothed(line, weight) {
  let sum = 0, total = 0, before = -Infinity;
  const y = line.y.map((value, at) => {
    const kept = weight ** (line.x[at] - before);
    [sum, total, before] = [kept * sum + (1 - kept) * value, kept * total + 1 - kept, line.x[at]];
    return sum / total;
  });
  return { ...line, y, line: `${line.line}, smoothed` };
}

function smooth(weight) {
  for (const chart of charts.filter(({ figure }) => figure.closest(".curves"))) {
    const { lines } = chart.spec.datasets;
    const behind = lines.map((line) => line.line ? { ...line, id: `${line.id} behind`, opacity: 0.33, stroke: 1 } : line);
    chart.lines = weight ? named({ lines }).map((line) => smoothed(line, weight)) : named({ lines });
    // Copies: Vega marks the rows that it has, and takes a row with such a mark for one that it knows.
    chart.view.data("lines", structuredClone(weight ? [...behind, ...chart.lines] : lines)).runAsync();
  }
}

function addSlider(curves) {
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
  const label = Object.assign(document.createElement("label"), { className: "smoothing", textContent: "Smoothing " });
  const shown = document.createElement("output");
  label.append(slider, " ", shown);
  curves.before(label);
  slider.addEventListener("input", () => {
    const weight = Number(slider.value);
    shown.textContent = weight ? `each step keeps ${weight} of the mean before it` : "";
    smooth(weight);
  });
}

const ready = loadLibrary().then(async () => {
  for (const figure of document.querySelectorAll("figure.chart")) await draw(figure).catch(console.error);
  document.querySelectorAll(".curves").forEach(addSlider);
});
