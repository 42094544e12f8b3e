// Names x steps: one row per name; the colour is the value, at the measured steps that it is about.

// Return a matrix of each name's values relative to the name's median; matrices of shares or counts stay unchanged.
function changeOf(matrix) {
  if (matrix.even || matrix.meaning.colours === "share" || matrix.key === "num_nonfinite") return matrix;
  if (matrix.change) return matrix.change;
  const usual = 32768; // the code of the median
  const codes = matrix.codes.slice();
  for (let start = 0; start < codes.length; start += matrix.numColumns) {
    const row = codes.subarray(start, start + matrix.numColumns);
    const known = row.filter((code) => code >= CODE_FIRST && code < CODE_INFINITE).sort();
    const shift = usual - known[known.length >> 1];
    row.forEach((code, column) => {
      if (code >= CODE_FIRST && code < CODE_INFINITE) row[column] = clamp(code + shift, CODE_FIRST, CODE_INFINITE - 1);
    });
  }
  const meaning = { ...matrix.meaning, long: matrix.meaning.long + ", times the layer's usual", colours: "diverging", centre: 1, reach: 100 };
  const change = { meaning, codes, start: -matrix.step * (usual - CODE_FIRST) };
  return (matrix.change = Object.assign(Object.create(matrix), change));
}

class Heatmap extends Frame {
  constructor(host, grid, label) {
    super(host, label);
    this.grid = grid;
    this.order = grid.names.map((_, name) => name);
    this.onResetY();
    Object.assign(this, { measured: grid.measured, last: grid.last });
    on("grid", (changed) => changed === grid && this.outdate());
    this.begin(this.wrap);
  }

  get steps() {
    return this.grid.xs;
  }

  tableContent() {
    const matrix = this.grid.matrix();
    return { head: ["name", ...this.grid.last], rows: this.order.map((name) => [this.grid.names[name], ...matrix.line(name)]) };
  }

  setOrder(order) {
    this.order = order;
    this.onResetY();
    this.outdate();
  }

  draw() {
    this.prepare();
    super.draw();
  }

  prepare() {
    this.matrix = this.grid.matrix();
    this.painted = this.grid.painted();
    const { painted } = this;
    painted.scale ??= colourScale(painted);
    this.palette = paletteOf(painted, painted.scale);
    drawScale(this.legend, painted.scale);
  }

  layout(width) {
    const longest = Math.max(8, ...this.order.slice(0, 2000).map((name) => this.grid.names[name].length));
    const height = clamp(Math.round(this.order.length * 13), 150, width < 600 ? 460 : 720) + 46;
    return { height, left: Math.round(Math.min(longest * 6.7 + 14, width * 0.3, 230)), side: 0 };
  }

  // For each pixel across: the columns [from, to) of which it shows samples, the largest code of these samples, and
  // whether they have NaN or Inf.
  samplesAcross(width) {
    const { grid, matrix, measured } = this;
    const [from, to, limit, isBad] = [new Int32Array(width).fill(this.last.length), new Int32Array(width), new Float64Array(width).fill(-Infinity), new Uint8Array(width)];
    this.eachStep(grid.xs, width, 5, (index, left, right) => {
      const step = grid.xs[index];
      const [column, place] = matrix.ofWindow ? [grid.columnOf(step), index] : [index, measured.placeOf(step)];
      if (column < 0) return;
      const largest = place === undefined || !matrix.ofWindow ? CODE_INFINITE : matrix.limitAt(measured, place);
      for (let x = left; x < right; x++) {
        from[x] = Math.min(from[x], column);
        to[x] = Math.max(to[x], column + 1);
        limit[x] = Math.max(limit[x], largest);
        isBad[x] |= !grid.bad()?.isBounded || measured.bad[place] > 0;
      }
    });
    return { from, to, limit, isBad };
  }

  paint(pixels, width, height) {
    const { from: begin, to: end, limit, isBad } = this.samplesAcross(width);
    const { matrix } = this;
    const { codes } = this.painted;
    const [top, bottom] = this.visible;
    const columns = this.grid.last.length;
    const bad = this.grid.bad() === matrix ? null : this.grid.bad()?.codes;
    for (let y = 0; y < height; y++) {
      const from = top + Math.floor((y * (bottom - top)) / height);
      const to = Math.max(from + 1, top + Math.floor(((y + 1) * (bottom - top)) / height));
      for (let x = 0; x < width; x++) {
        let winner = -1; // the largest code wins: codes are ordered by importance; nothing is painted without one
        for (let row = from; row < to; row++) {
          const base = this.order[row] * columns;
          for (let column = begin[x]; column < end[x]; column++) {
            const cell = base + column;
            if (isBad[x] && bad?.[cell] > CODE_ZERO) winner = CODE_INFINITE;
            else {
              const raw = matrix.codes[cell];
              const shown = raw <= limit[x] ? raw : matrix.within(raw, limit[x]); // the former is the usual case
              if (shown > CODE_MISSING) winner = Math.max(winner, shown > CODE_ZERO ? codes[cell] + shown - raw : shown);
              else if (raw === CODE_MISSING && this.grid.isWhole[column]) winner = Math.max(winner, CODE_MISSING);
            }
          }
        }
        if (winner >= 0) pixels[y * width + x] = this.palette[winner];
      }
    }
  }

  labels(context, { left, top, height }) {
    const [first, last] = this.visible;
    const rowHeight = height / Math.max(last - first, 1);
    const every = Math.max(1, Math.ceil(12.5 / rowHeight));
    context.font = '11px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';
    context.textAlign = "right";
    context.textBaseline = "middle";
    const characters = Math.floor((left - 12) / 6.7);
    for (let row = first; row < last; row += every) {
      const name = this.order[row];
      const chosen = this.grid.chosen.has(name);
      context.fillStyle = colour(chosen ? this.grid.colourOf(name) : "muted");
      context.fillText(shorten(this.grid.names[name], characters), left - 8, top + (row - first + 0.5) * rowHeight);
    }
  }

  rowAt(y, height) {
    const [first, last] = this.visible;
    return clamp(first + Math.floor((y / height) * (last - first)), first, last - 1);
  }

  bandAt(y, height) {
    const [first, last] = this.visible;
    const row = this.rowAt(y, height) - first;
    const size = height / (last - first);
    return size < 3 ? null : [row * size, (row + 1) * size];
  }

  // Return the middle of the next row; by rounding, an edge could belong to either row.
  nextRow(y, height, direction) {
    const [first, last] = this.visible;
    const row = clamp(this.rowAt(y, height) + direction, first, last - 1);
    return ((row - first + 0.5) * height) / (last - first);
  }

  describe(step, y, height) {
    if (this.order.length === 0) return null;
    const name = this.order[this.rowAt(y, height)];
    const { grid, matrix, measured } = this;
    const column = grid.columnOf(step);
    if (column < 0) return null;
    const [first, last] = [grid.first[column], grid.last[column]];
    const place = measured.placeOf(step);
    const isWindow = matrix.ofWindow && first < last;
    const count = lastAtMost(measured.steps, last) - lastAtMost(measured.steps, first - 1);
    const span = isWindow ? `${stepText(step)} of steps ${whole(first)}–${whole(last)}, ${whole(count)} measured` : stepText(step);
    const value = matrix.at(name, column);
    const text = Number.isNaN(value) ? (grid.isWhole[column] ? "missing" : "not kept") : matrix.meaning.format(value);
    const lines = [grid.names[name], span, matrix.meaning.long + ": " + text];
    const limit = isWindow && place !== undefined ? matrix.limitAt(measured, place) : CODE_INFINITE;
    if (matrix.codes[name * matrix.numColumns + column] > limit) lines.push(`at this step at most ${matrix.meaning.format(matrix.valueOf(limit))}`);
    else if (this.painted !== matrix && value > 0) lines.push(`${formatNumber(this.painted.at(name, column))} times the layer's usual`);
    const bad = !grid.bad()?.isBounded || measured.bad[place] > 0 ? (grid.bad()?.at(name, column) ?? NaN) : NaN;
    if (bad > 0 && this.matrix.key !== "num_nonfinite") lines.push(formatNumber(Math.round(bad)) + " NaN or Inf elements; the value is of the finite rest");
    return lines;
  }

  onZoomY(from, to) {
    const [first, last] = this.visible;
    const top = first + Math.floor(from * (last - first));
    this.visible = [top, Math.max(top + 1, first + Math.ceil(to * (last - first)))];
  }

  onResetY() {
    this.visible = [0, this.order.length];
  }

  onChoose(y, height) {
    if (this.order.length) this.grid.toggle(this.order[this.rowAt(y, height)]);
  }
}

// Limits and colours of one metric: the middle 98 % of the logarithms, a fixed centre, or 0 to 1.
function colourScale(matrix) {
  const { meaning } = matrix;
  if (meaning.colours === "share") return { ...meaning, linear: true, low: 0, high: 1 };
  if (matrix.even) return evenScale(matrix);
  const middle = middleCodes(matrix);
  if (middle === null) return { ...meaning, linear: false, low: 0.1, high: 1, empty: true };
  let [low, high] = middle.map((code) => matrix.valueOf(code));
  if (meaning.centre !== undefined) {
    const reach = Math.max(high / meaning.centre, meaning.centre / low, meaning.reach ?? 10);
    [low, high] = [meaning.centre / reach, meaning.centre * reach];
  }
  if (high < low * 1.5) [low, high] = [low / 1.5, high * 1.5];
  return { ...meaning, linear: false, low, high };
}

// Return the codes that enclose the middle 98 % of the numbers, by counting; null if there is no number.
function middleCodes({ codes }) {
  const counts = new Uint32Array(CODE_INFINITE + 1);
  for (let cell = 0; cell < codes.length; cell++) counts[codes[cell]]++;
  const total = codes.length - counts[CODE_MISSING] - counts[CODE_ZERO] - counts[CODE_INFINITE];
  const codeAt = (place) => {
    let code = CODE_FIRST;
    for (let passed = counts[code]; passed <= place; passed += counts[++code]);
    return code;
  };
  return total ? [codeAt(Math.floor(0.01 * (total - 1))), codeAt(Math.ceil(0.99 * (total - 1)))] : null;
}

// Limits for values of both signs: linear and symmetric around 0, enclosing the middle 98 %.
function evenScale(matrix) {
  const sizes = Array.from(matrix.codes.filter((code) => code >= CODE_FIRST && code < CODE_INFINITE), (code) => Math.abs(matrix.valueOf(code)));
  const reach = sizes.sort((a, b) => a - b)[Math.ceil(0.98 * (sizes.length - 1))] || 1;
  return { ...matrix.meaning, colours: "diverging", linear: true, low: -reach, high: reach };
}

function placeOn(scale, value) {
  return scale.linear ? ((value - scale.low) / (scale.high - scale.low)) ** (scale.power ?? 1) : Math.log(value / scale.low) / Math.log(scale.high / scale.low);
}

function paletteOf(matrix, scale) {
  const anchors = gradient(scale.colours);
  const palette = new Uint32Array(CODE_INFINITE + 1);
  const shades = Array.from({ length: 256 }, (_, shade) => packColour(colourAt(anchors, shade / 255)));
  // Codes and scale are both logarithmic, or both linear, so positions are linear in the codes.
  const start = placeOn(scale, matrix.valueOf(CODE_FIRST));
  const across = placeOn(scale, matrix.valueOf(CODE_FIRST + 1)) - start;
  const isEven = Boolean(scale.linear) === matrix.even;
  for (let code = CODE_FIRST; code < CODE_INFINITE; code++) {
    const place = isEven ? start + across * (code - CODE_FIRST) : placeOn(scale, matrix.valueOf(code));
    palette[code] = shades[Math.round(255 * clamp(place, 0, 1))];
  }
  palette[CODE_MISSING] = packHex(colour("missing"));
  palette[CODE_ZERO] = scale.linear ? shades[0] : packHex(colour("zero"));
  palette[CODE_INFINITE] = packHex(colour("nonfinite"));
  return palette;
}

// A colour sample with its meaning.
const swatchEntry = (swatch, text) => element("span", { class: "legend-entry" }, swatch, text);

// The colour bar with its axis, and the meaning of the colours outside it: [class, text].
function drawScale(host, scale, outside = [["hatched", "not measured"], ["missing", "missing"], ...(scale.linear ? [] : [["zero", "zero"]]), ["nonfinite", "NaN or Inf"]]) {
  const anchors = gradient(scale.colours);
  const bar = element("div", { class: "bar" });
  const stops = Array.from({ length: 13 }, (_, index) => `rgb(${colourAt(anchors, index / 12).join(",")})`);
  bar.style.background = `linear-gradient(to right, ${stops.join(",")})`;
  const ticks = element("div", { class: "bar-ticks" });
  for (const value of scale.empty ? [] : scaleTicks(scale)) {
    const tick = element("span", {}, scale.low === 0 ? formatShare(value) : formatTick(value));
    tick.style.left = 100 * placeOn(scale, value) + "%";
    ticks.append(tick);
  }
  host.replaceChildren(
    element("div", { class: "bar-label" }, scale.long),
    element("div", { class: "bar-wrap" }, bar, ticks),
    element("div", { class: "swatches" }, outside.map(([name, text]) => swatchEntry(swatch(null, "block " + name), text))),
  );
}

function scaleTicks(scale) {
  if (scale.linear) return scale.low === 0 ? [0, 0.5, 1] : [scale.low, 0, scale.high].map((value) => Number(value.toPrecision(2)));
  const decades = Math.log10(scale.high / scale.low);
  if (decades < 1.2) {
    const ticks = linearTicks(scale.low, scale.high, 3);
    return ticks.filter((tick) => tick > 0);
  }
  const every = Math.ceil(decades / 4);
  const first = Math.ceil(Math.log10(scale.low) - 1e-9);
  const ticks = [];
  for (let power = first; power <= Math.log10(scale.high) + 1e-9; power += every) ticks.push(10 ** power);
  return ticks;
}
