// A canvas with axes over steps: base class of the names x steps pictures and the histograms over time.
// A subclass paints the inside and defines the vertical axis; this class does pointer, keyboard, zoom and cursor.

class Frame extends Picture {
  // A subclass defines: layout(width) -> {height, left}, labels(context, box), optionally paint(pixels, width, height),
  //        describe(step, y, height) -> text lines or null; optionally nextRow(y, height, direction) -> y, and
  //        onChoose(y, height) for a click or Enter. It sets `measured`; `last`, the
  //        steps between which arrow keys move; and `steps`, those that the pointer finds.
  constructor(host, label) {
    super();
    this.label = label;
    this.canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": label });
    this.overlay = element("canvas", { class: "overlay", "aria-hidden": "true" });
    this.tooltip = element("div", { class: "tooltip", hidden: true });
    this.wrap = element("div", { class: "frame" }, this.canvas, this.overlay, this.tooltip);
    this.readout = element("div", { class: "readout", "aria-live": "polite" });
    this.legend = element("div", { class: "scale" });
    host.append(this.legend, this.wrap, this.readout, exportButtons(this));
    this.pointer = null;
    this.drag = null;
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerup", (event) => this.onUp(event));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || this.leave());
    this.canvas.addEventListener("dblclick", resetRange);
    this.canvas.addEventListener("keydown", (event) => this.onKeyDown(event));
    this.canvas.addEventListener("blur", () => this.leave());
    onTouch(this.canvas, {
      partAt: (event) => (this.place(event).x - this.box.left) / this.box.width,
      show: (event) => this.show(this.place(event)),
      leave: () => this.leave(),
    });
    this.canvas.addEventListener("click", (event) => event.pointerType === "touch" && this.click(this.place(event)));
  }

  // The steps at both edges.
  get range() {
    return view.range;
  }

  nextRow(y) {
    return y;
  }

  // Call visit(place, from, to) for each of these steps that is in view, with the pixels that it covers: at least `least`
  // where its neighbours leave room, so that a single step can be seen.
  eachStep(steps, width, least, visit) {
    const [low, high] = this.range;
    const across = (step) => ((step - low) / (high - low)) * width;
    let end = -Infinity; // of the previous step
    for (let place = lastAtMost(steps, this.range[0] - 1) + 1; place < steps.length && steps[place] < this.range[1] + 1; place++) {
      const step = steps[place];
      const [left, right, next] = [across(step - 0.5), across(step + 0.5), across(((steps[place + 1] ?? Infinity) + step) / 2)];
      const more = Math.max(0, (least * devicePixelRatio - (right - left)) / 2);
      const from = clamp(Math.round(Math.max(left - more, Math.min(left, end))), 0, width - 1);
      end = Math.min(right + more, Math.max(right, next));
      visit(place, from, clamp(Math.round(end), from + 1, width));
    }
  }

  // Return the step nearest to the pointer that has a value.
  stepNear(step) {
    return this.steps[nearestIndex(this.steps, step)] ?? null;
  }

  followStep() {
    this.drawOverlay();
  }

  draw() {
    const width = this.width;
    if (width === 0) return;
    const { height, left } = this.layout(width);
    const ratio = devicePixelRatio;
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    this.box = { left, top: 18, width: Math.max(width - left - 22, 20), height: height - 18 - 28 };
    const context = this.canvas.getContext("2d");
    const { left: x, top: y, width: across, height: down } = this.scaled(this.box);
    if (this.paint) {
      const image = context.createImageData(Math.round(across), Math.round(down));
      this.paint(new Uint32Array(image.data.buffer), image.width, image.height);
      context.putImageData(image, Math.round(x), Math.round(y));
    }
    this.drawMarks(context, this.scaled(this.box), (step) => this.xOf(step) * ratio);
    context.scale(ratio, ratio);
    this.drawAxes(context);
    this.drawOverlay();
  }

  // Hatch what was not measured, and draw the flags; `box` is in device pixels.
  drawMarks(context, box, positionOf, depth = 3 * devicePixelRatio) {
    drawGaps(context, box, positionOf, this.measured);
    drawFlags(context, box, positionOf, depth);
  }

  scaled(box) {
    return Object.fromEntries(Object.entries(box).map(([key, value]) => [key, value * devicePixelRatio]));
  }

  drawAxes(context) {
    const { left, top, width, height } = this.box;
    context.font = CHART_FONT;
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("grid");
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of linearTicks(...this.range, width / 64).filter(Number.isInteger)) {
      const [x, text] = [this.xOf(step), whole(step)];
      context.fillRect(x, top + height + 1, 1, 4);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(x, left + width + 20 - half), top + height + 8);
    }
    this.labels(context, this.box);
  }

  drawOverlay() {
    if (this.box === undefined) return;
    const context = this.overlay.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    const { left, top, width, height } = this.box;
    context.strokeStyle = context.fillStyle = colour("ink");
    if (view.step !== null && view.step >= this.range[0] && view.step <= this.range[1]) {
      context.setLineDash([4, 3]);
      context.strokeRect(this.xOf(view.step), top, 0, height);
      context.setLineDash([]);
    }
    if (this.drag !== null && this.pointer !== null) {
      const [from, to] = this.dragged();
      context.globalAlpha = 0.16;
      context.fillRect(from, top, to - from, height);
    }
  }

  xOf(step) {
    const [low, high] = this.range;
    return this.box.left + ((step - low) / (high - low)) * this.box.width;
  }

  stepAt(x) {
    return stepAcross((x - this.box.left) / this.box.width, this.range);
  }

  place(event) {
    const bounds = this.canvas.getBoundingClientRect();
    return { x: event.clientX - bounds.left, y: event.clientY - bounds.top };
  }

  inside({ x, y }) {
    const { left, top, width, height } = this.box;
    return x >= left && x < left + width && y >= top && y < top + height;
  }

  onDown(event) {
    const place = this.place(event);
    if (event.button !== 0 || !this.inside(place) || event.pointerType === "touch") return;
    this.drag = place;
    this.canvas.setPointerCapture(event.pointerId);
  }

  onMove(event) {
    if (event.pointerType === "touch") return;
    const place = this.place(event);
    if (this.drag === null && !this.inside(place)) return this.leave();
    this.show(place);
  }

  onUp(event) {
    if (this.drag === null) return;
    this.pointer = this.place(event);
    const [from, to] = this.dragged();
    this.drag = null;
    if (to - from > 4) setRange(this.stepAt(from), this.stepAt(to));
    else this.click(this.pointer);
    this.drawOverlay();
  }

  click(place) {
    if (this.inside(place)) this.onChoose?.(place.y - this.box.top, this.box.height);
  }

  // The edges of the area that is being selected.
  dragged() {
    const { left, width } = this.box;
    return [this.drag.x, clamp(this.pointer.x, left, left + width)].sort((a, b) => a - b);
  }

  show(place) {
    this.pointer = place;
    const step = this.stepNear(this.stepAt(place.x));
    const lines = this.drag === null && step !== null ? this.describe(step, place.y - this.box.top, this.box.height) : null;
    this.tooltip.hidden = lines === null;
    if (lines !== null) {
      this.tooltip.replaceChildren(...lines.map((line, index) => element("div", { class: index === 0 ? "strong" : null }, line)));
      this.readout.textContent = lines.join(" · ");
      const right = place.x > this.wrap.clientWidth / 2;
      this.tooltip.style.left = right ? "auto" : place.x + 14 + "px";
      this.tooltip.style.right = right ? this.wrap.clientWidth - place.x + 14 + "px" : "auto";
      this.tooltip.style.top = Math.max(place.y - 10, 0) + "px";
    }
    setStep(step, this);
    this.drawOverlay();
  }

  leave() {
    if (this.drag !== null || this.pointer === null) return;
    this.pointer = null;
    this.tooltip.hidden = true;
    this.readout.textContent = "";
    setStep(null, this);
    this.drawOverlay();
  }

  // Arrow keys move the keyboard's cursor; the subclass handles other keys.
  onKeyDown(event) {
    if (this.box === undefined) return;
    const { left, top, width, height } = this.box;
    const place = this.pointer ?? { x: left + width / 2, y: top + height / 2 };
    if (event.key === "Escape") return this.leave();
    const direction = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (direction) {
      const y = top + clamp(this.nextRow(place.y - top, height, direction), 1, height - 1);
      event.preventDefault();
      return this.show({ x: place.x, y });
    }
    const isChoice = event.key === "Enter" && this.onChoose !== undefined;
    const step = isChoice ? null : moveByKey(event, this.last, this.pointer === null ? null : view.step, this.range);
    if (step === undefined) return;
    event.preventDefault();
    if (isChoice) this.onChoose(place.y - top, height);
    else this.show({ x: clamp(this.xOf(step), left, left + width - 1), y: place.y });
  }
}
