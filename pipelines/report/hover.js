// Shows what is at the pointer; of a response the token under it.
const box = document.getElementById("hover");

function show(event, lines) {
  box.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  box.style.display = "block";
  box.style.left = `${Math.max(scrollX + 4, Math.min(event.pageX + 14, scrollX + innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${event.pageY + 14}px`;
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
