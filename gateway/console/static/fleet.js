// The fleet as it changes: its workers, models and routers, and what happens to them.

import {$, clock, element, fillList, make, mib, number, percent, replaceIfNew, setText, share, table} from "./dom.js";
import {onPicture, picture} from "./live.js";

const ROW_PX = 31;
const SPARE_ROWS = 20;
const SLOW = 1.5; // times the median of the model's workers

let slowAt = new Map(); // milliseconds a token from which a worker of a model is slow
let selected = null;
let wanted = null; // tells whether a worker is the one that the address names, until it is found
let sorting = {column: "worker_id", isDown: false};
let rows = [];

// `help` is on the column's title, and in the list of what the columns mean
const COLUMNS = [
  {id: "worker_id", title: "Worker", text: (worker) => worker.worker_id, help: "The worker's name."},
  {id: "model", title: "Model", text: (worker) => worker.model, help: "The name that requests give."},
  {id: "state", title: "State", text: (worker) => worker.state, style: (worker) => worker.state,
    help: "Ready takes requests. Silent has not been heard of for some seconds, ejected has failed too often of late, and "
      + "loadable loads its model when a request comes."},
  {id: "running", title: "Running", isNumber: true, text: (worker) => `${worker.running}/${worker.max_running}`,
    share: (worker) => share(worker.running, worker.max_running), help: "Streams, and how many it could run if its memory "
      + "were enough."},
  {id: "waiting", title: "Waiting", isNumber: true,
    text: (worker) => number(worker.waiting + worker.booked) + (waitsFor(worker) ? `, ${waitsFor(worker)}` : ""),
    value: (worker) => worker.waiting + worker.booked,
    help: "Requests that it has and that do not run yet: for memory, if its KV cache is promised to others; for a place, if "
      + "it runs as many as it can."},
  {id: "tokens_per_s", title: "Tokens/s", isNumber: true, text: (worker) => number(worker.tokens_per_s),
    help: "Tokens generated a second, all streams together."},
  {id: "token_ms", title: "ms a token", isNumber: true,
    text: (worker) => (worker.token_ms ? worker.token_ms.toFixed(1) : "–") + (isSlow(worker) ? " slow" : ""),
    style: (worker) => (isSlow(worker) ? "slow" : ""),
    help: "From one token of a stream to the next, at the worker's best: beside prompts it takes longer. Slow is more than "
      + "half again as long as the median of its model's workers, or the faster of two."},
  {id: "used_blocks", title: "KV used", isNumber: true,
    text: (worker) => percent(share(worker.used_blocks, worker.total_blocks)) + (isFull(worker) ? ", no room" : ""),
    value: (worker) => share(worker.used_blocks, worker.total_blocks),
    share: (worker) => share(worker.used_blocks, worker.total_blocks), style: (worker) => (isFull(worker) ? "full" : ""),
    help: "Share of its memory for keys and values that its requests hold. No room: with what these are expected to need, "
      + "all of it is taken, and routers send it no more."},
  {id: "cached_blocks", title: "KV cached", isNumber: true,
    text: (worker) => percent(share(worker.cached_blocks, worker.total_blocks)),
    value: (worker) => share(worker.cached_blocks, worker.total_blocks),
    help: "Share of that memory that holds the beginnings of earlier prompts. It is free for others when they need it."},
  {id: "memory", title: "Memory", isNumber: true,
    text: (worker) => (worker.memory ? mib(worker.memory.front_mib + worker.memory.engine_mib) : "–"),
    value: (worker) => (worker.memory ? worker.memory.front_mib + worker.memory.engine_mib : 0),
    help: "Resident memory of its processes: weights, KV on a CPU, host copies in use, and the rest."},
  {id: "hit_rate", title: "Hits", isNumber: true, text: (worker) => percent(worker.hit_rate),
    help: "Share of all prompt tokens that were cached, since its engine started."},
  {id: "queued_prefill_tokens", title: "Prompt tokens left", isNumber: true,
    text: (worker) => number(worker.queued_prefill_tokens), help: "Tokens of prompts that it has and has not computed yet."},
  {id: "host_blocks", title: "Host copies", isNumber: true, text: (worker) => blocksText(worker, worker.host_blocks),
    value: (worker) => worker.host_blocks * (worker.kv_block_bytes || 1),
    help: "KV blocks that were evicted and are kept in the machine's memory, to be copied back."},
  {id: "step_age_ms", title: "Step age ms", isNumber: true, text: (worker) => number(worker.step_age_ms),
    help: "How long the model has been computing since it last gave tokens. It is large while a long prompt is computed, and "
      + "grows without end in a worker that hangs."},
  {id: "role", title: "Role", text: (worker) => worker.role,
    help: "Prefill computes prompts for others, decode leaves long prompts to those, both does both."},
  {id: "site", title: "Site", text: (worker) => worker.site, help: "Place where it runs, if it was told."},
  {id: "host", title: "Host", text: (worker) => worker.host, help: "Name of its machine."},
];

/** Whether a worker's requests are expected to fill its KV memory: routers give it no more then. */
function isFull(worker) {
  return worker.total_blocks > 0 && Math.max(worker.expected_blocks, worker.used_blocks) >= worker.total_blocks;
}

function waitsFor(worker) {
  if (!worker.waiting) return "";
  if (worker.running >= worker.max_running) return "for a place";
  return isFull(worker) ? "for memory" : "";
}

function blocksText(worker, count) {
  const bytes = worker.kv_block_bytes ? `, ${mib(count * worker.kv_block_bytes / 1048576)}` : "";
  return count ? `${number(count)} blocks${bytes}` : "0";
}

function isSlow(worker) {
  return worker.token_ms > 0 && worker.token_ms > (slowAt.get(worker.model) || Infinity);
}

/** Shows the fleet, and the details of the worker that `argument` names: its id, a space, and its model. */
export function open(section, argument) {
  if (!section.firstChild) build(section);
  const [id, model] = argument.split(" ");
  wanted = argument ? (worker) => worker.worker_id === id && (!model || worker.model === model) : null;
  if (!argument) selected = null;
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
        ["Waiting in routers", true], ["Tokens/s", true], ["ms a token", true], ["KV used", true]])),
    make("section", {"aria-labelledby": "workers-title"},
      make("div", {class: "row"},
        make("h2", {id: "workers-title"}, "Workers"),
        make("label", {}, "Filter ", make("input", {id: "filter", type: "search", placeholder: "name, model or state",
          autocomplete: "off", on: {input: () => { sortRows(); drawRows(); }}})),
        make("p", {id: "shown"})),
      make("p", {class: "hint keys", id: "workers-hint"}, "Arrow keys move between rows, Enter shows a worker's details."),
      make("div", {id: "scroll", class: "wide tall", tabindex: 0, role: "region", "aria-label": "Table of workers",
        on: {scroll: drawRows}},
      make("table", {id: "workers", role: "grid", "aria-describedby": "workers-hint"},
        make("thead", {}, make("tr")), make("tbody", {on: {click: clickRow, keydown: moveByKey}}))),
      make("p", {id: "none", hidden: true}, "No worker matches the filter."),
      make("details", {class: "meanings"}, make("summary", {}, "What the columns mean"),
        make("dl", {}, ...COLUMNS.map((column) => make("div", {}, element("dt", column.title), element("dd", column.help)))))),
    make("section", {id: "detail", "aria-labelledby": "detail-title", hidden: true, on: {keydown: (event) => {
      if (event.key === "Escape") closeDetail();
    }}},
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
  drawSums(models);
  drawModels(models);
  const found = wanted && [...picture.workers.values()].find(wanted);
  if (found) {
    selected = found.number;
    wanted = null;
  }
  sortRows();
  drawRows();
  drawDetail();
  drawEvents();
  drawRouters();
}

function drawSums(models) {
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
    [models.length > 1 ? "KV used, fullest model" : "KV used", fullestOf(models)],
    ["Without KV room", number([...picture.workers.values()].filter(isFull).length)],
  ]);
}

function fullestOf(models) {
  const [used, model] = models.map((one) => [share(one.used_blocks, one.total_blocks), one.model])
    .reduce((most, one) => (one[0] > most[0] ? one : most), [0, ""]);
  return percent(used) + (models.length > 1 && model ? `, ${model}` : "");
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
      element("td", model.token_ms ? model.token_ms.toFixed(1) : "–", "number"),
      element("td", percent(share(model.used_blocks, model.total_blocks)), "number"));
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
  $("none").hidden = rows.length > 0 || all === 0;
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
  const kv = (name) => blocksText(worker, worker[name]);
  pairs.push(
    ["Engine", worker.engine],
    ["Up since", new Date(worker.since_ms).toLocaleString()],
    ["KV in all, of the engine's or a device's memory", kv("total_blocks")],
    ["KV in use", kv("used_blocks")],
    ["KV cached", kv("cached_blocks")],
    ["KV that its requests will need", kv("expected_blocks")],
    ["KV kept longest, as clients asked", kv("kept_blocks")],
    ["KV fetched from other workers", kv("fetched_blocks")],
    ["KV blocks that the router knows of", number(worker.indexed_blocks)],
    ["Its events reach the router", worker.events + (worker.lost_events ? `, ${number(worker.lost_events)} lost` : "")],
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
  const worker = picture.workers.get(value);
  selected = value;
  wanted = null;
  history.replaceState(null, "", worker ? `#fleet/${encodeURIComponent(`${worker.worker_id} ${worker.model}`)}` : "#fleet");
  drawRows();
  drawDetail();
}

function drawHead() {
  const made = COLUMNS.map((column) => {
    const head = document.createElement("th");
    head.scope = "col";
    if (column.isNumber) head.className = "number";
    const isSorted = sorting.column === column.id;
    head.title = column.help;
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
