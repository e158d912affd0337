// Tables of the research log: a click on a heading sorts.
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

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("#research-log table")) {
    if (table.tHead && table.tBodies.length && table.tBodies[0].rows.length > 3) sortable(table);
  }
});
