// Shows the values at the pointer. Each chart carries its labelled lines in data-hover, points as [pixel x, pixel y, x, y].
const box = document.getElementById("hover");
for (const chart of document.querySelectorAll("svg[data-hover]")) {
  const lines = JSON.parse(chart.dataset.hover);
  const width = chart.viewBox.baseVal.width, height = chart.viewBox.baseVal.height;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  chart.append(cursor);
  chart.addEventListener("mousemove", (event) => {
    const frame = chart.getBoundingClientRect();
    const x = (event.clientX - frame.left) / frame.width * width;
    const near = lines.map((line) => line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const first = near.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    for (const [name, value] of Object.entries({ x1: first[0], x2: first[0], y1: 30, y2: height - 34 })) cursor.setAttribute(name, value);
    cursor.style.display = "";
    box.replaceChildren();
    lines.forEach((line, index) => {
      const row = document.createElement("div");
      row.textContent = `${line.label}: ${near[index][3]} at ${near[index][2]}`;
      box.append(row);
    });
    box.style.display = "block";
    box.style.left = `${Math.min(event.pageX + 14, scrollX + innerWidth - box.offsetWidth - 8)}px`;
    box.style.top = `${event.pageY + 14}px`;
  });
  chart.addEventListener("mouseleave", () => { box.style.display = cursor.style.display = "none"; });
}
