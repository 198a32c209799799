// What was used: a table by day, model, key and more, bars by day, and the table as a CSV file.

import {element, labelled, make, number, plural, setText, table} from "./dom.js";
import {ask, call, me} from "./session.js";

const GROUPS = ["day", "tenant", "key", "model", "adapter", "operation"];
const NUMBERS = [["requests", "Requests"], ["prompt_tokens", "Prompt tokens"], ["cached_tokens", "of them cached"],
  ["completion_tokens", "Completion tokens"], ["total_tokens", "Tokens"]];
const ROWS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 120;
const BAR = 14;
const today = () => new Date().toISOString().slice(0, 10);
const before = (days) => new Date(Date.now() - 86400000 * days).toISOString().slice(0, 10);

let view = null;
let asked = 0;

export function open(section) {
  if (!section.firstChild) build(section);
  refresh();
}

export function close() {}

function build(section) {
  const input = (attributes) => make("input", {autocomplete: "off", on: {change: refresh}, ...attributes});
  view = {
    from: input({type: "date", value: before(6)}),
    to: input({type: "date", value: today()}),
    groups: new Map(GROUPS.map((name) => [name, input({type: "checkbox", checked: ["day", "model"].includes(name)})])),
    filters: new Map((me.role === "operator" ? ["tenant", "key", "model"] : ["model"])
      .map((name) => [name, input({type: "search", placeholder: "all"})])),
    problem: make("p", {class: "problem", role: "alert"}),
    count: make("p", {role: "status"}),
    chart: make("figure", {class: "chart"}),
    table: make("div"),
  };
  section.append(
    make("div", {class: "row"}, element("h2", "Usage"), labelled("From", view.from), labelled("to", view.to),
      ...[...view.filters].map(([name, box]) => labelled(`Only ${name}`, box)),
      make("button", {type: "button", on: {click: download}}, "Download CSV"), view.count),
    make("fieldset", {class: "row"}, element("legend", "A row for each"),
      ...[...view.groups].map(([name, box]) => labelled(name, box))),
    view.problem, view.chart, view.table,
  );
}

function query(groups, more = {}) {
  const found = new URLSearchParams({group_by: groups.join(","), ...more});
  if (view.from.value) found.set("from", view.from.value);
  if (view.to.value) found.set("to", view.to.value);
  for (const [name, box] of view.filters) if (box.value) found.set(name, box.value);
  return `../v1/usage?${found}`;
}

function chosenGroups() {
  return GROUPS.filter((name) => view.groups.get(name).checked);
}

async function refresh() {
  const mine = asked += 1;
  const groups = chosenGroups();
  try {
    const [page, days] = await Promise.all([ask(query(groups, {limit: ROWS})), ask(query(["day"], {limit: 400}))]);
    if (mine !== asked) return;
    setText(view.problem, "");
    setText(view.count, page.has_more ? `the first ${number(ROWS)} rows: the CSV file has up to 10,000`
      : `${plural(page.data.length, "row")}; days are UTC`);
    drawTable(groups, page);
    drawChart(days);
  } catch (error) {
    if (mine !== asked) return;
    setText(view.problem, error.message);
    view.chart.replaceChildren();
    view.table.replaceChildren();
  }
}

function drawTable(groups, page) {
  const columns = [...groups.map((name) => [name[0].toUpperCase() + name.slice(1), false]),
    ...NUMBERS.map(([, title]) => [title, true]), ["Errors", false]];
  const rowOf = (item, names) => [...names, ...NUMBERS.map(([name]) => number(item[name])),
    Object.entries(item.errors).map(([code, count]) => `${number(count)} ${code}`).join(", ")];
  const rows = page.data.map((item) => rowOf(item, groups.map((name) => item[name] || "–")));
  const total = rowOf(page.total, groups.map((_, at) => (at ? "" : "all")));
  view.table.replaceChildren(table("Table of usage", columns, groups.length ? [total, ...rows] : rows));
}

/** Draws a bar for each day; the table beside it says the same in text. */
function drawChart(page) {
  const tokens = new Map(page.data.map((item) => [item.day, item.total_tokens]));
  const days = [];
  for (let at = Date.parse(page.from); at <= Date.parse(page.to) && days.length < 400; at += 86400000) {
    days.push(new Date(at).toISOString().slice(0, 10));
  }
  const most = Math.max(1, ...tokens.values());
  const bars = days.map((day, at) => {
    const height = (HEIGHT * (tokens.get(day) || 0)) / most;
    const bar = shape("rect", {x: at * BAR + 1, y: HEIGHT - height, width: BAR - 2, height});
    bar.append(shape("title", {}, `${day}: ${number(tokens.get(day) || 0)} tokens`));
    return bar;
  });
  const label = `Tokens a day from ${page.from} to ${page.to}, at most ${number(most)}`;
  const drawing = shape("svg", {viewBox: `0 0 ${Math.max(1, days.length) * BAR} ${HEIGHT}`, role: "img", "aria-label": label,
    width: Math.min(960, Math.max(1, days.length) * 3 * BAR), height: HEIGHT, preserveAspectRatio: "none"});
  drawing.append(shape("line", {x1: 0, x2: days.length * BAR, y1: HEIGHT, y2: HEIGHT}), ...bars);
  view.chart.replaceChildren(drawing, element("figcaption", label));
}

function shape(tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

async function download() {
  try {
    const response = await call(query(chosenGroups(), {format: "csv", limit: 10000}));
    const url = URL.createObjectURL(await response.blob());
    make("a", {href: url, download: `usage-${view.from.value || "start"}-${view.to.value || today()}.csv`}).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } catch (error) {
    setText(view.problem, error.message);
  }
}
