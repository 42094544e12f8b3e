// The flight recorder: the last samples before an accident, at full resolution.

const ROWS_PER_PAGE = 100;

function recorderSection() {
  const { columns, rows, total } = content.flightRecorder;
  const search = element("input", { type: "search", placeholder: "Find rows", "aria-label": "Find rows of the flight recorder" });
  const position = element("span", { class: "count" });
  const host = element("div", { class: "scroll tall", tabindex: 0 });
  const sort = { column: null, down: false };
  let page = 0;

  function chosenRows() {
    const matches = matcher(search.value);
    let found = search.value.trim() === "" ? rows : rows.filter((row) => row.some((cell) => matches(String(cell))));
    if (sort.column !== null) {
      const sign = sort.down ? -1 : 1;
      found = [...found].sort((a, b) => sign * compareCells(a[sort.column], b[sort.column]));
    }
    return found;
  }

  function draw() {
    const found = chosenRows();
    const pages = Math.max(1, Math.ceil(found.length / ROWS_PER_PAGE));
    page = clamp(page, 0, pages - 1);
    const shown = found.slice(page * ROWS_PER_PAGE, (page + 1) * ROWS_PER_PAGE);
    const numeric = columns.map((_, index) => rows.some((row) => typeof row[index] === "number"));
    const head = columns.map((name, index) =>
      element(
        "th",
        { scope: "col", class: numeric[index] ? null : "text", "aria-sort": sort.column === index ? (sort.down ? "descending" : "ascending") : null },
        element("button", { type: "button", onclick: () => sortBy(index) }, name + (sort.column === index ? (sort.down ? " ↓" : " ↑") : "")),
      ),
    );
    const body = shown.map((row) => element("tr", {}, row.map((cell, index) => element("td", { class: (numeric[index] ? "" : "text") + (isAlarming(columns[index], cell) ? " alarming" : "") }, typeof cell === "number" ? formatNumber(cell, 5) : cell === null ? "–" : String(cell)))));
    host.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
    position.textContent = found.length ? `${page * ROWS_PER_PAGE + 1}–${page * ROWS_PER_PAGE + shown.length} of ${plural(found.length, "row")}` : "no rows";
    back.disabled = page === 0;
    forth.disabled = page === pages - 1;
  }

  function sortBy(column) {
    sort.down = sort.column === column ? !sort.down : typeof rows[0]?.[column] === "number";
    sort.column = column;
    draw();
  }

  function turn(by) {
    page += by;
    draw();
    host.scrollTop = 0;
  }

  const back = element("button", { type: "button", class: "quiet", "aria-label": "Previous rows", onclick: () => turn(-1) }, "‹");
  const forth = element("button", { type: "button", class: "quiet", "aria-label": "Next rows", onclick: () => turn(1) }, "›");
  search.addEventListener("input", () => { page = 0; draw(); });
  const { node, picture } = card("recorder", { wide: true });
  picture.append(element("div", { class: "controls" }, search, position, back, forth), host);
  if (total > rows.length) picture.append(element("p", { class: "hint" }, `The first ${rows.length.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} rows are in this page.`));
  draw();
  return node;
}

function compareCells(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}

function isAlarming(column, cell) {
  if (["nan", "inf", "-inf"].includes(String(cell).toLowerCase())) return true;
  return /num_(nan|inf|nonfinite)/.test(column) && typeof cell === "number" && cell > 0;
}
