// One layer's histograms over time: steps across, the gradient's value upwards, the share of elements as colour.

class HistogramPicture {
  // source: {bins, items}, and labelOf(item)
  constructor(host, controls, source, label) {
    this.source = source;
    this.full = false;
    controls.append(segmented("Vertical range", [["bulk", "Bulk"], ["all", "Whole range"]], "bulk", (value) => this.setFull(value === "all")));
    this.show(source.items[0]);
    this.frame = new Frame(host, this, label);
  }

  setFull(full) {
    this.full = full;
    this.setLimits();
    this.frame.draw();
  }

  choose(item) {
    this.show(item);
    this.frame.draw();
  }

  show(item) {
    this.item = item;
    this.data = histogramOf(item, this.source.bins);
    this.typical = typicalSpacing(this.data.steps);
    this.setLimits();
  }

  // An accident of a thousand times the usual size would press everything else into one line: the bulk is the range that
  // nine of ten histograms fit into.
  setLimits() {
    const reach = Array.from(this.data.low, (low, index) => Math.max(Math.abs(low), Math.abs(this.data.high[index]))).sort((a, b) => a - b);
    const part = this.full ? 1 : 0.9;
    const limit = reach[Math.floor(part * (reach.length - 1))] || reach[reach.length - 1] || 1;
    this.limits = [-1.05 * limit, 1.05 * limit];
  }

  height() {
    return 300;
  }

  gutter() {
    return 66;
  }

  paint(pixels, width, height) {
    const { steps, low, high, shares, bins } = this.data;
    const anchors = isDark() ? [[23, 28, 32], [28, 84, 110], [48, 160, 150], [253, 240, 160]] : [[255, 254, 251], [160, 205, 205], [30, 120, 130], [22, 20, 62]];
    const shades = Array.from({ length: 256 }, (_, shade) => packColour(colourAt(anchors, shade / 255)));
    const peaks = this.data.steps.map((_, column) => Math.max(1, ...shares.subarray(column * bins, (column + 1) * bins)));
    const empty = packHex(colour("missing"));
    const spans = columnSpans(steps, steps, this.typical, width);
    const [bottom, top] = this.limits;
    for (let x = 0; x < width; x++) {
      const covered = spans.to[x] > spans.from[x];
      const column = spans.to[x] - 1;
      for (let y = 0; y < height; y++) {
        const value = top - ((y + 0.5) / height) * (top - bottom);
        let pixel = covered ? shades[0] : empty;
        // Against the fullest bin of its own column: bins get wider when the gradient does, and hold more then.
        if (covered) pixel = shades[Math.round((255 * this.shareAt(column, value, shares, low, high, bins)) / peaks[column])];
        pixels[y * width + x] = pixel;
      }
    }
  }

  shareAt(column, value, shares, low, high, bins) {
    if (value < low[column] || value > high[column]) return 0;
    const bin = high[column] > low[column] ? Math.min(bins - 1, Math.floor(((value - low[column]) / (high[column] - low[column])) * bins)) : bins - 1;
    return shares[column * bins + bin];
  }

  labels(context, { left, top, height }) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of linearTicks(...this.limits, 6)) {
      const y = top + ((this.limits[1] - tick) / (this.limits[1] - this.limits[0])) * height;
      context.fillText(formatTick(tick), left - 8, y);
      context.fillRect(left - 5, y, 4, 1);
    }
  }

  steps() {
    return this.data.steps;
  }

  stepNear(step) {
    const column = columnAt(this.data.steps, this.data.steps, this.typical, step);
    return column === null ? null : this.data.steps[column];
  }

  describe(step, y, height) {
    const column = lastAtMost(this.data.steps, step);
    const { low, high, shares, bins } = this.data;
    const value = this.limits[1] - (y / height) * (this.limits[1] - this.limits[0]);
    const share = (this.shareAt(column, value, shares, low, high, bins) / 255) ** 2;
    return [
      this.source.labelOf(this.item),
      "step " + step.toLocaleString("en-US"),
      `about ${formatShare(share)} of the elements near ${formatNumber(value, 2)}`,
      `from ${formatNumber(low[column])} to ${formatNumber(high[column])}`,
    ];
  }

  nextRow(y, height, direction) {
    return y + 8 * direction;
  }

  onZoomY(from, to) {
    const [bottom, top] = this.limits;
    this.limits = [top - to * (top - bottom), top - from * (top - bottom)];
  }

  onResetY() {
    this.setLimits();
    this.frame.draw();
  }
}
