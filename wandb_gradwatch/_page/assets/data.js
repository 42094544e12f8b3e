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

// The names x columns codes of one metric, and the meaning of a code.
class Matrix {
  // meaning: {label, long, colours, format, centre}
  constructor({ key, signed, start, step, offset }, numNames, numColumns, meaning) {
    Object.assign(this, { key, start, step, numColumns, meaning });
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
  constructor({ key, names, columns, pooled, metrics }) {
    Object.assign(this, { key, names, pooled });
    [this.first, this.last] = columns;
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

  // Return the lines of the chosen names.
  series() {
    const matrix = this.matrix();
    const lines = [...this.chosen].map((name) => ({ label: this.names[name], values: matrix.line(name), colour: this.colourOf(name), width: 1.5, format: matrix.meaning.format }));
    if (this.key !== "update" || matrix.meaning.centre === undefined || !lines.length) return lines;
    return [{ label: "usual", values: this.last.map(() => matrix.meaning.centre), colour: "muted", width: 1.25, dash: [4, 3] }, ...lines];
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

const run = { grids: [], layers: null, own: [] }; // grids: the layers, then the families; own: the user's scalars

function unpackRun() {
  run.grids = content.grids.map((description) => new Grid(description));
  run.layers = run.grids[0];
  run.own = content.own.items.map(({ key, role, axis, offset }) => {
    const xs = content.own.axes[axis];
    return { key, role, xs, values: float32At(offset, xs.length) };
  });
}

// uPlot draws null as a gap, and lines continue across undefined (only another line has a point there). Values that are
// not finite cannot be drawn on an axis.
function drawable(values, positiveOnly) {
  return Array.from(values, (value) => (value === undefined || (Number.isFinite(value) && !(positiveOnly && value <= 0)) ? value : null));
}

function histogramOf(item, bins) {
  const count = item.steps.length;
  const limits = float32At(item.limits, 2 * count);
  // For each column, the shares of elements up to each edge, from 0 to 1; the bytes are roots of the bins' shares.
  const cumulative = new Float64Array(count * (bins + 1));
  for (let column = 0; column < count; column++) {
    const edges = cumulative.subarray(column * (bins + 1), (column + 1) * (bins + 1));
    for (let bin = 0; bin < bins; bin++) edges[bin + 1] = edges[bin] + arrays[item.shares + column * bins + bin] ** 2;
    edges.forEach((sum, edge) => (edges[edge] = sum / (edges[bins] || 1)));
  }
  return { steps: item.steps, low: limits.subarray(0, count), high: limits.subarray(count), cumulative, bins };
}
