"use strict";
(() => {
  const { settings, config, specs } = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("filters");
  const boxes = [...form.querySelectorAll("input[data-kind]")];
  const ofKind = (kind) => boxes.filter((box) => box.dataset.kind === kind);
  const hiddenOf = (kind) => new Set(ofKind(kind).filter((box) => !box.checked).map((box) => box.dataset.value));
  const numbers = (text) => (text ?? "").split(" ").filter((one) => one !== "");
  const charts = []; // {view, all}: all entries of the legend of settings, if there is one

  // --- hide and show: the boxes decide, and legends of settings change the boxes ----
  const STORE = "shown_setting_store"; // where Vega-Lite keeps what a legend has selected

  function filter() {
    const hidden = hiddenOf("setting");
    const attacks = hiddenOf("attack");
    const parties = hiddenOf("party");
    for (const node of document.querySelectorAll("main [data-settings], main [data-attack], main [data-party]")) {
      const own = numbers(node.dataset.settings);
      const off = (own.length > 0 && own.every((one) => hidden.has(one)))
        || attacks.has(node.dataset.attack) || parties.has(node.dataset.party);
      node.classList.toggle("off", off);
    }
    for (const box of ofKind("family")) {
      const own = numbers(box.dataset.value);
      const left = own.filter((one) => !hidden.has(one)).length;
      box.checked = left > 0;
      box.indeterminate = left > 0 && left < own.length;
    }
    const names = [...hidden].map((one) => settings[Number(one)]);
    return Promise.all(charts.map((chart) => apply(chart, names)));
  }

  function apply({ view, all, filtered }, names) {
    if (filtered) view.signal("hidden", names);
    if (all) {
      const left = all.filter((entry) => !names.includes(entry.values[0])).map((entry) => ({ ...entry }));
      view.change(STORE, view.changeset().remove(() => true).insert(left));
    }
    return view.runAsync();
  }

  function followLegend(all, shown) {
    const names = (entries) => new Set(entries.map((entry) => entry.values[0]));
    const [known, left] = [names(all), names(shown)];
    const changed = ofKind("setting").filter((box) => {
      const name = settings[Number(box.dataset.value)];
      return known.has(name) && box.checked !== left.has(name);
    });
    for (const box of changed) box.checked = !box.checked;
    if (changed.length > 0) setTimeout(filter); // not while the chart is being updated
  }

  form.addEventListener("change", (event) => {
    const { kind, value } = event.target.dataset;
    if (kind === "family") {
      const own = new Set(numbers(value));
      for (const box of ofKind("setting")) if (own.has(box.dataset.value)) box.checked = event.target.checked;
    }
    filter();
  });
  // Links to sections must not end under the bar.
  new ResizeObserver(() => { document.documentElement.style.scrollPaddingTop = `${form.offsetHeight}px`; }).observe(form);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("all").addEventListener("click", () => {
    for (const box of boxes) box.checked = true;
    filter();
  });

  // --- sort ------------------------------------------------------------------------
  function compare(a, b) {
    const [x, y] = [a.dataset.value, b.dataset.value];
    if (x !== undefined && y !== undefined) return Number(x) - Number(y);
    return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
  }

  for (const button of document.querySelectorAll("table.sortable thead button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = head.closest("table").tBodies[0];
      const column = Number(button.dataset.column);
      const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(a.cells[column], b.cells[column]));
      body.append(...rows);
    });
  }

  // --- charts ------------------------------------------------------------------------
  const options = { config, mode: "vega-lite", renderer: "svg", actions: false, ast: true };

  async function draw(figure) {
    const spec = specs[Number(figure.dataset.chart)];
    const { view } = await vegaEmbed(figure.querySelector(".chart"), spec, options);
    const has = (name) => spec.params.some((param) => param.name === name);
    const all = has("shown_setting") ? view.data(STORE).map(({ unit, fields, values }) => ({ unit, fields, values })) : null;
    charts.push({ view, all, filtered: has("hidden") });
    if (all) view.addDataListener(STORE, (_, shown) => followLegend(all, shown));
    figure.addEventListener("keydown", (event) => walk(figure, event));
    figure.addEventListener("blur", () => { figure.querySelector("output").textContent = ""; });
  }

  function walk(figure, event) {
    const marks = [...figure.querySelectorAll('.role-mark [role="graphics-symbol"][aria-label]')];
    const way = { ArrowRight: 1, ArrowLeft: -1, Home: 0, End: 0 }[event.key];
    const told = figure.querySelector("output");
    if (event.key === "Escape") told.textContent = "";
    if (way === undefined || marks.length === 0) return;
    event.preventDefault();
    const before = marks.findIndex((mark) => mark.classList.contains("here"));
    let next = (before + way + marks.length) % marks.length;
    if (before < 0 || event.key === "Home") next = 0;
    if (event.key === "End") next = marks.length - 1;
    marks[before]?.classList.remove("here");
    marks[next].classList.add("here");
    told.textContent = marks[next].getAttribute("aria-label");
  }

  const figures = [...document.querySelectorAll("figure")];
  const drawn = figures.reduce((before, figure) => before.then(() => draw(figure)), Promise.resolve());
  // A browser may remember boxes that were off.
  drawn.then(filter).then(() => { document.body.dataset.drawn = "yes"; });
})();
