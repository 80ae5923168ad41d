// Elements, state and what everything else on the page uses. Text enters the page as text alone: nothing here reads markup.

const data = JSON.parse(document.getElementById("data").textContent);
const hidden = { tables: new Set(), methods: new Set(), budgets: new Set() };
const NO_BUDGET = "no budget";
const listeners = [];

/** `attributes`: on* are handlers, null is left out; children are elements or text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function isShown(row) {
  return !hidden.methods.has(row.label) && !hidden.budgets.has(row.budget || NO_BUDGET);
}

/** Calls `draw` now and whenever filters or colours change. */
function whenChanged(draw) {
  listeners.push(draw);
  draw();
}

function changed() {
  listeners.forEach((draw) => draw());
}

/** The title of a row in so many characters; its budget stays. */
function titleIn(row, most) {
  if (!row.budget) return clip(row.label, most);
  return `${clip(row.label, Math.max(4, most - row.budget.length - 1))} ${row.budget}`;
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function points(share, digits = 1) {
  return share === null ? "" : (100 * share).toFixed(digits);
}

/** Whether the page is dark now, by its switch or else by the system. */
function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The colour of a line; on a dark page as much lighter as it needs to be seen. */
function lineColour(row) {
  if (row.full) return colour("ink");
  const hex = data.colours[row.line % data.colours.length];
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const bright = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
  const share = isDark() && bright < 0.5 ? 0.5 - bright : 0;
  return `rgb(${parts.map((part) => Math.round(part + (255 - part) * share)).join(",")})`;
}

function copyButton(text, name) {
  const button = el("button", { class: "copy", type: "button", "aria-label": `Copy ${name}`, onclick: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      copyBySelection(text); // no clipboard without a secure origin, as from file://
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
  return button;
}

function copyBySelection(text) {
  const field = el("textarea", { class: "offscreen" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
