// Several runs: a table with a row for each, and below it two of them side by side.

const SPARK = { width: 150, height: 24 };

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// The norm over the steps of all runs, on a logarithmic scale of its own, and a red mark where an element was NaN or Inf.
function normSpark({ norm, bad }, [first, last]) {
  const { xs, values } = unpackedLine(norm);
  const logs = Array.from(values, (value) => (value > 0 && Number.isFinite(value) ? Math.log10(value) : NaN));
  const known = logs.filter(Number.isFinite);
  const low = Math.min(...known);
  const reach = Math.max(Math.max(...known) - low, 1); // a decade at least
  const at = (step) => (((step - first) / Math.max(last - first, 1)) * (SPARK.width - 4) + 2).toFixed(1);
  let [line, marks, isJoined] = ["", "", false];
  logs.forEach((log, place) => {
    if (Number.isFinite(log)) line += `${isJoined ? "L" : "M"}${at(xs[place])} ${(SPARK.height - 3 - ((log - low) / reach) * (SPARK.height - 6)).toFixed(1)}`;
    isJoined = Number.isFinite(log);
  });
  for (const step of bad) marks += `M${at(step)} 0v${SPARK.height}`;
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, role: "img", "aria-label": "gradient norm over the steps" });
  drawing.append(svg("path", { class: "line", d: line }), svg("path", { class: "bad", d: marks }));
  return drawing;
}

let picked = null; // the two runs side by side; at first the worst and the best

function runsSection() {
  const text = (cell, kind = "") => element("td", { class: "text prose " + kind }, cell);
  const boxes = content.runs.map((one, index) => element("input", { type: "checkbox", "aria-label": `Compare ${one.name}`, onchange: () => pick(index) }));

  function pick(index) {
    picked = [...picked.filter((one) => one !== index), ...(boxes[index].checked ? [index] : [])].slice(-2);
    rebuild();
  }

  boxes.forEach((box, index) => (box.checked = picked.includes(index)));
  const rows = content.order.map((index) => {
    const one = content.runs[index];
    return [
      element("td", {}, boxes[index]),
      element("th", { scope: "row", class: "text prose" }, one.name + (one.name === one.id ? "" : ` (${one.id})`)),
      text(one.told, MOODS[one.verdict.status]),
      element("td", {}, normSpark(one, content.steps)),
      text(one.incident ? `${atStep(one.incident.step)} ${shorten(one.incident.layer, 32)}` : "–"),
      ...one.settings.map((value) => text(value)),
      one.share,
    ];
  });
  const head = ["", "Run", "Verdict", "Gradient norm", "First incident", ...content.settings, "Measured"].map((name) => element(name ? "th" : "td", name ? { scope: "col", class: "text" } : {}, name));
  const more = content.settingsLeft ? ` ${content.settingsLeft} more settings differ.` : "";
  return element("section", { class: "card", id: "runs" }, element("h2", {}, "The runs"), scrolled(table(head, rows), "all-runs"), hint("The worst run first. Tick two to see them side by side." + more));
}

// Pool the columns of a run's matrix to windows: the largest code of each, where infinity is the largest.
function pooledCodes(matrix, names, lasts, windows) {
  const codes = new Uint16Array(names.length * windows.length);
  const windowOf = lasts.map((step) => lastAtMost(windows, step - 1) + 1); // the first window that ends at the step or later
  names.forEach((name, row) => {
    windowOf.forEach((window, column) => {
      const cell = row * windows.length + window;
      if (window < windows.length) codes[cell] = Math.max(codes[cell], matrix.codes[name * lasts.length + column]);
    });
  });
  return Object.assign(Object.create(matrix), { codes, numColumns: windows.length, change: undefined });
}

const [RATIO_START, RATIO_STEP] = [-12, 0.0004]; // of the codes of a ratio: from 1e-12 to 1e14

function ratioOf(first, second, long) {
  const codes = first.codes.map((code, cell) => {
    const [one, other] = [first.valueOf(code), second.valueOf(second.codes[cell])];
    if (one === Infinity || other === Infinity) return CODE_INFINITE;
    const place = Math.round((Math.log10(other / one) - RATIO_START) / RATIO_STEP);
    if (Number.isNaN(place) || one === 0) return CODE_MISSING;
    return other === 0 ? CODE_ZERO : clamp(place + CODE_FIRST, CODE_FIRST, CODE_INFINITE - 1);
  });
  const meaning = { ...meaningIn("pair", "ratio"), long, colours: "diverging", centre: 1 };
  return Object.assign(Object.create(first), { codes, start: RATIO_START, step: RATIO_STEP, half: Math.log10(2) / RATIO_STEP, meaning, key: "ratio" });
}

// What at least one of two runs measured, without values.
function measuredByEither(one, other) {
  const both = Object.create(Measured.prototype);
  const steps = [...new Set([...one.steps, ...other.steps])].sort((a, b) => a - b);
  const ends = [one, other].flatMap(({ firsts, lasts }) => Array.from(firsts, (first, place) => [first, lasts[place]])).sort((a, b) => a[0] - b[0]);
  const joined = [];
  for (const [first, last] of ends) {
    if (joined.length && first <= joined.at(-1)[1] + 1) joined.at(-1)[1] = Math.max(joined.at(-1)[1], last);
    else joined.push([first, last]);
  }
  const nothing = steps.map(() => NaN);
  return Object.assign(both, { steps, norms: nothing, bad: steps.map(() => 0), firsts: joined.map(([first]) => first), lasts: joined.map(([, last]) => last) });
}

// The ratio of two runs by layer and step, in the windows of the coarser one, and the norms of one layer in both.
class Pair extends Grid {
  constructor(first, second) {
    const runs = [first, second].map((index) => content.runs[index]);
    const names = runs[0].names.filter((name) => new Set(runs[1].names).has(name));
    const [low, high] = [Math.max(...runs.map(({ lasts }) => lasts[0])), Math.min(...runs.map(({ lasts }) => lasts.at(-1)))];
    const [windows] = runs.map(({ lasts }) => lasts.filter((step) => step >= low && step <= high)).sort((a, b) => a.length - b.length);
    const measured = measuredByEither(...runs.map((one) => new Measured(one.measured)));
    const starts = windows.map((_, place) => measured.steps[lastAtMost(measured.steps, place ? windows[place - 1] : -Infinity) + 1]);
    super({ key: "pair", names, columns: [starts, windows, windows.map(() => true)], pooled: 1, metrics: [] }, measured);
    const meaning = meaningIn("layer", "grad_norm_max");
    const matrices = runs.map((one) => pooledCodes(new Matrix({ ...one.norms, key: "norms", ofWindow: true }, one.names.length, one.lasts.length, meaning), names.map((name) => one.names.indexOf(name)), one.lasts, windows));
    this.matrices = new Map([["ratio", ratioOf(...matrices, "largest norm of the window in B / in A")], ["A", matrices[0]], ["B", matrices[1]]]);
    Object.assign(this, { metric: "ratio", byValue: true, runs });
    const told = content.sentences[`${first}-${second}`];
    this.chosen = new Set([Math.max(0, names.indexOf(told?.name))]);
  }

  toggle(name) {
    this.choose([name]);
  }

  colourOf() {
    return "ink";
  }

  series() {
    const [name] = this.chosen;
    return ["A", "B"].map((letter, index) => ({ label: `${letter}  ${this.names[name]}`, values: this.valuesOf(name, this.matrices.get(letter)), colour: lineColour(index), marksNonFinite: true }));
  }

  draw(host) {
    new Heatmap(host, this, "Ratio of B to A: layers by steps. Arrow keys move, Enter shows the layer in both runs below.");
    const chartHost = element("div", { class: "chart" });
    host.append(hint("Click a row to see the layer's norms in both runs."), chartHost);
    const chart = new LineChart(chartHost, { label: "Largest norm of the window in both runs", xs: this.xs, series: this.series(), measured: this.measured, log: true, height: 200 });
    on("grid", (changed) => changed === this && chart.setSeries(this.series()));
  }
}

// The scalars that both runs have: the norm, then the user's own.
function sharedLines([first, second]) {
  const found = [{ key: "gradient norm", role: "norm", lines: [first, second].map(({ norm }) => unpackedLine(norm)) }];
  for (const one of first.own) {
    const other = second.own.find(({ key }) => key === one.key);
    if (other) found.push({ ...one, lines: [one, other].map(unpackedLine) });
  }
  return found;
}

function drawShared(host, { key, role, lines }) {
  const series = lines.map(({ xs, values }, index) => ({ label: "AB"[index], xs, values, colour: lineColour(index), width: 1.5, marksNonFinite: true, joins: role === "norm" ? isNext : () => true }));
  new LineChart(host, { label: key, series, measured: null, log: role === "norm" || lines.some(({ values }) => spansDecades(values)), height: role === "rate" ? 120 : 200 });
}

// Two runs side by side: what the comparison says, their scalars on one axis, and the ratio of every layer.
function sideBySide() {
  const [first, second] = [...picked].sort((a, b) => a - b);
  const runs = [first, second].map((index) => content.runs[index]);
  const told = content.sentences[`${first}-${second}`];
  const names = runs.map((one, index) => swatchEntry(swatch(lineColour(index), "block"), `${"AB"[index]}: ${one.name}`));
  const head = element("header", {}, element("h2", { class: "facts" }, names), told ? element("p", { class: "verdict " + (told.alike ? "good" : "careful") }, told.sentence + ".") : null);
  const strips = card("strips");
  for (const shared of sharedLines(runs)) {
    const host = element("div", { class: "chart" });
    strips.picture.append(element("p", { class: "caption" }, shared.key), host);
    queue(() => drawShared(host, shared));
  }
  const pair = runs.every((one) => one.lasts.length) ? new Pair(first, second) : null;
  if (!pair?.names.length || !pair.last.length) return [head, strips.node, hint("The runs have no layer, or no step, in common.")];
  const ratio = card("ratio_of_runs");
  queue(() => pair.draw(ratio.picture));
  return [head, strips.node, ratio.node];
}

function comparisonParts() {
  const notes = content.notes.length ? [element("details", { class: "note" }, element("summary", {}, plural(content.notes.length, "note")), content.notes.map((note) => element("p", {}, note)))] : [];
  const head = element("header", {}, element("div", { class: "brand" }, "gradwatch"), element("h1", {}, plural(content.runs.length, "run")));
  const told = "Runs are compared in the steps and the layers that both have, in the windows of the coarser one. Read by wandb_gradwatch.";
  picked ??= [content.order[0], content.order.at(-1)];
  return [toolbar(), head, ...notes, runsSection(), ...(picked.length === 2 ? sideBySide() : []), element("footer", {}, element("p", {}, told))];
}
