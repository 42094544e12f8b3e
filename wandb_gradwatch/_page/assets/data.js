// The run, unpacked: small things from the JSON, matrices from the compressed bytes.

const CODE_MISSING = 0;
const CODE_ZERO = 1;
const CODE_FIRST = 2;
const CODE_INFINITE = 65535;

let content = JSON.parse(document.getElementById("content").textContent);
let arrays = new Uint8Array();

// Take a run's content and its packed arrays in place of those before.
async function load(newContent, packedText) {
  const packed = Uint8Array.from(atob(packedText), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  arrays = new Uint8Array(await new Response(stream).arrayBuffer());
  content = newContent;
  unpackRun();
}

function float32At(offset, count) {
  return new Float32Array(arrays.slice(offset, offset + 4 * count).buffer);
}

// names x columns codes of one metric, and what a code means.
class Matrix {
  // meaning: {label, long, colours, format, centre}
  constructor(description, numNames, numColumns, meaning) {
    this.key = description.key;
    this.meaning = meaning;
    this.even = description.signed === true; // in even steps, for values of both signs; else in steps of the logarithm
    this.numColumns = numColumns;
    this.start = description.start;
    this.step = description.step;
    const size = numNames * numColumns;
    const low = arrays.subarray(description.offset, description.offset + size);
    const high = arrays.subarray(description.offset + size, description.offset + 2 * size);
    this.codes = new Uint16Array(size);
    for (let cell = 0; cell < size; cell++) this.codes[cell] = low[cell] | (high[cell] << 8);
  }

  valueOf(code) {
    if (code === CODE_MISSING) return NaN;
    if (code === CODE_ZERO) return 0;
    if (code === CODE_INFINITE) return Infinity;
    if (this.even) return this.start + this.step * (code - CODE_FIRST);
    return 10 ** (this.start + this.step * (code - CODE_FIRST));
  }

  at(name, column) {
    return this.valueOf(this.codes[name * this.numColumns + column]);
  }

  line(name) {
    const values = [];
    for (let column = 0; column < this.numColumns; column++) values.push(this.at(name, column));
    return values;
  }
}

const METRICS = {
  grad_norm: { label: "Norm", long: "gradient norm", colours: "sequential", format: formatNumber },
  grad_norm_max: { label: "Largest norm", long: "largest norm of the window", colours: "sequential", format: formatNumber },
  grad_param_ratio: { label: "Grad / param", long: "gradient norm / parameter norm", colours: "diverging", centre: 1e-3, format: formatNumber },
  param_norm: { label: "Parameters", long: "parameter norm", colours: "sequential", format: formatNumber },
  dead_ratio: { label: "Dead", long: "share of dead elements", colours: "share", format: formatShare },
  num_nonfinite: { label: "Non-finite", long: "NaN and Inf elements in the window", colours: "sequential", format: (value) => formatNumber(Math.round(value)) },
};

const run = { names: [], first: [], last: [], matrices: new Map(), own: [] }; // own: the user's scalars, {key, role, xs, values}

function unpackRun() {
  run.names = content.names;
  [run.first, run.last] = content.columns;
  run.matrices.clear();
  for (const description of content.metrics) {
    run.matrices.set(description.key, new Matrix(description, run.names.length, run.last.length, METRICS[description.key]));
  }
  run.own = content.own.items.map(({ key, role, axis, offset }) => {
    const xs = content.own.axes[axis];
    return { key, role, xs, values: float32At(offset, xs.length) };
  });
}

// uPlot draws null as a gap; a number that is not finite has no place on an axis. Over what is undefined, because
// another line has a point there, the line goes on.
function drawable(values, positiveOnly) {
  return Array.from(values, (value) => (value === undefined || (Number.isFinite(value) && !(positiveOnly && value <= 0)) ? value : null));
}

function histogramOf(item, bins) {
  const count = item.steps.length;
  const limits = float32At(item.limits, 2 * count);
  // Of every column the shares of the elements up to each edge, from 0 to 1; the bytes hold roots of the bins' shares.
  const cumulative = new Float64Array(count * (bins + 1));
  for (let column = 0; column < count; column++) {
    const edges = cumulative.subarray(column * (bins + 1), (column + 1) * (bins + 1));
    for (let bin = 0; bin < bins; bin++) edges[bin + 1] = edges[bin] + arrays[item.shares + column * bins + bin] ** 2;
    edges.forEach((sum, edge) => (edges[edge] = sum / (edges[bins] || 1)));
  }
  return { steps: item.steps, low: limits.subarray(0, count), high: limits.subarray(count), cumulative, bins };
}
