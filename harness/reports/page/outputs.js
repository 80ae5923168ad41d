// What two runs put out, example by example: those that differ first, found by any word in them.

const STEP = 20; // examples shown at once
const CUT_MARK = " […]";

function outputsSection(table) {
  const known = table.rows.map((_, i) => i).filter((i) => Object.keys(table.outputs.answers[i]).length);
  if (!known.length) return null;
  const full = known.find((i) => table.rows[i].full) ?? known[0];
  const other = known.find((i) => !table.rows[i].full) ?? known.find((i) => i !== full) ?? full;
  const state = { a: full, b: other, word: "", differing: false, most: STEP };
  const list = el("div", { class: "pairs" });
  const count = el("p", { class: "soft count", "aria-live": "polite" });
  const draw = () => drawPairs(table, state, list, count, draw);
  const change = (key) => (event) => {
    state[key] = key === "word" ? event.target.value.toLowerCase() : Number(event.target.value);
    state.most = STEP;
    draw();
  };
  const search = el("input", { type: "search", placeholder: "Search outputs and ids", "aria-label": "Search outputs", oninput: change("word") });
  const box = el("input", { type: "checkbox", onchange: (event) => ((state.differing = event.target.checked), draw()) });
  draw();
  return el(
    "section",
    { class: "outputs" },
    el("h3", {}, "Outputs side by side"),
    el("div", { class: "controls" }, picker("First run", table, known, state.a, change("a")), picker("Second run", table, known, state.b, change("b")), search, el("label", {}, box, " only where they differ")),
    count,
    list,
  );
}

function picker(name, table, known, chosen, onchange) {
  const options = known.map((i) => el("option", { value: i, selected: i === chosen }, table.rows[i].title));
  return el("select", { "aria-label": name, onchange }, options);
}

function drawPairs(table, state, list, count, draw) {
  const pairs = pairsOf(table, state);
  const differing = pairs.filter((pair) => pair.differs).length;
  const found = pairs.filter((pair) => (pair.differs || !state.differing) && contains(pair, state.word));
  found.sort((x, y) => y.differs - x.differs || x.place - y.place);
  const cut = data.cut ? `; ${data.cut}` : "";
  count.textContent = `${pairs.length} examples in common, ${differing} with different answers, ${found.length} found${cut}`;
  list.replaceChildren(...found.slice(0, state.most).map(pairNode));
  if (found.length > state.most) {
    const more = () => ((state.most += 5 * STEP), draw());
    list.append(el("button", { type: "button", class: "more", onclick: more }, `Show more (${found.length - state.most} left)`));
  }
}

function pairsOf(table, state) {
  const [mine, theirs] = [table.outputs.answers[state.a], table.outputs.answers[state.b]];
  return Object.keys(mine)
    .filter((place) => place in theirs)
    .map((place) => {
      const [id, group] = table.outputs.examples[place];
      const [a, b] = [answer(mine[place]), answer(theirs[place])];
      return { place: Number(place), id, group, a, b, differs: a.mark !== b.mark };
    });
}

function answer([text, score, tokens, stop, isCut, mark]) {
  return { text: text === null ? null : data.texts[text], score, tokens, stop, isCut, mark };
}

function contains(pair, word) {
  return !word || [pair.id, pair.group, pair.a.text ?? "", pair.b.text ?? ""].some((text) => text.toLowerCase().includes(word));
}

function pairNode(pair) {
  const [a, b] = compared(pair.a.text ?? "", pair.b.text ?? "");
  const head = el("div", { class: "which" }, el("strong", {}, pair.id), ` ${pair.group}`, pair.differs ? null : el("span", { class: "soft" }, " same answer"));
  return el("article", { class: "pair" }, head, side(pair.a, a), side(pair.b, b));
}

const WORDS = /\p{Script=Han}|[\p{L}\p{N}]+|\s|[^]/gu; // what is marked as a whole: a word, a number, any other character
const MOST_COMPARED = 4e6; // pairs of words; longer texts are marked whole between their common ends

/** Both texts in pieces, [text, whether the other lacks it]: the words outside their longest common subsequence. */
function compared(a, b) {
  const [x, y] = [a.match(WORDS) ?? [], b.match(WORDS) ?? []];
  let start = 0;
  while (start < Math.min(x.length, y.length) && x[start] === y[start]) start++;
  let end = 0;
  while (end < Math.min(x.length, y.length) - start && x[x.length - 1 - end] === y[y.length - 1 - end]) end++;
  const common = commonWords(x.slice(start, x.length - end), y.slice(start, y.length - end));
  return [x, y].map((words, i) => pieces(words, (place) => place < start || place >= words.length - end || common[i].has(place - start)));
}

/** Places in `x` and in `y` of a longest common subsequence. */
function commonWords(x, y) {
  const found = [new Set(), new Set()];
  if (x.length * y.length > MOST_COMPARED) return found;
  const width = y.length + 1;
  const longest = new Uint16Array((x.length + 1) * width); // of what is left behind each pair of places
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--)
      longest[i * width + j] = x[i] === y[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  for (let i = 0, j = 0; i < x.length && j < y.length; ) {
    if (x[i] === y[j]) (found[0].add(i++), found[1].add(j++));
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return found;
}

/** Neighbours that are alike in one piece. */
function pieces(words, isCommon) {
  const found = [];
  words.forEach((word, place) => {
    const lacks = !isCommon(place);
    if (found.length && found.at(-1)[1] === lacks) found.at(-1)[0] += word;
    else found.push([word, lacks]);
  });
  return found;
}

function side(one, parts) {
  const facts = `${one.score === null ? "" : `score ${points(one.score)} · `}${one.tokens} tokens · ${one.stop}`;
  const text = el("pre", {});
  if (one.text === null) text.append(el("em", {}, "left out: the page is full"));
  else text.append(...parts.map(([words, lacks]) => (lacks ? el("mark", {}, words) : words)));
  if (one.isCut) text.append(el("span", { class: "soft" }, CUT_MARK));
  return el("div", { class: one.score >= 1 ? "side right" : "side" }, el("div", { class: "soft" }, facts), text);
}
