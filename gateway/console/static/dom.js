// Makes elements, and texts of numbers. Text becomes text, never markup: it may come from models, clients and workers.

/** Finds an element by its id. */
export const $ = (id) => document.getElementById(id);

/** Makes an element with attributes, handlers under `on`, and children; attributes that are false or null are left out. */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) made.addEventListener(event, handler);
    } else if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function element(tag, text, style = "") {
  return make(tag, {class: style || null}, text);
}

/** Makes a table in a box that scrolls sideways: `columns` are [title, isNumber], `rows` lists of texts or elements. */
export function table(label, columns, rows = []) {
  const cell = (tag, child, isNumber, scope = null) => make(tag, {class: isNumber ? "number" : null, scope}, child);
  return make("div", {class: "wide", tabindex: 0, role: "region", "aria-label": label},
    make("table", {},
      make("thead", {}, make("tr", {}, ...columns.map(([title, isNumber]) => cell("th", title, isNumber, "col")))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((child, at) => cell("td", child, columns[at][1])))))));
}

/** Fills a <dl> with [title, text] pairs, and leaves it alone if it has them. */
export function fillList(list, pairs) {
  replaceIfNew(list, pairs.map(([title, text]) => make("div", {}, element("dt", title), element("dd", text))));
}

/** Replaces the children of an element only if they differ, so that selected text and scrolling stay. */
export function replaceIfNew(parent, children) {
  const isSame = parent.children.length === children.length
    && children.every((child, at) => child.isEqualNode(parent.children[at]));
  if (!isSame) parent.replaceChildren(...children);
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const share = (part, whole) => (whole ? part / whole : 0);
export const percent = (value) => `${Math.round(100 * value)} %`;
export const mib = (value) => (value >= 1024 ? `${(value / 1024).toFixed(1)} GiB` : `${number(value)} MiB`);
export const clock = (ms) => new Date(ms).toLocaleTimeString();
