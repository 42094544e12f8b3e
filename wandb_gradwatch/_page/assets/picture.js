// The base of all pictures. Each is redrawn at most once per frame of the screen, and only near the window: a picture that
// is farther away waits until it comes near, is printed, or is exported.

const stale = new Map(); // by node: the function that redraws an outdated picture
const near = new Set(); // nodes near the window
let frameIsAsked = false;

const nearness = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) near[isIntersecting ? "add" : "delete"](target);
    drawStale();
  },
  { rootMargin: "200px 0px" },
);

// The node must be observed by `nearness`.
function drawLater(node, draw) {
  stale.set(node, draw);
  if (!frameIsAsked) requestAnimationFrame(() => drawStale());
  frameIsAsked = true;
}

function drawStale(wanted = near) {
  frameIsAsked = false;
  for (const [node, draw] of [...stale]) {
    if (!wanted.has(node)) continue;
    stale.delete(node);
    draw();
  }
}

// Hatch the gaps between measured steps. `box` is in device pixels; points at both ends stay free.
function drawGaps(context, box, positionOf, measured, range = view.range) {
  const [size, free] = [Math.round(7 * devicePixelRatio), 3 * devicePixelRatio];
  const tile = element("canvas", { width: size, height: size });
  const line = tile.getContext("2d");
  Object.assign(line, { strokeStyle: colour("hatch"), lineWidth: devicePixelRatio });
  for (const shift of [-size, 0, size]) {
    line.moveTo(shift, size);
    line.lineTo(shift + size, 0);
  }
  line.stroke();
  context.save();
  context.fillStyle = context.createPattern(tile, "repeat");
  measured?.eachGap(range, (from, to) => {
    const [left, right] = [Math.max(positionOf(from) + free, box.left), Math.min(positionOf(to) - free, box.left + box.width)];
    if (right - left > 1) context.fillRect(left, box.top, right - left, box.height);
  });
  context.restore();
}

const pictures = new Map(); // by node

const isPrinting = () => "printing" in document.documentElement.dataset;

// Paper is narrower than the window: before printing, pictures are unfolded and redrawn for the paper, and each canvas is
// replaced by an image, because some browsers print a canvas blank.
addEventListener("beforeprint", () => {
  document.documentElement.dataset.printing = "";
  for (const details of page.querySelectorAll(":is(#more, .told):not([open])")) Object.assign(details, { open: true }).dataset.folded = "";
  for (const [node, picture] of pictures) picture.setWidth(node.clientWidth);
  drawStale(stale);
  for (const canvas of page.querySelectorAll("canvas:not(.overlay)")) {
    canvas.after(element("img", { class: "printed", src: canvas.toDataURL(), alt: canvas.getAttribute("aria-label") }));
  }
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.printing;
  for (const image of page.querySelectorAll(".printed")) image.remove();
  for (const details of page.querySelectorAll("[data-folded]")) Object.assign(details, { open: false }).removeAttribute("data-folded");
});

const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) pictures.get(target).setWidth(contentRect.width);
});

function forgetPictures() {
  for (const observer of [nearness, widths]) observer.disconnect();
  for (const kept of [pictures, stale, near]) kept.clear();
}

class Picture {
  // A subclass defines label, draw(), followStep() for the step under another picture's pointer, canvas, tableContent().
  begin(node) {
    this.node = node;
    this.width = Math.floor(node.clientWidth);
    pictures.set(node, this);
    for (const observer of [nearness, widths]) observer.observe(node);
    for (const what of ["range", "theme"]) on(what, () => this.outdate());
    on("step", (source) => source === this || this.followStep());
    if (this.width) this.draw(); // otherwise it is folded
  }

  setWidth(found) {
    const width = Math.floor(found);
    if (width === 0 || width === this.width) return; // 0: hidden
    this.width = width;
    this.outdate();
  }

  outdate() {
    drawLater(this.node, () => this.draw());
  }
}

// Arrow keys move over the steps in view; returns undefined for keys without a meaning here.
function moveByKey(event, steps, current, range = view.range) {
  if (event.key === "Escape") return null;
  const low = Math.max(0, lastAtMost(steps, range[0] - 1e-9) + 1);
  const high = lastAtMost(steps, range[1]);
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

// Touch: one finger moves the cursor, two fingers move and stretch the steps; vertical scrolling of the page still works.
// partAt(event) returns the horizontal position in the picture, from 0 to 1; show(event) moves the cursor there.
function onTouch(node, { partAt, show, leave }) {
  const fingers = new Map(); // by id: the step that a finger holds, and its current position

  function stretch() {
    const [first, second] = [...fingers.values()].sort((a, b) => a.part - b.part);
    const apart = second.part - first.part;
    if (apart < 0.02 || second.place <= first.place) return;
    const across = (second.place - first.place) / apart;
    const low = first.place - first.part * across;
    setRange(low, low + across);
  }

  node.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch") return;
    fingers.set(event.pointerId, { part: partAt(event) });
    for (const finger of fingers.values()) finger.place = stepAcross(finger.part);
    if (fingers.size === 1) show(event);
    else leave();
  });
  node.addEventListener("pointermove", (event) => {
    const finger = fingers.get(event.pointerId);
    if (finger === undefined) return;
    finger.part = partAt(event);
    if (fingers.size === 1) show(event);
    else if (fingers.size === 2) stretch();
  });
  for (const end of ["pointerup", "pointercancel"]) node.addEventListener(end, (event) => fingers.delete(event.pointerId));
}

// A row of buttons, exactly one of which is pressed.
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
