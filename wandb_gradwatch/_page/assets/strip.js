// The steps around an incident, or the whole run, as lanes on one axis: the loss, the learning rate, the norm, and the
// layers against their usual.

const [STEPS_BEFORE, STEPS_AFTER] = [10, 30]; // of an incident's first step
const MOST_GUILTY = 5; // layers
const [LINE_LANE, CELL_LANE, BETWEEN_LANES] = [46, 17, 8]; // heights in pixels

// The first of the user's scalars of a role; of a loss that the user does not log, ours.
function ownLane(role) {
  const own = run.own.find((one) => one.role === role);
  const [xs, values] = own ? [own.xs, own.values] : [content.steps, role === "loss" ? globalValues("loss") : undefined];
  return values === undefined ? [] : [{ label: own?.key ?? role, joins: own ? () => true : isNext, lines: [{ label: "", xs, values, colour: lineColour(role === "rate" ? 2 : 0) }] }];
}

function normLane() {
  const lines = [{ label: "before clipping", xs: run.measured.steps, values: run.measured.norms, colour: lineColour(0), bad: run.measured.bad }];
  if (content.received) lines.push({ label: "received", ...unpackedLine(content.received), colour: lineColour(1) });
  return { label: "gradient norm", joins: isNext, isMeasured: true, lines };
}

class Strip extends Frame {
  // names: of the layers, as indices; range: of steps, undefined for those in view; first: the step of the incident
  constructor(host, label, { names, range, first }) {
    super(host, `${label}. Arrow keys move.`);
    Object.assign(this, { own: range, first, measured: run.measured, steps: run.measured.steps, last: run.measured.steps });
    const matrix = run.layers.matrices.get("grad_norm_max") ?? run.layers.matrices.get("grad_norm");
    const layers = matrix ? names.map((name) => ({ label: run.layers.names[name], name, isMeasured: true })) : [];
    this.matrix = matrix;
    this.lanes = [...ownLane("loss"), ...ownLane("rate"), normLane(), ...layers];
    let top = 0;
    for (const lane of this.lanes) {
      Object.assign(lane, { top, height: lane.lines ? LINE_LANE : CELL_LANE });
      top += lane.height + (lane.lines ? BETWEEN_LANES : 2);
    }
    this.height = top;
    this.begin(this.wrap);
  }

  get range() {
    return this.own ?? view.range;
  }

  layout(width) {
    return { height: this.height + 46, left: Math.round(clamp(width * 0.3, 150, 250)) };
  }

  draw() {
    if (this.matrix) {
      this.change = changeOf(this.matrix);
      this.change.scale ??= colourScale(this.change);
      this.palette = paletteOf(this.change, this.change.scale);
      drawScale(this.legend, this.change.scale);
    }
    const lines = this.lanes.find(({ isMeasured }) => isMeasured).lines;
    if (lines.length > 1) this.legend.lastChild.append(...lines.map(({ label, colour: name }) => swatchEntry(swatch(name), label)));
    super.draw();
  }

  paint(pixels, width, height) {
    const ratio = devicePixelRatio;
    for (const lane of this.lanes.filter(({ name }) => name !== undefined)) {
      const [top, bottom] = [lane.top, lane.top + lane.height].map((y) => Math.min(Math.round(y * ratio), height));
      const shown = new Int32Array(width).fill(-1); // the largest code of each pixel
      this.eachStep(this.steps, width, 3, (place, from, to) => {
        const code = this.codeAt(lane.name, place);
        for (let x = from; x < to; x++) shown[x] = Math.max(shown[x], code);
      });
      shown.forEach((code, x) => {
        for (let y = top; code >= 0 && y < bottom; y++) pixels[y * width + x] = this.palette[code];
      });
    }
  }

  // The code of a layer's change at a measured step; -1 where the run keeps no value for it.
  codeAt(name, place) {
    const [grid, { matrix }] = [run.layers, this];
    const column = grid.columnOf(this.steps[place]);
    if (column < 0) return -1;
    const cell = name * matrix.numColumns + column;
    if (this.measured.bad[place] > 0 && grid.bad()?.codes[cell] > CODE_ZERO) return CODE_INFINITE;
    const code = grid.codeAt(name, place, matrix);
    if (code === CODE_MISSING) return matrix.codes[cell] === CODE_MISSING && grid.isWhole[column] ? CODE_MISSING : -1;
    return code > CODE_ZERO ? this.change.codes[cell] + code - matrix.codes[cell] : code;
  }

  drawMarks(context, box, positionOf) {
    for (const lane of this.lanes.filter(({ isMeasured }) => isMeasured)) {
      const part = { ...box, top: box.top + lane.top * devicePixelRatio, height: lane.height * devicePixelRatio };
      drawGaps(context, part, positionOf, this.measured, this.range);
    }
    if (this.own === undefined) drawFlags(context, box, positionOf);
  }

  labels(context, box) {
    if (this.first !== undefined) {
      context.fillStyle = colour("error");
      context.fillRect(this.xOf(this.first) - 0.5, box.top - 5, 1, box.height + 5);
    }
    for (const lane of this.lanes) {
      const top = box.top + lane.top;
      const middle = top + lane.height / 2;
      Object.assign(context, { font: CHART_FONT, textAlign: "left", textBaseline: "middle", fillStyle: colour("ink") });
      const characters = Math.floor((box.left - (lane.lines ? 62 : 10)) / 6.4);
      context.fillText(shorten(lane.label, characters), 2, middle);
      if (lane.lines) this.drawLines(context, box, lane, top);
    }
  }

  // Draw the lines of a lane, with the ends of its axis beside it and a red mark at each value that is not finite.
  drawLines(context, box, lane, top) {
    const known = lane.lines.flatMap((one) => valuesIn(one, this.range));
    let [low, high] = limitsOf(known);
    const least = limitsOf(known.filter((value) => value > 0))[0];
    const isLog = low >= 0 && high > 20 * least;
    if (isLog) low = least; // a zero lies at the lower edge
    const scale = isLog ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
    const reach = scale(high) - scale(low);
    const yOf = (value) => top + lane.height - 4 - (reach > 0 ? (scale(value) - scale(low)) / reach : 0.5) * (lane.height - 8);
    Object.assign(context, { fillStyle: colour("muted"), textAlign: "right" });
    if (known.length) context.fillText(formatNumber(high), box.left - 6, top + 5);
    if (low < high) context.fillText(formatNumber(low), box.left - 6, top + lane.height - 5);
    const [area, places] = [{ ...box, top, height: lane.height }, { range: this.range, xOf: (step) => this.xOf(step), yOf, joins: lane.joins }];
    for (const one of lane.lines) {
      const [from, to] = placesIn(one.xs, this.range);
      drawNonFinite(context, area, one, places);
      drawLine(context, area, one, { ...places, hasPoints: to - from <= box.width / 5 });
    }
  }

  // The value of each lane at a step, as [label, text].
  valuesAt(step) {
    return this.lanes.flatMap((lane) => {
      if (lane.name !== undefined) return [[lane.label, this.cellText(lane.name, this.measured.placeOf(step))]];
      return lane.lines.map(({ label, xs, values, bad }) => {
        const place = lastAtMost(xs, step + 0.5);
        const value = Math.abs(xs[place] - step) > 0.5 ? undefined : values[place];
        const rest = bad?.[place] > 0 ? ` of the finite rest, ${whole(bad[place])} NaN or Inf` : "";
        return [`${lane.label} ${label}`.trim(), value == null ? "not kept" : (Number.isNaN(value) && !bad ? "NaN" : formatNumber(value)) + rest];
      });
    });
  }

  cellText(name, place) {
    const code = this.codeAt(name, place);
    if (code < 0) return "not kept";
    return code === CODE_INFINITE ? "NaN or Inf" : code === CODE_MISSING ? "missing" : `${formatNumber(this.change.valueOf(code))} times its usual`;
  }

  describe(step) {
    return [stepText(step), ...this.valuesAt(step).map((parts) => parts.join(": "))];
  }

  tableContent() {
    const inView = this.steps.filter((step) => step >= this.range[0] && step <= this.range[1]);
    const rows = Array.from(inView, (step) => [step, ...this.valuesAt(step).map(([, text]) => text)]);
    return { head: ["step", ...this.valuesAt(inView[0]).map(([label]) => label)], rows };
  }
}
