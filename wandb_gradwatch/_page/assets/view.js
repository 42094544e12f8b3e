// The state that all pictures share: the range of steps, the step under the pointer, and the horizontal axis.

// From the first step to the last of the gradients and of the user's scalars; a step is as wide as 1.
function fullRange() {
  const all = [run.measured?.steps ?? content.steps, content.steps, ...content.own.axes].filter((steps) => steps.length);
  if (all.length === 0) return [0.5, 1.5];
  return [Math.min(...all.map((steps) => steps[0])) - 0.5, Math.max(...all.map((steps) => steps[steps.length - 1])) + 0.5];
}

let FULL_RANGE = [0, 1];

// All positions are kept in optimizer steps, and drawn at their position on the horizontal axis.
const STEP_AXIS = { label: "optimizer step", isTime: false, steps: [0, 1], values: [0, 1] };

const placeOf = (step) => between(view.axis.steps, view.axis.values, step);
const stepAtPlace = (place) => between(view.axis.values, view.axis.steps, place);

// Return the step at a part of the width, from 0 to 1.
function stepAcross(part) {
  const [low, high] = view.range.map(placeOf);
  return stepAtPlace(low + part * (high - low));
}

// Interpolate linearly between knots, and extrapolate before the first and after the last.
function between(from, to, value) {
  const left = clamp(lastAtMost(from, value), 0, from.length - 2);
  return to[left] + ((value - from[left]) / (from[left + 1] - from[left])) * (to[left + 1] - to[left]);
}

// Return the ticks of the range in view: the steps at which the axis has round values, with their labels.
function axisTicks(most) {
  const [low, high] = view.range.map(placeOf);
  const { isTime } = view.axis;
  const places = isTime ? timeTicks(low, high, most) : linearTicks(low, high, most);
  const shown = view.axis === STEP_AXIS ? places.filter(Number.isInteger) : places;
  return shown.map((place) => ({ step: stepAtPlace(place), text: isTime ? formatDuration(place) : whole(place) }));
}

function stepText(step) {
  const text = atStep(step);
  if (view.axis === STEP_AXIS) return text;
  const place = placeOf(step);
  return `${text} · ${view.axis.isTime ? formatDuration(place) : `${view.axis.label} ${formatNumber(place, 4)}`}`;
}

const view = {
  range: [...FULL_RANGE],
  step: null, // the step under the pointer of any picture
  axis: STEP_AXIS,
  opened: new Set(), // opened branches of the tree of layers
};

// The view is kept in the URL, so that a reloaded page, or a shared link, shows it again.
function viewOfAddress() {
  try {
    return JSON.parse(decodeURIComponent(location.hash.slice(1))) ?? {};
  } catch {
    return {}; // the URL has no view of this page
  }
}

function viewToAddress() {
  const grids = Object.fromEntries(run.grids.filter((grid) => grid.isTouched).map((grid) => [grid.key, grid.state()]));
  const state = { range: isZoomed() ? view.range : null, grids, axis: view.axis === STEP_AXIS ? null : view.axis.label, theme: chosenTheme };
  history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
}

// New ranges of the page are set to their full extent; the current view is kept if possible.
function resetView() {
  const before = viewOfAddress();
  FULL_RANGE = fullRange();
  view.range = Array.isArray(before.range) ? before.range.map((step) => clamp(Number(step), ...FULL_RANGE)) : [...FULL_RANGE];
  if (!(view.range[1] > view.range[0])) view.range = [...FULL_RANGE];
  view.step = null;
  view.axis = content.axes.find(({ label }) => label === before.axis) ?? STEP_AXIS;
  chosenTheme = before.theme ?? null;
  showTheme();
  for (const list of Object.values(listeners)) list.length = 0;
}

const listeners = { range: [], step: [], axis: [], grid: [], theme: [] };

function on(what, listener) {
  listeners[what].push(listener);
}

function announce(what, source = null) {
  for (const listener of listeners[what]) listener(source);
  if (what !== "step") viewToAddress();
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

const isZoomed = () => view.range[0] !== FULL_RANGE[0] || view.range[1] !== FULL_RANGE[1];

function setAxis(label) {
  view.axis = content.axes.find((axis) => axis.label === label) ?? STEP_AXIS;
  announce("axis");
}

function setStep(step, source) {
  if (step === view.step) return;
  view.step = step;
  announce("step", source);
}

// Return the index of the last element of an ascending list that is <= value; -1 if there is none.
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
