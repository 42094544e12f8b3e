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

const severity = ({ told }) => ["INFO", "WARN", "ERROR"].indexOf(told.level);
const MOST_OPEN = 3; // cards whose strip is not folded

// One card per incident, the worst first. The numbers are those of the flags.
function incidentsSection() {
  const numbered = content.incidents.map((incident, index) => ({ ...incident, number: index + 1 }));
  const cards = numbered.sort((a, b) => severity(b) - severity(a)).map((incident, place) => incidentCard(incident, place < MOST_OPEN && severity(incident) >= severity(numbered[0])));
  return element("section", { class: "card", id: "incidents" }, element("h2", {}, plural(cards.length, "incident")), element("ol", { class: "incidents" }, cards));
}

function incidentCard({ headline, text, told, number }, isOpen) {
  const { level, first_step: first, last_step: last, recovered_step: recovered, unmeasured_from: from, rank, layers } = told;
  const drawn = run.layers.metric ? layers.map(({ name }) => run.layers.names.indexOf(name)).filter((name) => name >= 0) : [];
  const end = recovered === null ? `seen until ${atStep(last)}` : `last seen at ${atStep(last)}, usual again at ${atStep(recovered)}`;
  const known = layers.some(({ value }) => value !== null) ? ["value", "usual"] : [];
  const parts = {
    "Not measured": from !== null && from < first ? `${stepRange(from, first - 1)}, in which it may have begun` : "",
    Layers: layers.length ? scrolled(table(["layer", ...known], layers.map((layer) => ["name", ...known].map((column) => layer[column])))) : "",
    Evidence: told.evidence,
    Remedy: told.remedy,
  };
  const details = Object.entries(parts).flatMap(([name, part]) => (part ? [element("dt", {}, name), element("dd", {}, part)] : []));
  const host = element("div", { class: "chart" });
  const folded = element("details", { class: "told" }, element("summary", {}, "Evidence and remedy"), isOpen ? null : host, element("dl", {}, details));
  if (hasRows()) {
    const names = [...new Set([...drawn, ...(run.layers.metric ? run.layers.byInterest() : [])])].slice(0, MOST_GUILTY);
    queue(() => new Strip(host, `Steps around incident ${number}`, { names, first, range: [first - STEPS_BEFORE - 0.5, first + STEPS_AFTER + 0.5] }));
  }
  return element(
    "li",
    { class: "incident " + level.toLowerCase(), id: `incident-${number}` },
    element("span", { class: "flag" }, String(number)),
    element(
      "div",
      {},
      element("strong", {}, headline),
      told.fact ? element("p", { class: "fact" }, told.fact) : null,
      element(
        "div",
        { class: "links" },
        element("span", { class: "level" }, level),
        element("span", {}, end + (rank === null ? "" : `, on rank ${rank}`)),
        link("zoom to " + atStep(first), () => zoomTo(first)),
        drawn.length ? link(`show ${plural(drawn.length, "layer")}`, () => (run.layers.choose(drawn), goTo(document.getElementById("layers")))) : null,
        copyButton("text", text),
        copyButton("JSON", JSON.stringify(told, null, 2)),
      ),
      isOpen ? host : null,
      details.length || !isOpen ? folded : null,
    ),
  );
}

// Without incidents: the steps in view.
function wholeRunSection() {
  const host = element("div", { class: "chart" });
  queue(() => new Strip(host, "The run", { names: run.layers.metric ? run.layers.byInterest().slice(0, MOST_GUILTY) : [] }));
  return element("section", { class: "card", id: "run" }, element("h2", {}, "The run, and the layers that changed most"), host);
}

// Draw the flags of the incidents at the top edge of a plot, their lines through it, and a light colour on the measured
// steps of each, down to a depth: no further than the edge where colours have a meaning. `box` is in device pixels.
function drawFlags(context, box, positionOf, depth = box.height, range = view.range) {
  const scale = devicePixelRatio;
  context.save();
  context.globalAlpha = depth < box.height ? 0.5 : 0.12;
  for (const { told } of content.incidents) {
    context.fillStyle = levelColour(told.level);
    const [low, high] = [Math.max(told.first_step, range[0]), Math.min(told.recovered_step === null ? told.last_step : told.recovered_step - 1, range[1])];
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
  const inView = content.incidents.map(({ told }, index) => ({ step: told.first_step, level: told.level, text: String(index + 1) })).filter(({ step }) => step >= range[0] && step <= range[1]);
  let end = -Infinity; // of the flag before: one that has no room has a line alone
  for (const { step, level, text } of inView.sort((a, b) => a.step - b.step)) {
    const [x, half] = [Math.round(positionOf(step)) + 0.5, Math.max(8 * scale, context.measureText(text).width / 2 + 4 * scale)];
    context.strokeStyle = context.fillStyle = levelColour(level);
    context.beginPath();
    context.moveTo(x, box.top);
    context.lineTo(x, box.top + box.height);
    context.stroke();
    if (x - half < end) continue;
    end = x + half;
    context.beginPath();
    context.roundRect(x - half, box.top - 16 * scale, 2 * half, 14 * scale, 4 * scale);
    context.fill();
    context.fillStyle = colour("card");
    context.fillText(text, x, box.top - 8.5 * scale);
  }
  context.restore();
}

// Zoom to the samples around a step, of which each can be seen.
function zoomTo(step) {
  const { steps } = run.measured;
  const [low, high] = [-20, 20].map((reach) => steps[clamp(nearestIndex(steps, step) + reach, 0, steps.length - 1)]);
  setRange(Math.min(low, step) - 0.5, Math.max(high, step) + 0.5);
  setStep(step, null);
  goTo(document.querySelector("#layers, #incidents"));
}
