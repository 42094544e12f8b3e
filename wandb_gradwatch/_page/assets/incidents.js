// The list of incidents, in the order in which they were found. Their numbers label the flags on all time axes.

const goTo = (node) => node.scrollIntoView({ behavior: "smooth", block: "start" });
const link = (text, onclick) => element("button", { type: "button", class: "link", onclick }, text);

// A button that copies a text, and says whether the browser has let it.
function copyButton(kind, text) {
  const button = link("copy as " + kind, async () => {
    const isCopied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    button.textContent = isCopied ? `copied as ${kind}` : "the browser refuses to copy";
  });
  button.setAttribute("aria-live", "polite");
  return button;
}

function incidentsSection() {
  const list = content.incidents.map(({ headline, text, told }, index) => {
    const { level, first_step: first, last_step: last, recovered_step: recovered, unmeasured_from: from, rank, layers } = told;
    const drawn = run.layers.metric ? layers.map(({ name }) => run.layers.names.indexOf(name)).filter((name) => name >= 0) : [];
    const end = recovered === null ? `seen until ${atStep(last)}` : `last seen at ${atStep(last)}, usual again at ${atStep(recovered)}`;
    const known = layers.some(({ value }) => value !== null) ? ["value", "usual"] : [];
    const rows = layers.map((layer) => ["name", ...known].map((column) => layer[column]));
    const parts = {
      Seen: told.fact,
      "Not measured": from !== null && from < first ? `${stepRange(from, first - 1)}, in which it may have begun` : "",
      Layers: rows.length ? scrolled(table(["layer", ...known], rows)) : "",
      Cause: told.cause_text + (told.rival_text && `, or ${told.rival_text}`),
      Evidence: told.evidence,
      Remedy: told.remedy,
    };
    return element(
      "li",
      { class: "incident " + level.toLowerCase() },
      element("span", { class: "flag" }, String(index + 1)),
      element(
        "div",
        {},
        element("strong", {}, headline),
        element(
          "div",
          { class: "links" },
          element("span", { class: "level" }, level),
          link("zoom to " + atStep(first), () => zoomTo(first)),
          element("span", {}, end + (rank === null ? "" : `, on rank ${rank}`)),
          drawn.length ? link(`show ${plural(drawn.length, "layer")}`, () => (run.layers.choose(drawn), goTo(document.getElementById("lines")))) : null,
          copyButton("text", text),
          copyButton("JSON", JSON.stringify(told, null, 2)),
        ),
        element("dl", { class: "told" }, Object.entries(parts).flatMap(([name, part]) => (part ? [element("dt", {}, name), element("dd", {}, part)] : []))),
        recordedAround(told),
      ),
    );
  });
  return element("section", { class: "card wide", id: "incidents" }, element("h2", {}, "Incidents"), element("ol", { class: "incidents" }, list));
}

// The flight recorder's rows around an incident's first step, the most conspicuous layers first.
const AROUND = 4; // recorded steps on either side
const MOST_GUILTY = 12;

function recordedAround({ first_step: first, layers: concerned }) {
  const { columns, rows } = content.flightRecorder ?? { columns: [], rows: [] };
  const [step, name, norm, nan, inf] = ["step", "name", "grad_norm", "num_nan", "num_inf"].map((column) => columns.indexOf(column));
  const recorded = [...new Set(rows.map((row) => row[step]))].sort((a, b) => a - b);
  if (name < 0 || !(recorded[0] <= first && first <= recorded.at(-1))) return null;
  const nearest = nearestIndex(recorded, first);
  const steps = recorded.slice(Math.max(0, nearest - AROUND), nearest + AROUND + 1);
  const details = element("details", { class: "data around" }, element("summary", {}, `One by one from the flight recorder: ${stepRange(steps[0], steps.at(-1))}`));
  const fill = () => {
    const layers = new Map(); // by name: its rows by step
    for (const row of rows) {
      if (!layers.has(row[name])) layers.set(row[name], new Map());
      layers.get(row[name]).set(row[step], row);
    }
    const isBad = (row) => row?.[nan] + row?.[inf] > 0;
    const guilt = ([layer, found]) => {
      const norms = steps.map((one) => found.get(one)?.[norm]).filter((value) => value > 0);
      return (steps.some((one) => isBad(found.get(one))) ? 1e6 : 0) + (concerned.some((one) => one.name === layer) ? 1e3 : 0) + Math.log10(Math.max(1, ...norms) / (norms[0] ?? 1));
    };
    const guilty = [...layers].sort((a, b) => guilt(b) - guilt(a)).slice(0, MOST_GUILTY);
    const cell = (row) => element("td", { class: isBad(row) ? "alarming" : null }, isBad(row) ? `${formatNumber(row[nan] + row[inf])} NaN or Inf` : formatNumber(row?.[norm]));
    const head = steps.map((one) => element("th", { scope: "col", class: one === recorded[nearest] ? "alarming" : null }, whole(one)));
    const body = guilty.map(([layer, found]) => [element("th", { scope: "row", class: "text" }, layer), ...steps.map((one) => cell(found.get(one)))]);
    details.append(scrolled(table([element("th", { scope: "col", class: "text" }, "gradient norm at step"), ...head], body)));
    if (layers.size > guilty.length) details.append(hint(`The first ${guilty.length} of ${layers.size} layers: NaN or Inf before those that the incident names, and those that grew most.`));
  };
  details.addEventListener("toggle", () => details.childElementCount === 1 && fill());
  return details;
}

// Draw the flags of the incidents at the top edge of a plot, their lines through it, and a light colour on the measured
// steps of each, down to a depth: no further than the edge where colours have a meaning. `box` is in device pixels.
function drawFlags(context, box, positionOf, depth = box.height) {
  const scale = devicePixelRatio;
  context.canvas.flags = []; // the places of the flags, for clicks
  context.save();
  context.globalAlpha = depth < box.height ? 0.5 : 0.12;
  for (const { told } of content.incidents) {
    context.fillStyle = levelColour(told.level);
    const [low, high] = [Math.max(told.first_step, view.range[0]), Math.min(told.recovered_step === null ? told.last_step : told.recovered_step - 1, view.range[1])];
    let end = box.left;
    run.measured.eachWithin(low, high, (from, to) => {
      const [left, right] = [from - 0.5, to + 0.5].map((step) => clamp(positionOf(step), end, box.left + box.width));
      if (right <= end) return;
      end = Math.max(right, left + scale);
      context.fillRect(left, depth < box.height ? box.top - depth : box.top, end - left, depth);
    });
  }
  Object.assign(context, { globalAlpha: 1, lineWidth: scale, font: `600 ${10 * scale}px ui-sans-serif, system-ui, sans-serif`, textAlign: "center", textBaseline: "middle" });
  context.setLineDash([3 * scale, 3 * scale]);
  for (const flag of groupedFlags(positionOf, 26 * scale)) {
    context.strokeStyle = context.fillStyle = levelColour(flag.level);
    for (const x of flag.lines) {
      context.beginPath();
      context.moveTo(Math.round(x) + 0.5, box.top);
      context.lineTo(Math.round(x) + 0.5, box.top + box.height);
      context.stroke();
    }
    const [first, last] = [Math.min(...flag.numbers), Math.max(...flag.numbers)];
    const text = first === last ? String(first) : `${first}–${last}`;
    const half = Math.max(8 * scale, context.measureText(text).width / 2 + 4 * scale);
    const middle = clamp((flag.lines[0] + flag.lines.at(-1)) / 2, box.left + half, box.left + box.width - half);
    context.canvas.flags.push({ first, left: middle - half, right: middle + half, top: box.top - 16 * scale, bottom: box.top - 2 * scale });
    context.beginPath();
    context.roundRect(middle - half, box.top - 16 * scale, 2 * half, 14 * scale, 4 * scale);
    context.fill();
    context.fillStyle = colour("card");
    context.fillText(text, middle, box.top - 8.5 * scale);
  }
  context.restore();
}

// Return the incidents in view, from left to right; overlapping ones share a flag in the colour of the worst.
function groupedFlags(positionOf, distance) {
  const flags = [];
  const inView = content.incidents
    .map(({ told }, index) => ({ step: told.first_step, level: told.level, number: index + 1 }))
    .filter(({ step }) => step >= view.range[0] && step <= view.range[1])
    .sort((a, b) => a.step - b.step);
  for (const { step, number, level } of inView) {
    const x = positionOf(step);
    if (!(x - flags.at(-1)?.lines.at(-1) < distance)) flags.push({ numbers: [], lines: [], level });
    const flag = flags.at(-1);
    flag.lines.push(x);
    flag.numbers.push(number);
    if (level === "ERROR" || flag.level === "INFO") flag.level = level;
  }
  return flags;
}

// A click on a flag opens the steps around its incident.
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
  const node = document.querySelectorAll(".incident")[flag.first - 1];
  const around = node.querySelector(".around");
  if (around) around.open = true;
  goTo(node);
});

// Zoom to the samples around a step, of which each can be seen.
function zoomTo(step) {
  const { steps } = run.measured;
  const [low, high] = [-20, 20].map((reach) => steps[clamp(nearestIndex(steps, step) + reach, 0, steps.length - 1)]);
  setRange(Math.min(low, step) - 0.5, Math.max(high, step) + 0.5);
  setStep(step, null);
  goTo(document.querySelector("#norm, #layers, #incidents"));
}
