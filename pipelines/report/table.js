// Filters the rows of every sortable table by the words of one field, and sorts a table by the column that is clicked.
const field = document.getElementById("filter");
const tables = [...document.querySelectorAll("table.sortable")];
const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
const compare = (a, b) => a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);

function filter() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const table of tables) for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
  history.replaceState(null, "", field.value ? `#${encodeURIComponent(field.value)}` : location.pathname);
}

for (const table of tables) for (const heading of table.tHead.rows[0].cells) {
  heading.tabIndex = 0;
  const sort = () => {
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const column = heading.cellIndex, sign = order === "ascending" ? 1 : -1;
    const full = (row) => valueOf(row, column) !== "";  // a row without a value comes last in either order
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      full(b) - full(a) || sign * compare(valueOf(a, column), valueOf(b, column)));
    table.tBodies[0].append(...rows);
  };
  heading.addEventListener("click", sort);
  heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}
if (field) {
  field.value = decodeURIComponent(location.hash.slice(1));
  field.addEventListener("input", filter);
  filter();
}
