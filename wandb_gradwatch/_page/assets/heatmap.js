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

const HIGH_ROW = 15; // pixels of each of the first rows, by interest

// The modules around a layer, up to the number that orders neighbours: "blocks.3".
function blockOf(name) {
  const parts = name.split(".");
  const number = parts.findIndex((part) => /^[0-9]+$/.test(part));
  return parts.slice(0, number >= 0 ? number + 1 : 1).join(".");
}

class Heatmap extends Frame {
  // byInterest: the names that changed most come first, and the first five rows are high enough to be read.
  constructor(host, grid, label, order = grid.names.map((_, name) => name), byInterest = false) {
    super(host, label);
    Object.assign(this, { grid, order, byInterest });
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

  setOrder(order, byInterest) {
    Object.assign(this, { order, byInterest });
    this.outdate();
  }

  draw() {
    this.matrix = this.grid.matrix();
    this.painted = this.grid.painted();
    const { painted } = this;
    painted.scale ??= colourScale(painted);
    this.palette = paletteOf(painted, painted.scale);
    drawScale(this.legend, painted.scale);
    super.draw();
  }

  layout(width) {
    const longest = Math.max(8, ...this.order.slice(0, 2000).map((name) => this.grid.names[name].length));
    const height = clamp(Math.round(this.order.length * 13), 150, isPrinting() ? 380 : width < 600 ? 460 : 720) + 46;
    return { height, left: Math.round(Math.min(longest * 6.7 + 14, clamp(width * 0.3, 150, 230))) };
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
    const { matrix, matrix: { codes: raws }, order, palette, painted: { codes } } = this;
    const [columns, isWhole] = [this.grid.last.length, Uint8Array.from(this.grid.isWhole)];
    const bad = this.grid.bad() === matrix ? null : this.grid.bad()?.codes;
    const winners = new Int32Array(width); // the largest code wins: codes are ordered by importance; -1: nothing is painted
    for (let y = 0; y < height; y++) {
      const from = this.rowAt(y, height);
      const to = Math.max(from + 1, y + 1 < height ? this.rowAt(y + 1, height) : order.length);
      winners.fill(-1);
      for (let row = from; row < to; row++) {
        const base = order[row] * columns;
        for (let x = 0; x < width; x++) {
          let winner = winners[x]; // kept here, because the inner loop takes the time
          for (let cell = base + begin[x]; cell < base + end[x]; cell++) {
            const raw = raws[cell];
            let code = CODE_INFINITE;
            if (!(isBad[x] && bad && bad[cell] > CODE_ZERO)) {
              const shown = raw <= limit[x] ? raw : matrix.within(raw, limit[x]); // the former is the usual case
              if (shown > CODE_ZERO) code = codes[cell] + shown - raw;
              else code = shown > CODE_MISSING || (raw === CODE_MISSING && isWhole[cell - base]) ? shown : -1;
            }
            if (code > winner) winner = code;
          }
          winners[x] = winner;
        }
      }
      for (let x = 0; x < width; x++) if (winners[x] >= 0) pixels[y * width + x] = palette[winners[x]];
    }
  }

  labels(context, { left, top, height }) {
    context.font = '11px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';
    context.textAlign = "right";
    context.textBaseline = "middle";
    const characters = Math.floor((left - 12) / 6.7);
    for (const { text, name, y } of this.labelled(height)) {
      context.fillStyle = colour(this.grid.chosen.has(name) ? this.grid.colourOf(name) : "muted");
      context.fillText(shorten(text, characters), left - 8, top + y);
    }
  }

  // The labels that have room: of each row, or else of the first rows and of each block of the others.
  labelled(height) {
    const [found, room, rows] = [[], 12.5, this.order.length];
    let end = -Infinity; // of the label before
    const place = (text, name, y) => {
      if (y - end < room) return;
      found.push({ text, name, y });
      end = y;
    };
    for (let row = 0, next; row < rows; row = next) {
      const [name, high] = [this.order[row], this.topOf(row + 1, height) - this.topOf(row, height)];
      const [block, isOwn] = [blockOf(this.grid.names[name]), high >= room];
      next = row + 1;
      while (!isOwn && !this.byInterest && next < rows && blockOf(this.grid.names[this.order[next]]) === block) next++;
      const middle = (this.topOf(row, height) + this.topOf(next, height)) / 2;
      if (isOwn) place(this.grid.names[name], name, middle);
      else if (!this.byInterest) place(block, null, middle);
    }
    return found;
  }

  // The number of rows at the top that are higher than the others, and their height in the unit of `height`.
  high(height) {
    const isDense = this.byInterest && this.order.length > AT_FIRST && this.box.height / this.order.length < HIGH_ROW;
    return isDense ? [AT_FIRST, (HIGH_ROW * height) / this.box.height] : [0, 0];
  }

  topOf(row, height) {
    const [count, size] = this.high(height);
    return row < count ? row * size : count * size + ((row - count) * (height - count * size)) / Math.max(this.order.length - count, 1);
  }

  rowAt(y, height) {
    const [count, size] = this.high(height);
    const [rest, rows] = [height - count * size, this.order.length];
    const row = y < count * size ? y / size : count + ((y - count * size) / rest) * (rows - count);
    return clamp(Math.floor(row), 0, rows - 1);
  }

  // Return the middle of the next row; by rounding, an edge could belong to either row.
  nextRow(y, height, direction) {
    const row = clamp(this.rowAt(y, height) + direction, 0, this.order.length - 1);
    return (this.topOf(row, height) + this.topOf(row + 1, height)) / 2;
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

  onChoose(y, height) {
    if (this.order.length) this.grid.toggle(this.order[this.rowAt(y, height)]);
  }
}

// Limits and colours of one metric: the middle 98 % of the values, around a fixed centre if there is one; or 0 to 1.
function colourScale(matrix) {
  const { meaning, even } = matrix;
  if (meaning.colours === "share") return { ...meaning, linear: true, low: 0, high: 1 };
  const every = Math.ceil(matrix.codes.length / 100_000); // so many are enough for limits
  const known = matrix.codes.filter((code, cell) => cell % every === 0 && code >= CODE_FIRST && code < CODE_INFINITE).sort();
  if (!known.length) return { ...meaning, linear: even, low: 0.1, high: 1, empty: true };
  let [low, high] = [Math.floor(0.01 * (known.length - 1)), Math.ceil(0.99 * (known.length - 1))].map((place) => matrix.valueOf(known[place]));
  if (even) {
    high = Math.max(Math.abs(low), Math.abs(high)) || 1; // symmetric around 0
    return { ...meaning, colours: "diverging", linear: true, low: -high, high };
  }
  if (meaning.centre !== undefined) {
    const reach = Math.max(high / meaning.centre, meaning.centre / low, meaning.reach ?? 10);
    [low, high] = [meaning.centre / reach, meaning.centre * reach];
  }
  if (high < low * 1.5) [low, high] = [low / 1.5, high * 1.5];
  return { ...meaning, linear: false, low, high };
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

function scaleTicks({ linear, low, high }) {
  if (linear) return low === 0 ? [0, 0.5, 1] : [low, 0, high].map((value) => Number(value.toPrecision(2)));
  return high < 16 * low ? linearTicks(low, high, 3).filter((tick) => tick > 0) : logTicks(low, high);
}
