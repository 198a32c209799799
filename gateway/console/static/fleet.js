// The fleet as it changes: its workers, models and routers, and what happens to them.

import {$, clock, element, fillList, make, mib, number, percent, replaceIfNew, setText, share, table} from "./dom.js";
import {onPicture, picture} from "./live.js";

const ROW_PX = 31;
const SPARE_ROWS = 20;
const SLOW = 1.5; // times the median of the model's workers

let slowAt = new Map(); // milliseconds a token from which a worker of a model is slow
let selected = null;
let sorting = {column: "worker_id", isDown: false};
let rows = [];

const COLUMNS = [
  {id: "worker_id", title: "Worker", text: (worker) => worker.worker_id},
  {id: "model", title: "Model", text: (worker) => worker.model},
  {id: "state", title: "State", text: (worker) => worker.state, style: (worker) => worker.state},
  {id: "running", title: "Running", isNumber: true, text: (worker) => `${worker.running}/${worker.max_running}`,
    share: (worker) => share(worker.running, worker.max_running)},
  {id: "waiting", title: "Waiting", isNumber: true, text: (worker) => number(worker.waiting + worker.booked),
    value: (worker) => worker.waiting + worker.booked},
  {id: "queued_prefill_tokens", title: "Prompt tokens left", isNumber: true,
    text: (worker) => number(worker.queued_prefill_tokens)},
  {id: "tokens_per_s", title: "Tokens/s", isNumber: true, text: (worker) => number(worker.tokens_per_s)},
  {id: "token_ms", title: "ms a token", isNumber: true,
    text: (worker) => (worker.token_ms ? worker.token_ms.toFixed(1) : "–") + (isSlow(worker) ? " slow" : ""),
    style: (worker) => (isSlow(worker) ? "slow" : "")},
  {id: "step_age_ms", title: "Step age ms", isNumber: true, text: (worker) => number(worker.step_age_ms)},
  {id: "used_blocks", title: "KV used", isNumber: true,
    text: (worker) => percent(share(worker.used_blocks, worker.total_blocks)),
    value: (worker) => share(worker.used_blocks, worker.total_blocks),
    share: (worker) => share(worker.used_blocks, worker.total_blocks)},
  {id: "cached_blocks", title: "KV cached", isNumber: true,
    text: (worker) => percent(share(worker.cached_blocks, worker.total_blocks)),
    value: (worker) => share(worker.cached_blocks, worker.total_blocks)},
  {id: "host_blocks", title: "In host memory", isNumber: true, text: (worker) => number(worker.host_blocks)},
  {id: "hit_rate", title: "Hits", isNumber: true, text: (worker) => percent(worker.hit_rate)},
  {id: "memory", title: "Memory", isNumber: true,
    text: (worker) => (worker.memory ? mib(worker.memory.front_mib + worker.memory.engine_mib) : "–"),
    value: (worker) => (worker.memory ? worker.memory.front_mib + worker.memory.engine_mib : 0)},
  {id: "role", title: "Role", text: (worker) => worker.role},
  {id: "site", title: "Site", text: (worker) => worker.site},
  {id: "host", title: "Host", text: (worker) => worker.host},
];

function isSlow(worker) {
  return worker.token_ms > 0 && worker.token_ms > (slowAt.get(worker.model) || Infinity);
}

export function open(section) {
  if (!section.firstChild) build(section);
  onPicture(draw);
  draw();
}

export function close() {
  onPicture(() => {});
}

function build(section) {
  selected = null;
  section.append(
    make("section", {"aria-label": "Sums"}, make("dl", {id: "sums"})),
    make("section", {"aria-labelledby": "models-title"},
      make("h2", {id: "models-title"}, "Models"),
      table("Table of models", [["Model"], ["Workers"], ["Running", true], ["Waiting at workers", true],
        ["Waiting in routers", true], ["Tokens/s", true], ["ms a token", true]])),
    make("section", {"aria-labelledby": "workers-title"},
      make("div", {class: "row"},
        make("h2", {id: "workers-title"}, "Workers"),
        make("label", {}, "Filter ", make("input", {id: "filter", type: "search", placeholder: "name, model or state",
          autocomplete: "off", on: {input: () => { sortRows(); drawRows(); }}})),
        make("p", {id: "shown"})),
      make("p", {class: "hint", id: "workers-hint"}, "Arrow keys move between rows, Enter shows a worker's details."),
      make("div", {id: "scroll", class: "wide tall", tabindex: 0, role: "region", "aria-label": "Table of workers",
        on: {scroll: drawRows}},
      make("table", {id: "workers", role: "grid", "aria-describedby": "workers-hint"},
        make("thead", {}, make("tr")), make("tbody", {on: {click: clickRow, keydown: moveByKey}})))),
    make("section", {id: "detail", "aria-labelledby": "detail-title", hidden: true},
      make("div", {class: "row"}, make("h2", {id: "detail-title", tabindex: -1}, "Worker"),
        make("button", {type: "button", on: {click: closeDetail}}, "Close")),
      make("dl")),
    make("div", {class: "columns"},
      make("section", {"aria-labelledby": "events-title"}, make("h2", {id: "events-title"}, "Events"),
        make("ol", {id: "events", tabindex: 0, "aria-labelledby": "events-title"})),
      make("section", {"aria-labelledby": "routers-title"}, make("h2", {id: "routers-title"}, "Routers"),
        make("ul", {id: "routers"}))));
  section.querySelector("table").id = "models";
  drawHead();
}

// Drawing

function draw() {
  const models = picture.models();
  slowAt = new Map(models.map((model) => [model.model, SLOW * model.token_ms]));
  drawSums();
  drawModels(models);
  sortRows();
  drawRows();
  drawDetail();
  drawEvents();
  drawRouters();
}

function drawSums() {
  const sum = (field) => [...picture.workers.values()].reduce((total, worker) => total + (worker[field] || 0), 0);
  const states = new Map();
  for (const worker of picture.workers.values()) states.set(worker.state, (states.get(worker.state) || 0) + 1);
  const waiting = picture.queues.reduce((total, queue) => total + queue[1] + queue[2], 0);
  fillList($("sums"), [
    ["Workers", [...states].map(([state, count]) => `${number(count)} ${state}`).join(", ") || "none"],
    ["Running", number(sum("running"))],
    ["Waiting at workers", number(sum("waiting") + sum("booked"))],
    ["Waiting in routers", number(waiting)],
    ["Tokens/s", number(sum("tokens_per_s"))],
    ["KV memory in use", percent(share(sum("used_blocks"), sum("total_blocks")))],
    ["KV memory cached", percent(share(sum("cached_blocks"), sum("total_blocks")))],
  ]);
}

function drawModels(models) {
  const made = models.map((model) => {
    const row = document.createElement("tr");
    const head = element("th", model.model);
    head.scope = "row";
    const states = [...model.states].map(([state, count]) => `${number(count)} ${state}`).join(", ") || "none";
    const loading = model.progress === null ? "" : `, loading ${percent(model.progress)}`;
    row.append(head, element("td", states + loading),
      ...[model.running, model.waiting, model.queued + model.held, model.tokens_per_s]
        .map((value) => element("td", number(value), "number")),
      element("td", model.token_ms ? model.token_ms.toFixed(1) : "–", "number"));
    return row;
  });
  replaceIfNew($("models").tBodies[0], made);
}

function sortRows() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const column = COLUMNS.find((one) => one.id === sorting.column);
  const value = column.value || ((worker) => worker[column.id]);
  rows = [...picture.workers.values()].filter((worker) => {
    const text = `${worker.worker_id} ${worker.model} ${worker.state} ${worker.host} ${worker.site} ${worker.role}`;
    return words.every((word) => text.toLowerCase().includes(word));
  });
  const keyed = rows.map((worker) => [value(worker), worker.worker_id, worker.number, worker]);
  keyed.sort((one, other) => (compare(one[0], other[0]) || compare(one[1], other[1]) || one[2] - other[2])
    * (sorting.isDown ? -1 : 1));
  rows = keyed.map((each) => each[3]);
  const all = picture.workers.size;
  const text = rows.length === all ? `${number(all)} in all` : `${number(rows.length)} of ${number(all)}`;
  setText($("shown"), text);
}

function compare(one, other) {
  if (one === other) return 0;
  return one < other ? -1 : 1;
}

/** Draws the rows that can be seen, and as much empty space as the others would take. */
function drawRows() {
  const scroll = $("scroll");
  const first = Math.max(0, Math.floor(scroll.scrollTop / ROW_PX) - SPARE_ROWS);
  const count = Math.ceil(scroll.clientHeight / ROW_PX) + 2 * SPARE_ROWS;
  const body = $("workers").tBodies[0];
  const seen = rows.slice(first, first + count);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.worker : null;
  while (body.rows.length > seen.length + 2) body.lastChild.remove();
  while (body.rows.length < seen.length + 2) body.append(newRow());
  space(body.rows[0], first * ROW_PX);
  space(body.rows[body.rows.length - 1], Math.max(0, rows.length - first - seen.length) * ROW_PX);
  $("workers").setAttribute("aria-rowcount", String(rows.length + 1));
  seen.forEach((worker, at) => fillRow(body.rows[at + 1], worker, first + at + 2));
  if (focused) {
    const row = body.querySelector(`tr[data-worker="${CSS.escape(focused)}"]`);
    if (row && document.activeElement !== row) row.focus({preventScroll: true});
  }
}

function newRow() {
  const row = document.createElement("tr");
  for (const column of COLUMNS) {
    const cell = document.createElement("td");
    if (column.isNumber) cell.classList.add("number");
    row.append(cell);
  }
  return row;
}

function space(row, height) {
  row.removeAttribute("tabindex");
  delete row.dataset.worker;
  row.setAttribute("aria-hidden", "true");
  for (const cell of row.cells) {
    cell.textContent = "";
    cell.style.padding = "0";
    cell.style.height = `${height}px`;
    cell.style.removeProperty("--share");
  }
}

function fillRow(row, worker, at) {
  if (row.hasAttribute("aria-hidden")) {
    row.removeAttribute("aria-hidden");
    for (const cell of row.cells) cell.removeAttribute("style");
  }
  row.tabIndex = -1;
  if (worker.number === (selected === null && rows.length ? rows[0].number : selected)) row.tabIndex = 0;
  row.dataset.worker = String(worker.number);
  row.setAttribute("aria-rowindex", String(at));
  row.setAttribute("aria-selected", String(worker.number === selected));
  COLUMNS.forEach((column, index) => {
    const cell = row.cells[index];
    const text = column.text(worker);
    setText(cell, text);
    const style = [column.isNumber ? "number" : "", column.share ? "share" : "", column.style ? column.style(worker) : ""]
      .filter(Boolean).join(" ");
    if (cell.className !== style) cell.className = style;
    if (column.share) cell.style.setProperty("--share", percent(column.share(worker)).replace(" ", ""));
  });
}

function drawDetail() {
  const worker = picture.workers.get(selected);
  $("detail").hidden = !worker;
  if (!worker) return;
  $("detail-title").textContent = `${worker.worker_id} of ${worker.model}`;
  const pairs = COLUMNS.slice(2).map((column) => [column.title, column.text(worker) || "–"]);
  pairs.push(
    ["Engine", worker.engine],
    ["Up since", new Date(worker.since_ms).toLocaleString()],
    ["KV blocks", `${number(worker.used_blocks)} used, ${number(worker.cached_blocks)} cached, `
      + `${number(worker.total_blocks)} in all`],
    ["KV blocks expected", number(worker.expected_blocks)],
    ["KV blocks kept for clients", number(worker.kept_blocks)],
    ["KV blocks fetched", number(worker.fetched_blocks)],
    ["KV blocks the router knows", number(worker.indexed_blocks)],
    ["Events", worker.events + (worker.lost_events ? `, ${number(worker.lost_events)} lost` : "")],
  );
  if (worker.memory) {
    pairs.push(["Memory of its processes", `frontend ${mib(worker.memory.front_mib)}, engine ${mib(worker.memory.engine_mib)}`]);
    for (const [device, total, free] of worker.memory.devices) {
      pairs.push([`Memory of ${device}`, `${mib(total - free)} of ${mib(total)} in use`]);
    }
  }
  fillList($("detail").querySelector("dl"), pairs);
}

function drawEvents() {
  const made = picture.events.map((event) => {
    const item = document.createElement("li");
    const time = element("time", clock(event.at));
    time.dateTime = new Date(event.at).toISOString();
    item.append(time, event.text);
    return item;
  });
  if (!made.length) made.push(element("li", "nothing has happened since this page was opened"));
  replaceIfNew($("events"), made);
}

function drawRouters() {
  const made = picture.routers.map((router) => {
    const part = router.models.length ? ` for ${router.models.join(" ")}` : "";
    const site = router.site ? ` at ${router.site}` : "";
    return element("li", `${router.router_id}${site}${part}: ${number(router.decisions)} requests placed, `
      + `${router.decisions_per_s.toFixed(1)} a second in ${number(router.decision_p50_us)} µs; ${number(router.waiting)} wait; `
      + `${number(router.continued)} continued elsewhere; prompts cached ${percent(router.hit_rate)}`);
  });
  if (!made.length) made.push(element("li", "no router answers"));
  replaceIfNew($("routers"), made);
}

// Hands

function select(value) {
  selected = value;
  drawRows();
  drawDetail();
}

function drawHead() {
  const made = COLUMNS.map((column) => {
    const head = document.createElement("th");
    head.scope = "col";
    if (column.isNumber) head.className = "number";
    const isSorted = sorting.column === column.id;
    head.setAttribute("aria-sort", isSorted ? (sorting.isDown ? "descending" : "ascending") : "none");
    const button = element("button", column.title + (isSorted ? (sorting.isDown ? " ▼" : " ▲") : ""));
    button.type = "button";
    button.addEventListener("click", () => {
      const isDown = sorting.column === column.id ? !sorting.isDown : Boolean(column.isNumber);
      sorting = {column: column.id, isDown};
      drawHead();
      sortRows();
      drawRows();
      $("workers").tHead.rows[0].cells[COLUMNS.indexOf(column)].firstChild.focus();
    });
    head.append(button);
    return head;
  });
  $("workers").tHead.rows[0].replaceChildren(...made);
}

function move(step) {
  const at = rows.findIndex((worker) => String(worker.number) === document.activeElement.dataset.worker);
  const next = Math.min(rows.length - 1, Math.max(0, at + step));
  const scroll = $("scroll");
  const top = next * ROW_PX;
  if (top < scroll.scrollTop) scroll.scrollTop = top;
  if (top + 3 * ROW_PX > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + 3 * ROW_PX - scroll.clientHeight;
  drawRows();
  const row = $("workers").querySelector(`tr[data-worker="${rows[next].number}"]`);
  if (row) row.focus({preventScroll: true});
}

function clickRow(event) {
  const row = event.target.closest("tr[data-worker]");
  if (row) select(Number(row.dataset.worker));
}

function moveByKey(event) {
  const steps = {ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9};
  if (event.key in steps) move(steps[event.key]);
  else if (event.key === "Enter" || event.key === " ") {
    select(Number(document.activeElement.dataset.worker));
    $("detail-title").focus();
  } else return;
  event.preventDefault();
}

function closeDetail() {
  const before = selected;
  select(null);
  const row = $("workers").querySelector(`tr[data-worker="${before}"]`);
  (row || $("scroll")).focus();
}
