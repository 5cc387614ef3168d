// Of each chart with named lines: its values as a CSV file. Of the learning curves: a slider that smooths them.
const drawnOf = new Map();  // a line that has been smoothed -> itself as it was drawn, behind it

function download(chart) {
  const axes = chart.dataset.axes.split(" ").map(Number), across = axes.slice(0, 4), upward = axes.slice(4);
  // An apostrophe before what a spreadsheet would take for a formula.
  const quoted = (text) => `"${text.replace(/^[=+\-@\t\r\n＝＋－＠]/, "'$&").replaceAll('"', '""')}"`;
  const rows = [...chart.querySelectorAll("[data-name]")].flatMap((line) => pixelsOf(drawnOf.get(line) ?? line).map(
    ([x, y]) => [quoted(line.dataset.name), valueAt(x, 0.01, across), valueAt(y, 0.01, upward)].join(",")));
  const text = [`line,${quoted(chart.dataset.x)},value`, ...rows, ""].join("\n"), title = chart.getAttribute("aria-label");
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })) });
  link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "")}.csv`;
  link.click();
  URL.revokeObjectURL(link.href);
}

for (const chart of document.querySelectorAll("svg[data-axes]")) {
  for (const line of chart.querySelectorAll("[data-label]")) line.dataset.name = line.dataset.label;
  const button = Object.assign(document.createElement("button"), { className: "download", textContent: "CSV" });
  button.title = "The chart's values, to the hundredth of a pixel";
  button.addEventListener("click", () => download(chart));
  chart.after(button);
}

// An exponential mean by steps, not by points: of a long curve only the points that make its shape are drawn. Pixels are
// as good as values, since a mean of straight lines is one.
function smoothed(pixels, stepsOfPixel, weight) {
  let sum = 0, total = 0, before = -Infinity;
  return pixels.map(([x, y]) => {
    const kept = weight ** ((x - before) * stepsOfPixel);
    [sum, total, before] = [kept * sum + (1 - kept) * y, kept * total + 1 - kept, x];
    return [x, sum / total];
  });
}

const curves = document.querySelector(".curves");
if (curves) {
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
  const label = Object.assign(document.createElement("label"), { className: "smoothing", textContent: "Smoothing " });
  const shown = document.createElement("output");
  label.append(slider, " ", shown);
  curves.before(label);
  slider.addEventListener("input", () => {
    const weight = Number(slider.value);
    shown.textContent = weight ? `each step keeps ${weight} of the mean before it` : "";
    for (const chart of curves.querySelectorAll("svg[data-axes]")) {
      const [start, end, low, high] = chart.dataset.axes.split(" ").map(Number);
      for (const line of chart.querySelectorAll("polyline[data-name]")) {
        if (!drawnOf.has(line)) {
          const raw = line.cloneNode();
          for (const name of ["label", "name"]) delete raw.dataset[name];
          raw.classList.add("faint");
          line.before(raw);
          drawnOf.set(line, raw);
        }
        const drawn = drawnOf.get(line), pixels = smoothed(pixelsOf(drawn), (high - low) / (end - start), weight);
        line.setAttribute("points", weight ? pixels.map((pixel) => pixel.join(",")).join(" ") : drawn.getAttribute("points"));
        line.dataset.label = line.dataset.name + (weight ? ", smoothed" : "");
        drawn.style.display = weight ? "" : "none";
      }
    }
  });
}
