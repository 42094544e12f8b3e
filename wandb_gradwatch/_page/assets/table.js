// Tables, and exports of pictures.

// Rows of cells: numbers, texts, or elements that are cells already. Columns of texts are aligned left.
function table(head, rows) {
  const isText = head.map((_, column) => rows.some((row) => typeof row[column] === "string"));
  const cellOf = (cell, column) => (cell instanceof Node ? cell : element("td", { class: isText[column] ? "text" : null }, typeof cell === "string" ? cell : formatNumber(cell, 5)));
  const headOf = (cell, column) => (cell instanceof Node ? cell : element("th", { scope: "col", class: isText[column] ? "text" : null }, cell));
  return element("table", {}, element("thead", {}, element("tr", {}, head.map(headOf))), element("tbody", {}, rows.map((row) => element("tr", {}, row.map(cellOf)))));
}

const scrolled = (node, kind = "") => element("div", { class: "scroll " + kind, tabindex: 0 }, node);

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
  const png = () => {
    drawStale(new Set([picture.node]));
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
