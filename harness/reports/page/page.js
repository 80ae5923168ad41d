// The page from top to bottom: alarms, filters, a section per table.

const LONG = 320; // characters of a caution

function start() {
  document.getElementById("head").append(...heading());
  document.getElementById("filters").append(...filters());
  document.getElementById("tables").append(...data.tables.map(section));
  document.getElementById("foot").append(
    el("p", {}, `Made by kv-harness (python -m harness.report --html) on ${data.made}. Scores 0 to 100, intervals 95 %, bytes binary.`),
  );
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  unpackPlotly();
}

function heading() {
  const several = data.tables.length > 1;
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  const links = data.tables.map((table, i) => el("li", {}, el("a", { href: `#table-${i}` }, table.title)));
  return [
    el("div", { class: "top" }, el("h1", {}, data.title), themeSwitch()),
    el("p", { class: "soft" }, `${count(data.runs, "run")} in ${count(data.tables.length, "table")}`),
    data.conditions ? el("p", { class: "soft" }, data.conditions) : null,
    several ? el("nav", { "aria-label": "Tables" }, el("ol", {}, links)) : null,
    redAlarms(),
    data.left_out.length ? el("ul", { class: "left-out" }, data.left_out.map((text) => el("li", {}, text))) : null,
  ].filter(Boolean);
}

function redAlarms() {
  const found = data.tables.flatMap((table, i) => table.alarms.filter((alarm) => alarm.red).map((alarm) => [i, table, alarm]));
  if (!found.length) return null;
  const lines = found.map(([i, table, alarm]) => el("li", {}, el("a", { href: `#table-${i}` }, table.title), `: ${alarm.text}`));
  return el("div", { class: "alarm", role: "alert" }, el("strong", {}, "Alarms"), el("ul", {}, lines));
}

function themeSwitch() {
  const name = () => (isDark() ? "Light" : "Dark");
  const button = el("button", { type: "button", id: "theme", onclick: turn }, name());
  try {
    const kept = localStorage.getItem("kv-harness-theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch {} // a browser may keep nothing for a file
  function turn() {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("kv-harness-theme", document.documentElement.dataset.theme);
    } catch {}
    changed();
  }
  whenChanged(() => (button.textContent = name()));
  return button;
}

function filters() {
  const rows = data.tables.flatMap((table) => table.rows);
  const budgets = unique(rows.map((row) => row.budget || NO_BUDGET));
  budgets.sort((a, b) => (a === NO_BUDGET) - (b === NO_BUDGET) || a.localeCompare(b, "en", { numeric: true }));
  const several = data.tables.length > 1;
  const menus = [
    several ? menu("Tables", "tables", data.tables.map((table) => table.title)) : null,
    menu("Methods", "methods", unique(rows.map((row) => row.label))),
    menu("Budgets", "budgets", budgets),
  ];
  return menus.filter(Boolean);
}

function unique(values) {
  return [...new Set(values)];
}

function menu(name, key, values) {
  const state = el("span", { class: "soft" });
  const boxes = values.map((value) => {
    const box = el("input", { type: "checkbox", checked: true, value, onchange: () => (toggle(value, box.checked), changed()) });
    return box;
  });
  function toggle(value, on) {
    if (on) hidden[key].delete(value);
    else hidden[key].add(value);
  }
  function all(on) {
    boxes.forEach((box) => ((box.checked = on), toggle(box.value, on)));
    changed();
  }
  const buttons = el("div", { class: "both" }, el("button", { type: "button", onclick: () => all(true) }, "All"), el("button", { type: "button", onclick: () => all(false) }, "None"));
  const labels = boxes.map((box) => el("label", {}, box, ` ${box.value}`));
  whenChanged(() => (state.textContent = hidden[key].size ? `${values.length - hidden[key].size} of ${values.length}` : "all"));
  const node = el("details", { class: "menu", "data-menu": key }, el("summary", {}, `${name} `, state), el("div", { class: "choices" }, buttons, labels));
  node.addEventListener("keydown", (event) => event.key === "Escape" && ((node.open = false), node.querySelector("summary").focus()));
  document.addEventListener("click", (event) => node.contains(event.target) || (node.open = false));
  return node;
}

/** What a reader sees first: one table, what it says, and one figure. The rest is folded. */
function section(table, i) {
  const node = el("section", { class: "table", id: `table-${i}`, "aria-labelledby": `title-${i}` });
  const blocks = Object.fromEntries(table.blocks.map((block) => [block.name, blockSection(table, block)]));
  const { overview, ...others } = blocks;
  node.append(
    ...[
      el("h2", { id: `title-${i}` }, table.title),
      overview,
      el("ul", { class: "lines" }, table.lines.map((line) => el("li", {}, line))),
      forest(table),
      details(table, others),
    ].filter(Boolean),
  );
  whenChanged(() => (node.hidden = hidden.tables.has(table.title)));
  return node;
}

function details(table, blocks) {
  const { scores, costs: peaks, groups, averages, parts, ...others } = blocks;
  const node = el("details", { class: "more" }, el("summary", {}, "All tables, conditions, cautions, plots and outputs"));
  node.append(
    ...table.alarms.map(banner),
    el("ul", { class: "conditions" }, [...table.conditions, table.points ? `score: ${table.metric}, 0 to 100` : "perplexity: the smaller the better"].map((line) => el("li", {}, line))),
    ...[scores, notesOf(table), costs(table), peaks, ...Object.values(others), sideBySide(groups, averages)].filter(Boolean),
    ...[heatMaps(table), layersChart(table), partsChart(table), parts, outputsSection(table)].filter(Boolean),
  );
  return node;
}

/** Where they fit. */
function sideBySide(...nodes) {
  return el("div", { class: "beside" }, nodes);
}

/** A red one is always whole. */
function banner(alarm) {
  const word = el("strong", {}, alarm.red ? "Alarm " : "Caution ");
  return el("div", { class: alarm.red ? "banner red" : "banner" }, alarm.red ? [word, alarm.text] : folded(alarm.text, word));
}

/** A long text opens; until then it ends at a comma. */
function folded(text, word) {
  if (text.length < LONG) return [word, text];
  const start = text.slice(0, LONG / 2).replace(/,[^,]*$/, ", …");
  return el("details", {}, el("summary", {}, word, start), el("p", {}, text));
}

function notesOf(table) {
  const warnings = el("ul", { class: "notes" }, table.warnings.map((text) => el("li", { class: "warning" }, folded(text, null))));
  const heads = table.blocks.find((block) => block.name === "scores").columns.filter((column) => column.means).map((column) => `${column.head.replace(/\n/g, " ")}: ${column.means}`);
  const notes = el("ul", { class: "notes" }, [...table.notes, ...heads].map((text) => el("li", {}, text)));
  return el("div", { class: "notes" }, warnings, el("details", {}, el("summary", {}, "How to read this table"), notes));
}

start();
