"use strict";
(() => {
  const { settings, config, specs, ranked } = JSON.parse(document.getElementById("data").textContent);
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

  // --- the ranking of a matrix, for any weight ----------------------------------------
  const BEST = 3;
  const slider = document.getElementById("beta");
  const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

  function scored(beta) {
    const dcs = ([found, lost]) => 1 / (1 + Math.sqrt((1 - beta) * found ** 2 + beta * lost ** 2));
    const groups = ranked.groups.map((group) => ({ ...group, dcs: mean(group.gaps.map(dcs)) }));
    const shared = groups.filter((group) => ranked.common.includes(group.dataset));
    const overall = [...new Set(shared.map((group) => group.method))].map((method) => {
      const own = shared.filter((group) => group.method === method);
      const failed = own.some((group) => group.failed);
      return { dataset: ranked.all, method, failed, dcs: mean(own.map((group) => group.dcs)) };
    });
    return [...groups, ...overall].sort((a, b) => a.failed - b.failed || b.dcs - a.dcs);
  }

  function rank() {
    const beta = Number(slider.value);
    document.getElementById("weight").textContent = beta.toFixed(2);
    const groups = scored(beta);
    const of = (dataset) => groups.filter((group) => group.dataset === dataset);
    for (const row of document.querySelectorAll("#best tbody tr")) {
      const good = of(row.dataset.party).filter((group) => !group.failed && group.method !== ranked.none);
      for (let place = 0; place < BEST; place += 1) {
        const one = good[place];
        row.cells[place + 1].textContent = one ? `${one.method} (${one.dcs.toFixed(3)})` : "";
      }
    }
    const heads = [...document.querySelectorAll("#ranking thead th")].map((head) => head.innerText.trim());
    for (const row of document.querySelectorAll("#ranking tbody tr")) {
      const known = of(row.dataset.party);
      const place = known.findIndex((group) => group.method === settings[Number(row.dataset.settings)]);
      for (const [name, value, digits] of [["rank", place + 1, 0], ["DCS", known[place].dcs, 3]]) {
        const cell = row.cells[heads.indexOf(name)];
        cell.textContent = value.toFixed(digits);
        cell.dataset.value = value;
      }
    }
    const scores = Object.fromEntries(groups.map((group) => [`${group.dataset}/${group.method}`, Number(group.dcs.toFixed(4))]));
    return Promise.all(charts.filter((chart) => chart.scores).map(({ view }) => view.signal("scores", scores).runAsync()));
  }

  // --- charts ------------------------------------------------------------------------
  const options = { config, mode: "vega-lite", renderer: "svg", actions: false, ast: true };

  async function draw(figure) {
    const spec = specs[Number(figure.dataset.chart)];
    const { view } = await vegaEmbed(figure.querySelector(".chart"), spec, options);
    const has = (name) => spec.params.some((param) => param.name === name);
    const all = has("shown_setting") ? view.data(STORE).map(({ unit, fields, values }) => ({ unit, fields, values })) : null;
    charts.push({ view, all, filtered: has("hidden"), scores: has("scores") });
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

  slider?.addEventListener("input", rank);
  const figures = [...document.querySelectorAll("figure")];
  const drawn = figures.reduce((before, figure) => before.then(() => draw(figure)), Promise.resolve());
  // A browser may remember boxes that were off.
  drawn.then(filter).then(() => slider && rank()).then(() => { document.body.dataset.drawn = "yes"; });
})();
