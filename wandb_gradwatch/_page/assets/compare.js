// Several runs side by side: the first compared with each of the others.

function comparisonHeader() {
  const sentences = content.pairs.map((pair) => element("p", { class: "verdict " + (pair.alike ? "good" : "careful") }, pair.sentence + "."));
  return element("header", {}, element("div", { class: "brand" }, "gradwatch"), element("h1", {}, "Runs " + content.run.name), sentences);
}

function runsSection() {
  const text = (cell, kind = "") => element("td", { class: "text " + kind }, cell);
  const rows = content.runs.map((one, index) => {
    const only = [...new Set(content.pairs.flatMap((pair, place) => (index === 0 ? pair.only[0] : place === index - 1 ? pair.only[1] : [])))];
    const layers = plural(one.numLayers, "layer") + (only.length ? `, ${only.length} not in all: ${only.slice(0, 3).join(", ")}${only.length > 3 ? " …" : ""}` : "");
    return [
      element("th", { scope: "row", class: "text" }, swatchEntry(swatch(lineColour(index), "block"), one.letter)),
      text(one.name + (one.name === one.id ? "" : ` (${one.id})`), "prose"),
      text(one.verdict.sentence, "prose " + MOODS[one.verdict.status]),
      text(one.incidents[0] ?? "none", "prose"),
      one.lastStep,
      text(layers, "prose"),
    ];
  });
  const head = ["Run", "Name", "Verdict", "First incident", "Last step", "Layers"].map((name) => element("th", { scope: "col", class: name === "Last step" ? null : "text" }, name));
  const settings = content.settings.length
    ? scrolled(table(["Setting", ...content.runs.map((one) => one.letter)], content.settings))
    : element("p", { class: "never" }, "The configurations of the runs are the same.");
  return element("section", { class: "card wide", id: "runs" }, element("h2", {}, "The runs"), scrolled(table(head, rows)), element("h3", { class: "caption" }, "Settings that differ"), settings);
}

function stripsCard() {
  const { node, picture } = card("strips");
  for (const strip of content.strips) {
    const lines = strip.lines.map(({ xs, offset }) => [xs, Array.from(float32At(offset, xs.length))]);
    // The joined column is undefined if one run has no value at another's step; lines continue across it.
    const [xs, ...columns] = uPlot.join(lines);
    const series = columns.map((values, index) => ({ label: content.runs[index].letter, values, colour: lineColour(index), width: 1.5, marksNonFinite: true, joins: strip.role === "norm" ? isNext : undefined }));
    const host = element("div", { class: "chart" });
    picture.append(element("p", { class: "caption" }, strip.label), host);
    queue(() => new LineChart(host, { label: strip.label, xs, series, measured: null, log: strip.role === "norm" || columns.some(spansDecades), height: strip.role === "rate" ? 120 : 200 }));
  }
  return node;
}

// The ratio of two runs by layer and step, and the norms of one layer in both runs.
class Pair extends Grid {
  constructor(description) {
    super(description, new Measured(description.measured));
    this.letters = [description.first, description.second];
    const long = `largest norm of the window in ${this.letters[1]} / in ${this.letters[0]}`;
    Object.assign(this.matrix().meaning, { long, colours: "diverging", centre: 1 });
    this.chosen = new Set([description.name ?? 0]);
  }

  toggle(name) {
    this.choose([name]);
  }

  colourOf() {
    return "ink";
  }

  series() {
    const [name] = this.chosen;
    return this.letters.map((letter) => {
      const place = content.runs.findIndex((one) => one.letter === letter);
      return { label: `${letter}  ${this.names[name]}`, values: this.valuesOf(name, this.matrices.get(letter)), colour: lineColour(place), marksNonFinite: true };
    });
  }

  draw(host) {
    new Heatmap(host, this, `Ratio of ${this.letters[1]} to ${this.letters[0]}: layers by steps. Arrow keys move, Enter shows the layer in both runs below.`);
    const chartHost = element("div", { class: "chart" });
    host.append(hint("Click a row to see the layer's norms in both runs."), chartHost);
    const chart = new LineChart(chartHost, { label: "Largest norm of the window in both runs", xs: this.xs, series: this.series(), measured: this.measured, log: true, height: 200 });
    on("grid", (changed) => changed === this && chart.setSeries(this.series()));
  }
}

function ratioCard() {
  const { node, picture } = card("ratio_of_runs");
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
