// What watch(metrics=...) measured: for each family a card with names x steps, the lines of chosen names, and, of
// activations, the distribution of one name.

const SHARES = new Set(["dead_ratio", "zero_ratio", "entropy_ratio"]);
const USUAL_UPDATE = 1e-3;
const AT_FIRST = 5; // names whose lines are drawn before anybody has chosen

function meaningIn(family, metric) {
  const words = metric.replaceAll("_", " ");
  const meaning = { label: words[0].toUpperCase() + words.slice(1), long: words, colours: "sequential", format: formatNumber };
  if (SHARES.has(metric)) return { ...meaning, colours: "share", format: formatShare };
  if (family === "update" && metric === "ratio") return { ...meaning, long: "update norm / parameter norm", colours: "diverging", centre: USUAL_UPDATE };
  return meaning;
}

class Family {
  constructor(description) {
    this.key = description.key;
    this.names = description.names;
    [this.first, this.last] = description.columns;
    this.pooled = description.pooled;
    this.histograms = { ...description.histograms, symbol: "x", labelOf: (item) => description.histogramNames[item.name] };
    this.matrices = new Map(
      description.metrics.map((metric) => [metric.key, new Matrix(metric, this.names.length, this.last.length, meaningIn(this.key, metric.key))]),
    );
    this.metric = this.matrices.keys().next().value;
    if (this.key === "update" && this.matrices.has("ratio")) this.metric = "ratio";
    const before = view.families[this.key]?.map((name) => this.names.indexOf(name)).filter((name) => name >= 0);
    this.chosen = new Set(before ?? (this.names.length ? this.byRange().slice(0, AT_FIRST) : []));
    this.changed = () => {};
  }

  matrix() {
    return this.matrices.get(this.metric);
  }

  bad() {
    return this.matrices.get("num_nonfinite");
  }

  toggle(name) {
    if (this.chosen.has(name)) this.chosen.delete(name);
    else if (this.chosen.size < MAX_CHOSEN) this.chosen.add(name);
    this.choose(this.chosen);
  }

  choose(chosen) {
    this.chosen = chosen;
    view.families[this.key] = [...chosen].map((name) => this.names[name]);
    this.changed();
  }

  colourOf(name) {
    return lineColour([...this.chosen].indexOf(name));
  }

  // Indices of names, those first whose value of this metric moved most.
  byRange() {
    const matrix = this.matrix();
    const range = this.names.map((_, name) => {
      const codes = Array.from(matrix.codes.subarray(name * matrix.numColumns, (name + 1) * matrix.numColumns)).filter((code) => code >= CODE_FIRST && code < CODE_INFINITE);
      return codes.length ? Math.max(...codes) - Math.min(...codes) : -1;
    });
    return this.names.map((_, name) => name).sort((a, b) => range[b] - range[a]);
  }

  series() {
    const matrix = this.matrix();
    const lines = [...this.chosen].map((name) => ({
      label: this.names[name],
      values: matrix.line(name),
      colour: () => this.colourOf(name),
      width: 1.5,
      format: matrix.meaning.format,
    }));
    if (matrix.meaning.centre === undefined || !lines.length) return lines;
    const usual = { label: "usual", values: this.last.map(() => matrix.meaning.centre), colour: () => colour("muted"), width: 1.25, dash: [4, 3], isMark: true };
    return [usual, ...lines];
  }

  get isLogarithmic() {
    const { even, meaning } = this.matrix();
    return !even && meaning.colours !== "share" && this.metric !== "num_nonfinite";
  }
}

function familyCards() {
  return content.families.flatMap((description) => {
    const family = new Family(description);
    return [family.names.length ? familyCard(family) : null, family.histograms.items.length ? familyHistogramCard(family) : null];
  });
}

function familyCard(family) {
  const { node, picture } = card(family.key, { wide: true });
  const what = { activation: "module", attention: "head", router: "router", noise_scale: "group", ranks: "rank" }[family.key] ?? "parameter";
  const search = element("input", { type: "search", placeholder: `Find a ${what}`, "aria-label": `Find ${what}s of ${family.key}` });
  const count = element("span", { class: "count" });
  const metrics = [...family.matrices.keys()];
  let heatmap = null;
  let chart = null;

  function setMetric(key) {
    family.metric = key;
    heatmap.refresh();
    family.changed();
  }

  function found() {
    const shown = family.names.map((_, name) => name).filter((name) => matcher(search.value)(family.names[name]));
    count.textContent = shown.length === family.names.length ? plural(shown.length, what) : `${shown.length} of ${plural(family.names.length, what)}`;
    heatmap?.setOrder(shown);
  }

  // A row of buttons for a few metrics, a list for many.
  const options = metrics.map((key) => [key, family.matrices.get(key).meaning.label]);
  let chooser = segmented("Metric", options, family.metric, setMetric);
  if (metrics.length > 8) {
    chooser = element("select", { "aria-label": "Metric" }, options.map(([key, label]) => element("option", { value: key }, label)));
    chooser.value = family.metric;
    chooser.addEventListener("change", () => setMetric(chooser.value));
  }
  const clear = element("button", { type: "button", class: "quiet", onclick: () => family.choose(new Set()) }, "Clear lines");
  picture.append(element("div", { class: "controls" }, metrics.length > 1 ? chooser : null, search, count, clear));
  search.addEventListener("input", found);
  queue(() => {
    heatmap = new LayerHeatmap(picture, family, `${plural(family.names.length, what)} by steps. Arrow keys move, Enter adds the ${what} to the lines below.`);
    picture.append(element("p", { class: "hint" }, "Click a row to add its line, or to take it away."));
    if (family.pooled > 1) picture.append(element("p", { class: "hint" }, `Each column is the largest of ${family.pooled} rows of the run.`));
    const host = element("div", { class: "chart" });
    picture.append(host);
    chart = new LineChart(host, { label: `Chosen ${what}s`, xs: family.last, series: family.series(), log: family.isLogarithmic, canLog: false });
    family.changed = () => {
      chart.log = family.isLogarithmic;
      chart.setSeries(family.series());
      heatmap.frame.draw();
    };
    found();
  });
  return node;
}

function familyHistogramCard(family) {
  const { node, picture } = card(family.key + "_histogram", { wide: true });
  distribution(picture, family.histograms, "module", "Distribution of the output's elements over steps");
  return node;
}
