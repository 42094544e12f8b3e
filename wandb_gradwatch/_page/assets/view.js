// The state that all pictures share: the range of steps and the step under the pointer.

// From the first step to the last of the gradients and of the user's scalars; a step is as wide as 1.
function fullRange() {
  const all = [run.measured?.steps ?? content.steps, content.steps, ...content.own.axes].filter((steps) => steps.length);
  if (all.length === 0) return [0.5, 1.5];
  return [Math.min(...all.map((steps) => steps[0])) - 0.5, Math.max(...all.map((steps) => steps[steps.length - 1])) + 0.5];
}

let FULL_RANGE = [0, 1];

// Return the step at a part of the width, from 0 to 1.
const stepAcross = (part, [low, high] = view.range) => low + part * (high - low);

// Interpolate linearly between knots, and extrapolate before the first and after the last.
function between(from, to, value) {
  const left = clamp(lastAtMost(from, value), 0, from.length - 2);
  return to[left] + ((value - from[left]) / (from[left + 1] - from[left])) * (to[left + 1] - to[left]);
}

// A step, and W&B's own step where that counts something else.
function stepText(step) {
  const other = content.wandbSteps;
  return atStep(step) + (other ? ` · W&B step ${whole(Math.round(between(other.steps, other.values, step)))}` : "");
}

const view = {
  range: [...FULL_RANGE],
  step: null, // the step under the pointer of any picture
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
  const state = { range: isZoomed() ? view.range : null, grids, theme: chosenTheme };
  history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
}

// New ranges of the page are set to their full extent; the current view is kept if possible.
function resetView() {
  const before = viewOfAddress();
  FULL_RANGE = fullRange();
  view.range = Array.isArray(before.range) ? before.range.map((step) => clamp(Number(step), ...FULL_RANGE)) : [...FULL_RANGE];
  if (!(view.range[1] > view.range[0])) view.range = [...FULL_RANGE];
  view.step = null;
  chosenTheme = before.theme ?? null;
  showTheme();
  for (const list of Object.values(listeners)) list.length = 0;
}

const listeners = { range: [], step: [], grid: [], theme: [] };

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

const resetRange = () => setRange(...FULL_RANGE);

const isZoomed = () => view.range[0] !== FULL_RANGE[0] || view.range[1] !== FULL_RANGE[1];

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
