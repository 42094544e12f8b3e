// The pictures of layers: which metric, which layers, in which order.

// The largest of each window first: the last step's value hides a spike before it.
const METRIC_ORDER = ["grad_norm_max", "grad_norm", "grad_param_ratio", "param_norm", "dead_ratio", "num_nonfinite"];

// Names that contain every word of the query; dots and slashes are the same, so that both spellings of a name are found.
function matcher(query) {
  const wanted = query.toLowerCase().replaceAll(".", "/").split(/\s+/).filter(Boolean);
  return (name) => {
    const spelled = name.toLowerCase().replaceAll(".", "/");
    return wanted.every((word) => spelled.includes(word));
  };
}

// Indices of names from the most to the least remarkable: non-finite, then by how far the norm moved in the run.
function byInterest() {
  const norms = run.matrices.get("grad_norm_max") ?? run.matrices.get(view.metric);
  const bad = run.matrices.get("num_nonfinite");
  const interest = run.names.map((_, name) => {
    let low = Infinity;
    let high = 0;
    let broken = 0;
    for (let column = 0; column < run.last.length; column++) {
      const cell = name * run.last.length + column;
      if (bad !== undefined && bad.codes[cell] > CODE_ZERO) broken = 1;
      const code = norms.codes[cell];
      if (code < CODE_FIRST) continue;
      low = Math.min(low, code);
      high = Math.max(high, code);
    }
    return broken * 1e6 + (high > 0 ? high - low : 0);
  });
  return run.names.map((_, name) => name).sort((a, b) => interest[b] - interest[a]);
}

function layersCard() {
  const { node, picture } = card("layers", { wide: true });
  const metrics = METRIC_ORDER.filter((key) => run.matrices.has(key));
  const search = element("input", { type: "search", placeholder: "Find layers, e.g. mlp fc", "aria-label": "Find layers" });
  let heatmap = null;
  let sorted = false;
  const order = () => {
    const matches = matcher(search.value);
    const found = (sorted ? byInterest() : run.names.map((_, name) => name)).filter((name) => matches(run.names[name]));
    count.textContent = found.length === run.names.length ? plural(found.length, "layer") : `${found.length} of ${plural(run.names.length, "layer")}`;
    heatmap?.setOrder(found);
  };
  const count = element("span", { class: "count" });
  search.addEventListener("input", order);
  picture.append(
    element(
      "div",
      { class: "controls" },
      segmented("Metric", metrics.map((key) => [key, METRICS[key].label]), view.metric, setMetric),
      segmented("Colour", [["change", "Against its usual"], ["value", "By value"]], view.byValue ? "value" : "change", (value) => {
        view.byValue = value === "value";
        announce("metric");
      }),
      segmented("Order", [["model", content.inModelOrder ? "Model order" : "By name"], ["interest", "Most changed"]], "model", (value) => {
        sorted = value === "interest";
        order();
      }),
      search,
      count,
    ),
  );
  order();
  queue(() => {
    heatmap = new LayerHeatmap(picture);
    on("metric", () => heatmap.refresh());
    on("chosen", () => heatmap.frame.draw());
    picture.append(element("p", { class: "hint" }, "Drag to zoom, double-click to reset. Click a row to add it to the lines below."));
    if (content.pooledColumns > 1) picture.append(element("p", { class: "hint" }, `Each column is the largest of ${content.pooledColumns} rows of the run.`));
  });
  return node;
}

function linesCard() {
  const { node, picture } = card("lines", { wide: true });
  const heading = element("p", { class: "lead" });
  const pickerList = element("div", { class: "picker-list", role: "group", "aria-label": "Layers" });
  const search = element("input", { type: "search", placeholder: "Find layers", "aria-label": "Find layers to draw" });
  const clear = element("button", { type: "button", class: "quiet", onclick: () => clearChosen() }, "Clear");
  const picker = element("div", { class: "picker" }, element("div", { class: "picker-head" }, search, clear), pickerList);
  const chartHost = element("div", { class: "picker-chart" });
  picture.append(heading, element("div", { class: "with-picker" }, picker, chartHost));
  const boxes = []; // of the layers whose lines are there

  function clearChosen() {
    view.chosen.clear();
    announce("chosen");
  }

  function leafLine({ names: [name] }, ends) {
    const box = element("input", { type: "checkbox", onchange: () => toggleChosen(name) });
    const swatch = element("span", { class: "swatch" });
    const text = element("span", { class: "layer-name", "aria-label": run.names[name] }, shorten(run.names[name], 26));
    boxes.push({ name, box, swatch });
    mark(boxes.slice(-1));
    return element("label", { title: run.names[name] }, box, swatch, text, ...ends);
  }

  function fill() {
    const matches = run.names.map((_, name) => name).filter((name) => matcher(search.value)(run.names[name]));
    const flat = search.value.trim() !== "" || run.names.length <= MOST_LINES;
    const nodes = flat ? matches.slice(0, 200).map((name) => ({ names: [name] })) : layerTree(matches);
    boxes.length = 0;
    pickerList.replaceChildren(...treeLines(nodes, run.matrices.get(view.metric), leafLine, view.opened));
    if (flat && matches.length > nodes.length) pickerList.append(element("p", { class: "hint" }, `${matches.length - nodes.length} more: search for them`));
    if (matches.length === 0) pickerList.append(element("p", { class: "hint" }, "No layer of this name"));
  }

  function mark(marked = boxes) {
    const full = view.chosen.size >= MAX_CHOSEN;
    for (const { name, box, swatch } of marked) {
      box.checked = view.chosen.has(name);
      box.disabled = full && !box.checked;
      swatch.style.background = box.checked ? chosenColour(name) : "transparent";
    }
  }

  function series() {
    const matrix = run.matrices.get(view.metric);
    return [...view.chosen].map((name) => ({
      label: run.names[name],
      values: matrix.line(name),
      colour: () => chosenColour(name),
      width: 1.5,
      format: METRICS[view.metric].format,
    }));
  }

  function title() {
    const long = METRICS[view.metric].long;
    heading.textContent = long[0].toUpperCase() + long.slice(1) + (view.chosen.size ? "" : ": choose layers from the list, or click rows above");
  }

  search.addEventListener("input", fill);
  queue(() => {
    const chart = new LineChart(chartHost, { label: "Chosen layers", xs: run.last, series: series(), log: view.metric !== "dead_ratio", height: 320 });
    const refresh = () => {
      title();
      mark();
      chart.setSeries(series());
    };
    on("chosen", refresh);
    on("metric", () => {
      fill();
      refresh();
    });
    onTheme(fill);
  });
  fill();
  title();
  return node;
}

function histogramCard() {
  // At first the layer that is most remarkable of those that have histograms.
  const places = new Map(content.histograms.items.map((item, index) => [item.name, index]));
  const first = run.matrices.size ? places.get(byInterest().find((name) => places.has(name))) : 0;
  const source = { ...content.histograms, first, symbol: "g", labelOf: (item) => run.names[item.name] };
  const { node, picture } = card("histogram", { wide: true });
  distribution(picture, source, "layer", "Distribution of the gradient's elements over steps");
  return node;
}

// The histograms of one name over time, and what chooses the name.
function distribution(picture, source, what, label) {
  const { items } = source;
  const select = element("select", { "aria-label": what[0].toUpperCase() + what.slice(1) });
  const search = element("input", { type: "search", placeholder: "Find a " + what, "aria-label": `Find a ${what}'s distribution` });
  const controls = element("div", { class: "controls" }, search, select);
  picture.append(controls);
  const note = element("p", { class: "hint" });
  let drawn = null;

  function options() {
    const chosen = select.value;
    const matches = items.map((item, index) => [item, index]).filter(([item]) => matcher(search.value)(source.labelOf(item)));
    select.replaceChildren(...matches.slice(0, 2000).map(([item, index]) => element("option", { value: index }, source.labelOf(item))));
    select.disabled = matches.length === 0;
    if (matches.some(([, index]) => String(index) === chosen)) select.value = chosen;
    else if (matches.length) choose();
  }

  function choose() {
    const item = items[Number(select.value)];
    drawn?.choose(item);
    note.textContent = item.steps.length < item.total ? `${item.steps.length} of ${item.total} histograms are in this page, evenly spaced.` : "";
  }

  search.addEventListener("input", options);
  select.addEventListener("change", choose);
  queue(() => {
    drawn = new HistogramPicture(picture, controls, source, label);
    picture.append(element("p", { class: "hint" }, "At the right: how the elements lie at the step under the pointer, else at the last."), note);
    options();
    if (source.first !== undefined) select.value = String(source.first);
    choose();
  });
}
