"use strict";
// Pages work without this file: it adds the countdown, keys, and the focus of screen readers.

const heading = document.querySelector("[data-focus]");
if (heading) heading.focus({ preventScroll: true });

const form = document.querySelector("#trial");
let sent = false;

// A page that the back button brings out of memory may be answered already.
window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

if (form) {
  form.addEventListener("submit", (event) => {
    if (sent) event.preventDefault();
    sent = true;
    form.setAttribute("aria-busy", "true");
  });
  form.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
    for (const button of form.querySelectorAll("[data-keys]")) {
      if (button.dataset.keys.split(" ").includes(event.key)) {
        event.preventDefault();
        form.requestSubmit(button);
        return;
      }
    }
  });
}

if (form && form.dataset.left) {
  const clock = document.querySelector("#clock");
  const said = document.querySelector("#said");
  const end = performance.now() + 1000 * Number(form.dataset.left);
  const spoken = new Set();
  const tick = () => {
    const left = Math.max(0, Math.ceil((end - performance.now()) / 1000));
    clock.hidden = false;
    clock.textContent = `${left} s`;
    for (const mark of [30, 10]) {
      // Only at the moment itself: a reload does not repeat what is past.
      if (left === mark && !spoken.has(mark)) {
        spoken.add(mark);
        said.textContent = `${mark} seconds left`;
      }
    }
    if (left === 0 && !sent) form.requestSubmit(document.querySelector("#timeout"));
    else if (!sent) setTimeout(tick, 250);
  };
  tick();
}
