// A preview of the W&B report or workspace: its blocks in their order, with panels drawn from the run if it has their
// keys.

// Convert **bold** and `code` in a line to elements.
function inlineMarkdown(text) {
  return text.split(/(\*\*[^*]+\*\*|`[^`]+`)/).map((part) => {
    if (part.startsWith("**")) return element("strong", {}, part.slice(2, -2));
    return part.startsWith("`") ? element("code", {}, part.slice(1, -1)) : part;
  });
}

function markdown(text) {
  return text.split("\n\n").map((paragraph) => {
    const lines = paragraph.split("\n");
    if (!lines.every((line) => line.startsWith("- "))) return element("p", {}, inlineMarkdown(paragraph));
    return element("ul", {}, lines.map((line) => element("li", {}, inlineMarkdown(line.slice(2)))));
  });
}

function previewPanel({ text, title, keys, log, limits, left, isOwn, lines }) {
  if (text !== undefined) return element("div", { class: "panel prose" }, markdown(text));
  const node = element("div", { class: "panel" }, element("p", { class: "caption" }, title));
  if (lines.length === 0) {
    node.append(element("p", { class: "never" }, keys && content.preview.isDrawn ? "Nothing of it is in this run: " : "", element("code", {}, keys)));
    return node;
  }
  const host = element("div", { class: "chart" });
  node.append(host);
  const [low, high] = limits;
  const stepsOf = ({ steps, count }) => (steps === null ? content.steps : float64At(steps, count));
  const series = lines.map((line, index) => ({ label: line.label, xs: stepsOf(line), values: float32At(line.values, line.count), colour: lineColour(index), width: 1.5 }));
  queue(() => new LineChart(host, { label: title, xs: content.steps, measured: isOwn ? null : run.measured, series, log, limits: low === null || high === null ? null : [low, high], height: 190 }));
  if (left) node.append(hint(`and ${plural(left, "more line")}`));
  return node;
}

function previewBlock({ kind, text, isOpen, panels }) {
  const grid = element("div", { class: "panels" }, panels.map(previewPanel));
  if (kind === "PanelGrid") return grid;
  if (kind === "Section") return element("details", { open: isOpen }, element("summary", {}, element("h2", {}, text), element("span", { class: "count" }, plural(panels.length, "panel"))), grid);
  if (kind === "MarkdownBlock") return element("div", { class: "prose" }, markdown(text));
  return kind === "P" ? element("p", { class: "prose" }, text) : element(kind.toLowerCase(), {}, text);
}

function previewParts() {
  const { what, title, isDrawn, blocks } = content.preview;
  const from = isDrawn ? `its panels are drawn from ${content.run.file}` : "its panels name their keys, as there is no run on this machine to draw";
  const told = `A preview of the ${what} by wandb_gradwatch, not W&B's own drawing: nothing was sent; ${from}.`;
  const head = element("header", {}, element("div", { class: "brand" }, "gradwatch"), element("h1", {}, title), element("p", { class: "facts" }, told));
  return [toolbar(), head, element("section", { class: "card report", id: "preview" }, blocks.map(previewBlock))];
}
