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
    about.commit && `commit ${about.commit.slice(0, 10)}`,
    about.span && stepRange(...about.span),
    run.layers.names.length ? plural(run.layers.names.length, "layer") : null,
    plural(about.numFlushes, "flush", "flushes"),
    ...numbers(),
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

// Numbers about the whole run.
function numbers() {
  const known = (key) => (globalValues(key) ?? []).filter((value) => value !== null);
  const sum = (key) => known(key).reduce((total, value) => total + value, 0);
  const nonFinite = sum("num_nan") + sum("num_inf");
  return [
    nonFinite ? `${formatNumber(nonFinite)} NaN or Inf` : null,
    sum("clip_ratio") ? `${formatShare(sum("clip_ratio") / known("clip_ratio").length)} of the steps clipped, on average` : null,
    sum("num_skipped_steps") ? `${plural(sum("num_skipped_steps"), "step")} skipped by the loss scaler` : null,
    sum("num_guarded_steps") ? `${plural(sum("num_guarded_steps"), "step")} withheld by the guard` : null,
    has("overhead_ratio") ? `overhead ${formatShare(known("overhead_ratio").at(-1))}` : null,
  ];
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
  const range = content.steps.length > 1 ? [element("span", { class: "toolbar-label" }, "Steps"), low, element("span", {}, "–"), high, reset] : [];
  return element("nav", { class: "toolbar", "aria-label": "Range of steps, and theme" }, element("div", { class: "range" }, range), theme);
}

function chartCard(key, parts) {
  const used = parts.filter((part) => part.series.length);
  if (used.length === 0) return null;
  const { node, picture } = card(key);
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
  // The norm of every sample; the norm that the optimizer received is not kept for each.
  const norms = has("grad_norm") || has("grad_norm_max") ? [{ label: "before clipping", xs: run.measured.steps, values: run.measured.norms, bad: run.measured.bad, marksNonFinite: true, colour: lineColour(0), width: 2 }] : [];
  if (content.received) norms.push({ label: "received by the optimizer", ...unpackedLine(content.received), colour: lineColour(2), size: 3 });
  // A loss that the user logs is drawn above, at every row that has it.
  const loss = run.own.some((one) => one.role === "loss") ? [] : globalSeries("loss", "loss", 0);
  return chartCard("norm", [
    { title: "Loss", caption: true, height: 130, log: loss.some((one) => spansDecades(one.values)), series: loss },
    { log: true, height: 300, series: norms },
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
  const forecast = (what, formats = FORMATS) => formats.flatMap(([key, label, place]) => globalSeries(`${key}_${what}`, label, place));
  const cards = {
    precision: [
      { ...SHARE, ...SMALL, title: "Share that would lose digits", series: forecast("underflow_ratio") },
      { ...SHARE, ...SMALL, title: "Share that would become 0", none: "No element would become 0 in any of these formats.", series: forecast("flush_ratio") },
      { ...SMALL, title: "Octaves from the largest element to overflow", series: forecast("headroom", FORMATS.filter(([key]) => key !== "bf16")) },
    ],
    quantiles: [{ log: true, series: sizes }],
    dead: [{ ...SHARE, series: globalSeries("dead_ratio", "of all elements", 0) }],
    nonfinite: [{ none: "No element was NaN or Inf.", canLog: false, xs: run.measured.steps, starts: run.measured.steps, series: has("num_nan") || has("num_inf") ? [{ label: "NaN and Inf", values: run.measured.bad, colour: lineColour(3), kind: "bars" }] : [] }],
    scale: [{ log: true, height: 170, series: scale }, skipped, withheld],
    spread: [{ canLog: false, series: [...globalSeries("grad_std", "deviation", 5), ...globalSeries("grad_mean", "mean", 0)] }],
    overhead: [{ ...SHARE, series: globalSeries("overhead_ratio", "share of the time since watch()", 4) }, { ...SMALL, title: "Steps from one measured to the next", series: globalSeries("sample_every", "sample_every", 5) }],
  };
  return Object.entries(cards).map(([key, parts]) => chartCard(key, parts));
}

// One of the user's own scalars, by choice.
function ownCard() {
  if (run.own.length === 0) return null;
  const { node, picture } = card("own");
  const host = element("div", { class: "chart" });
  const select = element("select", { "aria-label": "Metric", onchange: () => draw() }, run.own.map((one, index) => element("option", { value: index }, one.key)));
  const draw = () => {
    const one = run.own[Number(select.value)];
    host.replaceChildren();
    new LineChart(host, { label: one.key, xs: one.xs, measured: null, series: [{ label: one.key, values: one.values, colour: lineColour(0), marksNonFinite: true }], log: spansDecades(one.values), height: 230 });
  };
  picture.append(element("div", { class: "controls" }, select), host);
  if (content.own.left) picture.append(hint(`${content.own.left} more keys are not in this page.`));
  queue(draw);
  return node;
}

// Return whether a line needs a logarithmic scale: it is positive, and its ends differ by a factor of 100.
function spansDecades(values) {
  const known = values.filter(Number.isFinite);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  return low > 0 && known.reduce((most, value) => Math.max(most, value), 0) > 100 * low;
}

function emptyNotice() {
  const { numRows } = content.run;
  const text = numRows ? `This run has ${plural(numRows, "history row")}, but none of them was logged by wandb_gradwatch. Call wandb_gradwatch.watch(model) after wandb.init(), before the training loop.` : "This run has no history rows yet. If it is still training, write this page again in a moment.";
  return element("section", { class: "card notice", id: "empty" }, element("h2", {}, "No gradients here"), element("p", {}, text));
}

// The settings of the run; secrets are hidden before they come here.
function settingsCard() {
  if (!content.settings.length) return null;
  const rows = content.settings.map(([key, value]) => [key, String(value)]);
  return element("section", { class: "card", id: "settings" }, element("h2", {}, "Settings"), scrolled(table(["setting", "value"], rows)));
}

// First what happened, then every layer; all other pictures are folded, and drawn when they are unfolded.
function runParts() {
  const parts = [toolbar(), header(), ...content.notes.map((note) => element("p", { class: "note" }, note))];
  if (!hasRows()) parts.push(emptyNotice());
  if (content.incidents.length) parts.push(incidentsSection());
  else if (hasRows()) parts.push(wholeRunSection());
  if (run.layers.metric) parts.push(gridCard(run.layers));
  const others = hasRows() ? [ownCard(), normCard(), content.histograms.items.length ? histogramCard() : null, ...familyCards(), element("div", { class: "pair" }, smallCards())] : [];
  others.push(settingsCard());
  if (others.some(Boolean)) parts.push(element("details", { id: "more" }, element("summary", {}, "More"), others.filter(Boolean)));
  return [...parts, footer()];
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
  return element("footer", {}, element("p", {}, `Norms are those of the finite elements, before clipping unless a title says otherwise; a gap means that the value is missing or was not kept, not that it is zero; hatched steps were not measured.${pooled} Read from ${content.run.file} by wandb_gradwatch.`));
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
