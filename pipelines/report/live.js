// The live page: asks the server for the steps that it lacks, and draws the runs' curves over each other by charts.js.
const about = JSON.parse(document.getElementById("about").textContent);
const LEAST_POINTS = 24, MOST_POINTS = 2400;  // of a line; and over all charts, so that a redraw takes less than 100 ms
const AXES = { steps: "step", tokens: "response tokens", time: "minutes of training" };
const by = (id) => document.getElementById(id);
const runs = new Map();  // run id -> {known: [state, rows, attempt, step], curves: {metric: {x: steps, y}}}
const shown = new Map();  // metric -> its chart, with `full`: its lines with all points
const state = readState();  // the choices, which the page's address keeps
let groups = [], key = "", recorded = [], range = null, look = false, timer = 0, drawing = Promise.resolve(), asked = 0;

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  return {
    metrics: given.getAll("metric"), hidden: new Set(given.getAll("hide")), log: new Set(given.getAll("log")),
    axis: given.get("x") in AXES ? given.get("x") : "steps", smoothing: Number(given.get("smooth")) || 0, band: !given.has("singles"),
  };
}

function keepState() {
  const kept = new URLSearchParams();
  for (const [name, values] of [["metric", state.metrics], ["hide", state.hidden], ["log", state.log]]) for (const value of values) kept.append(name, value);
  if (state.axis !== "steps") kept.set("x", state.axis);
  if (state.smoothing) kept.set("smooth", state.smoothing);
  if (!state.band) kept.set("singles", "1");
  history.replaceState(null, "", `${location.pathname}${location.search}${[...kept].length ? `#${kept}` : ""}`);
}

// What a step of a run was: its number, or the response tokens or minutes of training until its end.
function places(run, steps) {
  const { axis } = state, of = runs.get(run.id).curves[about.axes[axis]];
  if (axis === "steps") return steps;
  if (!of) return steps.map(() => null);
  of.sums ??= of.y.reduce((sums, value) => (sums.push((sums.at(-1) ?? 0) + (value ?? 0)), sums), []);
  const unit = axis === "time" ? 1 / 60 : run.responses;
  return steps.map((step) => unit * (of.sums[after(of.x, step) - 1] ?? 0));
}

// How many of sorted values are at most `value`.
function after(values, value) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] <= value) low = middle + 1; else high = middle; }
  return low;
}

function curve(run, metric, isLog) {
  const found = runs.get(run.id)?.curves[metric];
  if (!found) return [];
  const kept = found.x.map((_, at) => at).filter((at) => found.y[at] !== null && !(isLog && found.y[at] <= 0));
  if (!kept.length) return [];
  let line = { x: kept.map((at) => found.x[at]), y: kept.map((at) => found.y[at]) };
  if (state.smoothing) line = smoothed(line, state.smoothing);
  return [{ run, steps: line.x, x: places(run, line.x), y: line.y }];
}

// The mean of seeds at the steps that all of them have, with Student's interval.
function mean(seeds, [least, most]) {
  const count = seeds.length, sets = seeds.slice(1).map(({ steps }) => new Map(steps.map((step, at) => [step, at])));
  const result = { steps: [], x: [], y: [], low: [], high: [] };
  const factor = about.factors[Math.min(count, about.factors.length + 1) - 2];
  seeds[0].steps.forEach((step, first) => {
    const at = [first, ...sets.map((set) => set.get(step))];
    if (at.includes(undefined)) return;
    const values = at.map((place, seed) => seeds[seed].y[place]), middle = values.reduce((a, b) => a + b) / count;
    const half = factor * Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (count - 1) / count);
    result.steps.push(step);
    result.x.push(at.reduce((sum, place, seed) => sum + seeds[seed].x[place], 0) / count);
    result.y.push(middle);
    result.low.push(Math.max(middle - half, least ?? -Infinity));
    result.high.push(Math.min(middle + half, most ?? Infinity));
  });
  return result;
}

function linesOf(metric) {
  const { bounds } = about.metrics[metric] ?? { bounds: [null, null] }, isLog = state.log.has(metric);
  return groups.flatMap((group, place) => {
    const seeds = group.runs.flatMap((run) => curve(run, metric, isLog));
    const row = (line, label, faint) => ({ group: place, line: label, color: `var(--c${place % 8})`, dots: line.x.length === 1, opacity: faint ? 0.33 : 1, stroke: faint ? 1 : 2, ...line });
    const single = (faint) => (seed) => row({ x: seed.x, y: seed.y }, faint ? "" : seeds.length > 1 ? `${group.label}, seed ${seed.run.seed}` : group.label, faint);
    if (seeds.length < 2 || !state.band) return seeds.map(single(false));
    // A seed that has just begun does not cut the mean of those that have gone further.
    const last = Math.max(...seeds.map(({ steps }) => steps.at(-1))), far = seeds.filter(({ steps }) => steps.at(-1) === last);
    const together = far.length > 1 ? far : seeds, { low, high, steps, ...middle } = mean(together, isLog ? [1e-300, bounds[1]] : bounds);
    const isBand = together.length >= about.leastSeeds;
    const beside = isBand ? seeds.filter((seed) => !together.includes(seed)) : seeds;
    return [...beside.map(single(true)), ...(middle.x.length ? [row(isBand ? { ...middle, low, high } : middle, group.label, false)] : [])];
  });
}

// The points of a line in the range and one on either side; of many, those that preserve the line's shape: largest
// triangle three buckets, as in charts.py.
function thinned(line, [from, to], most) {
  const start = Math.max(0, after(line.x, from) - 1), end = Math.min(line.x.length, after(line.x, to) + 1), count = end - start;
  let kept = Array.from({ length: Math.max(count, 0) }, (_, at) => start + at);
  if (count > most) {
    const edge = (bucket) => start + 1 + Math.floor(bucket * (count - 2) / (most - 2));
    kept = [start];
    for (let bucket = 0; bucket < most - 2; bucket++) {
      const x = line.x[kept.at(-1)], y = line.y[kept.at(-1)], stop = bucket === most - 3 ? end : edge(bucket + 2);
      let nextX = 0, nextY = 0, best = -1, chosen = edge(bucket);
      for (let at = edge(bucket + 1); at < stop; at++) { nextX += line.x[at]; nextY += line.y[at]; }
      nextX /= stop - edge(bucket + 1); nextY /= stop - edge(bucket + 1);
      for (let at = edge(bucket); at < edge(bucket + 1); at++) {
        const area = Math.abs((x - nextX) * (line.y[at] - y) - (x - line.x[at]) * (nextY - y));
        if (area > best) [best, chosen] = [area, at];
      }
      kept.push(chosen);
    }
    kept.push(end - 1);
  }
  const lists = Object.entries(line).filter(([, value]) => Array.isArray(value));
  return { ...line, ...Object.fromEntries(lists.map(([name, values]) => [name, kept.map((at) => values[at])])) };
}

const isHidden = ({ group }) => state.hidden.has(groups[group].label);

function extentOf() {
  let low = Infinity, high = -Infinity;
  for (const { full } of shown.values()) for (const line of full) if (!isHidden(line)) { low = Math.min(low, line.x[0]); high = Math.max(high, line.x.at(-1)); }
  return low < high ? [low, high] : low === high ? [low - 0.5, low + 0.5] : [0, 1];
}

async function redraw(chart, ends) {
  const visible = chart.full.filter((line) => !isHidden(line));
  const most = Math.max(LEAST_POINTS, Math.floor(MOST_POINTS / shown.size / Math.max(1, visible.length)));
  const lines = visible.map((line) => thinned(line, ends, most)).filter(({ x }) => x.length);
  chart.lines = named({ lines });
  chart.spec.datasets.lines = visible;
  chart.view.signal("x0", ends[0]).signal("x1", ends[1]).data("lines", lines.map((line, id) => ({ ...line, id })));
  if (!chart.isFilled) chart.view.resize();  // the axes of an empty chart took less room
  chart.isFilled = lines.length > 0;
  await chart.view.runAsync();
}

// One redraw after the other; a chart that the visitor has touched comes first.
function redrawAll(first) {
  const ends = range ?? extentOf();
  by("all").disabled = !range;
  for (const [id, at] of [["from", 0], ["to", 1]]) if (document.activeElement !== by(id)) by(id).value = brief(ends[at]);
  const order = [...shown.values()].sort((a, b) => (b === first) - (a === first));
  drawing = drawing.then(async () => { for (const chart of order) await redraw(chart, ends); }).catch(console.error);
  return drawing;
}

function recompute() {
  for (const [metric, chart] of shown) chart.full = linesOf(metric);
  return redrawAll();
}

async function addChart(metric) {
  const card = by("chart").content.cloneNode(true).firstElementChild, figure = card.querySelector("figure");
  const heading = about.metrics[metric]?.heading ?? metric;
  const about_ = figure.querySelector("script"), spec = JSON.parse(about_.textContent);
  spec.title = heading;
  spec.params = [{ name: "x0", value: 0 }, { name: "x1", value: 1 }];
  spec.encoding.x.title = AXES[state.axis];
  if (state.log.has(metric)) spec.encoding.y.scale = { type: "log", nice: true };
  about_.textContent = JSON.stringify(spec);
  figure.setAttribute("aria-label", heading);
  by("charts").append(card);
  const chart = await draw(figure);
  Object.assign(chart, { card, metric, full: [] });
  card.querySelector(".enlarge").addEventListener("click", (event) => {
    const isLarge = card.classList.toggle("large");
    event.target.textContent = isLarge ? "Shrink" : "Enlarge";
    chart.view.height(isLarge ? 420 : 190);
    dispatchEvent(new Event("resize"));
    redrawAll(chart);
  });
  const log = card.querySelector(".log");
  log.setAttribute("aria-pressed", state.log.has(metric));
  log.addEventListener("click", async () => {
    if (!state.log.delete(metric)) state.log.add(metric);
    log.setAttribute("aria-pressed", state.log.has(metric));
    chart.spec.encoding.y.scale = state.log.has(metric) ? { type: "log", nice: true } : { zero: false, nice: true };
    chart.spec.datasets.lines = [];
    keepState();
    await (drawing = drawing.then(() => embed(chart)));
    chart.full = linesOf(metric);
    redrawAll(chart);
  });
  card.querySelector(".csv").addEventListener("click", () => download(chart));
  addZoom(chart);
  shown.set(metric, chart);
}

function addZoom(chart) {
  const { figure } = chart, mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  let begun = null;
  mark.setAttribute("class", "zoom");
  figure.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.target.closest("svg")) begun = event; });
  figure.addEventListener("dblclick", () => { range = null; redrawAll(chart); });
  figure.addEventListener("pointermove", (event) => {
    if (!begun) return;
    const svg = figure.querySelector("svg"), frame = svg.getBoundingClientRect(), unit = svg.viewBox.baseVal.width / frame.width;
    const ends = [begun.clientX, event.clientX].map((x) => (x - frame.left) * unit).sort((a, b) => a - b);
    for (const [name, value] of Object.entries({ x: ends[0], y: 0, width: ends[1] - ends[0], height: svg.viewBox.baseVal.height })) mark.setAttribute(name, value);
    svg.append(mark);
  });
  addEventListener("pointerup", (event) => {
    if (begun && Math.abs(event.clientX - begun.clientX) > 5) {
      range = [placeAt(chart, begun), placeAt(chart, event)].sort((a, b) => a - b);
      redrawAll(chart);
    }
    begun = null;
    mark.remove();
  });
}

// Makes the charts those of the chosen metrics, in their order.
async function syncCharts() {
  const wanted = chosen();
  for (const [metric, chart] of shown) if (!wanted.includes(metric)) { chart.card.remove(); chart.view.finalize(); charts.splice(charts.indexOf(chart), 1); shown.delete(metric); }
  for (const metric of wanted) if (!shown.has(metric)) await addChart(metric);
  for (const metric of wanted) by("charts").append(shown.get(metric).card);
}

const isAnswer = (name) => /^(mean|score)@/.test(name);
const chosen = () => state.metrics.length ? state.metrics : recorded.filter((name) => isAnswer(name) || about.first.includes(name));

function showChoice() {
  const wanted = chosen(), box = by("metrics"), listed = [...box.querySelectorAll("input")].map(({ value }) => value);
  if (recorded.join("\n") !== listed.join("\n")) box.replaceChildren(...recorded.map((name) => {
    const label = document.createElement("label"), input = Object.assign(document.createElement("input"), { type: "checkbox", value: name });
    label.append(input, ` ${about.metrics[name]?.heading ?? name}`);
    return label;
  }));
  for (const input of box.querySelectorAll("input")) input.checked = wanted.includes(input.value);
}

function showSeries() {
  const list = by("series");
  by("key").textContent = key;
  list.replaceChildren(...groups.map((group, place) => {
    const button = Object.assign(document.createElement("button"), { type: "button" }), color = document.createElement("i");
    color.style.background = `var(--c${place % 8})`;
    const ended = group.runs.filter(({ status }) => !["pending", "running"].includes(status)).length;
    const step = Math.max(...group.runs.map(({ id }) => runs.get(id)?.known[3] ?? 0), 0);
    const seeds = group.runs.length > 1 ? `${ended} of ${group.runs.length} ended` : group.runs[0].status;
    const told = Object.assign(document.createElement("small"), { textContent: `${seeds}${group.steps ? `, step ${step} of ${group.steps}` : ""}` });
    button.append(color, `${group.label} `, told);
    button.setAttribute("aria-pressed", !state.hidden.has(group.label));
    button.addEventListener("click", () => { if (!state.hidden.delete(group.label)) state.hidden.add(group.label); hide(); });
    button.addEventListener("dblclick", () => {
      const others = groups.map(({ label }) => label).filter((label) => label !== group.label);
      state.hidden = new Set(others.every((label) => state.hidden.has(label)) ? [] : others);
      hide();
    });
    return button;
  }));
}

function hide() {
  [...by("series").children].forEach((button, place) => button.setAttribute("aria-pressed", !state.hidden.has(groups[place].label)));
  keepState();
  redrawAll();
}

function showState() {
  const counts = new Map();
  for (const { status } of groups.flatMap((group) => group.runs)) counts.set(status, (counts.get(status) ?? 0) + 1);
  const total = [...counts.values()].reduce((a, b) => a + b, 0);
  const told = [...counts].map(([status, count]) => `${count} ${status}`).join(", ");
  by("state").textContent = total ? `${total} ${total === 1 ? "run" : "runs"}: ${told} · read ${new Date().toLocaleTimeString()}` : "No run has begun yet: it is starting.";
}

function showAnswer({ text, note, asks }) {
  const [words, small, button] = by("answer").children;
  [words.textContent, small.textContent, button.hidden] = [text, note, !asks];
  by("answer").hidden = !text && !note;
}

function take(sent) {
  for (const [id, of] of Object.entries(sent.runs)) {
    const run = of.whole ? { curves: {} } : runs.get(id);
    for (const [name, { x, y, whole }] of Object.entries(of.curves)) {
      const steps = Array.isArray(x) ? x : y.map((_, at) => x + at), before = whole ? null : run.curves[name];
      const kept = before ? after(before.x, steps[0] - 1) : 0;
      run.curves[name] = { x: [...(before?.x.slice(0, kept) ?? []), ...steps], y: [...(before?.y.slice(0, kept) ?? []), ...y] };
    }
    runs.set(id, Object.assign(run, { known: of.known }));
  }
  ({ groups, key } = sent);
  const order = Object.keys(about.metrics), all = new Set([...recorded, ...sent.recorded]), known = order.filter((name) => all.has(name));
  recorded = [...[...all].filter((name) => !order.includes(name)).sort(), ...known];
}

async function ask() {
  clearTimeout(timer);
  const mine = ++asked;
  let wait = 10;
  try {
    const known = Object.fromEntries([...runs].map(([id, run]) => [id, run.known]));
    const body = JSON.stringify({ of: about.of, metrics: state.metrics, x: state.axis, known, look });
    const answer = await fetch(location.origin + location.pathname, { method: "POST", body });
    if (!answer.ok) throw new Error(await answer.text());
    const sent = await answer.json();
    if (mine !== asked) return;
    [wait, look] = [sent.wait, false];
    if (sent.groups) {
      take(sent);
      showChoice(); showSeries();
      if (sent.answer) showAnswer(sent.answer);
      await syncCharts();
      await recompute();
    }
    showState();
  } catch (error) {
    by("state").textContent = `The server does not answer (${error.message.trim()}); asking again in ${wait} s. If its command has ended, "rpg watch --web" serves the page again.`;
  }
  if (mine === asked && !document.hidden) timer = setTimeout(ask, 1000 * wait);
}

function askAnew() {
  runs.clear();
  return ask();
}

addEventListener("load", () => ready.then(() => {
  by("axis").value = state.axis;
  by("smoothing").value = state.smoothing;
  by("band").checked = state.band;
  by("smoothing").addEventListener("input", () => { state.smoothing = Number(by("smoothing").value); keepState(); recompute(); });
  by("band").addEventListener("change", () => { state.band = by("band").checked; keepState(); recompute(); });
  by("all").addEventListener("click", () => { range = null; redrawAll(); });
  for (const id of ["from", "to"]) by(id).addEventListener("change", () => {
    const ends = [by("from"), by("to")].map(({ valueAsNumber }) => valueAsNumber);
    range = ends[0] < ends[1] ? ends : null;
    redrawAll();
  });
  by("axis").addEventListener("change", async () => {
    [state.axis, range] = [by("axis").value, null];
    keepState();
    for (const chart of shown.values()) { chart.spec.encoding.x.title = AXES[state.axis]; chart.spec.datasets.lines = []; await embed(chart); }
    askAnew();
  });
  by("metrics").addEventListener("change", () => {
    state.metrics = [...by("metrics").querySelectorAll("input:checked")].map(({ value }) => value);
    keepState();
    askAnew();
  });
  by("answer").querySelector("button").addEventListener("click", () => { look = true; ask(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  ask();
}));
