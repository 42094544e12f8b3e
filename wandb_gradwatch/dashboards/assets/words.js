// What each picture shows, what healthy looks like, and what to do otherwise.

const WORDS = {
  norm: {
    title: "Gradient norm of the whole model",
    healthy: "Falls in the first hundred steps, then stays within a factor of ten. The largest of each window lies close above the line. A clip ratio below 10 % means clipping only catches outliers.",
    otherwise: "A single spike: look for a bad batch, and clip the norm. Growth over many steps: lower the learning rate or warm up for longer. A clip ratio near 100 %: the limit, not the loss, sets the step size; raise it or lower the learning rate. Below 1e-7: nothing is being learnt.",
  },
  layers: {
    title: "Every layer, every step",
    healthy: "Rows of even colour. Neighbouring layers differ by less than a hundred times, and colours fade slowly from left to right.",
    otherwise: "A gradient of colour from top to bottom is a signal that dies or grows with depth: check initialisation, normalisation and residual connections. A vertical stripe is a bad step; the first row to turn bright or red is where to look. A grey row receives nothing.",
  },
  lines: {
    title: "Chosen layers",
    healthy: "Lines run side by side. On a logarithmic scale healthy layers stay parallel.",
    otherwise: "A line that leaves the others names the layer. For gradient / parameter norm, 0.001 is usual: above 1 one step can overwrite the weights, below 0.000001 the layer stands still.",
  },
  histogram: {
    title: "Distribution of one layer's gradient",
    healthy: "A symmetric band around zero whose width changes slowly.",
    otherwise: "A band that widens step by step precedes an explosion. A band that collapses to one line is a layer that stopped learning. One-sided bands point to activations that are always positive, or to a saturated output.",
  },
  quantiles: {
    title: "Size of the elements",
    healthy: "The band between the 1st and the 99th percentile keeps its width and moves slowly.",
    otherwise: "A median that falls below 6e-8 is zero in float16: use a loss scale, or bfloat16. A maximum far above the band is a few outlying elements: look at embeddings and the last layer.",
  },
  dead: {
    title: "Dead elements",
    healthy: "Near zero for dense layers. Embeddings are mostly dead by nature: only the rows in the batch receive a gradient.",
    otherwise: "A share that keeps rising is units that switched off: lower the learning rate, or use a leaky activation. A share of 100 % from the start is a layer that the loss does not reach.",
  },
  nonfinite: {
    title: "NaN and Inf elements",
    healthy: "None. Under float16 with a loss scale, a single skipped step now and then is calibration.",
    otherwise: "Find the first layer in the picture of all layers that turns red, then what its forward computes: a logarithm or a root of zero, a division, an overflow in half precision.",
  },
  scale: {
    title: "Loss scale and skipped steps",
    healthy: "The scale doubles every few thousand steps and halves now and then, with one skipped step each time.",
    otherwise: "Skips in a row, or a scale that falls towards 1: the gradients overflow for real. Lower the learning rate or switch to bfloat16.",
  },
  spread: {
    title: "Mean and deviation",
    healthy: "The mean is far smaller than the deviation and crosses zero.",
    otherwise: "A mean as large as the deviation is a gradient that pushes everything one way: check the loss for a constant term, and the data for an offset.",
  },
  overhead: {
    title: "Cost of watching",
    healthy: "Below 1 % of the training time.",
    otherwise: "Raise sample_every, log histograms less often, or set max_overhead.",
  },
  other: {
    title: "Other metrics of the same rows",
    healthy: "Whatever was logged together with the gradients: the loss, custom metrics, activations.",
    otherwise: "Compare the step at which the loss turns with the step at which a gradient does: the one that moves first is the cause.",
  },
};

function words(key) {
  return element(
    "aside",
    { class: "words" },
    element("h3", {}, "Healthy"),
    element("p", {}, WORDS[key].healthy),
    element("h3", {}, "Otherwise"),
    element("p", {}, WORDS[key].otherwise),
  );
}

// A card: title, picture, and the words beside it.
function card(key, { wide = false, lead = null } = {}) {
  const picture = element("div", { class: "picture" });
  const node = element(
    "section",
    { class: "card" + (wide ? " wide" : ""), id: key },
    element("h2", {}, WORDS[key].title),
    lead === null ? null : element("p", { class: "lead" }, lead),
    element("div", { class: "beside" }, picture, words(key)),
  );
  return { node, picture };
}
