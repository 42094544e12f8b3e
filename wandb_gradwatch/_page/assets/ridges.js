// The histograms of one name over time: steps across; upwards the logarithm of the elements' size, or their signed value.
// The colour is the share of elements, lines are percentiles; at the right is the cross-section at the pointer's step.

const PERCENTILES = [
  { share: 0.99, label: "99th percentile", dash: [2, 2] },
  { share: 0.75, label: "75th", dash: [6, 3] },
  { share: 0.5, label: "median", dash: [] },
  { share: 0.25, label: "25th", dash: [6, 3] },
];

class HistogramPicture extends Frame {
  // source: {edges, items, symbol}, and labelOf(item)
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
    this.columns = histogramOf(item, this.source.edges);
    Object.assign(this, { measured: run.measured, steps: item.steps, last: item.steps });
    this.reach = this.columns.map(({ from, to }) => Math.max(-from, to));
    this.percentiles = PERCENTILES.map(({ share }) => item.steps.map((_, column) => this.percentile(column, share)));
    this.onResetY();
    if (this.node) this.outdate();
  }

  // The range of the axis: exponents of sizes, or values. For values, the range that contains nearly all elements of nine
  // of ten histograms: an outlier of a thousand times the usual size would compress everything else into one line.
  onResetY() {
    const known = this.signed ? this.steps.map((_, column) => this.percentile(column, 0.999)) : this.reach;
    const reach = known.filter((one) => one > 0).sort((a, b) => a - b);
    if (this.signed) {
      const limit = reach[Math.floor(0.9 * (reach.length - 1))] ?? 1;
      this.limits = [-1.05 * limit, 1.05 * limit];
      return;
    }
    const top = Math.log10(reach.at(-1) ?? 1);
    // Down to the size below which one of a hundred elements lies that are not 0.
    const least = this.steps.map((_, column) => this.percentile(column, 0.01 + 0.99 * this.zeros(column)));
    this.limits = [Math.log10(least.reduce((low, one) => Math.min(low, one || Infinity), 10 ** (top - 1))), top];
  }

  // Return the share of a column's elements in the bins from one up to another, counted from the bin of zeros.
  share(column, from, to) {
    const [{ upTo }, middle] = [this.columns[column], this.source.edges.length];
    return upTo[middle + to] - upTo[middle + from - 1];
  }

  zeros(column) {
    return this.share(column, 0, 0);
  }

  // Return the share of a column's elements up to a value; they lie evenly in each bin, between the extremes.
  upTo(column, value) {
    const { edges, upTo, from, to } = this.columns[column];
    if (value >= to) return 1;
    return value < from ? 0 : between(edges, upTo, value);
  }

  within(column, size) {
    return this.upTo(column, size) - this.upTo(column, -size);
  }

  // Return the size that this share of the elements does not exceed; NaN if it is 0.
  percentile(column, share) {
    let [low, high] = [this.source.edges[1], this.reach[column]];
    if (this.zeros(column) > share || !(high > 0)) return NaN;
    for (let round = 0; round < 32; round++) {
      const middle = Math.sqrt(low) * Math.sqrt(high);
      if (this.within(column, middle) < share) low = middle;
      else high = middle;
    }
    return high;
  }

  layout(width) {
    return { height: 320, left: AXIS_WIDTH, side: width < 600 ? 70 : 130 };
  }

  // Return the density of the elements at `rows` places of the axis, from the top: that of a bin in its middle, and a
  // straight line from middle to middle. Bins around zero that are thinner than two rows count as one.
  profile(column, rows, signs) {
    const [bottom, top] = this.limits;
    const height = (top - bottom) / rows;
    const sizes = [...this.source.edges.slice(0, -1), Math.max(this.source.edges.at(-1), this.reach[column])];
    const found = this.signed ? sizes.findIndex((size, bin) => bin > 0 && sizes[bin + 1] - size >= 2 * height) : 1;
    const inner = found < 0 ? sizes.length - 1 : found;
    const outer = sizes.slice(inner);
    const at = (place) => this.share(column, place, place);
    const sharesOf = (sign) => outer.slice(1).map((_, bin) => at(sign * (inner + bin + 1)));
    let [edges, shares] = [outer.map(Math.log10), signs.map(sharesOf).reduce((one, other) => one.map((share, bin) => share + other[bin]))];
    if (this.signed) {
      outer[0] = Math.max(outer[0], height);
      edges = [...outer.map((size) => -size).reverse(), ...outer];
      shares = [...sharesOf(-1).reverse(), this.share(column, -inner, inner), ...sharesOf(1)];
    }
    const middles = [edges[0], ...shares.map((_, bin) => (edges[bin] + edges[bin + 1]) / 2), edges.at(-1)];
    const densities = [0, ...shares.map((share, bin) => share / (edges[bin + 1] - edges[bin])), 0];
    return Array.from({ length: rows }, (_, row) => between(middles, densities, clamp(top - (row + 0.5) * height, edges[0], edges.at(-1))) || 0);
  }

  draw() {
    this.drawLegend();
    super.draw();
  }

  paint(pixels, width, height) {
    const anchors = gradient("density");
    const shades = Array.from({ length: 256 }, (_, shade) => packColour(colourAt(anchors, shade / 255)));
    this.eachStep(this.last, width, 8, (column, left, right) => {
      if (left === right) return;
      const found = this.profile(column, height, [1, -1]);
      // Relative to the fullest row of the same column: the sizes differ between columns.
      const most = found.reduce((largest, one) => Math.max(largest, one), 0) || 1;
      found.forEach((one, y) => pixels.fill(shades[Math.round(255 * Math.sqrt(one / most))], y * width + left, y * width + right));
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
    const rows = Math.round(height);
    const curves = this.signed ? [[[1, -1], colour("ink")]] : [[[1], colour(lineColour(0))], [[-1], colour(lineColour(1))]];
    const drawn = curves.map(([signs, stroke]) => ({ stroke, shares: this.profile(column, rows, signs) }));
    const most = Math.max(...drawn.flatMap(({ shares }) => shares), Number.MIN_VALUE);
    context.save();
    context.font = CHART_FONT;
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    context.fillText(atStep(this.last[column]), start + across / 2, top - 6);
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
    const scale = { long: "share of the elements, of the fullest size in the same step", colours: "density", linear: true, power: 0.5, low: 0, high: 1 };
    drawScale(this.legend, scale, []);
    if (this.signed) return;
    const lines = PERCENTILES.map(({ label, dash: [drawn, left] }) => {
      const line = swatch(null);
      line.style.background = drawn ? `repeating-linear-gradient(to right, currentcolor 0 ${drawn}px, transparent ${drawn}px ${drawn + left}px)` : "currentcolor";
      return swatchEntry(line, label);
    });
    this.legend.lastChild.append(...lines, swatchEntry(swatch(lineColour(0)), "above 0"), swatchEntry(swatch(lineColour(1)), "below 0"));
  }

  tableContent() {
    return { head: ["step", ...PERCENTILES.map(({ label }) => `${label} of |${this.source.symbol}|`)], rows: this.last.map((step, column) => [step, ...this.percentiles.map((values) => (values[column] > 0 ? values[column] : null))]) };
  }

  describe(step, y, height) {
    const column = lastAtMost(this.last, step);
    const [bottom, top] = this.limits;
    const place = top - (y / height) * (top - bottom);
    const value = formatNumber(this.signed ? place : 10 ** place, 2);
    const below = this.signed ? this.upTo(column, place) : this.within(column, 10 ** place);
    const above = `${formatShare(1 - below)} of the elements ${this.signed ? "above" : "larger than"} ${value}`;
    const lines = PERCENTILES.slice(0, 3).map(({ label }, index) => `${label} ${formatNumber(this.percentiles[index][column])}`);
    if (this.zeros(column)) lines.push(`${formatShare(this.zeros(column))} are 0`);
    return [this.source.labelOf(this.item), stepText(step), above, lines.join(", "), `from ${formatNumber(this.columns[column].low)} to ${formatNumber(this.columns[column].high)}`];
  }

  nextRow(y, height, direction) {
    return y + 8 * direction;
  }

  onZoomY(from, to) {
    const [bottom, top] = this.limits;
    this.limits = [top - to * (top - bottom), top - from * (top - bottom)];
  }
}
