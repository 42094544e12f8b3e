// The unpacked run: small data from the JSON, matrices from the compressed bytes.

const CODE_MISSING = 0;
const CODE_ZERO = 1;
const CODE_FIRST = 2;
const CODE_INFINITE = 65535;

let content = JSON.parse(document.getElementById("content").textContent);
let arrays = new Uint8Array();

// Replace the current content and arrays by those of a run.
async function load(newContent, packedText) {
  const packed = Uint8Array.from(atob(packedText), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  arrays = new Uint8Array(await new Response(stream).arrayBuffer());
  content = newContent;
  unpackRun();
}

const float32At = (offset, count) => new Float32Array(arrays.slice(offset, offset + 4 * count).buffer);
const float64At = (offset, count) => new Float64Array(arrays.slice(offset, offset + 8 * count).buffer);

const unpackedLine = ({ count, steps, values }) => ({ xs: float64At(steps, count), values: float32At(values, count) });

// What was measured: the samples, with the norm and the NaN and Inf elements of each, and the intervals of steps of which
// every one was measured; nothing is drawn between two intervals.
class Measured {
  constructor({ count, steps, norms, bad, numIntervals, firsts, lasts }) {
    this.steps = float64At(steps, count);
    [this.norms, this.bad] = [norms, bad].map((offset) => float32At(offset, count));
    [this.firsts, this.lasts] = [firsts, lasts].map((offset) => float64At(offset, numIntervals));
  }

  // The place of a sample by its step; undefined if the step is not listed.
  placeOf(step) {
    const place = lastAtMost(this.steps, step);
    return this.steps[place] === step ? place : undefined;
  }

  // Call visit(from, to) for each part of an interval in which every step was measured.
  eachWithin(from, to, visit) {
    for (let place = Math.max(0, lastAtMost(this.firsts, from)); this.firsts[place] <= to; place++) {
      if (this.lasts[place] >= from) visit(Math.max(from, this.firsts[place]), Math.min(to, this.lasts[place]));
    }
  }

  // Call visit(from, to) for each gap in a range: from half a step after a measured step to half a step before the next.
  eachGap([low, high], visit) {
    for (let place = lastAtMost(this.firsts, low); place < this.firsts.length; place++) {
      const [from, to] = [place < 0 ? low : this.lasts[place] + 0.5, place + 1 < this.firsts.length ? this.firsts[place + 1] - 0.5 : high];
      if (from >= high) return;
      if (to > from) visit(from, to);
    }
  }
}

// The names x columns codes of one metric, and the meaning of a code.
class Matrix {
  // meaning: {label, long, colours, format, centre}
  constructor({ key, signed, ofWindow, isBounded, start, step, offset }, numNames, numColumns, meaning) {
    Object.assign(this, { key, ofWindow, isBounded, start, step, numColumns, meaning });
    this.half = Math.log10(2) / step; // a factor of two, in codes
    this.even = signed === true; // linear steps, for values of both signs; otherwise logarithmic steps
    const size = numNames * numColumns;
    const low = arrays.subarray(offset, offset + size);
    const high = arrays.subarray(offset + size, offset + 2 * size);
    this.codes = new Uint16Array(size);
    for (let cell = 0; cell < size; cell++) this.codes[cell] = low[cell] | (high[cell] << 8);
  }

  valueOf(code) {
    if (code === CODE_MISSING) return NaN;
    if (code === CODE_ZERO) return 0;
    if (code === CODE_INFINITE) return Infinity;
    const place = this.start + this.step * (code - CODE_FIRST);
    return this.even ? place : 10 ** place;
  }

  at(name, column) {
    return this.valueOf(this.codes[name * this.numColumns + column]);
  }

  line(name) {
    return Array.from({ length: this.numColumns }, (_, column) => this.at(name, column));
  }

  // The largest code that a sample can have: a layer's norm is at most the model's; NaN and Inf were only at samples that
  // have any.
  limitAt(measured, place) {
    if (!this.isBounded) return CODE_INFINITE;
    if (this.key === "num_nonfinite") return measured.bad[place] > 0 ? CODE_INFINITE : CODE_ZERO;
    const norm = measured.norms[place];
    if (!content.isOneModel || !Number.isFinite(norm)) return CODE_INFINITE;
    return CODE_FIRST + Math.ceil((Math.log10(norm) - this.start) / this.step);
  }

  // The code to show for a window's largest value at a sample with this limit: CODE_MISSING where it says too little,
  // because the sample's value is below half of the largest.
  within(code, limit) {
    if (code <= limit || this.key === "num_nonfinite") return Math.min(code, limit);
    return code - limit <= this.half ? limit : CODE_MISSING;
  }
}

const SHARES = new Set(["dead_ratio", "zero_ratio", "entropy_ratio"]);
// By grid and metric: what differs from the metric's own words.
const MEANINGS = {
  "layer/grad_norm": { label: "Norm", long: "gradient norm" },
  "layer/grad_norm_max": { label: "Largest norm", long: "largest norm of the window" },
  "layer/grad_param_ratio": { label: "Grad / param", long: "gradient norm / parameter norm", colours: "diverging", centre: 1e-3 },
  "layer/param_norm": { label: "Parameters", long: "parameter norm" },
  "layer/dead_ratio": { label: "Dead", long: "share of dead elements" },
  "layer/num_nonfinite": { label: "Non-finite", long: "NaN and Inf elements in the window", format: (value) => formatNumber(Math.round(value)) },
  "update/ratio": { long: "update norm / parameter norm", colours: "diverging", centre: 1e-3 },
};

function meaningIn(grid, metric) {
  const words = metric.replaceAll("_", " ");
  const kind = SHARES.has(metric) ? { colours: "share", format: formatShare } : { colours: "sequential", format: formatNumber };
  return { label: words[0].toUpperCase() + words.slice(1), long: words, ...kind, ...MEANINGS[`${grid}/${metric}`] };
}

const MAX_CHOSEN = 24; // more lines are unreadable
const AT_FIRST = 5; // names that are chosen initially

// A names x steps grid with one matrix per metric: the layers, a family of watch(metrics=...), or a pair of runs.
class Grid {
  constructor({ key, names, columns, pooled, metrics }, measured = run.measured) {
    Object.assign(this, { key, names, pooled, measured });
    [this.first, this.last, this.isWhole] = columns;
    this.matrices = new Map(metrics.map((metric) => [metric.key, new Matrix(metric, names.length, this.last.length, meaningIn(key, metric.key))]));
    const before = viewOfAddress().grids?.[key] ?? {};
    this.isTouched = Array.isArray(before.chosen);
    this.metric = this.matrices.has(before.metric) ? before.metric : this.matrices.keys().next().value;
    this.byValue = before.byValue ?? key !== "layer"; // otherwise coloured by the change relative to each name's median
    const known = () => before.chosen.map((name) => names.indexOf(name)).filter((name) => name >= 0);
    this.chosen = new Set(this.isTouched ? known() : this.metric ? this.byInterest().slice(0, AT_FIRST) : []);
  }

  state() {
    return { metric: this.metric, byValue: this.byValue, chosen: [...this.chosen].map((name) => this.names[name]) };
  }

  show(changes) {
    Object.assign(this, changes, { isTouched: true });
    announce("grid", this);
  }

  choose(names) {
    this.show({ chosen: new Set(names.slice(0, MAX_CHOSEN)) });
  }

  toggle(name) {
    const others = [...this.chosen].filter((one) => one !== name);
    this.choose(this.chosen.has(name) ? others : [...others, name]);
  }

  matrix() {
    return this.matrices.get(this.metric);
  }

  painted() {
    return this.byValue ? this.matrix() : changeOf(this.matrix());
  }

  bad() {
    return this.matrices.get("num_nonfinite");
  }

  get isLogarithmic() {
    const { even, meaning } = this.matrix();
    return !even && meaning.colours !== "share" && this.metric !== "num_nonfinite";
  }

  colourOf(name) {
    return lineColour([...this.chosen].indexOf(name));
  }

  // The steps of the lines: of all samples if the values are about windows, otherwise the columns' last.
  get xs() {
    return this.matrix().ofWindow ? this.measured.steps : this.last;
  }

  // Return a name's values at these steps: undefined where the run does not keep one.
  valuesOf(name, matrix = this.matrix()) {
    if (!matrix.ofWindow) return matrix.line(name).map((value, column) => (Number.isNaN(value) && !this.isWhole[column] ? undefined : value));
    return Array.from(this.measured.steps, (step, place) => matrix.valueOf(this.codeAt(name, place, matrix)));
  }

  // The code to show of a metric about windows at a measured step, given by its place.
  codeAt(name, place, matrix) {
    const column = this.columnOf(this.measured.steps[place]);
    const code = column < 0 ? CODE_MISSING : matrix.codes[name * matrix.numColumns + column];
    return matrix.within(code, matrix.limitAt(this.measured, place));
  }

  // The column that holds a step; -1 if none does.
  columnOf(step) {
    const column = lastAtMost(this.first, step);
    return step <= this.last[column] ? column : -1;
  }

  // Return the lines of the chosen names.
  series() {
    const { meaning } = this.matrix();
    const lines = [...this.chosen].map((name) => ({ label: this.names[name], values: this.valuesOf(name), colour: this.colourOf(name), width: 1.5, format: meaning.format }));
    if (this.key !== "update" || meaning.centre === undefined || !lines.length) return lines;
    return [{ label: "usual", values: Array.from(this.xs, () => meaning.centre), colour: "muted", width: 1.25, dash: [4, 3], joins: () => true }, ...lines];
  }

  // Return indices of names, most conspicuous first: non-finite values, then the largest changes of the norm.
  byInterest() {
    const { codes, numColumns } = this.matrices.get("grad_norm_max") ?? this.matrix();
    const bad = this.bad()?.codes;
    const interest = this.names.map((_, name) => {
      let [low, high, broken] = [Infinity, 0, 0];
      for (let cell = name * numColumns; cell < (name + 1) * numColumns; cell++) {
        if (bad !== undefined && bad[cell] > CODE_ZERO) broken = 1;
        if (codes[cell] < CODE_FIRST) continue;
        low = Math.min(low, codes[cell]);
        high = Math.max(high, codes[cell]);
      }
      return broken * 1e6 + (high > 0 ? high - low : 0);
    });
    return this.names.map((_, name) => name).sort((a, b) => interest[b] - interest[a]);
  }
}

const run = { measured: null, grids: [], layers: null, own: [] }; // grids: the layers, then the families; own: the user's scalars

function unpackRun() {
  run.measured = content.measured ? new Measured(content.measured) : null;
  run.grids = content.grids.map((description) => new Grid(description));
  run.layers = run.grids[0];
  run.own = content.own.items.map(({ key, role, axis, offset }) => {
    const xs = content.own.axes[axis];
    return { key, role, xs, values: float32At(offset, xs.length) };
  });
}

// The histograms of one name, one for each step: the extremes, where elements end for certain (from, to), the signed edges
// between these, and the share of elements up to each. `sizes` are the limits of the bins of one sign; the last is open.
function histogramOf(item, sizes) {
  const [count, bins, end] = [item.steps.length, 2 * sizes.length - 1, sizes.at(-1)];
  const extremes = float32At(item.extremes, 2 * count);
  const outer = [...sizes.slice(0, -1), Infinity];
  const signed = [...outer.map((size) => -size).reverse(), ...outer]; // the middle bin counts zeros
  return item.steps.map((_, column) => {
    const [low, high] = [extremes[column], extremes[column + count]];
    const [from, to] = [Number.isFinite(low) ? low : -end, Number.isFinite(high) ? high : end];
    const roots = arrays.subarray(item.shares + column * bins, item.shares + (column + 1) * bins); // of the bins' shares
    let sum = 0;
    const sums = Array.from(roots, (root) => (sum += root ** 2));
    return { low, high, from, to, edges: signed.map((edge) => clamp(edge, from, to)), upTo: [0, ...sums].map((one) => one / (sum || 1)) };
  });
}
