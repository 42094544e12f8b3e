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

// The card of a grid: its controls, the picture, and the lines of chosen names.
function gridCard(grid) {
  const what = WHAT[grid.key] ?? "parameter";
  const isOfLayers = grid === run.layers;
  const { node, picture } = card(isOfLayers ? "layers" : grid.key);
  const search = element("input", { type: "search", placeholder: `Find a ${what}`, "aria-label": `Find ${what}s` + (isOfLayers ? "" : " of " + grid.key.replaceAll("_", " ")), oninput: () => order() });
  const count = element("span", { class: "count" });
  let [heatmap, byInterest] = [null, isOfLayers && content.incidents.length > 0];

  // The names to show, in their order.
  function order() {
    const names = byInterest ? grid.byInterest() : grid.names.map((_, name) => name);
    const matches = matcher(search.value);
    const found = names.filter((name) => matches(grid.names[name]));
    count.textContent = found.length === names.length ? plural(found.length, what) : `${found.length} of ${plural(names.length, what)}`;
    heatmap?.setOrder(found, byInterest);
    return found;
  }

  const metrics = [...grid.matrices].map(([key, { meaning }]) => [key, meaning.label]);
  const controls = element("div", { class: "controls" }, metrics.length > 1 ? segmented("Metric", metrics, grid.metric, (metric) => grid.show({ metric })) : null);
  if (isOfLayers) {
    const colours = segmented("Colour", [["change", "Against its usual"], ["value", "By value"]], grid.byValue ? "value" : "change", (value) => grid.show({ byValue: value === "value" }));
    const orders = segmented("Order", [["model", content.inModelOrder ? "Model order" : "By name"], ["interest", "Most changed"]], byInterest ? "interest" : "model", (value) => {
      byInterest = value === "interest";
      order();
    });
    controls.append(colours, orders);
  }
  controls.append(search, count, element("button", { type: "button", class: "quiet", onclick: () => grid.choose([]) }, "Clear lines"));
  picture.append(controls);
  queue(() => {
    const name = what[0].toUpperCase() + what.slice(1);
    heatmap = new Heatmap(picture, grid, `${name}s by steps. Arrow keys move, Enter adds the ${what} to the lines below.`, order(), byInterest);
    const host = element("div", { class: "chart" });
    picture.append(hint("Drag to zoom, double-click to reset; a click on a row draws its line, or takes it away. Blank: measured, but the run keeps no value for the step."), host);
    if (grid.pooled > 1) host.before(hint(`Each column is the largest of ${grid.pooled} rows of the run.`));
    const chart = new LineChart(host, { label: `Chosen ${what}s`, xs: grid.xs, series: grid.series(), log: grid.isLogarithmic, canLog: false, height: 220 });
    on("grid", (changed) => {
      if (changed !== grid) return;
      chart.log = grid.isLogarithmic;
      chart.setSeries(grid.series(), grid.xs);
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
    return [grid.names.length ? gridCard(grid) : null, histograms.items.length ? distributionCard(key + "_histogram", source, what, label) : null];
  });
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
  const select = element("select", { "aria-label": what[0].toUpperCase() + what.slice(1), onchange: () => choose() }, items.map((item, index) => element("option", { value: index }, source.labelOf(item))));
  picture.append(element("div", { class: "controls" }, select));
  const note = hint("");
  let drawn = null;

  function choose() {
    const item = items[Number(select.value)];
    drawn.choose(item);
    note.textContent = item.steps.length < item.total ? `${item.steps.length} of ${item.total} histograms are in this page, evenly spaced.` : "";
  }

  select.value = String(source.first ?? 0);
  queue(() => {
    drawn = new HistogramPicture(picture, source, label, items[Number(select.value)]);
    picture.append(hint("There are two bins per octave."), note);
    choose();
  });
  return node;
}
