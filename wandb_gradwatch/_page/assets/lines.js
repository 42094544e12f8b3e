// A line chart over steps: shared zoom and cursor, alerts as flags, logarithmic or linear, usable by keyboard.

const CHART_FONT = '11px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
// uPlot draws an axis only where it finds its distance of ticks in a list.
const ALL_SIZES = Array.from({ length: 620 }, (_, index) => Number(`1e${index - 311}`));

class LineChart {
  // series: {label, values, colour: () => css, width, dash, kind: "line" | "bars" | "steps" | "band", format}
  // A band fills the area between its two neighbours before it.
  constructor(host, { label, xs, series, log = false, canLog = true, height = 260, format = formatNumber, tick = formatTick, limits = null }) {
    Object.assign(this, { host, label, xs, series, log, height, format, tick, limits });
    this.plotHost = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": label + ", over steps" });
    this.legend = element("div", { class: "legend" });
    this.controls = element("div", { class: "controls" });
    if (canLog) this.controls.append(scaleSwitch(log, (value) => this.setLog(value)));
    this.empty = element("p", { class: "hint", hidden: true }, "Nothing is above 0, and a logarithmic scale begins above it.");
    host.append(this.controls, this.plotHost, this.empty, this.legend, element("div", { class: "below" }, dataTable(() => this.tableContent()), exportButtons(label, () => this.tableContent(), () => this.plot.ctx.canvas)));
    this.plotHost.addEventListener("keydown", (event) => this.onKey(event));
    this.plotHost.addEventListener("blur", () => setStep(null, this));
    const across = (event) => event.clientX - this.plot.over.getBoundingClientRect().left;
    onTouch(this.plotHost, {
      partAt: (event) => across(event) / this.plot.over.clientWidth,
      show: (event) => this.plot.setCursor({ left: across(event), top: 12 }),
      leave: () => setStep(null, null),
    });
    this.build();
    onWidth(this.plotHost, (width) => this.plot.setSize({ width, height: this.height }));
    on("range", () => this.applyRange());
    on("step", (source) => this.applyStep(source));
    on("axis", () => this.rebuild());
    onTheme(() => this.rebuild());
  }

  setLog(value) {
    this.log = value;
    this.rebuild();
  }

  setSeries(series) {
    this.series = series;
    this.rebuild();
  }

  rebuild() {
    this.plot.destroy();
    this.build();
  }

  build() {
    this.top = this.log ? usefulTop(this.series) : Infinity;
    // A bar of height zero would be a dash on the axis.
    const data = [this.xs, ...this.series.map((one) => drawable(one.values, this.log || one.kind === "bars"))];
    this.plot = new uPlot(this.options(), data, this.plotHost);
    const isEmpty = data.slice(1).every((values) => values.every((value) => value === null));
    this.empty.hidden = !(this.log && this.series.length && isEmpty);
    this.buildLegend();
  }

  options() {
    const grid = { stroke: () => colour("grid"), width: 1 };
    const axis = { stroke: () => colour("muted"), font: CHART_FONT, grid, ticks: { ...grid, size: 4 } };
    // uPlot's own ticks end at 1e32, and with them the whole axis: a training that diverges goes on beyond.
    const splits = (plot, axis, low, high) => (this.log ? logTicks(low, high) : linearTicks(low, high, this.height / 40));
    return {
      width: this.plot?.width || this.plotHost.clientWidth || 300,
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
        {
          ...axis,
          space: 64,
          size: 30,
          gap: 4,
          splits: (plot) => axisTicks(plot.width / 72).map(({ step }) => step),
          filter: (plot, ticks) => ticks,
          values: (plot) => axisTicks(plot.width / 72).map(({ text }) => text),
        },
        {
          ...axis,
          gap: 4,
          incrs: ALL_SIZES,
          splits,
          filter: (plot, ticks) => ticks,
          size: (plot, texts) => axisWidth(texts),
          values: (plot, ticks) => ticks.map(this.tick),
        },
      ],
      series: [{}, ...this.series.map((one) => this.plotSeries(one))],
      bands: this.series.flatMap((one, index) => (one.fillTo === undefined ? [] : [{ series: [index + 1, one.fillTo + 1], fill: one.fill() }])),
      hooks: {
        drawAxes: [(plot) => this.drawNonFinite(plot)],
        draw: [(plot) => this.drawBeyond(plot), (plot) => drawFlags(plot.ctx, plot.bbox, (step) => plot.valToPos(step, "x", true))],
        setCursor: [(plot) => this.onCursor(plot)],
        setSelect: [(plot) => this.onSelect(plot)],
      },
    };
  }

  // Where a logged value was NaN or infinite: a band as wide as its row, solid at its foot.
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

  // A triangle at the top edge where a value is beyond it.
  drawBeyond(plot) {
    const { ctx: context, bbox: box } = plot;
    const size = 5 * devicePixelRatio;
    for (const one of this.series) {
      context.fillStyle = one.colour();
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

  plotSeries(one) {
    const paths =
      one.kind === "bars" ? uPlot.paths.bars({ size: [0.7, 18, 2], align: -1 }) : one.kind === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined;
    return {
      label: one.label,
      stroke: one.colour,
      fill: one.kind === "bars" ? one.colour : undefined,
      width: one.width ?? 1.75,
      dash: one.dash,
      paths,
      spanGaps: false,
      points: one.kind === "bars" ? { show: false } : { size: 4, fill: one.colour },
    };
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

  applyRange() {
    this.plot.redraw(true, true);
    this.plot.setData(this.plot.data, true); // scales are computed anew from the shared range
  }

  applyStep(source) {
    if (source === this) return;
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
      const swatch = element("span", { class: "swatch" + (one.kind === "bars" ? " block" : "") });
      swatch.style.background = one.colour();
      return element("span", { class: "legend-entry", title: one.label }, swatch, element("span", { class: "legend-label" }, one.label), this.legendValues[index]);
    });
    this.legend.replaceChildren(this.legendStep, ...entries);
    this.showValues(null);
  }

  // The values under the cursor; without one, the last that is not missing.
  showValues(index) {
    this.legendStep.textContent = index === null ? "last" : stepText(this.xs[index]);
    this.series.forEach((one, line) => {
      let place = index;
      while (place > 0 && one.values[place] === undefined) place--; // a point of another line alone
      const value = index === null ? lastPresent(one.values) : one.values[place];
      this.legendValues[line].textContent = (one.format ?? this.format)(value);
    });
  }

  tableContent() {
    return { head: ["step", ...this.series.map((one) => one.label)], rows: this.xs.map((step, index) => [step, ...this.series.map((one) => one.values[index])]) };
  }
}

function lastPresent(values) {
  for (let index = values.length - 1; index >= 0; index--) {
    if (values[index] != null && !Number.isNaN(values[index])) return values[index];
  }
  return null;
}

// Where a logarithmic axis ends so that a few values of 1e22 do not press a run of ones flat: four decades above what
// nine of ten stay below. Infinity where nothing is that far.
function usefulTop(series) {
  const known = series.flatMap((one) => Array.from(one.values).filter((value) => Number.isFinite(value) && value > 0)).sort((a, b) => a - b);
  if (known.length === 0) return Infinity;
  const top = 1e4 * known[Math.floor(0.9 * (known.length - 1))];
  return known[known.length - 1] > 100 * top ? top : Infinity;
}

// Whole decades where the axis spans several, and not more of them than one can read; 1, 2 and 5 within one.
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

// Plots one below the other begin at the same place, unless a label needs more.
const AXIS_WIDTH = 62;

function axisWidth(texts) {
  return Math.max(AXIS_WIDTH, 14 + 6.4 * Math.max(0, ...(texts ?? []).map((text) => text.length)));
}

// Arrow keys walk over the steps in view; undefined where the key means nothing here.
function moveByKey(event, steps, current) {
  if (event.key === "Escape") return null;
  const low = Math.max(0, lastAtMost(steps, view.range[0] - 1e-9) + 1);
  const high = lastAtMost(steps, view.range[1]);
  if (high < low) return undefined;
  const place = current === null ? null : nearestIndex(steps, current);
  const far = event.shiftKey ? 10 : 1;
  const target = {
    ArrowLeft: place === null ? high : place - far,
    ArrowRight: place === null ? low : place + far,
    Home: low,
    End: high,
  }[event.key];
  return target === undefined ? undefined : steps[clamp(target, low, high)];
}

function scaleSwitch(log, change) {
  return segmented("Scale", [["log", "Log"], ["linear", "Linear"]], log ? "log" : "linear", (value) => change(value === "log"));
}

// A row of buttons of which one is pressed.
function segmented(label, options, chosen, change) {
  const group = element("div", { class: "segmented", role: "group", "aria-label": label });
  const buttons = options.map(([value, text]) =>
    element("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => select(value) }, text),
  );
  function select(value) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === value));
    change(value);
  }
  group.append(...buttons);
  return group;
}

const widthListeners = new Map();
const widthObserver = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const width = Math.floor(entry.contentRect.width);
    const known = widthListeners.get(entry.target);
    if (width === 0 || width === known.width) continue;
    known.width = width;
    known.listener(width);
  }
});

function forgetWidths() {
  widthObserver.disconnect();
  widthListeners.clear();
}

// Called when the width becomes another one; whoever draws now draws for the width of now.
function onWidth(node, listener) {
  widthListeners.set(node, { listener, width: Math.floor(node.clientWidth) });
  widthObserver.observe(node);
}

// Flags of the alerts at the top edge of a plot, and their lines through it. `box` is in device pixels.
function drawFlags(context, box, positionOf) {
  const scale = devicePixelRatio;
  context.canvas.flags = []; // where they are, for a click on one
  context.save();
  for (const flag of groupedFlags(positionOf, 26 * scale)) {
    context.strokeStyle = levelColour(flag.level);
    context.lineWidth = scale;
    context.setLineDash([3 * scale, 3 * scale]);
    for (const x of flag.lines) {
      context.beginPath();
      context.moveTo(Math.round(x) + 0.5, box.top);
      context.lineTo(Math.round(x) + 0.5, box.top + box.height);
      context.stroke();
    }
    const text = flag.first === flag.last ? String(flag.first) : `${flag.first}–${flag.last}`;
    context.font = `600 ${10 * scale}px ui-sans-serif, system-ui, sans-serif`;
    const half = Math.max(8 * scale, context.measureText(text).width / 2 + 4 * scale);
    const middle = clamp((flag.lines[0] + flag.lines[flag.lines.length - 1]) / 2, box.left + half, box.left + box.width - half);
    context.canvas.flags.push({ ...flag, left: middle - half, right: middle + half, top: box.top - 16 * scale, bottom: box.top - 2 * scale });
    context.fillStyle = levelColour(flag.level);
    context.beginPath();
    context.roundRect(middle - half, box.top - 16 * scale, 2 * half, 14 * scale, 4 * scale);
    context.fill();
    context.fillStyle = colour("card");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, middle, box.top - 8.5 * scale);
  }
  context.restore();
}

// Alerts in view, from left to right; those whose flags would overlap share one, in the colour of the worst.
function groupedFlags(positionOf, distance) {
  const flags = [];
  const inView = content.alerts
    .flatMap((alert, index) => alert.times.map((time) => ({ ...time, number: index + 1 })))
    .filter(({ step }) => step !== null && step >= view.range[0] && step <= view.range[1])
    .sort((a, b) => a.step - b.step);
  for (const { step, number, level } of inView) {
    const x = positionOf(step);
    const last = flags[flags.length - 1];
    if (last === undefined || x - last.lines[last.lines.length - 1] >= distance) {
      flags.push({ first: number, last: number, lines: [x], level });
      continue;
    }
    last.lines.push(x);
    last.first = Math.min(last.first, number);
    last.last = Math.max(last.last, number);
    if (level === "ERROR" || (level === "WARN" && last.level === "INFO")) last.level = level;
  }
  return flags;
}

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: `${content.run.id}-${name}`.replace(/[^\w.+-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A number as it is, a text in quotes; a text that a spreadsheet would take for a formula loses that power.
function csvCell(cell) {
  if (cell === null || cell === undefined) return "";
  return typeof cell === "number" ? String(cell) : '"' + cell.replace(/^(?=[=+@-])/, "'").replaceAll('"', '""') + '"';
}

function toCsv({ head, rows }) {
  return [head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

// What a picture can be taken away as. `canvasOf` gives its canvas, on which the card's colour is missing.
function exportButtons(name, makeContent, canvasOf) {
  const csv = () => save(new Blob([toCsv(makeContent())], { type: "text/csv" }), name + ".csv");
  const png = () => {
    const drawn = canvasOf();
    const copy = element("canvas", { width: drawn.width, height: drawn.height });
    const context = copy.getContext("2d");
    context.fillStyle = colour("card");
    context.fillRect(0, 0, copy.width, copy.height);
    context.drawImage(drawn, 0, 0);
    copy.toBlob((blob) => save(blob, name + ".png"));
  };
  const button = (text, onclick) => element("button", { type: "button", class: "export", "aria-label": `${name} as ${text}`, onclick }, text);
  return element("div", { class: "exports" }, button("CSV", csv), button("PNG", png));
}

// The numbers behind a picture, built when they are asked for.
function dataTable(makeContent) {
  const details = element("details", { class: "data" }, element("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    details.querySelector(".scroll")?.remove();
    if (!details.open) return;
    const { head, rows } = makeContent();
    const inView = rows.filter((row) => row[0] >= view.range[0] && row[0] <= view.range[1]);
    const shown = inView.slice(-500);
    details.append(plainTable(head, shown));
    details.querySelector("summary").textContent = shown.length < inView.length ? `Numbers (the last ${shown.length} of ${inView.length} rows in view)` : "Numbers";
  });
  return details;
}

function plainTable(head, rows) {
  return element(
    "div",
    { class: "scroll", tabindex: 0 },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, head.map((text, column) => element("th", { scope: "col", class: typeof rows[0]?.[column] === "string" ? "text" : null }, text)))),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map((cell) => element("td", { class: typeof cell === "string" ? "text" : null }, typeof cell === "string" ? cell : formatNumber(cell, 5)))))),
    ),
  );
}
