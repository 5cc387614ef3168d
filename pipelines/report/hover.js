// Shows the values at the pointer: of charts, the labelled lines' at its step; of a response, the token's under it.
const box = document.getElementById("hover");

function show(event, lines) {
  box.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  box.style.display = "block";
  box.style.left = `${Math.max(scrollX + 4, Math.min(event.pageX + 14, scrollX + innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${event.pageY + 14}px`;
}

// data-axes: the pixels and the values of the x axis' ends, then those of the y axis. The lines carry pixels alone.
function pixelsOf(line) {
  if (line.points) return [...line.points].map(({ x, y }) => [x, y]);
  return [...line.children].map((dot) => [dot.cx.baseVal.value, dot.cy.baseVal.value]);
}

// `grain`: the part of a pixel to which it is given. No digit is shown that the pixel does not tell.
function valueAt(pixel, grain, [start, end, low, high]) {
  const value = low + (pixel - start) / (end - start) * (high - low);
  const resolution = Math.abs((high - low) / (end - start)) * grain;
  return Number(value.toFixed(Math.min(12, Math.max(0, Math.floor(-Math.log10(resolution))))));
}

for (const chart of document.querySelectorAll("svg[data-axes]")) {
  const axes = chart.dataset.axes.split(" ").map(Number), across = axes.slice(0, 4), upward = axes.slice(4);
  const lines = [...chart.querySelectorAll("[data-label]")];
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  chart.append(cursor);
  const follow = (event) => {
    const frame = chart.getBoundingClientRect();
    const x = (event.clientX - frame.left) / frame.width * chart.viewBox.baseVal.width;
    const nearest = (points) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const near = lines.map((line) => nearest(pixelsOf(line))), first = nearest(near);
    for (const [name, value] of Object.entries({ x1: first[0], x2: first[0], y1: upward[1], y2: upward[0] })) cursor.setAttribute(name, value);
    cursor.style.display = "";
    show(event, lines.map((line, index) => `${line.dataset.label}: ${valueAt(near[index][1], 0.01, upward)} at ${valueAt(near[index][0], 0.01, across)}`));
  };
  chart.addEventListener("mousemove", follow);
  chart.addEventListener("click", follow);
  chart.addEventListener("mouseleave", () => { box.style.display = cursor.style.display = "none"; });
}

for (const response of document.querySelectorAll(".tokens")) {
  const point = (event) => {
    const about = event.target.dataset.about;
    if (about) show(event, about.split(" · ")); else box.style.display = "none";
  };
  response.addEventListener("mouseover", point);
  response.addEventListener("click", point);
  response.addEventListener("mouseleave", () => { box.style.display = "none"; });
}
