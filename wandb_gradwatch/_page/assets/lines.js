// Lines and bars over steps, drawn on a canvas: whole charts, and the lanes of a strip.

const CHART_FONT = '11px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const AXIS_WIDTH = 62; // plots below each other have the same left edge, unless a label needs more space
const isNext = (from, to) => to - from === 1; // otherwise, what lies between is not known

// The places of the steps in a range, [from, to), with one more at each end, to which a line may lead.
function placesIn(xs, [low, high]) {
  return [Math.max(0, lastAtMost(xs, low)), Math.min(xs.length, lastAtMost(xs, high) + 2)];
}

const limitsOf = (values) => values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);

// A value of which `bad` elements were not finite is that of the finite rest, and is not drawn.
const isDrawn = ({ values, bad }, place) => Number.isFinite(values[place]) && !(bad?.[place] > 0);

// The finite values of a line in a range.
function valuesIn(one, range) {
  const [from, to] = placesIn(one.xs, range);
  const found = [];
  for (let place = from; place < to; place++) {
    if (isDrawn(one, place) && one.xs[place] >= range[0] && one.xs[place] <= range[1]) found.push(one.values[place]);
  }
  return found;
}

// Draw a line within an area. joins(from, to) tells whether it connects the values of two steps; undefined values are
// passed over, others that are missing interrupt it; a value that no line reaches is a point.
function drawLine(context, area, one, { range, xOf, yOf, joins, hasPoints = false }) {
  const { xs, values, colour: name, width = 1.75, dash = [], size = 4 } = one;
  const [from, to] = placesIn(xs, range);
  const points = [];
  let before = -1; // the place of the value before, -1 if it is missing
  let isReached = true; // by a line
  context.save();
  context.beginPath();
  context.rect(area.left, area.top - 3, area.width, area.height + 6);
  context.clip();
  Object.assign(context, { strokeStyle: colour(name), fillStyle: colour(name), lineWidth: width });
  context.setLineDash(dash);
  context.beginPath();
  for (let place = from; place < to; place++) {
    if (values[place] === undefined) continue;
    const [isShown, x] = [isDrawn(one, place), xOf(xs[place])];
    const isJoined = isShown && before >= 0 && joins(xs[before], xs[place]);
    if (before >= 0 && !isJoined && !isReached) points.push(before);
    if (isShown) context[isJoined ? "lineTo" : "moveTo"](x, yOf(values[place]));
    if (isShown && hasPoints) points.push(place);
    [before, isReached] = [isShown ? place : -1, isJoined];
  }
  if (before >= 0 && !isReached) points.push(before);
  context.stroke();
  const corners = points.map((place) => [xOf(xs[place]) - size / 2, yOf(values[place]) - size / 2]);
  const seen = new Map(corners.map(([x, y]) => [Math.round((2 * x) / size) + 1e5 * Math.round((2 * y) / size), [x, y]])); // one for each square of half its size
  for (const [x, y] of seen.values()) context.fillRect(x, y, size, size);
  context.restore();
}

// Mark values that were NaN or infinite: a band as wide as the measured step, else as the row, opaque at the bottom.
function drawNonFinite(context, { left, top, width, height }, { xs, values, bad }, { range, xOf }) {
  const [from, to] = placesIn(xs, range);
  const middle = (place, other) => (bad ? xs[place] + (other - place) / 2 : (xs[place] + (xs[other] ?? xs[place])) / 2);
  const edge = (place, other) => clamp(xOf(middle(place, other)), left, left + width);
  context.fillStyle = colour("nonfinite");
  let painted = left; // the end of the band before: two on each other would be darker
  for (let place = from; place < to; place++) {
    if (bad ? !(bad[place] > 0) : values[place] == null || Number.isFinite(values[place])) continue; // null: missing
    const [start, end] = [Math.max(edge(place, place - 1), painted), edge(place, place + 1)];
    if (end <= painted || start >= left + width) continue;
    painted = Math.max(end, start + 2);
    for (const [alpha, down] of [[0.2, height], [1, 5]]) {
      context.globalAlpha = alpha;
      context.fillRect(start, top + height - down, painted - start, down);
    }
  }
}

// A chart with a vertical axis, linear or logarithmic.
class LineChart extends Frame {
  // series: {label, values, colour, width, dash, kind: "line" | "bars" | "tops", format, joins, xs, starts}; colours are
  // names in the style sheet. Bars, and their tops, stand at the measured steps from starts[place] to xs[place].
  // measured: what lies between its steps is hatched; null: every value stands for itself, and lines connect them.
  constructor(host, { label, xs, series, starts = xs, measured = run.measured, log = false, canLog = true, height = 260, format = formatNumber, tick = formatTick, limits = null }) {
    const controls = element("div", { class: "controls" });
    host.append(controls);
    super(host, label + ", over steps");
    Object.assign(this, { measured, log, height, format, tick, limits });
    const setLog = (value) => {
      this.log = value === "log";
      this.setSeries(this.series);
    };
    if (canLog) controls.append(segmented("Scale", [["log", "Log"], ["linear", "Linear"]], log ? "log" : "linear", setLog));
    this.defaults = { xs, starts, joins: measured ? isNext : () => true };
    this.setSeries(series);
    this.begin(this.wrap);
  }

  setSeries(series, xs = this.defaults.xs) {
    this.defaults.xs = xs;
    this.series = series.map((one) => ({ ...this.defaults, starts: one.xs ?? this.defaults.starts, ...one }));
    const all = [...new Set(this.series.map((one) => one.xs))];
    this.steps = this.last = all.length === 1 ? all[0] : Float64Array.from(new Set(all.flatMap((steps) => Array.from(steps)))).sort();
    const values = this.series.flatMap((one) => Array.from(one.values).filter(Number.isFinite));
    this.top = this.log ? usefulTop(values) : Infinity;
    const entries = this.series.map((one) => {
      const last = Array.from(one.values).findLast((value) => value != null && !Number.isNaN(value));
      return element("span", { class: "legend-entry" }, swatch(one.colour, one.kind === "bars" ? "block" : ""), element("span", { class: "legend-label", title: one.label }, one.label), element("span", { class: "legend-value", title: "the last" }, (one.format ?? this.format)(last)));
    });
    const isEmpty = this.log && values.length > 0 && values.every((value) => value <= 0);
    this.legend.replaceChildren(...entries, isEmpty ? hint("Nothing is above 0, and a logarithmic scale begins above it.") : "");
    if (this.node) this.outdate();
  }

  layout() {
    this.ends = this.yLimits();
    const [low, high] = this.ends;
    this.ticks = this.log ? logTicks(low, high) : linearTicks(low, high, this.height / 40);
    const longest = Math.max(0, ...this.ticks.map((tick) => this.tick(tick).length));
    return { height: this.height, left: Math.max(AXIS_WIDTH, 14 + 6.4 * longest) };
  }

  // The ends of the vertical axis: around the values in view; whole decades if it is logarithmic.
  yLimits() {
    if (this.limits !== null) return this.limits;
    const known = this.series.flatMap((one) => valuesIn(one, this.range)).filter((value) => !this.log || (value > 0 && value <= this.top));
    if (!known.length) return this.log ? [0.1, 10] : [0, 1];
    let [low, high] = limitsOf(known);
    if (this.log) {
      const [first, last] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
      return [Number(`1e${first}`), Number(`1e${Math.max(last, first + 1)}`)];
    }
    [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    const more = 0.06 * (high - low) || 1;
    return [low < 0 ? low - more : 0, high > 0 || low === 0 ? high + more : 0];
  }

  yOf(value, { top, height }) {
    const [low, high] = this.log ? this.ends.map(Math.log10) : this.ends;
    return top + height - (((this.log ? Math.log10(Math.max(value, Number.MIN_VALUE)) : value) - low) / (high - low)) * height;
  }

  drawMarks(context, box, positionOf) {
    super.drawMarks(context, box, positionOf, box.height);
  }

  labels(context, box) {
    const { left, top, width, height } = box;
    Object.assign(context, { textAlign: "right", textBaseline: "middle", fillStyle: colour("muted"), strokeStyle: colour("grid") });
    for (const tick of this.ticks) {
      const y = this.yOf(tick, box);
      if (y < top - 1 || y > top + height + 1) continue;
      context.strokeRect(left, Math.round(y) + 0.5, width, 0);
      context.fillText(this.tick(tick), left - 8, y);
    }
    const places = { range: this.range, xOf: (step) => this.xOf(step), yOf: (value) => this.yOf(value, box) };
    for (const one of this.series) {
      if (one.marksNonFinite) drawNonFinite(context, box, one, places);
      context.globalAlpha = 1;
      if (one.kind) this.drawBars(context, box, one);
      else drawLine(context, box, one, { ...places, joins: one.joins });
      if (this.top < Infinity) this.drawBeyond(context, box, one);
    }
  }

  drawBars(context, { left, top, width, height }, { xs, starts, values, kind, colour: name }) {
    const [low, high] = this.range;
    context.fillStyle = colour(name);
    for (let place = 0; place < xs.length; place++) {
      if (!(values[place] > 0) || xs[place] < low || starts[place] > high) continue;
      const y = clamp(this.yOf(values[place], this.box), top, top + height);
      this.measured.eachWithin(starts[place], xs[place], (from, to) => {
        const [start, end] = [from - 0.5, to + 0.5].map((step) => clamp(this.xOf(step), left, left + width));
        context.fillRect(start, y, Math.max(end - start, 2), kind === "tops" ? 2 : top + height - y);
      });
    }
  }

  // Draw a triangle at the top edge for a value beyond it.
  drawBeyond(context, { left, top, width }, { xs, values, colour: name }) {
    context.fillStyle = colour(name);
    for (let place = 0; place < xs.length; place++) {
      const x = this.xOf(xs[place]);
      if (!(values[place] > this.top) || values[place] === Infinity || x < left || x > left + width) continue;
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x - 5, top + 8);
      context.lineTo(x + 5, top + 8);
      context.fill();
    }
  }

  valueAt({ xs, values }, step) {
    const place = lastAtMost(xs, step);
    return xs[place] === step ? values[place] : undefined;
  }

  describe(step) {
    return [stepText(step), ...this.series.map((one) => `${one.label}: ${(one.format ?? this.format)(this.valueAt(one, step))}`)];
  }

  tableContent() {
    return { head: ["step", ...this.series.map((one) => one.label)], rows: Array.from(this.steps, (step) => [step, ...this.series.map((one) => this.valueAt(one, step))]) };
  }
}

// Return the end of a logarithmic axis such that a few values of 1e22 do not compress a run of ones: four decades above
// the 90th percentile. Infinity if no value is far beyond that.
function usefulTop(values) {
  const known = values.filter((value) => value > 0).sort((a, b) => a - b);
  const top = 1e4 * known[Math.floor(0.9 * (known.length - 1))];
  return known.at(-1) > 100 * top ? top : Infinity;
}

// Return ticks: decades (at most about seven) if the axis spans several, otherwise 1, 2 and 5.
function logTicks(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.ceil((last - first + 1) / 7);
  const ticks = [];
  for (let power = first - 1; power <= last; power++) {
    const factors = last > first ? (power % every === 0 ? [1] : []) : [1, 2, 5];
    for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
  }
  return ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
}
