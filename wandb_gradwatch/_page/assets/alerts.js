// The list of alerts, grouped by title, most severe first. Their numbers label the flags on all time axes.

const LEVEL_WORDS = { ERROR: "Error", WARN: "Warning", INFO: "Info" };

// The layers that an alert names, as indices into the names.
function layersOf({ text }) {
  const words = new Set(text.split(/[\s,;:()]+/).map((word) => word.replace(/\.$/, "")));
  return run.layers.names.map((_, name) => name).filter((name) => words.has(run.layers.names[name]));
}

function showLayers(names) {
  run.layers.choose(names);
  document.getElementById("lines").scrollIntoView({ behavior: "smooth", block: "start" });
}

function alertsSection() {
  const list = content.alerts.map((alert, index) => {
    const layers = run.layers.metric ? layersOf(alert) : [];
    const show = element("button", { type: "button", class: "alert-step", onclick: () => showLayers(layers), title: "Draw the lines of these layers" }, layers.length === 1 ? "show its layer" : `show its ${layers.length} layers`);
    const go = alert.times.map(({ step }) =>
      step === null
        ? element("span", { class: "alert-step" }, "step unknown")
        : element("button", { type: "button", class: "alert-step", onclick: () => zoomTo(step), title: "Zoom all pictures to this step" }, "step " + step.toLocaleString("en-US")),
    );
    return element(
      "li",
      { class: "alert " + alert.level.toLowerCase().replace(/[^a-z]/g, "") },
      element("span", { class: "flag" }, String(index + 1)),
      element(
        "div",
        { class: "alert-body" },
        element("div", { class: "alert-head" }, element("strong", {}, alert.title), element("span", { class: "level" }, LEVEL_WORDS[alert.level] ?? alert.level), go, layers.length ? show : null),
        element("p", {}, alert.text),
        findingOf(alert),
        recordedAround(alert),
      ),
    );
  });
  const node = element("section", { class: "card wide", id: "alerts" }, element("h2", {}, "Alerts"), element("ol", { class: "alerts" }, list.slice(0, 8)));
  const rest = list.slice(8);
  if (rest.length) {
    const more = element("button", { type: "button", class: "quiet", onclick: () => { node.querySelector("ol").append(...rest); more.remove(); } }, `Show ${rest.length} more`);
    node.append(more);
  }
  return node;
}

// The flight recorder's rows around an alert, step by step, with the most conspicuous layers first.
const AROUND = 4; // recorded steps on either side
const MOST_GUILTY = 12;

function recordedAround(alert) {
  const { columns, rows } = content.flightRecorder ?? { columns: [], rows: [] };
  const [step, name, norm, nan, inf] = ["step", "name", "grad_norm", "num_nan", "num_inf"].map((column) => columns.indexOf(column));
  const recorded = [...new Set(rows.map((row) => row[step]))].sort((a, b) => a - b);
  if (alert.step === null || name < 0 || !(recorded[0] <= alert.step && alert.step <= recorded.at(-1))) return null;
  const nearest = nearestIndex(recorded, alert.step);
  const steps = recorded.slice(Math.max(0, nearest - AROUND), nearest + AROUND + 1);
  const title = `Steps ${steps[0].toLocaleString("en-US")}–${steps.at(-1).toLocaleString("en-US")} one by one, from the flight recorder`;
  const details = element("details", { class: "data around" }, element("summary", {}, title));
  const fill = () => {
    const layers = new Map(); // by name: its rows by step
    for (const row of rows) {
      if (!layers.has(row[name])) layers.set(row[name], new Map());
      layers.get(row[name]).set(row[step], row);
    }
    const named = new Set(layersOf(alert).map((one) => run.layers.names[one]));
    const isBad = (row) => row !== undefined && row[nan] + row[inf] > 0;
    const guilt = ([layer, found]) => {
      const norms = steps.map((one) => found.get(one)?.[norm]).filter((value) => value > 0);
      return (steps.some((one) => isBad(found.get(one))) ? 1e6 : 0) + (named.has(layer) ? 1e3 : 0) + Math.log10(Math.max(1, ...norms) / (norms[0] ?? 1));
    };
    const guilty = [...layers].sort((a, b) => guilt(b) - guilt(a)).slice(0, MOST_GUILTY);
    const cell = (row) => element("td", { class: isBad(row) ? "alarming" : null }, isBad(row) ? `${formatNumber(row[nan] + row[inf])} NaN or Inf` : formatNumber(row?.[norm]));
    const head = steps.map((one) => element("th", { scope: "col", class: one === recorded[nearest] ? "alarming" : null }, one.toLocaleString("en-US")));
    const body = guilty.map(([layer, found]) => [element("th", { scope: "row", class: "text" }, layer), ...steps.map((one) => cell(found.get(one)))]);
    details.append(scrolled(table([element("th", { scope: "col", class: "text" }, "gradient norm at step"), ...head], body)));
    if (layers.size > guilty.length) details.append(hint(`The first ${guilty.length} of ${layers.size} layers: NaN or Inf before those that the alert names, and those that grew most.`));
  };
  details.addEventListener("toggle", () => details.childElementCount === 1 && fill());
  return details;
}

// Draw the flags of the alerts at the top edge of a plot, and their lines through it. `box` is in device pixels.
function drawFlags(context, box, positionOf) {
  const scale = devicePixelRatio;
  context.canvas.flags = []; // the places of the flags, for clicks
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

// Return the alerts in view, from left to right; overlapping ones share a flag in the colour of the most severe.
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

// A click on a flag opens the steps around its alert.
function flagUnder(event) {
  const picture = event.target.closest(".plot, .frame");
  const canvas = picture?.querySelector("canvas");
  const bounds = canvas?.getBoundingClientRect();
  const [x, y] = bounds ? [event.clientX - bounds.left, event.clientY - bounds.top].map((place) => place * devicePixelRatio) : [];
  const flag = canvas?.flags?.find(({ left, right, top, bottom }) => left <= x && x <= right && top <= y && y <= bottom);
  picture?.classList.toggle("on-flag", flag !== undefined);
  return flag;
}

page.addEventListener("pointermove", flagUnder);
page.addEventListener("click", (event) => {
  const flag = flagUnder(event);
  if (flag === undefined) return;
  const node = document.querySelectorAll(".alert")[flag.first - 1] ?? document.getElementById("alerts");
  const around = node.querySelector(".around");
  if (around) around.open = true;
  node.scrollIntoView({ behavior: "smooth", block: "start" });
});

// Show the first bad operation, if the step was run again: what it made, where, and which modules it reached.
function findingOf({ finding }) {
  if (!finding.length) return null;
  return element("dl", { class: "finding", "aria-label": "The first bad operation" }, finding.flatMap(([name, value]) => [element("dt", {}, name), element("dd", { class: name.toLowerCase() }, value)]));
}

// Zoom to the samples around a step, of which each can be seen.
function zoomTo(step) {
  const { steps } = run.measured;
  const [low, high] = [-20, 20].map((reach) => steps[clamp(nearestIndex(steps, step) + reach, 0, steps.length - 1)]);
  setRange(Math.min(low, step) - 0.5, Math.max(high, step) + 0.5);
  setStep(step, null);
  (document.getElementById("norm") ?? document.getElementById("layers"))?.scrollIntoView({ behavior: "smooth", block: "start" });
}
