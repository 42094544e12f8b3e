// The names x steps pictures: the layers, and for each family of watch(metrics=...) a card with the picture, the lines of
// chosen names, and the distribution of one name.

const WHAT = { layer: "layer", activation: "module", attention: "head", router: "router", noise_scale: "group", ranks: "rank" };

// Find names that contain every word of the query. Dots and slashes are equal, so both spellings of a name match.
function matcher(query) {
  const wanted = query.toLowerCase().replaceAll(".", "/").split(/\s+/).filter(Boolean);
  return (name) => {
    const spelled = name.toLowerCase().replaceAll(".", "/");
    return wanted.every((word) => spelled.includes(word));
  };
}

// A row of buttons for a few options, a list for many.
function chooser(label, options, chosen, change) {
  if (options.length <= 8) return segmented(label, options, chosen, change);
  const select = element("select", { "aria-label": label, onchange: () => change(select.value) }, options.map(([value, text]) => element("option", { value }, text)));
  select.value = chosen;
  return select;
}

// The card of a grid with its controls; `more` are additional controls, `then` draws the area below.
function gridCard(grid, { more = [], hints, then = () => {} }) {
  const what = WHAT[grid.key] ?? "parameter";
  const isOfLayers = grid === run.layers;
  const { node, picture } = card(isOfLayers ? "layers" : grid.key);
  const search = element("input", { type: "search", placeholder: `Find a ${what}`, "aria-label": `Find ${what}s` + (isOfLayers ? "" : " of " + grid.key.replaceAll("_", " ")), oninput: () => order() });
  const count = element("span", { class: "count" });
  let [heatmap, byInterest] = [null, false];

  function order() {
    const names = byInterest ? grid.byInterest() : grid.names.map((_, name) => name);
    const matches = matcher(search.value);
    const found = names.filter((name) => matches(grid.names[name]));
    count.textContent = found.length === names.length ? plural(found.length, what) : `${found.length} of ${plural(names.length, what)}`;
    heatmap?.setOrder(found);
  }

  const metrics = [...grid.matrices].map(([key, { meaning }]) => [key, meaning.label]);
  const controls = element("div", { class: "controls" }, metrics.length > 1 ? chooser("Metric", metrics, grid.metric, (metric) => grid.show({ metric })) : null);
  if (isOfLayers) {
    const colours = segmented("Colour", [["change", "Against its usual"], ["value", "By value"]], grid.byValue ? "value" : "change", (value) => grid.show({ byValue: value === "value" }));
    const orders = segmented("Order", [["model", content.inModelOrder ? "Model order" : "By name"], ["interest", "Most changed"]], "model", (value) => {
      byInterest = value === "interest";
      order();
    });
    controls.append(colours, orders);
  }
  controls.append(search, count, ...more);
  picture.append(controls);
  order();
  queue(() => {
    const name = what[0].toUpperCase() + what.slice(1);
    heatmap = new Heatmap(picture, grid, `${name}s by steps. Arrow keys move, Enter adds the ${what} to the lines below.`);
    if (grid.pooled > 1) hints = [...hints, `Each column is the largest of ${grid.pooled} rows of the run.`];
    picture.append(...hints.map(hint));
    then(picture);
  });
  return node;
}

function layersCard() {
  return gridCard(run.layers, { hints: ["Blank: measured, but the run keeps no value of the layer for the step. Drag to zoom, double-click to reset. Click a row to add it to the lines below."] });
}

// The lines of chosen layers, beside the tree of all layers.
function linesCard() {
  const grid = run.layers;
  const { node, picture } = card("lines");
  const heading = element("p", { class: "lead" });
  const list = element("div", { class: "picker-list", role: "group", "aria-label": "Layers" });
  const search = element("input", { type: "search", placeholder: "Find layers", "aria-label": "Find layers to draw", oninput: () => fill() });
  const clear = element("button", { type: "button", class: "quiet", onclick: () => grid.choose([]) }, "Clear");
  const chartHost = element("div", { class: "picker-chart" });
  picture.append(heading, element("div", { class: "with-picker" }, element("div", { class: "picker" }, element("div", { class: "picker-head" }, search, clear), list), chartHost));
  const boxes = []; // checkboxes of the layers in the tree

  function leafLine({ names: [name] }, ends) {
    const box = element("input", { type: "checkbox", onchange: () => grid.toggle(name) });
    const text = element("span", { class: "layer-name", "aria-label": grid.names[name] }, shorten(grid.names[name], 26));
    boxes.push({ name, box, colour: swatch(null) });
    mark(boxes.slice(-1));
    return element("label", { title: grid.names[name] }, box, boxes.at(-1).colour, text, ...ends);
  }

  function fill() {
    const matches = grid.names.map((_, name) => name).filter((name) => matcher(search.value)(grid.names[name]));
    const isFlat = search.value.trim() !== "" || grid.names.length <= MOST_LINES;
    const nodes = isFlat ? matches.slice(0, 200).map((name) => ({ names: [name] })) : layerTree(matches);
    boxes.length = 0;
    list.replaceChildren(...treeLines(nodes, leafLine));
    if (isFlat && matches.length > nodes.length) list.append(hint(`${matches.length - nodes.length} more: search for them`));
    if (matches.length === 0) list.append(hint("No layer of this name"));
  }

  function mark(marked = boxes) {
    for (const { name, box, colour } of marked) {
      box.checked = grid.chosen.has(name);
      box.disabled = grid.chosen.size >= MAX_CHOSEN && !box.checked;
      colour.style.background = box.checked ? `var(--${grid.colourOf(name)})` : "transparent";
    }
  }

  function title() {
    const { long } = grid.matrix().meaning;
    heading.textContent = long[0].toUpperCase() + long.slice(1) + (grid.chosen.size ? "" : ": choose layers from the list, or click rows above");
  }

  fill();
  title();
  queue(() => {
    const chart = new LineChart(chartHost, { label: "Chosen layers", xs: grid.xs, series: grid.series(), log: grid.isLogarithmic, height: 320 });
    let filled = grid.metric; // the metric of the values in the tree
    nearness.observe(list);
    on("grid", (changed) => {
      if (changed !== grid) return;
      title();
      mark();
      chart.setSeries(grid.series(), grid.xs);
      if (filled !== grid.metric) drawLater(list, fill);
      filled = grid.metric;
    });
  });
  return node;
}

function familyCards() {
  return content.grids.slice(1).flatMap(({ key, histograms, histogramNames }) => {
    const grid = run.grids.find((one) => one.key === key);
    const source = { ...histograms, symbol: "x", labelOf: (item) => histogramNames[item.name] };
    const [what, of] = key === "activation" ? ["module", "output"] : ["parameter", "parameter"];
    const label = `Distribution of the ${of}'s elements over steps`;
    return [grid.names.length ? familyCard(grid) : null, histograms.items.length ? distributionCard(key + "_histogram", source, what, label) : null];
  });
}

function familyCard(grid) {
  const clear = element("button", { type: "button", class: "quiet", onclick: () => grid.choose([]) }, "Clear lines");
  const then = (picture) => {
    const host = element("div", { class: "chart" });
    picture.append(host);
    const chart = new LineChart(host, { label: `Chosen ${WHAT[grid.key] ?? "parameter"}s`, xs: grid.xs, series: grid.series(), log: grid.isLogarithmic, canLog: false });
    on("grid", (changed) => {
      if (changed !== grid) return;
      chart.log = grid.isLogarithmic;
      chart.setSeries(grid.series(), grid.xs);
    });
  };
  return gridCard(grid, { more: [clear], hints: ["Click a row to add its line, or to take it away."], then });
}

function histogramCard() {
  // The initial layer is the most conspicuous one that has histograms.
  const places = new Map(content.histograms.items.map((item, index) => [item.name, index]));
  const first = run.layers.metric ? places.get(run.layers.byInterest().find((name) => places.has(name))) : 0;
  const source = { ...content.histograms, first, symbol: "g", labelOf: (item) => run.layers.names[item.name] };
  return distributionCard("histogram", source, "layer", "Distribution of the gradient's elements over steps");
}

// The histograms of one name over time, with a control to choose the name.
function distributionCard(key, source, what, label) {
  const { node, picture } = card(key);
  const { items } = source;
  const search = element("input", { type: "search", placeholder: "Find a " + what, "aria-label": `Find a ${what}'s distribution`, oninput: () => options() });
  const select = element("select", { "aria-label": what[0].toUpperCase() + what.slice(1), onchange: () => choose() });
  const controls = element("div", { class: "controls" }, search, select);
  picture.append(controls);
  const note = hint("");
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

  options();
  if (source.first !== undefined) select.value = String(source.first);
  queue(() => {
    drawn = new HistogramPicture(picture, controls, source, label, items[Number(select.value)]);
    picture.append(hint("There are two bins per octave, with interpolation between their middles. At the right: the step under the pointer, else the last."), note);
    choose();
  });
  return node;
}
