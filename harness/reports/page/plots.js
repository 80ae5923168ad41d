// Charts, by Plotly. Each is drawn once it comes into view, and again when filters, colours or the width change.

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon", "triangle-left", "triangle-right", "hexagon"];
const CROWDED = 6; // from so many lines on, intervals cover more than they say
const MOST_LABELS = 20; // lines that are named at their ends; more have a legend
const NARROW = 520; // pixels
const MOST_MAPS = 24;
const LINE = 14; // pixels between two names
const charts = [];
const inView = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) if (isIntersecting) drawChart(charts.find((chart) => chart.node === target));
}, { rootMargin: "300px" });

addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));

/** Paper is white, has no view to scroll, and its own width: all is drawn again for it, and afterwards for the screen. */
function onPaper(on) {
  const root = document.documentElement;
  if (on) root.dataset.screen = root.dataset.theme ?? "";
  const theme = on ? "light" : root.dataset.screen;
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  root.classList.toggle("paper", on);
  if (on) document.querySelectorAll("details.more").forEach((node) => (node.open = true));
  changed();
  charts.forEach((one) => ((one.stale = true), on ? drawChart(one) : redraw(one)));
}

/** `make(width)` gives { data, layout } or null, where the filters leave nothing. */
function chart(title, note, make) {
  const node = el("div", { class: "chart" });
  const one = { node, make, stale: true };
  charts.push(one);
  inView.observe(node);
  new ResizeObserver(() => (one.width !== node.clientWidth && redraw(one))).observe(node);
  listeners.push(() => redraw(one));
  return el("figure", {}, el("figcaption", {}, el("strong", {}, title), note ? ` ${note}` : null), node);
}

function redraw(one) {
  one.stale = true;
  const box = one.node.getBoundingClientRect();
  if (box.width && box.bottom > -300 && box.top < innerHeight + 300) drawChart(one);
  else { inView.unobserve(one.node); inView.observe(one.node); }
}

function drawChart(one) {
  if (!one.stale || !window.Plotly || !one.node.clientWidth) return;
  one.stale = false;
  one.width = one.node.clientWidth;
  const made = one.make(one.width);
  if (!made) {
    Plotly.purge(one.node);
    one.node.replaceChildren(el("p", { class: "soft" }, "Nothing is left by the filters."));
    return;
  }
  one.node.querySelectorAll(":scope > p").forEach((line) => line.remove());
  const config = { displaylogo: false, displayModeBar: false };
  Plotly.react(one.node, made.data, { ...look(), ...made.layout, width: one.width }, config);
}

/** Plotly is unpacked after the tables stand. */
async function unpackPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
  try {
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = el("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  } catch {
    document.querySelectorAll(".chart").forEach((node) => node.append("This browser is too old for the charts; the tables have all numbers."));
    return;
  }
  charts.forEach(redraw);
}

function look() {
  return {
    font: { family: colour("font"), size: 12, color: colour("ink") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 }, align: "left" },
    showlegend: false,
    dragmode: false,
  };
}

function axis(title, extra = {}) {
  const grid = colour("grid");
  return { title: { text: title, standoff: 8, font: { size: 12, color: colour("soft") } }, gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { size: 11, color: colour("soft") }, ticks: "", fixedrange: true, ...extra };
}

/** Plotly reads markup in its texts: names are escaped, never obeyed. */
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** The ranking as a picture: each row's difference to Full with its interval. */
function forest(table) {
  if (!table.rows.some((row) => row.beside)) return null;
  const unit = table.points ? "in points" : "log-likelihood in nats per token";
  const note = `${unit}, with its 95 % interval. * holds after Holm’s correction; † not complete. Grey and hollow: p ≥ 0.05.`;
  return chart("Difference to Full,", note, (width) => {
    const rows = table.rows.filter((row) => row.beside && isShown(row)).sort((a, b) => a.beside.diff - b.beside.diff || b.title.localeCompare(a.title));
    return rows.length ? forestPlot(rows, width, table.points ? POINTS : NATS) : null;
  });
}

/** Units of a difference, decimals, name of the axis, and the least that it shows on either side of 0. */
const POINTS = { scale: 100, places: 1, name: "points", least: 5, room: 2 };
const NATS = { scale: 1, places: 3, name: "nats per token", least: 0.05, room: 0.02 };

function forestPlot(rows, width, unit) {
  const most = width < NARROW ? 22 : 44;
  const names = rows.map((row) => plain(titleIn(row, most)) + (row.status === "complete" ? "" : " †") + (row.holds ? " *" : ""));
  const values = rows.map((row) => unit.scale * row.beside.diff);
  const [low, high] = [0, 1].map((end) => rows.map((row) => unit.scale * row.beside.ci95[end]));
  const told = rows.map((_, i) => `${values[i].toFixed(unit.places)} [${low[i].toFixed(unit.places)}, ${high[i].toFixed(unit.places)}]`);
  const faint = colour("faint");
  const colours = rows.map((row) => (row.grey ? faint : lineColour(row)));
  const bars = rows.map((row, i) => ({
    type: "scatter", mode: "lines+markers", x: [low[i], values[i], high[i]], y: [i, i, i], line: { color: colours[i], width: 1.5 },
    marker: { size: [0, 9, 0], color: colours[i], opacity: 1, line: { width: 1.4, color: colours[i] }, symbol: symbol(row) + (row.grey ? "-open" : "") },
    hovertemplate: `${plain(row.title)}<br>${told[i]}<br>p = ${row.beside.p.toPrecision(2)}<extra></extra>`,
  }));
  const shapes = [{ type: "line", x0: 0, x1: 0, y0: -0.6, y1: rows.length - 0.4, line: { color: colour("soft"), width: 1 }, layer: "below" }];
  const longest = Math.max(...names.map((name) => name.length));
  const y = axis("", { tickvals: rows.map((_, i) => i), ticktext: names, range: [-0.6, rows.length - 0.4], showgrid: false, tickfont: { size: 12, color: colour("ink") } });
  const x = axis(unit.name, { range: [Math.min(-unit.least, ...low) - unit.room, Math.max(unit.least, ...high) + unit.room] });
  return { data: bars, layout: { shapes, xaxis: x, yaxis: y, height: 66 + 22 * rows.length, margin: { l: 14 + 6.6 * longest, r: 12, t: 6, b: 44 } } };
}

function symbol(row) {
  return row.full ? "star" : SYMBOLS[row.line % SYMBOLS.length];
}

/** Of a line: those that begin the colours again are dashed. */
function dash(row) {
  return row.full || row.line < data.colours.length ? "solid" : "dash";
}

/** Score against each cost: small multiples. */
function costs(table) {
  if (!table.panels.length) return null;
  const panels = table.panels.map((panel) => chart(`Score against ${panel.name}`, panel.timed && table.caution ? `(caution: ${table.caution})` : null, (width) => costPlot(table, panel, width)));
  const note = `A line joins the budgets of a method; ★ and the dashed line are Full. Filled marks lie on the Pareto front of all complete rows (dotted): no other row costs as little and scores as much. Rows without the cost, or where it is 0, are not drawn. Up to ${CROWDED} lines have their 95 % intervals: choose methods above, or point at a mark.`;
  return el("section", { class: "costs" }, el("h3", {}, "Score against cost"), el("p", { class: "soft" }, note), el("div", { class: "panels" }, panels));
}

function costPlot(table, panel, width) {
  const places = table.rows.map((_, i) => i).filter((i) => panel.xs[i] && table.rows[i].score !== null);
  const lines = groupBy(places.filter((i) => isShown(table.rows[i])), (i) => table.rows[i].label);
  const fulls = table.rows.filter((row) => row.full && row.score !== null && isShown(row));
  if (!lines.size) return null;
  const front = panel.front.filter((i) => places.includes(i)).sort((a, b) => panel.xs[a] - panel.xs[b]);
  const traces = [{ type: "scatter", mode: "lines", x: front.map((i) => panel.xs[i]), y: front.map((i) => 100 * table.rows[i].score), line: { shape: "hv", dash: "dot", width: 1.2, color: colour("soft") }, hoverinfo: "skip", showlegend: false }];
  for (const [label, some] of lines) {
    some.sort((a, b) => panel.xs[a] - panel.xs[b]);
    traces.push(costLine(table, panel, some, lines.size <= CROWDED), legendLine(table.rows[some[0]], label));
  }
  const xs = places.map((i) => panel.xs[i]);
  const range = panel.log ? [Math.log10(Math.min(...xs)) - 0.06, Math.log10(Math.max(...xs)) + 0.06] : [Math.min(0, ...xs), 1.05 * Math.max(...xs)];
  const ticks = panel.log ? { type: "log", tickvals: [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100] } : { nticks: 6 };
  const shapes = fulls.map((row) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: 100 * row.score, y1: 100 * row.score, line: { dash: "dash", width: 1, color: colour("soft") }, layer: "below" }));
  const layout = { shapes, xaxis: axis(panel.name, { range, ...ticks }), yaxis: axis(`score (${plain(table.metric)}, 0 to 100)`, { range: heights([...places.map((i) => table.rows[i]), ...fulls], lines.size <= CROWDED), nticks: 6 }), height: Math.max(340, 80 + LINE * lines.size), margin: { l: 44, r: 12, t: 8, b: 46 } };
  const ends = [...lines].map(([label, some]) => ({ label, row: table.rows[some[0]], x: panel.xs[some.at(-1)], y: 100 * table.rows[some.at(-1)].score }));
  nameLines(ends, traces, layout, width, panel.log);
  return { data: traces, layout };
}

/** From the lowest to the highest, intervals where they are drawn, with room for marks; two points at least. */
function heights(rows, intervals) {
  const ends = rows.flatMap((row) => (intervals && row.ci ? row.ci : [row.score])).map((share) => 100 * share);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const room = Math.max(0.06 * (high - low), (2 - (high - low)) / 2);
  return [low - room, high + room];
}

/** What the legend shows of a line, whichever of its marks are hollow. */
function legendLine(row, label) {
  const hue = lineColour(row);
  return { type: "scatter", mode: "lines+markers", name: plain(label), x: [null], y: [null], line: { color: hue, width: row.full ? 0 : 1.6, dash: dash(row) }, marker: { symbol: symbol(row), size: row.full ? 12 : 8, color: hue } };
}

function costLine(table, panel, some, intervals) {
  const rows = some.map((i) => table.rows[i]);
  const [first] = rows;
  const up = rows.map((row) => 100 * ((row.ci ?? [row.score, row.score])[1] - row.score));
  const down = rows.map((row) => 100 * (row.score - (row.ci ?? [row.score, row.score])[0]));
  const hue = lineColour(first);
  const names = some.map((i) => symbol(table.rows[i]) + (panel.front.includes(i) ? "" : "-open"));
  return {
    type: "scatter", mode: "lines+markers", showlegend: false, x: some.map((i) => panel.xs[i]), y: rows.map((row) => 100 * row.score),
    line: { color: hue, width: first.full ? 0 : 1.6, dash: dash(first) }, marker: { symbol: names, size: first.full ? 12 : 8, color: hue, line: { width: 1.4, color: hue } }, cliponaxis: false,
    error_y: { type: "data", symmetric: false, array: up, arrayminus: down, thickness: 1, width: 0, color: hue.replace("rgb", "rgba").replace(")", ",0.4)"), visible: intervals },
    text: rows.map((row) => plain(row.title) + (row.ci ? `<br>score ${points(row.score)} [${points(row.ci[0], 0)}, ${points(row.ci[1], 0)}]` : "")),
    hovertemplate: `%{text}<br>${plain(panel.name)}: %{x:.3~g}<extra></extra>`,
  };
}

/** Names at the ends of the lines, as far apart as they need to be; a legend where there is no room. */
function nameLines(ends, traces, layout, width, log) {
  const most = Math.max(...ends.map((end) => end.label.length));
  const room = Math.min(26 + 6.3 * Math.min(most, 26), width * 0.36);
  if (width < NARROW || ends.length > MOST_LABELS) {
    layout.showlegend = true;
    layout.legend = { orientation: "h", y: -0.2, yanchor: "top", font: { size: 11 } };
    layout.height += 19 * Math.ceil((ends.length * (36 + 6.2 * most)) / width);
    layout.margin = { ...layout.margin, b: layout.margin.b + 8 };
    return;
  }
  layout.margin = { ...layout.margin, r: room };
  const [low, high] = layout.yaxis.range;
  const pixel = (high - low) / (layout.height - layout.margin.t - layout.margin.b);
  const right = layout.xaxis.range[1];
  const spots = spread(ends.map((end) => end.y), LINE * pixel, low, high);
  ends.forEach((end, i) => {
    const hue = lineColour(end.row);
    const most = Math.floor((room - 16) / 6);
    const text = plain(end.whole ? titleIn(end.row, most) : clip(end.label, most));
    layout.annotations = [...(layout.annotations ?? []), { x: right, y: spots[i], xanchor: "left", xshift: 8, text, showarrow: false, font: { size: 11, color: hue } }];
    layout.shapes = [...(layout.shapes ?? []), { type: "line", x0: end.x, y0: end.y, x1: log ? 10 ** right : right, y1: spots[i], line: { color: hue, width: 0.6, dash: "dot" }, opacity: 0.5, layer: "below" }];
  });
}

/** Nearest places that keep `gap`, in the given order of heights, within low and high. */
function spread(ys, gap, low, high) {
  const order = ys.map((_, i) => i).sort((a, b) => ys[a] - ys[b]);
  const spots = [...ys];
  order.forEach((i, n) => (spots[i] = Math.max(spots[i], low + gap / 2, n ? spots[order[n - 1]] + gap : low)));
  order.reverse().forEach((i, n) => (spots[i] = Math.min(spots[i], high - gap / 2, n ? spots[order[n - 1]] - gap : high)));
  return spots;
}

function groupBy(values, key) {
  const found = new Map();
  for (const value of values) found.set(key(value), [...(found.get(key(value)) ?? []), value]);
  return found;
}
