// Tables of the research log and of the results: a click on a heading sorts, words filter.
"use strict";

function number(text) {
  const found = text.replace(/[,\s]/g, "").match(/^[^\d+-]*([+-]?\d+(\.\d+)?)/);
  return found ? Number(found[1]) : NaN;
}

function compare(a, b) {
  const x = number(a), y = number(b);
  if (Number.isNaN(x) || Number.isNaN(y)) return a.localeCompare(b);
  return x - y;
}

function sortable(table) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.className = "sort";
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" };
      const order = next[cell.getAttribute("aria-sort") || "none"];
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (order !== "none") cell.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const text = (row) => row.cells[column]?.textContent.trim() ?? "";
      const rows = order === "none" ? original
        : [...original].sort((a, b) => sign * compare(text(a), text(b)));
      body.append(...rows);
    });
  });
}

function filterable(table) {
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter: words of a row, such as miv confirmation";
  input.setAttribute("aria-label", "Filter the rows");
  input.className = "filter";
  table.before(input);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const shown = [...row.cells].slice(0, 4).map((cell) => cell.textContent).join(" ");
      const starts = shown.toLowerCase().split(/\s+/);
      row.hidden = !words.every((word) => starts.some((start) => start.startsWith(word)));
    }
  });
}

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("#research-log table, table.sortable")) {
    if (table.tHead && table.tBodies.length && table.tBodies[0].rows.length > 3) sortable(table);
    if (table.matches(".sortable")) filterable(table);
  }
});
