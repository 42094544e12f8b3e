// The histograms of one name over time: steps across; upwards the logarithm of the elements' size, or their signed value.
// The colour is the share of elements, lines are percentiles; at the right is the cross-section at the pointer's step.

const PERCENTILES = [
  { share: 0.99, label: "99th percentile", dash: [2, 2] },
  { share: 0.75, label: "75th", dash: [6, 3] },
  { share: 0.5, label: "median", dash: [] },
  { share: 0.25, label: "25th", dash: [6, 3] },
];

class HistogramPicture extends Frame {
  // source: {bins, items, symbol}, and labelOf(item)
  constructor(host, controls, source, label, item) {
    super(host, label);
    this.source = source;
    this.signed = false;
    controls.append(segmented("Vertical axis", [["size", `log |${source.symbol}|`], ["value", `${source.symbol}, with its sign`]], "size", (value) => this.choose(this.item, value === "value")));
    this.choose(item);
    this.begin(this.wrap);
  }

  choose(item, signed = this.signed) {
    Object.assign(this, { item, signed });
    this.data = histogramOf(item, this.source.bins);
    const { low, high } = this.data;
    Object.assign(this, { measured: run.measured, steps: this.data.steps, last: this.data.steps });
    this.reach = Array.from(low, (one, column) => Math.max(Math.abs(one), Math.abs(high[column])));
    // The size below which a column does not distinguish sizes: the limit of the bin around zero.
    this.finest = Array.from(low, (one, column) => {
      if (one > 0 || high[column] < 0) return Math.min(Math.abs(one), Math.abs(high[column]));
      const width = (high[column] - one) / this.source.bins;
      return Math.max(-one % width, width - (-one % width));
    });
    this.percentiles = PERCENTILES.map(({ share }) => item.steps.map((_, column) => this.percentile(column, share)));
    this.onResetY();
    if (this.node) this.outdate();
  }

  // The range of the axis: exponents of sizes, or values. For values, the range that contains nine of ten histograms:
  // an outlier of a thousand times the usual size would compress everything else into one line.
  onResetY() {
    const reach = this.reach.filter((one) => one > 0).sort((a, b) => a - b);
    if (this.signed) {
      const limit = reach[Math.floor(0.9 * (reach.length - 1))] ?? 1;
      this.limits = [-1.05 * limit, 1.05 * limit];
      return;
    }
    const finest = this.finest.filter((one) => one > 0);
    const top = Math.log10(reach.at(-1) ?? 1);
    this.limits = [Math.min(top - 1, Math.log10(finest.reduce((least, one) => Math.min(least, one), Infinity))), top];
  }

  // Return the share of a column's elements up to a value, assuming a uniform density within each bin.
  upTo(column, value) {
    const { low, high, cumulative, bins } = this.data;
    if (value >= high[column]) return 1;
    if (value <= low[column]) return 0;
    const place = ((value - low[column]) / (high[column] - low[column])) * bins;
    const bin = Math.min(Math.floor(place), bins - 1);
    const [below, above] = [cumulative[column * (bins + 1) + bin], cumulative[column * (bins + 1) + bin + 1]];
    return below + (place - bin) * (above - below);
  }

  // Return the share up to a position on the axis; for sizes, of one sign or of both.
  below(column, place, signs = [1, -1]) {
    if (this.signed) return this.upTo(column, place);
    const size = 10 ** place;
    return signs.reduce((total, sign) => total + Math.abs(this.upTo(column, sign * size) - this.upTo(column, 0)), 0);
  }

  // Return the size that this share of the elements does not exceed; NaN if it lies in the bin around zero.
  percentile(column, share) {
    const within = (size) => this.upTo(column, size) - this.upTo(column, -size);
    let [low, high] = [this.finest[column], this.reach[column]];
    if (!(low > 0) || within(low) > share) return NaN;
    for (let round = 0; round < 24; round++) {
      const middle = Math.sqrt(low * high);
      if (within(middle) < share) low = middle;
      else high = middle;
    }
    return high;
  }

  layout(width) {
    return { height: 320, left: AXIS_WIDTH, side: width < 600 ? 70 : 130 };
  }

  // Return the shares of the elements in `rows` equal parts of the axis, from the top. The elements were counted in two
  // bins per octave, in each of which the shares are even.
  profile(column, rows, signs) {
    const [bottom, top] = this.limits;
    if (!this.signed) {
      return Array.from({ length: rows }, (_, row) => {
        const octaves = (top - ((row + 0.5) / rows) * (top - bottom)) * Math.log2(10);
        const [whole, half] = [Math.floor(octaves), Math.log2(1.5)];
        const [low, high] = octaves - whole < half ? [whole, whole + half] : [whole + half, whole + 1];
        const [from, to] = [low, high].map((edge) => edge * Math.log10(2));
        return ((this.below(column, to, signs) - this.below(column, from, signs)) * (top - bottom)) / (rows * (to - from));
      });
    }
    const edges = Array.from({ length: rows + 1 }, (_, row) => this.below(column, top - (row / rows) * (top - bottom), signs));
    return edges.slice(0, -1).map((edge, row) => Math.max(0, edge - edges[row + 1]));
  }

  // Return the first row, from the top, that lies in the bin around zero.
  firstUnresolved(column, rows) {
    if (this.signed) return rows;
    const [bottom, top] = this.limits;
    return clamp(Math.ceil(((top - Math.log10(this.finest[column])) / (top - bottom)) * rows), 0, rows);
  }

  draw() {
    this.drawLegend();
    super.draw();
  }

  paint(pixels, width, height) {
    const anchors = gradient("density");
    const shades = Array.from({ length: 256 }, (_, shade) => packColour(colourAt(anchors, shade / 255)));
    const empty = packHex(colour("missing"));
    this.eachStep(this.last, width, 8, (column, left, right) => {
      if (left === right) return;
      const shares = this.profile(column, height);
      const resolved = this.firstUnresolved(column, height);
      // Relative to the fullest row of the same column: bins are wider, and hold more, when the gradient is larger.
      const most = shares.slice(0, resolved).reduce((largest, share) => Math.max(largest, share), 0) || 1;
      for (let y = 0; y < height; y++) {
        const shade = y < resolved ? shades[Math.min(255, Math.round(255 * Math.sqrt(shares[y] / most)))] : empty;
        pixels.fill(shade, y * width + left, y * width + right);
      }
    });
  }

  labels(context, box) {
    const { left, top, width, height } = box;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const ticks = this.signed ? linearTicks(...this.limits, 6) : logTicks(...this.limits.map((place) => 10 ** place)).map(Math.log10);
    for (const tick of ticks) {
      const y = this.yOf(tick, box);
      context.fillText(formatTick(this.signed ? tick : Number((10 ** tick).toPrecision(3))), left - 8, y);
      context.fillRect(left - 5, y, 4, 1);
    }
    if (this.signed) return;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    PERCENTILES.forEach(({ dash }, index) => {
      context.beginPath();
      let before = false;
      this.percentiles[index].forEach((value, column) => {
        const [x, y, isJoined] = [this.xOf(this.last[column]), this.yOf(Math.log10(value), box), this.last[column] - this.last[column - 1] === 1];
        if (value > 0) context[before && isJoined ? "lineTo" : "moveTo"](x, y);
        if (value > 0 && !isJoined) context.moveTo(x - 5, y), context.lineTo(x + 5, y), context.moveTo(x, y);
        before = value > 0;
      });
      // A line that is visible on any colour: the text colour, surrounded by the card's colour.
      for (const [name, lineWidth] of [["card", 3], ["ink", 1.75]]) {
        context.setLineDash(name === "ink" ? dash : []);
        Object.assign(context, { strokeStyle: colour(name), lineWidth, globalAlpha: name === "ink" ? 1 : 0.5 });
        context.stroke();
      }
    });
    context.restore();
  }

  yOf(place, { top, height }) {
    return top + ((this.limits[1] - place) / (this.limits[1] - this.limits[0])) * height;
  }

  // The cross-section: the distribution of the elements at one step, per sign if the axis shows sizes.
  drawSide(context, { left, top, width, height }, step) {
    const column = step === null ? this.last.length - 1 : lastAtMost(this.last, this.stepNear(step) ?? -Infinity);
    if (column < 0) return;
    const [start, across] = [left + width + 22, this.layout(this.width).side - 26];
    const rows = Math.round(height / 3);
    const curves = this.signed ? [[[1, -1], colour("ink")]] : [[[1], colour(lineColour(0))], [[-1], colour(lineColour(1))]];
    const drawn = curves.map(([signs, stroke]) => ({ stroke, shares: this.profile(column, rows, signs).slice(0, this.firstUnresolved(column, rows)) }));
    const most = Math.max(...drawn.flatMap(({ shares }) => shares), 1e-9);
    context.save();
    context.font = CHART_FONT;
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    context.fillText("step " + this.last[column].toLocaleString("en-US"), start + across / 2, top - 6);
    context.fillText("share", start + across / 2, top + height + 14);
    context.strokeStyle = colour("grid");
    context.strokeRect(start - 0.5, top - 0.5, across + 1, height + 1);
    for (const { stroke, shares } of drawn) {
      context.beginPath();
      shares.forEach((share, row) => context[row ? "lineTo" : "moveTo"](start + (share / most) * across, top + ((row + 0.5) / rows) * height));
      Object.assign(context, { strokeStyle: stroke, lineWidth: 1.75 });
      context.stroke();
    }
    context.restore();
  }

  drawLegend() {
    const dashed = ([drawn, left]) => (drawn ? `repeating-linear-gradient(to right, currentcolor 0 ${drawn}px, transparent ${drawn}px ${drawn + left}px)` : "currentcolor");
    const scale = { long: "share of the elements, of the fullest size in the same step", colours: "density", linear: true, power: 0.5, low: 0, high: 1 };
    drawScale(this.legend, scale, [["missing", this.signed ? "missing" : "missing, or smaller than the bins tell apart"]]);
    if (this.signed) return;
    const lines = PERCENTILES.map(({ label, dash }) => {
      const line = swatch(null);
      line.style.background = dashed(dash);
      return swatchEntry(line, label);
    });
    this.legend.lastChild.append(...lines, swatchEntry(swatch(lineColour(0)), "above 0"), swatchEntry(swatch(lineColour(1)), "below 0"));
  }

  tableContent() {
    return { head: ["step", ...PERCENTILES.map(({ label }) => `${label} of |${this.source.symbol}|`)], rows: this.last.map((step, column) => [step, ...this.percentiles.map((values) => (values[column] > 0 ? values[column] : null))]) };
  }

  describe(step, y, height) {
    const column = lastAtMost(this.last, step);
    const place = this.limits[1] - (y / height) * (this.limits[1] - this.limits[0]);
    const value = formatNumber(this.signed ? place : 10 ** place, 2);
    const above = `${formatShare(1 - this.below(column, place))} of the elements ${this.signed ? "above" : "larger than"} ${value}`;
    const lines = PERCENTILES.map(({ label }, index) => `${label} ${formatNumber(this.percentiles[index][column])}`);
    return [this.source.labelOf(this.item), stepText(step), above, lines.slice(0, 3).join(", "), `from ${formatNumber(this.data.low[column])} to ${formatNumber(this.data.high[column])}`];
  }

  nextRow(y, height, direction) {
    return y + 8 * direction;
  }

  onZoomY(from, to) {
    const [bottom, top] = this.limits;
    this.limits = [top - to * (top - bottom), top - from * (top - bottom)];
  }
}
