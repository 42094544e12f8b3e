// The alerts as a list, the most severe first and those of one title together; their numbers are the flags on every time axis.

const LEVEL_WORDS = { ERROR: "Error", WARN: "Warning", INFO: "Info" };

function alertsSection() {
  const list = content.alerts.map((alert, index) => {
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
        element("div", { class: "alert-head" }, element("strong", {}, alert.title), element("span", { class: "level" }, LEVEL_WORDS[alert.level] ?? alert.level), go),
        element("p", {}, alert.text),
        findingOf(alert),
      ),
    );
  });
  const shown = list.slice(0, 8);
  const rest = list.slice(8);
  const node = element("section", { class: "card wide", id: "alerts" }, element("h2", {}, "Alerts"), element("ol", { class: "alerts" }, shown));
  if (rest.length) {
    const more = element("button", { type: "button", class: "quiet", onclick: () => { node.querySelector("ol").append(...rest); more.remove(); } }, `Show ${rest.length} more`);
    node.append(more);
  }
  return node;
}

// The first bad operation, where the step was run again: what, where, and from there to where.
function findingOf({ finding }) {
  if (!finding.length) return null;
  return element("dl", { class: "finding", "aria-label": "The first bad operation" }, finding.flatMap(([name, value]) => [element("dt", {}, name), element("dd", { class: name.toLowerCase() }, value)]));
}

// A twentieth of the run around a step, but never less than a few flushes.
function zoomTo(step) {
  const reach = Math.max((FULL_RANGE[1] - FULL_RANGE[0]) / 20, 4 * typicalSpacing(content.steps));
  setRange(step - reach, step + reach);
  setStep(step, null);
  (document.getElementById("norm") ?? document.getElementById("layers"))?.scrollIntoView({ behavior: "smooth", block: "start" });
}
