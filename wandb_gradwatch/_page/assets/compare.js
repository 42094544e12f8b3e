// Several runs side by side: the first beside each of the others.

function comparisonHeader() {
  const sentences = content.pairs.map((pair) => element("p", { class: "verdict " + (pair.alike ? "good" : "careful") }, pair.sentence + "."));
  return element("header", {}, element("div", { class: "brand" }, "gradwatch"), element("h1", {}, "Runs " + content.run.name), sentences);
}

function runMark(index) {
  const swatch = element("span", { class: "swatch block" });
  swatch.style.background = lineColour(index);
  onTheme(() => (swatch.style.background = lineColour(index)));
  return element("span", { class: "legend-entry" }, swatch, content.runs[index].letter);
}

function runsSection() {
  const alone = (index) => (index === 0 ? content.pairs.map((pair) => pair.onlyFirst) : [content.pairs[index - 1].onlySecond]).flat();
  const rows = content.runs.map((one, index) => {
    const only = [...new Set(alone(index))];
    const layers = plural(one.numLayers, "layer") + (only.length ? `, ${only.length} not in all: ${only.slice(0, 3).join(", ")}${only.length > 3 ? " …" : ""}` : "");
    return element(
      "tr",
      {},
      element("th", { scope: "row", class: "text" }, runMark(index)),
      element("td", { class: "text" }, one.name + (one.name === one.id ? "" : ` (${one.id})`)),
      element("td", { class: "text prose " + one.verdict.mood }, one.verdict.text),
      element("td", {}, one.lastStep === null ? "–" : one.lastStep.toLocaleString("en-US")),
      element("td", { class: "text prose" }, layers),
    );
  });
  const head = ["Run", "Name", "Verdict", "Last step", "Layers"].map((text) => element("th", { scope: "col", class: text === "Last step" ? null : "text" }, text));
  const settings = content.settings.length
    ? plainTable(["Setting", ...content.runs.map((one) => one.letter)], content.settings)
    : element("p", { class: "never" }, "The configurations of the runs are the same.");
  return element(
    "section",
    { class: "card wide", id: "runs" },
    element("h2", {}, "The runs"),
    element("div", { class: "scroll", tabindex: 0 }, element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows))),
    element("h3", { class: "caption" }, "Settings that differ"),
    settings,
  );
}

function stripsCard() {
  const { node, picture } = card("strips", { wide: true });
  for (const strip of content.strips) {
    const lines = strip.lines.map(({ xs, offset }) => [xs, Array.from(float32At(offset, xs.length))]);
    // Where one run has no value at another's step, the joined column is undefined: a line goes on over it.
    const [xs, ...columns] = uPlot.join(lines);
    const series = columns.map((values, index) => ({ label: content.runs[index].letter, values, colour: () => lineColour(index), width: 1.5, marksNonFinite: true }));
    const host = element("div", { class: "chart" });
    picture.append(element("p", { class: "caption" }, strip.label), host);
    queue(() => new LineChart(host, { label: strip.label, xs, series, log: strip.role === "norm" || columns.some(spansDecades), height: strip.role === "rate" ? 120 : 200 }));
  }
  return node;
}

// The ratio of two runs by layer and step, and both norms of one layer.
class Pair {
  constructor(description) {
    Object.assign(this, description);
    [this.first, this.last] = description.columns;
    this.letters = [description.first, description.second];
    const matrix = (one, meaning) => new Matrix(one, this.names.length, this.last.length, meaning);
    this.norms = description.norms.map((one) => matrix({ ...one, key: "norm" }, METRICS.grad_norm_max));
    const long = `largest norm of the window in ${this.letters[1]} / in ${this.letters[0]}`;
    this.ratios = matrix({ ...description.ratio, key: "ratio" }, { long, colours: "diverging", centre: 1, format: formatNumber });
    this.chosen = new Set([description.name ?? 0]);
    this.changed = () => {};
  }

  matrix() {
    return this.ratios;
  }

  bad() {}

  toggle(name) {
    this.chosen.clear();
    this.chosen.add(name);
    this.changed();
  }

  colourOf() {
    return colour("ink");
  }

  series() {
    const [name] = this.chosen;
    return this.norms.map((matrix, index) => {
      const place = content.runs.findIndex((one) => one.letter === this.letters[index]);
      return { label: `${this.letters[index]}  ${this.names[name]}`, values: matrix.line(name), colour: () => lineColour(place), marksNonFinite: true };
    });
  }

  draw(host) {
    const title = `Ratio of ${this.letters[1]} to ${this.letters[0]}: layers by steps. Arrow keys move, Enter shows the layer in both runs below.`;
    const heatmap = new LayerHeatmap(host, this, title);
    host.append(element("p", { class: "hint" }, "Click a row to see the layer's norms in both runs."));
    const chartHost = element("div", { class: "chart" });
    host.append(chartHost);
    const chart = new LineChart(chartHost, { label: "Largest norm of the window in both runs", xs: this.last, series: this.series(), log: true, height: 200 });
    this.changed = () => {
      chart.setSeries(this.series());
      heatmap.frame.draw();
    };
  }
}

function ratioCard() {
  const { node, picture } = card("ratio_of_runs", { wide: true });
  const pairs = content.pairs.map((description) => new Pair(description));
  const hosts = pairs.map(() => element("div", { hidden: true }));
  const show = (chosen) => {
    hosts.forEach((host, index) => (host.hidden = index !== chosen));
    if (!hosts[chosen].hasChildNodes()) pairs[chosen].draw(hosts[chosen]);
  };
  const choices = pairs.map((pair, index) => [String(index), `${pair.letters[1]} / ${pair.letters[0]}`]);
  if (pairs.length > 1) picture.append(element("div", { class: "controls" }, segmented("Runs", choices, "0", (value) => show(Number(value)))));
  picture.append(...hosts);
  queue(() => show(0));
  return node;
}

function comparisonParts() {
  const notes = content.notes.map((note) => element("p", { class: "note" }, note));
  const told = "Runs are compared in the steps and the layers that both have, in the windows of the coarser one. Read by wandb_gradwatch. Lines: uPlot (MIT).";
  return [toolbar(), comparisonHeader(), ...notes, runsSection(), stripsCard(), ratioCard(), element("footer", {}, element("p", {}, told))];
}
