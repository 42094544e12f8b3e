// The histograms of one name over time: steps across, upwards the logarithm of the elements' size.
// The colour is the share of elements, lines are percentiles.

const PERCENTILES = [
  { share: 0.99, label: "99th percentile", dash: [2, 2] },
  { share: 0.75, label: "75th", dash: [6, 3] },
  { share: 0.5, label: "median", dash: [] },
  { share: 0.25, label: "25th", dash: [6, 3] },
];

class HistogramPicture extends Frame {
  // source: {edges, items, symbol}, and labelOf(item)
  constructor(host, source, label, item) {
    super(host, label);
    this.source = source;
    this.choose(item);
    this.begin(this.wrap);
  }

  choose(item) {
    this.columns = histogramOf(item, this.source.edges);
    Object.assign(this, { item, measured: run.measured, steps: item.steps, last: item.steps });
    this.reach = this.columns.map(({ from, to }) => Math.max(-from, to));
    this.percentiles = PERCENTILES.map(({ share }) => item.steps.map((_, column) => this.percentile(column, share)));
    const top = Math.log10(Math.max(...this.reach.filter((one) => one > 0)));
    // Down to the size below which one of a hundred elements lies that are not 0.
    const least = this.steps.map((_, column) => this.percentile(column, 0.01 + 0.99 * this.zeros(column)) || Infinity);
    this.limits = Number.isFinite(top) ? [Math.log10(Math.min(...least, 10 ** top)), top] : [-1, 0]; // exponents
    if (this.limits[0] === top) this.limits[0] = top - 1;
    if (this.node) this.outdate();
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

  layout() {
    return { height: 320, left: AXIS_WIDTH };
  }

  // Return the density of the elements at `rows` places of the axis, from the top: that of a bin in its
  // middle, and a straight line from middle to middle.
  profile(column, rows) {
    const [bottom, top] = this.limits;
    const edges = [...this.source.edges.slice(1, -1), Math.max(this.source.edges.at(-1), this.reach[column])].map(Math.log10);
    const shares = edges.slice(1).map((_, bin) => this.share(column, bin + 2, bin + 2) + this.share(column, -bin - 2, -bin - 2));
    const middles = [edges[0], ...shares.map((_, bin) => (edges[bin] + edges[bin + 1]) / 2), edges.at(-1)];
    const densities = [0, ...shares.map((share, bin) => share / (edges[bin + 1] - edges[bin])), 0];
    return Array.from({ length: rows }, (_, row) => between(middles, densities, clamp(top - ((row + 0.5) * (top - bottom)) / rows, edges[0], edges.at(-1))) || 0);
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
      const found = this.profile(column, height);
      // Relative to the fullest row of the same column: the sizes differ between columns.
      const most = found.reduce((largest, one) => Math.max(largest, one), 0) || 1;
      found.forEach((one, y) => pixels.fill(shades[Math.round(255 * Math.sqrt(one / most))], y * width + left, y * width + right));
    });
  }

  labels(context, box) {
    const { left, top, width, height } = box;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of logTicks(...this.limits.map((place) => 10 ** place))) {
      const y = this.yOf(Math.log10(tick), box);
      context.fillText(formatTick(tick), left - 8, y);
      context.fillRect(left - 5, y, 4, 1);
    }
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

  drawLegend() {
    const scale = { long: "share of the elements, of the fullest size in the same step", colours: "density", linear: true, power: 0.5, low: 0, high: 1 };
    drawScale(this.legend, scale, []);
    const lines = PERCENTILES.map(({ label, dash: [drawn, left] }) => {
      const line = swatch(null);
      line.style.background = drawn ? `repeating-linear-gradient(to right, currentcolor 0 ${drawn}px, transparent ${drawn}px ${drawn + left}px)` : "currentcolor";
      return swatchEntry(line, label);
    });
    this.legend.lastChild.append(...lines);
  }

  tableContent() {
    return { head: ["step", ...PERCENTILES.map(({ label }) => `${label} of |${this.source.symbol}|`)], rows: this.last.map((step, column) => [step, ...this.percentiles.map((values) => (values[column] > 0 ? values[column] : null))]) };
  }

  describe(step, y, height) {
    const column = lastAtMost(this.last, step);
    const [bottom, top] = this.limits;
    const place = top - (y / height) * (top - bottom);
    const above = `${formatShare(1 - this.within(column, 10 ** place))} of the elements larger than ${formatNumber(10 ** place, 2)}`;
    const lines = PERCENTILES.slice(0, 3).map(({ label }, index) => `${label} ${formatNumber(this.percentiles[index][column])}`);
    if (this.zeros(column)) lines.push(`${formatShare(this.zeros(column))} are 0`);
    return [this.source.labelOf(this.item), stepText(step), above, lines.join(", "), `from ${formatNumber(this.columns[column].low)} to ${formatNumber(this.columns[column].high)}`];
  }

  nextRow(y, height, direction) {
    return y + 8 * direction;
  }
}
