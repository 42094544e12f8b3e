// Tables: the numbers behind a picture, settings and runs, and the flight recorder; and exports of pictures and tables.

// Rows of cells: numbers, texts, or elements that are cells already. Columns of texts are aligned left.
function table(head, rows) {
  const isText = head.map((_, column) => rows.some((row) => typeof row[column] === "string"));
  const cellOf = (cell, column) => (cell instanceof Node ? cell : element("td", { class: isText[column] ? "text" : null }, typeof cell === "string" ? cell : formatNumber(cell, 5)));
  const headOf = (cell, column) => (cell instanceof Node ? cell : element("th", { scope: "col", class: isText[column] ? "text" : null }, cell));
  return element("table", {}, element("thead", {}, element("tr", {}, head.map(headOf))), element("tbody", {}, rows.map((row) => element("tr", {}, row.map(cellOf)))));
}

const scrolled = (node, kind = "") => element("div", { class: "scroll " + kind, tabindex: 0 }, node);

// The numbers behind a picture; the table is built when it is opened.
function dataTable(makeContent) {
  const details = element("details", { class: "data" }, element("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    details.querySelector(".scroll")?.remove();
    if (!details.open) return;
    const { head, rows } = makeContent();
    const inView = rows.filter((row) => row[0] >= view.range[0] && row[0] <= view.range[1]);
    const shown = inView.slice(-500);
    details.append(scrolled(table(head, shown)));
    details.querySelector("summary").textContent = shown.length < inView.length ? `Numbers (the last ${shown.length} of ${inView.length} rows in view)` : "Numbers";
  });
  return details;
}

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: `${content.run.id}-${name}`.replace(/[^\w.+-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A CSV cell: a number unchanged, a text in quotes; a text that a spreadsheet would execute as a formula is defused.
function csvCell(cell) {
  if (cell === null || cell === undefined) return "";
  return typeof cell === "number" ? String(cell) : '"' + cell.replace(/^(?=[=+@-])/, "'").replaceAll('"', '""') + '"';
}

// The export formats of a picture. The canvas itself lacks the card's background colour.
function exportButtons(picture) {
  const name = picture.label.split(".")[0];
  const csv = () => {
    const { head, rows } = picture.tableContent();
    save(new Blob([[head, ...rows].map((row) => row.map(csvCell).join(",") + "\r\n").join("")], { type: "text/csv" }), name + ".csv");
  };
  const png = async () => {
    drawStale(new Set([picture.node]));
    await null; // uPlot paints in a microtask
    const { canvas } = picture;
    const copy = element("canvas", { width: canvas.width, height: canvas.height });
    const context = copy.getContext("2d");
    context.fillStyle = colour("card");
    context.fillRect(0, 0, copy.width, copy.height);
    context.drawImage(canvas, 0, 0);
    copy.toBlob((blob) => save(blob, name + ".png"));
  };
  const button = (text, onclick) => element("button", { type: "button", class: "export", "aria-label": `${name} as ${text}`, onclick }, text);
  return element("div", { class: "exports" }, button("CSV", csv), button("PNG", png));
}

// The flight recorder: the last samples before an accident, at full resolution.
const ROWS_PER_PAGE = 100;

function recorderSection() {
  const { columns, rows, total } = content.flightRecorder;
  const search = element("input", { type: "search", placeholder: "Find rows", "aria-label": "Find rows of the flight recorder" });
  const position = element("span", { class: "count" });
  const host = scrolled([], "tall");
  const isNumeric = columns.map((_, index) => rows.some((row) => typeof row[index] === "number"));
  let page = 0;

  function chosenRows() {
    const matches = matcher(search.value);
    return search.value.trim() === "" ? rows : rows.filter((row) => row.some((cell) => matches(String(cell))));
  }

  function draw() {
    const found = chosenRows();
    const pages = Math.max(1, Math.ceil(found.length / ROWS_PER_PAGE));
    page = clamp(page, 0, pages - 1);
    const shown = found.slice(page * ROWS_PER_PAGE, (page + 1) * ROWS_PER_PAGE);
    const head = columns.map((name, index) => element("th", { scope: "col", class: isNumeric[index] ? null : "text" }, name));
    const cellOf = (cell, index) =>
      element("td", { class: (isNumeric[index] ? "" : "text") + (isAlarming(columns[index], cell) ? " alarming" : "") }, typeof cell === "number" ? formatNumber(cell, 5) : cell === null ? "–" : String(cell));
    host.replaceChildren(table(head, shown.map((row) => row.map(cellOf))));
    position.textContent = found.length ? `${page * ROWS_PER_PAGE + 1}–${page * ROWS_PER_PAGE + shown.length} of ${plural(found.length, "row")}` : "no rows";
    back.disabled = page === 0;
    forth.disabled = page === pages - 1;
  }

  function turn(to) {
    page = to;
    draw();
    host.scrollTop = 0;
  }

  const back = element("button", { type: "button", class: "quiet", "aria-label": "Previous rows", onclick: () => turn(page - 1) }, "‹");
  const forth = element("button", { type: "button", class: "quiet", "aria-label": "Next rows", onclick: () => turn(page + 1) }, "›");
  search.addEventListener("input", () => turn(0));
  const { node, picture } = card("recorder");
  picture.append(element("div", { class: "controls" }, search, position, back, forth), host);
  if (total > rows.length) picture.append(hint(`The first ${whole(rows.length)} of ${whole(total)} rows are in this page.`));
  draw();
  return node;
}

function isAlarming(column, cell) {
  if (["nan", "inf", "-inf"].includes(String(cell).toLowerCase())) return true;
  return /num_(nan|inf|nonfinite)/.test(column) && typeof cell === "number" && cell > 0;
}
