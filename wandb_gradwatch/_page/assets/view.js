// What all pictures share: the range of steps, the step under the pointer, and the chosen layers.

const lastStep = Math.max(1, ...[content.steps, ...content.own.axes].map((steps) => steps[steps.length - 1] ?? 1));

// The first row stands for the steps up to it, as every other row does: it gets the usual width of one.
function fullRange() {
  if (content.steps.length < 2) return [lastStep - 1, lastStep + 1];
  return [Math.max(Math.min(0, content.steps[0] - 1), content.steps[0] - typicalSpacing(content.steps)), lastStep];
}

// The median distance of neighbours.
function typicalSpacing(steps) {
  const spaces = steps.slice(1).map((step, index) => step - steps[index]).sort((a, b) => a - b);
  return spaces.length ? spaces[spaces.length >> 1] : 1;
}

const FULL_RANGE = fullRange();

const view = {
  range: [...FULL_RANGE],
  step: null, // under the pointer of any picture
  chosen: new Set(), // indices of names
  metric: null, // shown by the layers' pictures
};

// A page that reloads while its run goes on comes back as it was left.
const MEMORY = "gradwatch:" + content.run.id;

function remembered() {
  try {
    return JSON.parse(sessionStorage.getItem(MEMORY)) ?? {};
  } catch {
    return {}; // some browsers give files no storage: the page starts afresh
  }
}

function remember() {
  const chosen = [...view.chosen].map((name) => content.names[name]);
  const state = { range: isZoomed() ? view.range : null, chosen, metric: view.metric, theme: chosenTheme };
  try {
    sessionStorage.setItem(MEMORY, JSON.stringify(state));
  } catch {
    // as above
  }
}

window.addEventListener("pagehide", remember);
const memory = remembered();
chosenTheme = memory.theme ?? null;
document.documentElement.dataset.theme = isDark() ? "dark" : "light";
if (memory.range) view.range = memory.range.map((step) => clamp(step, ...FULL_RANGE));

const listeners = { range: [], step: [], chosen: [], metric: [] };

function on(what, listener) {
  listeners[what].push(listener);
}

function announce(what, source = null) {
  for (const listener of listeners[what]) listener(source);
}

function setRange(low, high) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return;
  low = clamp(low, FULL_RANGE[0], FULL_RANGE[1]);
  high = clamp(high, FULL_RANGE[0], FULL_RANGE[1]);
  if (high - low < 1e-9 * (FULL_RANGE[1] - FULL_RANGE[0])) return;
  if (low === view.range[0] && high === view.range[1]) return;
  view.range = [low, high];
  announce("range");
}

function resetRange() {
  setRange(...FULL_RANGE);
}

function isZoomed() {
  return view.range[0] !== FULL_RANGE[0] || view.range[1] !== FULL_RANGE[1];
}

function setStep(step, source) {
  if (step === view.step) return;
  view.step = step;
  announce("step", source);
}

const MAX_CHOSEN = 24; // more lines than this tell nothing

function toggleChosen(name) {
  if (view.chosen.has(name)) view.chosen.delete(name);
  else if (view.chosen.size < MAX_CHOSEN) view.chosen.add(name);
  announce("chosen");
}

function chosenColour(name) {
  return lineColour([...view.chosen].indexOf(name));
}

function setMetric(key) {
  view.metric = key;
  announce("metric");
}

// Index of the last element of an ascending list that is <= value; -1 where there is none.
function lastAtMost(list, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearestIndex(list, value) {
  const left = lastAtMost(list, value);
  if (left < 0) return 0;
  if (left + 1 < list.length && list[left + 1] - value < value - list[left]) return left + 1;
  return left;
}
