// Enlarges images, sorts tables and unfolds the appendix. Without it the page is complete.
"use strict";
const each = (selector, act) => document.querySelectorAll(selector).forEach(act);
const view = document.getElementById("view");
const enlarge = (image) => {
  const shown = document.createElement("img");
  const text = document.createElement("p");
  shown.src = image.src;
  shown.alt = text.textContent = image.alt;
  view.replaceChildren(shown, text);
  view.showModal();
};
each(".faces img, .closest img", (image) => {
  image.tabIndex = 0;
  image.setAttribute("role", "button");
  image.addEventListener("click", () => enlarge(image));
  image.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); enlarge(image); }
  });
});
view.addEventListener("click", () => view.close());

// A cell is worth its first number; text without one is compared as text.
const worth = (row, place) => {
  const text = row.cells[place].textContent.trim().replace(/[\u202f\u00a0](?=\d)/g, "");
  const found = text.replace(/\u2212/g, "-").match(/^[^\d-]{0,2}(-?\d+(\.\d+)?)/);
  return found ? [0, Number(found[1]), text] : [1, 0, text];
};
const compare = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2].localeCompare(b[2]);
each("table.figures", (table) => {
  const body = table.tBodies[0];
  if (body.rows.length < 2 || body.querySelector(".sum")) return;
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    head.tabIndex = 0;
    head.classList.add("sorts");
    const sort = () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      [...table.tHead.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [worth(row, place), row]);
      rows.sort((a, b) => (falling ? -1 : 1) * compare(a[0], b[0]));
      body.append(...rows.map((pair) => pair[1]));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
    });
  });
});
const unfold = document.getElementById("unfold");
unfold.hidden = false;
unfold.addEventListener("click", () => each("details", (part) => { part.open = true; }));
