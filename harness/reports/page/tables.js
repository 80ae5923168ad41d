// Tables: sorted by any column, filtered with the page, a row opens what is behind it.

const GLYPHS = [..."●■◆▲▼✚✖⬟◀▶⬢"]; // as SYMBOLS of the charts

const MOST_ROWS = 20; // of a table that is shown whole at once; a longer one folds
const SHOWN_ROWS = 12;

/** One of a table's blocks, with its heading. */
function blockSection(table, block) {
  const body = el("div");
  const order = { column: block.name === "overview" ? startColumn(block) : null, down: block.name === "overview" && table.points, open: new Set(), whole: false };
  const redraw = () => body.replaceChildren(drawn(table, block, order, redraw));
  whenChanged(redraw);
  return body;
}

/** The ranking begins with the best score, or the smallest perplexity. */
function startColumn(block) {
  const place = block.columns.findIndex((column) => column.head === "score" || column.head === "perplexity");
  return place < 0 ? null : place;
}

function drawn(table, block, order, redraw) {
  const shown = columnsShown(table, block);
  const rows = rowsShown(table, block);
  if (!rows.length || shown.length < 2) return el("p", { class: "soft" }, "Nothing is left by the filters.");
  sortRows(rows, block, order);
  const opens = block.name === "overview";
  const grid = el("table", { class: "grid" }, el("caption", {}, block.caption), headOf(block, shown, order, opens, redraw));
  const body = el("tbody");
  const folds = rows.length > MOST_ROWS && !order.whole && !document.documentElement.classList.contains("paper");
  for (const place of folds ? rows.slice(0, SHOWN_ROWS) : rows) {
    const run = block.runs.length ? table.rows[block.runs[place]] : null;
    body.append(...rowOf(block, shown, place, run, opens && order.open, table));
  }
  grid.append(body);
  const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": block.caption }, grid);
  new ResizeObserver(() => grid.style.setProperty("--name", `${grid.querySelector(".name").offsetWidth}px`)).observe(grid);
  const unfold = () => ((order.whole = true), redraw());
  const more = folds ? el("button", { type: "button", class: "more", onclick: unfold }, `Show all ${rows.length} rows`) : null;
  return el("div", {}, scroll, more, block.note ? el("p", { class: "soft" }, block.note) : null);
}

function columnsShown(table, block) {
  const places = block.columns.map((_, place) => place);
  return places.filter((place) => {
    const run = block.columns[place].run;
    return run === null || isShown(table.rows[run]);
  });
}

function rowsShown(table, block) {
  const count = block.columns[0].cells.length;
  const places = Array.from({ length: count }, (_, place) => place);
  return block.runs.length ? places.filter((place) => isShown(table.rows[block.runs[place]])) : places;
}

function sortRows(rows, block, order) {
  if (order.column === null) return;
  const column = block.columns[order.column];
  const value = (place) => (column.values.length ? column.values[place] : column.cells[place] || null);
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null); // what is unknown comes last either way
    const less = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
    return order.down ? -less : less;
  });
}

function headOf(block, shown, order, opens, redraw) {
  const cells = shown.map((place, i) => {
    const column = block.columns[place];
    const active = order.column === place;
    const sort = () => {
      order.down = active ? !order.down : column.values.length > 0;
      order.column = place;
      redraw();
    };
    const name = column.head;
    const label = el("span", {}, breakable(name), column.unit ? el("span", { class: "unit" }, column.unit) : null);
    const button = el("button", { type: "button", class: "sort", title: column.means, onclick: sort, "data-column": name.replace("\n", " ") }, label);
    const way = active ? (order.down ? "descending" : "ascending") : null;
    return el("th", { scope: "col", class: classOf(column, i), "aria-sort": way }, button);
  });
  if (opens) cells.unshift(el("th", { class: "opener" }, el("span", { class: "offscreen" }, "Details")));
  return el("thead", {}, el("tr", {}, cells));
}

/** `open`: places of the rows whose details are shown, through every sorting; false where rows have none. */
function rowOf(block, shown, place, run, open, table) {
  const cells = shown.map((at, i) => cellOf(block.columns[at], place, i, run, table));
  const line = el("tr", { class: run && run.full && table.rows.some((row) => !row.full) ? "full" : null }, cells);
  if (!open) return [line];
  const details = el("tr", { class: "details", hidden: !open.has(place) }, el("td", { colspan: shown.length + 1 }, detailsOf(run)));
  const button = el("button", { type: "button", class: "open", "aria-expanded": String(open.has(place)), onclick: toggle });
  button.setAttribute("aria-label", `Command and provenance of ${run.title}`);
  function toggle() {
    details.hidden = !details.hidden;
    if (details.hidden) open.delete(place);
    else open.add(place);
    button.setAttribute("aria-expanded", String(!details.hidden));
  }
  line.prepend(el("td", { class: "opener" }, button));
  return [line, details];
}

/** Name and budget stay in sight when a table is scrolled sideways. */
function classOf(column, i) {
  return [column.left ? "left" : null, i === 0 ? "name" : null, column.head === "budget" ? "budget" : null].filter(Boolean).join(" ") || null;
}

function cellOf(column, place, i, run, table) {
  const text = column.left ? column.cells[place] : column.cells[place].replace(/(^|[ \[])-(?=\d)/g, "$1−");
  const faint = run && run.grey && (column.head === "vs full" || column.head === "p");
  const kind = [classOf(column, i), faint ? "faint" : null].filter(Boolean).join(" ") || null;
  if (i === 0) return el("th", { scope: "row", class: "name" }, run ? swatch(run) : null, breakable(text));
  const told = faint ? "p ≥ 0.05" : column.head === "stamps" ? meaningOf(text, table) : null;
  return el("td", { class: kind, title: told }, ...withInterval(text, column));
}

/** What the letters of a stamp say: the notes explain each. */
function meaningOf(stamps, table) {
  return [...stamps].map((letter) => table.notes.find((note) => note.startsWith(`${letter}: `)) ?? `${letter}: see the notes below the table`).join("\n");
}

/** A name that breaks behind _ / and = before it breaks anywhere else. */
function breakable(text) {
  return text.split(/(?<=[_/=])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
}

/** Value and interval apart, so that either is aligned. */
function withInterval(text, column) {
  const at = text.indexOf(" [");
  if (at < 0) return [text];
  const longest = Math.max(...column.cells.map((cell) => cell.length - Math.max(0, cell.indexOf(" ["))));
  const interval = el("span", { class: "interval" }, text.slice(at + 1));
  interval.style.minWidth = `${longest - 1}ch`;
  return [text.slice(0, at), interval];
}

function swatch(run) {
  const mark = el("span", { class: "swatch", "aria-hidden": "true" }, run.full ? "★" : GLYPHS[run.line % GLYPHS.length]);
  mark.style.color = lineColour(run);
  return mark;
}

function detailsOf(run) {
  const facts = run.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return el(
    "div",
    { class: "behind" },
    el("div", { class: "command" }, el("code", {}, run.command), copyButton(run.command, `the command of ${run.title}`)),
    run.warnings.length ? el("ul", { class: "warnings" }, run.warnings.map((text) => el("li", {}, text))) : null,
    el("dl", {}, facts),
  );
}

/** Heads of tables stay in sight: a box that scrolls sideways lets nothing stick to the window. */
function followHeads() {
  const top = document.getElementById("filters").getBoundingClientRect().bottom;
  for (const grid of document.querySelectorAll(".grid")) {
    const [start, end] = [grid.caption, grid].map((node) => node.getBoundingClientRect().bottom);
    const head = grid.tHead;
    const room = end - start - 3 * head.offsetHeight; // the last rows go under it
    head.style.transform = start < top && room > 0 ? `translateY(${Math.min(top - start, room)}px)` : "";
  }
}

addEventListener("scroll", followHeads, { passive: true });
