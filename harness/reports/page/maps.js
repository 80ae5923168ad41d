// Charts of what happened inside: needles by length and depth, recall by layer, the time of a step.

const MOST_LINES = 12; // of recall, that are still told apart
const PARTS = { select: 0, fetch: 3, attend: 2 }; // part -> its colour; what is no method's is grey

/** Runs of one length share a map, a line each; those of several lengths have a map each. */
function heatMaps(table) {
  if (!table.heat.length) return null;
  const figures = [...groupBy(table.heat, (map) => map.task)].map(([task, maps]) => {
    const flat = unique(maps.map((map) => [...map.lengths, ...map.depths].join())).length === 1 && maps[0].lengths.length === 1;
    const where = flat ? `by depth of the needle, at a length of ${maps[0].lengths[0]} tokens.` : "by length (tokens, across) and depth (%, down).";
    const note = `mean score ${where} Yellow is 100, blue 0; an empty cell holds no needle. Point at a cell for its number of examples.`;
    return chart(`Needles, ${task}:`, note, (width) => (flat ? flatMap : heatPlot)(table, maps, width));
  });
  return el("section", {}, el("h3", {}, "Where the needles were found"), figures);
}

function flatMap(table, maps, width) {
  const shown = maps.filter((map) => isShown(table.rows[map.row]));
  if (!shown.length) return null;
  const column = (values) => values.map((line) => line[0]);
  const rows = shown.map((map) => table.rows[map.row]);
  return rowsMap(rows, shown.map((map) => column(map.means)), shown[0].depths, "depth of the needle (%)", width, {
    customdata: shown.map((map) => column(map.counts)), texttemplate: "%{z:.0f}",
    hovertemplate: "%{y}<br>depth %{x} %<br>score %{z:.1f}, n = %{customdata}<extra></extra>", showscale: false,
  });
}

/** A line of cells, 0 to 100, for each run. */
function rowsMap(rows, z, x, title, width, how) {
  const names = rows.map((row) => plain(titleIn(row, width < NARROW ? 18 : 40)));
  const longest = Math.max(...names.map((name) => name.length));
  const y = axis("", { tickvals: rows.map((_, i) => i), ticktext: names, autorange: "reversed", showgrid: false, tickfont: { size: 12, color: colour("ink") } });
  const trace = { type: "heatmap", z, x, y: rows.map((_, i) => i), zmin: 0, zmax: 100, colorscale: "Cividis", xgap: 1, ygap: 1, textfont: { size: 10 }, hoverongaps: false, colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 10, color: colour("soft") } }, ...how };
  const across = axis(title, { type: typeof x[0] === "string" ? "category" : "linear", showgrid: false, automargin: true });
  return { data: [trace], layout: { plot_bgcolor: colour("grid"), xaxis: across, yaxis: y, height: 60 + 19 * rows.length, margin: { l: 14 + 6.8 * longest, r: 12, t: 6, b: 46 } } };
}

function heatPlot(table, maps, width) {
  const shown = maps.filter((map) => isShown(table.rows[map.row])).slice(0, MOST_MAPS);
  if (!shown.length) return null;
  const across = Math.max(1, Math.min(shown.length, Math.floor(width / 210)));
  const down = Math.ceil(shown.length / across);
  const [tall, gap, top] = [22 * Math.max(...shown.map((map) => map.depths.length)) + 26, 44, 30];
  const height = down * (tall + gap) + top - 18;
  const layout = { annotations: [], height, plot_bgcolor: colour("grid"), margin: { l: 0, r: 0, t: 0, b: 0 } };
  const traces = shown.map((map, i) => {
    const [column, line] = [i % across, Math.floor(i / across)];
    const end = i ? i + 1 : "";
    const y1 = 1 - (top + line * (tall + gap)) / height;
    const [x0, x1] = [column / across + 42 / width, (column + 1) / across - 8 / width];
    const bare = { showgrid: false, tickfont: { size: 10, color: colour("soft") } };
    layout[`xaxis${end}`] = axis("", { ...bare, domain: [x0, x1], anchor: `y${end}`, type: "category" });
    layout[`yaxis${end}`] = axis("", { ...bare, domain: [y1 - (tall - 26) / height, y1], anchor: `x${end}`, type: "category", autorange: "reversed" });
    const name = plain(titleIn(table.rows[map.row], Math.floor(width / across / 7)));
    layout.annotations.push({ text: name, showarrow: false, xref: "paper", yref: "paper", x: x0, y: y1, yshift: 3, xanchor: "left", yanchor: "bottom", font: { size: 12 } });
    return {
      type: "heatmap", z: map.means, x: map.lengths, y: map.depths, xaxis: `x${end}`, yaxis: `y${end}`, zmin: 0, zmax: 100, colorscale: "Cividis", showscale: false, xgap: 2, ygap: 2,
      texttemplate: map.lengths.length <= 6 ? "%{z:.0f}" : "", textfont: { size: 10 }, hoverongaps: false, customdata: map.counts,
      hovertemplate: `${plain(table.rows[map.row].title)}<br>length %{x}, depth %{y} %<br>score %{z:.1f}, n = %{customdata}<extra></extra>`,
    };
  });
  const left = maps.filter((map) => isShown(table.rows[map.row])).length - shown.length;
  if (left > 0) layout.annotations.push({ text: `${left} more: choose fewer methods or budgets above`, showarrow: false, xref: "paper", yref: "paper", x: 0, y: 0, xanchor: "left", yanchor: "bottom", font: { color: colour("soft") } });
  return { data: traces, layout };
}

function layersChart(table) {
  if (!table.layers.length) return null;
  const figure = chart("Recall per layer:", "share read of the tokens with the largest weights, mean over KV heads and examples.", (width) => {
    const shown = table.layers.filter((one) => isShown(table.rows[one.row]) && !table.rows[one.row].full);
    return shown.length ? (shown.length > MOST_LINES ? layersMap : layersPlot)(table, shown, width) : null;
  });
  return el("section", {}, el("h3", {}, "Recall per layer"), figure);
}

/** More lines than an eye can follow. */
function layersMap(table, shown, width) {
  const rows = shown.map((one) => table.rows[one.row]);
  const recall = shown.map((one) => one.recall.map((value) => 100 * value));
  const layers = recall.reduce((most, one) => (one.length > most.length ? one : most)).map((_, i) => i);
  return rowsMap(rows, recall, layers, "layer; recall (%) as colour", width, { hovertemplate: "%{y}<br>layer %{x}: %{z:.1f} %<extra></extra>" });
}

function layersPlot(table, shown, width) {
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const budgets = unique(shown.map((one) => table.rows[one.row].budget));
  const traces = shown.map(({ row, recall }) => ({
    type: "scatter", mode: "lines", name: plain(table.rows[row].title), x: recall.map((_, i) => i), y: recall.map((value) => 100 * value),
    line: { color: lineColour(table.rows[row]), width: 1.6, dash: dashes[budgets.indexOf(table.rows[row].budget) % dashes.length] },
    hovertemplate: `${plain(table.rows[row].title)}<br>layer %{x}: %{y:.1f} %<extra></extra>`,
  }));
  const last = Math.max(...shown.map((one) => one.recall.length)) - 1;
  const layout = { xaxis: axis("layer", { range: [-0.3, last + 0.3] }), yaxis: axis("recall (%)", { range: [-3, 103] }), height: 360, margin: { l: 44, r: 12, t: 8, b: 46 } };
  const ends = shown.map(({ row, recall }) => ({ label: table.rows[row].title, whole: true, row: table.rows[row], x: recall.length - 1, y: 100 * recall.at(-1) }));
  nameLines(ends, traces, layout, width, false);
  return { data: traces, layout };
}

function partsChart(table) {
  if (!table.parts.length) return null;
  const figure = chart("Time of a decode step:", `medians of its parts, in milliseconds, of traced runs.${table.caution && ` Caution: ${table.caution}.`}`, (width) => {
    const shown = table.parts.filter((one) => isShown(table.rows[one.row])).reverse();
    return shown.length ? partsPlot(table, shown, width) : null;
  });
  return el("section", {}, el("h3", {}, "Where the time goes"), figure);
}

function partsPlot(table, shown, width) {
  const greys = [colour("soft"), colour("line")];
  const names = shown.map((one) => plain(titleIn(table.rows[one.row], width < NARROW ? 18 : 36)));
  const traces = Object.keys(shown[0].ms).map((part) => ({
    type: "bar", orientation: "h", name: plain(part), y: shown.map((_, i) => i), x: shown.map((one) => one.ms[part]),
    marker: { color: part in PARTS ? data.colours[PARTS[part]] : greys[part === "model" ? 1 : 0] }, hovertemplate: `${plain(part)}: %{x:.3~g} ms<extra></extra>`,
  }));
  const y = axis("", { tickvals: shown.map((_, i) => i), ticktext: names, showgrid: false, tickfont: { size: 12, color: colour("ink") } });
  const longest = Math.max(...names.map((name) => name.length));
  const legend = { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" };
  return { data: traces, layout: { barmode: "stack", bargap: 0.45, showlegend: true, legend, xaxis: axis("ms"), yaxis: y, height: 100 + 30 * shown.length, margin: { l: 14 + 6.8 * longest, r: 12, t: 30, b: 44 } } };
}
