"use strict";
(() => {
  // --- hide and show -------------------------------------------------------------
  const form = document.getElementById("filters");
  const boxes = [...form.querySelectorAll("input[data-kind]")];
  const hiddenOf = (kind) => new Set(boxes
    .filter((box) => box.dataset.kind === kind && !box.checked)
    .map((box) => box.dataset.value));

  function filter() {
    const series = hiddenOf("series");
    const attacks = hiddenOf("attack");
    const parties = hiddenOf("party");
    for (const node of document.querySelectorAll("main [data-series], main [data-attack], main [data-party]")) {
      const own = (node.dataset.series ?? "").split(" ").filter((one) => one !== "");
      const off = (own.length > 0 && own.every((one) => series.has(one)))
        || attacks.has(node.dataset.attack) || parties.has(node.dataset.party);
      node.classList.toggle("off", off);
    }
    for (const box of boxes.filter((one) => one.dataset.kind === "family")) {
      const own = box.dataset.value.split(" ");
      const left = own.filter((one) => !series.has(one)).length;
      box.checked = left > 0;
      box.indeterminate = left > 0 && left < own.length;
    }
    hideTip();
  }

  form.addEventListener("change", (event) => {
    const box = event.target;
    if (box.dataset.kind === "family") {
      const own = new Set(box.dataset.value.split(" "));
      for (const one of boxes) {
        if (one.dataset.kind === "series" && own.has(one.dataset.value)) one.checked = box.checked;
      }
    }
    filter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("all").addEventListener("click", () => {
    for (const box of boxes) box.checked = true;
    filter();
  });

  // --- sort ----------------------------------------------------------------------
  for (const button of document.querySelectorAll("table.sortable thead button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = head.closest("table").tBodies[0];
      const column = Number(button.dataset.column);
      const sign = up ? 1 : -1;
      const rows = [...body.rows];
      rows.sort((a, b) => sign * compare(a.cells[column], b.cells[column]));
      body.append(...rows);
    });
  }

  function compare(a, b) {
    const [x, y] = [a.dataset.value, b.dataset.value];
    if (x !== undefined && y !== undefined) return Number(x) - Number(y);
    return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
  }

  // --- values under the pointer, or by the arrow keys ------------------------------
  const tip = document.getElementById("tip");
  let ring = null;

  const shown = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };

  function axis(text) {
    const [start, end, low, high, log, ...name] = text.split(" ");
    const [a, b, l, h] = [start, end, low, high].map(Number);
    const value = (place) => {
      const share = (place - a) / (b - a);
      return log === "1" ? l * (h / l) ** share : l + share * (h - l);
    };
    return { name: name.join(" "), value };
  }

  function placesOf(svg) {
    const places = [];
    for (const mark of svg.querySelectorAll(".mark[data-tip]:not(.off)")) {
      const [x, y] = mark.dataset.at.split(",").map(Number);
      places.push({ x, y, text: mark.dataset.tip });
    }
    if (svg.dataset.x === undefined) return places;
    const across = axis(svg.dataset.x);
    const up = axis(svg.dataset.y);
    for (const line of svg.querySelectorAll(".line:not(.off)")) {
      for (const pair of line.getAttribute("points").split(" ")) {
        const [x, y] = pair.split(",").map(Number);
        const words = `${across.name} ${shown(across.value(x))}, ${up.name} ${shown(up.value(y))}`;
        places.push({ x, y, text: `${line.dataset.name}: ${words}` });
      }
    }
    return places;
  }

  function showTip(svg, place) {
    ring?.remove();
    ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("class", "here");
    ring.setAttribute("cx", place.x);
    ring.setAttribute("cy", place.y);
    ring.setAttribute("r", 7);
    svg.append(ring);
    tip.textContent = place.text;
    tip.hidden = false;
    const at = new DOMPoint(place.x, place.y).matrixTransform(svg.getScreenCTM());
    const room = document.documentElement.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(4, Math.min(at.x + 12, room)) + window.scrollX}px`;
    const above = at.y - tip.offsetHeight - 12;
    tip.style.top = `${(above > 0 ? above : at.y + 12) + window.scrollY}px`;
  }

  function hideTip() {
    ring?.remove();
    ring = null;
    tip.hidden = true;
  }

  for (const svg of document.querySelectorAll("figure svg")) {
    let number = -1;
    const point = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let [best, least] = [null, 28];
      for (const place of placesOf(svg)) {
        const far = Math.hypot(place.x - at.x, place.y - at.y);
        if (far < least) [best, least] = [place, far];
      }
      if (best) showTip(svg, best);
      else hideTip();
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hideTip);
    svg.addEventListener("blur", hideTip);
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1, Home: 0, End: 0 }[event.key];
      if (event.key === "Escape") hideTip();
      const places = placesOf(svg);
      if (way === undefined || places.length === 0) return;
      event.preventDefault();
      if (event.key === "Home" || (number < 0 && way > 0)) number = 0;
      else if (event.key === "End" || (number < 0 && way < 0)) number = places.length - 1;
      else number = (number + way + places.length) % places.length;
      showTip(svg, places[number]);
    });
  }

  filter(); // a browser may remember boxes that were off
})();
