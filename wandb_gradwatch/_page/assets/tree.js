// The layers as a tree: blocks, kinds in each block (weights, biases, norms), layers in each kind. Every row has a
// sparkline of its largest values, and the worst value. Branches are closed at first, and built when they are opened.

const MOST_LINES = 40; // shown at first; more than one and a half times as many siblings are split into branches
const SPARK = { width: 72, height: 16 };

function blockOf(parts) {
  const number = parts.findIndex((part) => /^[0-9]+$/.test(part));
  return parts.slice(0, number >= 0 ? number + 1 : 1).join(".");
}

function kindOf(name) {
  const [module, own] = name.split(".").slice(-2);
  if (/norm|^ln|^bn/i.test(module)) return "norms";
  return own === "bias" ? "biases" : "weights";
}

// Group names by the label that a function gives them, in the order of the names: [[label, names]].
function grouped(names, labelOf) {
  const groups = new Map();
  for (const name of names) {
    const label = labelOf(name);
    if (!groups.has(label)) groups.set(label, []);
    groups.get(label).push(name);
  }
  return [...groups];
}

// A branch is {label, names, children}, a leaf {label, names: [name]}. Names are indices.
function layerTree(names) {
  const parts = new Map(names.map((name) => [name, run.layers.names[name].split(".")]));
  const outer = commonParts([...parts.values()]);
  const leaf = (name) => ({ label: run.layers.names[name], names: [name] });
  const branches = grouped(names, (name) => [...parts.get(name).slice(0, outer), blockOf(parts.get(name).slice(outer))].join("."));
  return inRanges(
    branches.map(([label, members]) => {
      if (members.length === 1) return leaf(members[0]);
      const kinds = grouped(members, (name) => kindOf(run.layers.names[name])).map(([kind, layers]) => ({ label: kind, names: layers, children: inRanges(layers.map(leaf)) }));
      return { label, names: members, children: kinds.length === 1 || members.length <= 4 ? inRanges(members.map(leaf)) : kinds };
    }),
  );
}

// Return the number of outer modules that all names share.
function commonParts(all) {
  let count = 0;
  while (all.length && all.every((parts) => parts.length > count + 1 && parts[count] === all[0][count])) count++;
  return count;
}

// Split too many siblings into branches of equal size.
function inRanges(nodes) {
  if (nodes.length <= 1.5 * MOST_LINES) return nodes;
  const size = Math.ceil(nodes.length / MOST_LINES);
  const ranges = [];
  for (let start = 0; start < nodes.length; start += size) {
    const children = nodes.slice(start, start + size);
    ranges.push({ label: `${children[0].label} – ${children.at(-1).label}`, names: children.flatMap((child) => child.names), children });
  }
  return ranges;
}

// Return the largest code of some names in each of some columns, whether an element there was NaN or infinite, and the worst.
function extremesOf(names, matrix, width) {
  const columns = new Uint16Array(width);
  const broken = new Uint8Array(columns.length);
  const bad = run.layers.bad()?.codes;
  for (const name of names) {
    for (let column = 0, cell = name * matrix.numColumns; column < matrix.numColumns; column++, cell++) {
      const place = Math.floor(((run.layers.last[column] - FULL_RANGE[0]) / (FULL_RANGE[1] - FULL_RANGE[0])) * width);
      if (matrix.codes[cell] > columns[place]) columns[place] = matrix.codes[cell];
      if (bad !== undefined && bad[cell] > CODE_ZERO) broken[place] = 1;
    }
  }
  return { columns, broken, worst: Math.max(CODE_MISSING, ...columns) };
}

// A drawing in colours of the style sheet, which adapts to a new theme without redrawing.
function sparkline({ columns, broken }, matrix) {
  const known = columns.filter((code) => code >= CODE_FIRST && code < CODE_INFINITE);
  const low = known.reduce((least, code) => Math.min(least, code), Infinity);
  const reach = Math.max(known.reduce((most, code) => Math.max(most, code), 0) - low, matrix.even ? 1 : 1 / matrix.step); // a decade at least
  const across = SPARK.width / columns.length;
  const bars = { good: "", bad: "" };
  columns.forEach((code, place) => {
    const isBad = broken[place] || code === CODE_INFINITE;
    if (!isBad && code < CODE_FIRST) return;
    const height = isBad ? SPARK.height : 2 + ((code - low) / reach) * (SPARK.height - 2);
    bars[isBad ? "bad" : "good"] += `M${place * across} ${SPARK.height}v${-height}h${Math.max(across, 1)}v${height}z`;
  });
  const svg = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, "aria-hidden": "true" });
  drawing.append(...Object.entries(bars).map(([name, d]) => svg("path", { class: name, d })));
  return drawing;
}

// The cells of every row beside its name.
function lineEnd(node) {
  const matrix = run.layers.matrix();
  const found = extremesOf(node.names, matrix, SPARK.width);
  const isBad = found.broken.includes(1);
  const worst = isBad ? "NaN or Inf" : found.worst === CODE_MISSING ? "–" : matrix.meaning.format(matrix.valueOf(found.worst));
  return [sparkline(found, matrix), element("span", { class: "worst" + (isBad ? " alarming" : ""), title: "the largest in the run" }, worst)];
}

// The rows of nodes; `leafLine(node, ends)` makes the row of a layer.
function treeLines(nodes, leafLine) {
  const openAll = nodes.reduce((total, node) => total + 1 + (node.children?.length ?? 0), 0) <= MOST_LINES / 2;
  return nodes.map((node) => {
    const ends = lineEnd(node);
    if (!node.children) return leafLine(node, ends);
    const inside = element("div", { class: "branch-inside" });
    const summary = element("summary", {}, element("span", { class: "layer-name", title: node.label }, node.label), element("span", { class: "count" }, String(node.names.length)), ...ends);
    const details = element("details", { class: "branch" }, summary, inside);
    const key = node.names[0] + node.label;
    const fill = () => {
      if (!inside.hasChildNodes()) inside.append(...treeLines(node.children, leafLine));
    };
    details.addEventListener("toggle", () => {
      if (details.open) fill();
      view.opened[details.open ? "add" : "delete"](key);
    });
    if (openAll || view.opened.has(key)) {
      fill();
      details.open = true;
    }
    return details;
  });
}
