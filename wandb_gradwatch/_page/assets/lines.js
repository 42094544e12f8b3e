// A line chart over steps: shared zoom and cursor, incidents as flags, logarithmic or linear, usable by keyboard.

const CHART_FONT = '11px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
// uPlot draws an axis only if it finds the distance of its ticks in a list.
const isNext = (from, to) => to - from === 1; // otherwise, what lies between is not known
const ALL_SIZES = Array.from({ length: 620 }, (_, index) => Number(`1e${index - 311}`));

class LineChart extends Picture {
  // series: {label, values, colour, width, dash, kind: "line" | "bars" | "tops", format, joins}; colours are names in the
  // style sheet. Bars, and their tops, stand at the measured steps from starts[index] to xs[index]. joins(from, to) tells
  // whether a line connects the values of two steps.
  // measured: what lies between its steps is hatched; null: every value stands for itself, and lines connect them.
  constructor(host, { label, xs, series, starts = xs, measured = run.measured, log = false, canLog = true, height = 260, format = formatNumber, tick = formatTick, limits = null }) {
    super();
    Object.assign(this, { label, xs, starts, measured, log, height, format, tick, limits });
    const plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": label + ", over steps" });
    this.legend = element("div", { class: "legend" });
    const setLog = (value) => {
      this.log = value === "log";
      this.setSeries(this.series);
    };
    const controls = element("div", { class: "controls" }, canLog ? segmented("Scale", [["log", "Log"], ["linear", "Linear"]], log ? "log" : "linear", setLog) : null);
    this.empty = element("p", { class: "hint", hidden: true }, "Nothing is above 0, and a logarithmic scale begins above it.");
    host.append(controls, plot, this.empty, this.legend, element("div", { class: "below" }, dataTable(() => this.tableContent()), exportButtons(this)));
    plot.addEventListener("keydown", (event) => this.onKey(event));
    plot.addEventListener("blur", () => setStep(null, null));
    const across = (event) => event.clientX - this.plot.over.getBoundingClientRect().left;
    onTouch(plot, {
      partAt: (event) => across(event) / this.plot.over.clientWidth,
      show: (event) => this.plot.setCursor({ left: across(event), top: 12 }),
      leave: () => setStep(null, null),
    });
    this.take(series);
    this.begin(plot);
  }

  get canvas() {
    return this.plot.ctx.canvas;
  }

  setSeries(series, xs = this.xs) {
    this.xs = xs;
    this.take(series);
    this.outdate("series");
  }

  take(series) {
    this.series = series;
    this.top = this.log ? usefulTop(series) : Infinity;
    // A bar of height zero would be drawn as a dash on the axis.
    this.data = [this.xs, ...series.map((one) => drawable(one.values, this.log || one.kind === "bars"))];
    this.parts = series.map((one, index) => this.partsOf(this.data[index + 1], one.joins ?? (this.measured ? isNext : () => true)));
    const isEmpty = this.data.slice(1).every((values) => values.every((value) => value === null));
    this.empty.hidden = !(this.log && series.length && isEmpty);
    this.buildLegend();
  }

  // Return the gaps of a line, as [from, to] steps, and the places of values that no line reaches.
  partsOf(values, joins) {
    const [gaps, alone] = [[], []];
    let [before, isJoined] = [-1, true]; // the previous value, and whether it is joined to the one before it
    for (let place = 0; place <= values.length; place++) {
      if (values[place] === undefined && place < values.length) continue;
      const joined = place < values.length && values[place] !== null && before >= 0 && values[before] !== null && joins(this.xs[before], this.xs[place]);
      if (before >= 0 && !joined) {
        if (!isJoined && values[before] !== null) alone.push(before);
        if (gaps.length && gaps.at(-1)[1] === this.xs[before]) gaps.at(-1)[1] = this.xs[place] ?? Infinity;
        else gaps.push([this.xs[before], this.xs[place] ?? Infinity]);
      }
      [before, isJoined] = [place, joined];
    }
    return { gaps, alone };
  }

  // uPlot can change its range and width; any other change needs a new uPlot.
  outdate(what) {
    this.mustBuild ||= what !== "range" && what !== "width";
    super.outdate();
  }

  draw() {
    if (this.plot && !this.mustBuild) {
      if (this.plot.width !== this.width) this.plot.setSize({ width: this.width, height: this.height });
      this.plot.redraw(true, true);
      this.plot.setData(this.data, true); // computes the scales from the shared range
      return;
    }
    this.plot?.destroy();
    this.plot = new uPlot(this.options(), this.data, this.node);
    this.mustBuild = false;
  }

  options() {
    const grid = { stroke: () => colour("grid"), width: 1 };
    const axis = { stroke: () => colour("muted"), font: CHART_FONT, grid, ticks: { ...grid, size: 4 }, gap: 4, filter: (plot, ticks) => ticks };
    const stepTicks = (plot) => axisTicks(plot.width / 72);
    return {
      width: this.width || 300,
      height: this.height,
      legend: { show: false },
      padding: [18, 22, 0, 0],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => resetRange() },
      },
      select: { show: true },
      scales: {
        x: { time: false, distr: 100, fwd: placeOf, bwd: stepAtPlace, range: () => view.range },
        y: { distr: this.log ? 3 : 1, log: 10, range: (plot, low, high) => this.yRange(low, high) },
      },
      axes: [
        { ...axis, space: 64, size: 30, splits: (plot) => stepTicks(plot).map(({ step }) => step), values: (plot) => stepTicks(plot).map(({ text }) => text) },
        {
          ...axis,
          incrs: ALL_SIZES,
          // uPlot's own ticks end at 1e32, and the axis with them; a diverging training exceeds that.
          splits: (plot, axis, low, high) => (this.log ? logTicks(low, high) : linearTicks(low, high, this.height / 40)),
          size: (plot, texts) => axisWidth(texts),
          values: (plot, ticks) => ticks.map(this.tick),
        },
      ],
      series: [{}, ...this.series.map((one, index) => this.plotSeries(one, this.parts[index]))],
      hooks: {
        drawAxes: [(plot) => drawGaps(plot.ctx, plot.bbox, (step) => plot.valToPos(step, "x", true), this.measured), (plot) => this.drawBars(plot), (plot) => this.drawNonFinite(plot)],
        draw: [(plot) => this.drawBeyond(plot), (plot) => drawFlags(plot.ctx, plot.bbox, (step) => plot.valToPos(step, "x", true))],
        setCursor: [(plot) => this.onCursor(plot)],
        setSelect: [(plot) => this.onSelect(plot)],
      },
    };
  }

  drawBars(plot) {
    const { ctx: context, bbox: box } = plot;
    const position = (value, axis) => plot.valToPos(value, axis, true);
    const [width, thick] = [2 * devicePixelRatio, 2 * devicePixelRatio];
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.width, box.height);
    context.clip();
    this.series.forEach((one, index) => {
      context.fillStyle = colour(one.colour);
      if (one.kind !== "bars" && one.kind !== "tops") return;
      this.data[index + 1].forEach((value, place) => {
        if (value === null || value === undefined || this.xs[place] < view.range[0] || this.starts[place] > view.range[1]) return;
        const top = position(value, "y");
        this.measured.eachWithin(this.starts[place], this.xs[place], (from, to) => {
          const [left, right] = [position(from - 0.5, "x"), position(to + 0.5, "x")];
          const more = Math.max(0, (width - (right - left)) / 2);
          context.fillRect(left - more, top, right - left + 2 * more, one.kind === "tops" ? thick : box.top + box.height - top);
        });
      });
    });
    context.restore();
  }

  // Mark logged values that were NaN or infinite: a band as wide as the row, opaque at the bottom.
  drawNonFinite(plot) {
    const { ctx: context, bbox: box } = plot;
    context.save();
    context.fillStyle = colour("nonfinite");
    for (const one of this.series.filter((series) => series.marksNonFinite)) {
      for (let index = 0; index < this.xs.length; index++) {
        if (Number.isFinite(one.values[index]) || one.values[index] == null) continue;
        const middle = (other) => clamp(plot.valToPos((this.xs[index] + (this.xs[other] ?? this.xs[index])) / 2, "x", true), box.left, box.left + box.width);
        const [from, to] = [middle(index - 1), middle(index + 1)];
        const width = to <= box.left || from >= box.left + box.width ? 0 : Math.max(to - from, 2 * devicePixelRatio);
        context.globalAlpha = 0.2;
        context.fillRect(from, box.top, width, box.height);
        context.globalAlpha = 1;
        context.fillRect(from, box.top + box.height - 5 * devicePixelRatio, width, 5 * devicePixelRatio);
      }
    }
    context.restore();
  }

  // Draw a triangle at the top edge for a value beyond it.
  drawBeyond(plot) {
    if (this.top === Infinity) return;
    const { ctx: context, bbox: box } = plot;
    const size = 5 * devicePixelRatio;
    for (const one of this.series) {
      context.fillStyle = colour(one.colour);
      for (let index = 0; index < this.xs.length; index++) {
        const x = plot.valToPos(this.xs[index], "x", true);
        if (!(one.values[index] > this.top) || !Number.isFinite(one.values[index]) || x < box.left || x > box.left + box.width) continue;
        context.beginPath();
        context.moveTo(x, box.top);
        context.lineTo(x - size, box.top + 1.6 * size);
        context.lineTo(x + size, box.top + 1.6 * size);
        context.fill();
      }
    }
  }

  plotSeries(one, { gaps, alone }) {
    const stroke = colour(one.colour);
    if (one.kind !== undefined) return { label: one.label, stroke, paths: () => null, points: { show: false } };
    const inView = () => gaps.filter(([from, to]) => to > view.range[0] && from < view.range[1]);
    const positions = (plot) => inView().map((ends) => ends.map((step) => clamp(plot.valToPos(step, "x", true), plot.bbox.left - 1e4, plot.bbox.left + plot.bbox.width + 1e4)));
    const points = { size: one.size ?? 5, fill: stroke, filter: (plot, series) => this.visibleOf(plot, alone, this.data[series]) };
    return { label: one.label, stroke, width: one.width ?? 1.75, dash: one.dash, gaps: positions, points };
  }

  // Of the places of values, return those in view whose points do not lie on each other.
  visibleOf(plot, places, values) {
    const kept = new Map();
    for (const place of places) {
      if (this.xs[place] < view.range[0] || this.xs[place] > view.range[1]) continue;
      const [x, y] = [plot.valToPos(this.xs[place], "x"), plot.valToPos(values[place], "y")].map((pixel) => Math.round(pixel / 2));
      kept.set(x * 1e5 + y, place);
    }
    return [...kept.values()].sort((a, b) => a - b);
  }

  yRange(low, high) {
    if (this.limits !== null) return this.limits;
    if (low === null || high === null) return this.log ? [0.1, 10] : [0, 1];
    if (this.log) {
      const top = Math.max(Math.min(high, this.top), low * 2);
      return uPlot.rangeLog(low, top, 10, false);
    }
    return uPlot.rangeNum(Math.min(low, 0), high === low && high === 0 ? 1 : high, { min: { pad: 0.05, soft: 0, mode: 1 }, max: { pad: 0.08, soft: 0, mode: 2 } });
  }

  onSelect(plot) {
    if (plot.select.width < 4) return;
    const low = plot.posToVal(plot.select.left, "x");
    const high = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    setRange(low, high);
  }

  onCursor(plot) {
    const index = plot.cursor.idx;
    this.showValues(index ?? null);
    if (!this.following) setStep(index === null || index === undefined ? null : this.xs[index], this);
  }

  followStep() {
    this.following = true;
    const left = view.step === null ? -10 : this.plot.valToPos(view.step, "x");
    this.plot.setCursor({ left, top: left < 0 ? -10 : 12 });
    this.following = false;
  }

  onKey(event) {
    const moved = moveByKey(event, this.xs, view.step);
    if (moved === undefined) return;
    event.preventDefault();
    setStep(moved, null);
  }

  buildLegend() {
    this.legendStep = element("span", { class: "legend-step" });
    this.legendValues = this.series.map(() => element("span", { class: "legend-value" }));
    const entries = this.series.map((one, index) => {
      const label = element("span", { class: "legend-label", title: one.label }, one.label);
      return element("span", { class: "legend-entry" }, swatch(one.colour, one.kind === "bars" ? "block" : ""), label, this.legendValues[index]);
    });
    this.legend.replaceChildren(this.legendStep, ...entries);
    this.showValues(null);
  }

  // Show the values under the cursor; without a cursor, the last values that are not missing.
  showValues(index) {
    this.legendStep.textContent = index === null ? "last" : stepText(this.xs[index]);
    this.series.forEach((one, line) => {
      const value = index === null ? one.values.findLast((value) => value != null && !Number.isNaN(value)) : one.values[index];
      this.legendValues[line].textContent = (one.format ?? this.format)(value);
    });
  }

  tableContent() {
    return { head: ["step", ...this.series.map((one) => one.label)], rows: this.xs.map((step, index) => [step, ...this.series.map((one) => one.values[index])]) };
  }
}

// Return the end of a logarithmic axis such that a few values of 1e22 do not compress a run of ones: four decades above
// the 90th percentile. Infinity if no value is far beyond that.
function usefulTop(series) {
  const known = series.flatMap((one) => Array.from(one.values).filter((value) => Number.isFinite(value) && value > 0)).sort((a, b) => a - b);
  if (known.length === 0) return Infinity;
  const top = 1e4 * known[Math.floor(0.9 * (known.length - 1))];
  return known[known.length - 1] > 100 * top ? top : Infinity;
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

// Plots below each other have the same left edge, unless a label needs more space.
const AXIS_WIDTH = 62;

const axisWidth = (texts) => Math.max(AXIS_WIDTH, 14 + 6.4 * Math.max(0, ...(texts ?? []).map((text) => text.length)));

