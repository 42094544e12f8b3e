// Builds the page from top to bottom.

const waiting = []; // pictures are drawn when their hosts are in the page and have a width

const queue = (draw) => waiting.push(draw);

const globalValues = (key) => content.globals["gradwatch/" + key];
const has = (key) => globalValues(key) !== undefined;
const globalSeries = (key, label, place, more = {}) => (has(key) ? [{ label, values: globalValues(key), colour: lineColour(place), ...more }] : []);

const MOODS = { ok: "good", warn: "careful", error: "bad", unknown: "" }; // by the status of a verdict

function header() {
  const { run: about } = content;
  const facts = [
    about.project,
    about.id === about.name ? null : about.id,
    about.startedAt && new Date(about.startedAt).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }),
    about.span && stepRange(...about.span),
    run.layers.names.length ? plural(run.layers.names.length, "layer") : null,
    plural(about.numFlushes, "flush", "flushes"),
  ].filter(Boolean);
  return element(
    "header",
    {},
    element("div", { class: "brand" }, "gradwatch"),
    element("h1", {}, about.name, about.finished ? "" : element("span", { class: "pill open" }, "no end record")),
    hasRows() ? element("p", { class: "verdict " + MOODS[content.verdict.status] }, content.verdict.sentence + ".") : null,
    element("p", { class: "facts" }, facts.map((fact) => element("span", {}, fact)), rowAge()),
  );
}

const hasRows = () => content.steps.length > 0;

function toolbar() {
  const low = element("input", { type: "number", "aria-label": "First step" });
  const high = element("input", { type: "number", "aria-label": "Last step" });
  const reset = element("button", { type: "button", class: "quiet", onclick: resetRange }, "Whole run");
  const theme = element("button", { type: "button", class: "quiet", id: "theme", onclick: () => chooseTheme(isDark() ? "light" : "dark") });
  const show = () => {
    low.value = Math.ceil(view.range[0]);
    high.value = Math.floor(view.range[1]);
    reset.disabled = !isZoomed();
  };
  const name = () => (theme.textContent = isDark() ? "Light" : "Dark");
  for (const input of [low, high]) input.addEventListener("change", () => { setRange(Number(low.value), Number(high.value)); show(); });
  on("range", show);
  on("theme", name);
  show();
  name();
  const axes = element("select", { "aria-label": "Horizontal axis" }, [STEP_AXIS, ...content.axes].map(({ label }) => element("option", { value: label }, "By " + label)));
  axes.value = view.axis.label;
  axes.addEventListener("change", () => setAxis(axes.value));
  const range = content.steps.length > 1 ? [element("span", { class: "toolbar-label" }, "Steps"), low, element("span", {}, "–"), high, reset, content.axes.length ? axes : null] : [];
  return element("nav", { class: "toolbar", "aria-label": "Range of steps, horizontal axis and theme" }, element("div", { class: "range" }, range), theme);
}

function tiles() {
  const known = (key) => (globalValues(key) ?? []).filter((value) => value !== null);
  const last = (key) => known(key).at(-1) ?? null;
  const sum = (key) => known(key).reduce((total, value) => total + value, 0);
  const mean = (key) => (known(key).length ? sum(key) / known(key).length : null);
  const [first] = content.incidents.map(({ told }) => told).sort((a, b) => a.first_step - b.first_step);
  const nonFinite = sum("num_nan") + sum("num_inf");
  const norm = globalValues("grad_norm")?.at(-1); // missing if no element is finite; an earlier row's norm is not used
  const bad = last("num_nan") + last("num_inf") > 0;
  const ofWhat = bad ? (norm == null ? "no element was finite at the last flush" : "of the finite elements alone, at the last flush") : "at the last flush, before clipping";
  return element(
    "section",
    { class: "tiles", "aria-label": "At a glance" },
    tile("Incidents", String(content.incidents.length), first ? `first: ${first.title}, ${atStep(first.first_step)}` : "in the steps measured", MOODS[content.verdict.status]),
    has("grad_norm") ? tile("Gradient norm", formatNumber(norm), ofWhat) : null,
    has("clip_ratio") ? tile("Clipped", formatShare(mean("clip_ratio")), "of the steps, on average") : null,
    has("num_nan") || has("num_inf") ? tile("Non-finite", formatNumber(nonFinite), "NaN and Inf elements in the run", nonFinite > 0 ? "bad" : "good") : null,
    has("grad_scale") ? tile("Skipped", formatNumber(sum("num_skipped_steps")), "steps skipped by the loss scaler") : null,
    sum("num_guarded_steps") > 0 ? tile("Withheld", formatNumber(sum("num_guarded_steps")), "steps not applied by the guard", "careful") : null,
    has("overhead_ratio") ? tile("Overhead", formatShare(last("overhead_ratio")), overheadNote(last("overhead_ratio"))) : null,
  );
}

function overheadNote(share) {
  const { seconds } = content.run;
  return "of the time since watch()" + (seconds === null ? "" : `: about ${formatDuration(Number((share * seconds).toPrecision(2)))}`);
}

function tile(label, value, note, mood = "") {
  return element("div", { class: "tile " + mood }, element("div", { class: "tile-label" }, label), element("div", { class: "tile-value" }, value), element("div", { class: "tile-note" }, note));
}

function chartCard(key, parts, options = {}) {
  const used = parts.filter((part) => part.series.length);
  if (used.length === 0) return null;
  const { node, picture } = card(key, options);
  for (const part of used) {
    if (part.none && part.series.every((one) => one.values.every((value) => !value))) {
      picture.append(element("p", { class: "never" }, part.none));
      continue;
    }
    const host = element("div", { class: "chart" });
    picture.append(part.caption ? element("p", { class: "caption" }, part.title) : "", host);
    queue(() => new LineChart(host, { label: part.title ?? content.words[key].title, xs: content.steps, starts: content.starts, ...part }));
  }
  return node;
}

// Parts of a card: shares, whose axis ends at 1 if they are bars, and parts with their own caption.
const SHARE = { canLog: false, format: formatShare, tick: formatShareTick };
const SMALL = { caption: true, canLog: false, height: 110 };
const SHARE_OF_STEPS = { ...SHARE, ...SMALL, limits: [0, 1.05] };

function normCard() {
  // The norm of every sample; the norm that the optimizer received is kept for the last sample of each row.
  const received = globalValues("grad_norm_clipped");
  const [xs, ...lines] = uPlot.join([[run.measured.steps, run.measured.norms], [content.steps, received ?? content.steps]].map((line) => line.map((values) => Array.from(values))));
  const norms = has("grad_norm") || has("grad_norm_max") ? [{ label: "before clipping", values: lines[0], colour: lineColour(0), width: 2 }] : [];
  if (received) norms.push({ label: "received by the optimizer", values: lines[1], colour: lineColour(2), size: 3 });
  // A loss that the user logs is drawn above, at every row that has it.
  const loss = run.own.some((one) => one.role === "loss") ? [] : globalSeries("loss", "loss", 0);
  return chartCard("norm", [
    { title: "Loss", caption: true, height: 130, log: loss.some((one) => spansDecades(one.values)), series: loss },
    { log: true, height: 300, xs, series: norms },
    ...totalParts(),
    { ...SHARE_OF_STEPS, title: "Steps whose gradient something else than clipping changed after the backward", series: globalSeries("changed_ratio", "steps changed", 4, { kind: "bars" }) },
    { ...SHARE_OF_STEPS, title: "Clip ratio", none: "No step was clipped.", series: globalSeries("clip_ratio", "steps clipped", 3, { kind: "bars" }) },
  ]);
}

// One line per model, or per optimizer if several step in turn.
function totalParts() {
  const of = (key, more) => content.totals.flatMap((name, index) => globalSeries(`${key}/${name}`, name, index, more));
  const parts = [{ title: "Largest norm of the window, each by itself", series: of("grad_norm_total_max", { kind: "tops" }) }, { title: "Norm before clipping, each by itself", series: of("grad_norm_total") }];
  return content.totals.length > 1 ? parts.map((part) => ({ ...part, caption: true, log: true, height: 200 })) : [];
}

// bf16 overflows where float32 does: its headroom would compress the other lines.
const FORMATS = [["fp16", "fp16", 0], ["bf16", "bf16", 4], ["fp8_e5m2", "fp8 e5m2", 3], ["fp8_e4m3", "fp8 e4m3", 1]];

function precisionCard() {
  const of = (what, formats = FORMATS) => formats.flatMap(([key, label, place]) => globalSeries(`${key}_${what}`, label, place));
  const chart = { ...SMALL, height: 130 };
  return chartCard("precision", [
    { ...SHARE, ...chart, title: "Share that would lose digits", series: of("underflow_ratio") },
    { ...SHARE, ...chart, title: "Share that would become 0", none: "No element would become 0 in any of these formats.", series: of("flush_ratio") },
    { ...chart, title: "Octaves from the largest element to overflow", series: of("headroom", FORMATS.filter(([key]) => key !== "bf16")) },
  ]);
}

function smallCards() {
  const isAbove0 = (key) => globalValues(key)?.some((value) => value > 0);
  const bars = (key, label, place) => globalSeries(key, label, place, { kind: "bars" });
  const scale = globalSeries("grad_scale", "loss scale", 2);
  const skipped = { ...SMALL, caption: false, title: "Skipped steps", none: "No step was skipped.", series: scale.length ? bars("num_skipped_steps", "skipped steps", 3) : [] };
  const withheld = { ...skipped, title: "Withheld steps", none: null, series: isAbove0("num_guarded_steps") ? bars("num_guarded_steps", "withheld by the guard", 1) : [] };
  const sizes = [
    ...globalSeries("grad_abs_max", "largest", 1, { width: 1.25, dash: [4, 3] }),
    ...globalSeries("grad_abs_p99", "99th percentile", 5, { width: 1 }),
    ...globalSeries("grad_abs_p50", "median", 0, { width: 2 }),
    ...globalSeries("grad_abs_p01", "1st percentile", 5, { width: 1 }),
  ];
  const cards = {
    quantiles: [{ log: true, series: sizes }],
    dead: [{ ...SHARE, series: globalSeries("dead_ratio", "of all elements", 0) }],
    nonfinite: [{ none: "No element was NaN or Inf.", canLog: false, xs: run.measured.steps, starts: run.measured.steps, series: has("num_nan") || has("num_inf") ? [{ label: "NaN and Inf", values: run.measured.bad, colour: lineColour(3), kind: "bars" }] : [] }],
    scale: [{ log: true, height: 170, series: scale }, skipped, withheld],
    spread: [{ canLog: false, series: [...globalSeries("grad_std", "deviation", 5), ...globalSeries("grad_mean", "mean", 0)] }],
    overhead: [{ ...SHARE, series: globalSeries("overhead_ratio", "share of the time since watch()", 4) }, { ...SMALL, title: "Steps from one measured to the next", series: globalSeries("sample_every", "sample_every", 5) }],
  };
  return Object.entries(cards).map(([key, parts]) => chartCard(key, parts, { isWide: false }));
}

// The user's own scalars: the loss and the learning rate are shown immediately, the others on request.
function ownCard() {
  if (run.own.length === 0) return null;
  const { node, picture } = card("own");
  const ofRole = (role, most) => run.own.filter((one) => one.role === role).slice(0, most);
  const first = [...ofRole("loss", 2), ...ofRole("rate", 1)];
  if (first.length === 0) first.push(run.own[0]);
  const draw = (one, host) => {
    const colour = lineColour(one.role === "rate" ? 2 : 0);
    const chart = new LineChart(host, { label: one.key, xs: one.xs, measured: null, series: [{ label: one.key, values: one.values, colour, marksNonFinite: true }], log: spansDecades(one.values), height: one.role === "rate" ? 120 : 230 });
    const bad = one.values.filter((value) => !Number.isFinite(value)).length;
    if (bad) chart.legend.after(element("p", { class: "hint" }, swatch(null, "block nonfinite"), ` NaN or Inf at ${plural(bad, "point")}`));
  };
  for (const one of first) {
    const host = element("div", { class: "chart" });
    picture.append(host);
    queue(() => draw(one, host));
  }
  const rest = run.own.filter((one) => !first.includes(one));
  if (rest.length) {
    const host = element("div", { class: "chart" });
    const select = element("select", { "aria-label": "Another metric" }, element("option", { value: "" }, "Show another metric"), rest.map((one, index) => element("option", { value: index }, one.key)));
    select.addEventListener("change", () => {
      host.replaceChildren();
      if (select.value !== "") draw(rest[Number(select.value)], host);
    });
    picture.append(element("div", { class: "controls" }, select), host);
  }
  if (content.own.left) picture.append(hint(`${content.own.left} more keys are not in this page.`));
  return node;
}

// Return whether a line needs a logarithmic scale: it is positive, and its ends differ by a factor of 100.
function spansDecades(values) {
  const known = values.filter(Number.isFinite);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  return low > 0 && known.reduce((most, value) => Math.max(most, value), 0) > 100 * low;
}

function absent() {
  const missing = [
    [!has("grad_scale"), "loss scale (no GradScaler was seen)"],
    [content.histograms.items.length === 0, "histograms"],
    [content.flightRecorder === null, "a flight recorder table (it is written when an error is raised)"],
    [!has("overhead_ratio"), "overhead"],
  ].filter(([isMissing]) => isMissing);
  return missing.length ? element("p", { class: "absent" }, "Not in this run: " + missing.map(([, text]) => text).join("; ") + ".") : null;
}

function emptyNotice() {
  const rows = content.run.numRows;
  const text =
    rows === 0
      ? "This run has no history rows yet. If it is still training, write this page again in a moment."
      : `This run has ${plural(rows, "history row")}, but none of them was logged by wandb_gradwatch. Call wandb_gradwatch.watch(model) after wandb.init(), before the training loop; rows appear every log_every steps.`;
  return element("section", { class: "card wide notice", id: "empty" }, element("h2", {}, "No gradients here"), element("p", {}, text));
}

function runParts() {
  const parts = [toolbar(), header(), ...content.notes.map((note) => element("p", { class: "note" }, note))];
  if (hasRows()) parts.push(tiles(), ownCard());
  else parts.push(emptyNotice());
  if (content.incidents.length) parts.push(incidentsSection());
  if (hasRows()) {
    parts.push(normCard());
    if (run.layers.metric) parts.push(layersCard(), linesCard());
    if (content.histograms.items.length) parts.push(histogramCard());
    parts.push(...familyCards(), precisionCard(), element("div", { class: "pair" }, smallCards()));
  }
  if (content.flightRecorder !== null) parts.push(recorderSection());
  parts.push(hasRows() ? absent() : null, footer());
  return parts;
}

function build() {
  resetView();
  waiting.length = 0;
  forgetPictures();
  const parts = content.preview ? previewParts() : content.pairs ? comparisonParts() : runParts();
  page.replaceChildren(...parts.filter(Boolean));
  for (const draw of waiting) draw();
}

function footer() {
  const pooled = content.pooledPoints > 1 ? ` Each point of a line is the largest of ${content.pooledPoints} rows.` : "";
  return element("footer", {}, element("p", {}, `Norms are those of the finite elements, before clipping unless a title says otherwise; a gap means that the value is missing or was not kept, not that it is zero; hatched steps were not measured.${pooled} Read from ${content.run.file} by wandb_gradwatch. Lines: uPlot (MIT).`));
}

// If drawing fails, the page shows the error instead of staying blank; tests read data-state.
load(content, document.getElementById("arrays").textContent)
  .then(() => {
    build();
    document.documentElement.dataset.state = "drawn";
    return follow();
  })
  .catch((error) => {
    document.documentElement.dataset.state = "failed";
    page.append(element("p", { class: "note" }, "This page could not be drawn: " + error));
    throw error;
  });
