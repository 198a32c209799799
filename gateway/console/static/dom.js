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
export const plural = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;
export const share = (part, whole) => (whole ? part / whole : 0);
export const percent = (value) => `${Math.round(100 * value)} %`;
export const mib = (value) => (value >= 1024 ? `${(value / 1024).toFixed(1)} GiB`
  : value >= 1 || !value ? `${number(value)} MiB` : `${number(Math.max(1, value * 1024))} KiB`);
export const clock = (ms) => new Date(ms).toLocaleTimeString();

/** Asks in a dialog before something is done. `lines` say what it means, `fields` are elements for the form, and `action`
 * names the button. Resolves to the form's values by the names of its fields, or to null if the answer is no. */
export function askFirst({title, lines = [], fields = [], action, isDangerous = false}) {
  return new Promise((resolve) => {
    let answer = null;
    const no = make("button", {type: "button", on: {click: () => dialog.close()}}, "Cancel");
    const yes = make("button", {class: isDangerous ? "danger" : null}, action);
    const form = make("form", {method: "dialog", on: {submit: () => { answer = Object.fromEntries(new FormData(form)); }}},
      element("h2", title), ...lines.map((line) => element("p", line)), ...fields, make("div", {class: "row"}, no, yes));
    const dialog = make("dialog", {"aria-label": title, on: {close: () => {
      dialog.remove();
      resolve(answer);
    }}}, form);
    document.body.append(dialog);
    dialog.showModal();
    if (isDangerous) no.focus();
  });
}

/** Makes a field with its label; `input` is an <input>, <select> or <textarea>. */
export const labelled = (text, input) => make("label", {class: "field"}, text, " ", input);
