// Tables of results: a click on a heading sorts, a field above a long table filters its rows.
// About sixty lines instead of a table library, which would bring jQuery or a build step.
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
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter rows";
  field.setAttribute("aria-label", "Filter the rows of the table");
  field.className = "filter";
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    for (const row of table.tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
  (table.closest(".pst-scrollable-table-container") ?? table).before(field);
}

document.addEventListener("DOMContentLoaded", () => {
  if (!document.location.pathname.includes("/results/")) return;
  for (const table of document.querySelectorAll("article table")) {
    if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 4) continue;
    sortable(table);
    if (table.tBodies[0].rows.length > 9) filterable(table);
  }
});
