// How single requests went: the recent ones of a tenant, and one as a timeline with the reasons in sentences.

import {$, clock, element, fillList, make, number, percent, replaceIfNew, setText, share, table} from "./dom.js";
import {onPicture, picture} from "./live.js";
import {ask, me} from "./session.js";

const REFRESH_MS = 2000;
const MOST = 200; // requests that are asked for at a time, as many as a router tells of
const KINDS = {
  held: "waits for a worker of its model", tokenize: "prompt is tokenized", queue: "waits until a worker has room",
  accept: "is sent to the worker", refused: "is refused", worker_queue: "waits at the worker", prefill: "prompt is computed",
  starting: "waits at the worker, or its prompt is computed", waiting: "waits for a worker",
  decode: "tokens are generated", gap: "is taken to another worker",
};

let timer = null;
let shownId = "";
let scrolled = 0; // how far down the list was when a request was opened
let hasEnded = false; // whether the one that is shown can't change any more
let round = 0; // counts openings and closings: what an earlier one has asked for is not shown

export function open(section, argument) {
  if (!section.firstChild) build(section);
  if (argument && !shownId) scrolled = scrollY;
  const isClosed = shownId && !argument;
  shownId = argument;
  hasEnded = false;
  $("request-id").value = argument;
  $("way").hidden = !argument;
  setText($("way-title"), argument ? `Request ${argument}: loading` : "");
  $("way-more").hidden = true;
  for (const id of ["way-story", "way-times", "way-facts", "way-gaps"]) $(id).replaceChildren();
  onPicture(tellMissing);
  round += 1;
  refresh(round);
  if (argument) $("way-title").focus();
  if (isClosed) scrollTo(0, scrolled);
}

export function close() {
  onPicture(() => {});
  clearTimeout(timer);
  round += 1;
}

function build(section) {
  const refreshNow = () => refresh(round);
  section.append(
    make("div", {class: "row"},
      make("h2", {id: "requests-title"}, "Requests"),
      make("form", {id: "find", class: "row", on: {submit: find}},
        make("label", {}, "Id ", make("input", {id: "request-id", type: "search", autocomplete: "off", spellcheck: "false", size: 26,
          placeholder: "or its beginning"})),
        make("button", {}, "Find")),
      make("label", {}, make("input", {id: "only-failed", type: "checkbox", on: {change: refreshNow}}), " Errors only"),
      make("label", {}, "First token after at least ", make("input", {id: "slower", type: "number", min: 0, step: "any",
        size: 5, placeholder: "0", on: {change: refreshNow}}), " s"),
      make("label", {}, "Filter ", make("input", {id: "request-filter", type: "search", autocomplete: "off",
        placeholder: "id, model, worker or state", on: {input: () => drawRows()}})),
      make("label", {id: "of-tenant", hidden: me.role !== "operator"}, "Tenant ",
        make("input", {id: "tenant", value: me.tenant, autocomplete: "off", on: {change: refreshNow}}))),
    make("p", {id: "requests-problem", class: "problem", role: "alert"}),
    make("section", {id: "way", "aria-labelledby": "way-title", hidden: true, on: {keydown: (event) => {
      if (event.key === "Escape") location.hash = "#requests";
    }}},
      make("div", {class: "row"}, make("h2", {id: "way-title", tabindex: -1}),
        make("button", {type: "button", on: {click: () => { location.hash = "#requests"; }}}, "Close")),
      make("ol", {id: "way-story"}),
      make("div", {id: "way-more", hidden: true},
        make("h3", {}, "Where its time went"),
        make("ol", {id: "way-times"}),
        make("dl", {id: "way-facts"}),
        make("h3", {}, "Times between tokens"),
        make("ol", {id: "way-gaps"}))),
    table("Table of requests", [["Received"], ["Id"], ["Model"], ["State or end"], ["Workers"], ["Prompt", true], ["Cached", true],
      ["Tokens", true], ["First token", true], ["In all", true]]),
    make("p", {id: "requests-note", class: "hint"}));
  section.querySelector("table").id = "requests-table";
}

function find(event) {
  event.preventDefault();
  const id = $("request-id").value.trim();
  location.hash = id ? `#requests/${encodeURIComponent(id)}` : "#requests";
}

/** Reads everything anew, and again after a while as long as the part is open. */
async function refresh(mine) {
  clearTimeout(timer);
  const query = new URLSearchParams({limit: String(MOST)});
  if ($("only-failed").checked) query.set("failed", "1");
  if (Number($("slower").value) > 0) query.set("slower_than_ms", String(1000 * Number($("slower").value)));
  const tenant = $("tenant").value.trim();
  if (tenant && tenant !== me.tenant) query.set("tenant", tenant);
  try {
    const [recent, way] = await Promise.all([
      ask(`requests?${query}`), shownId && !hasEnded ? ask(`requests/${encodeURIComponent(shownId)}?${query}`) : null]);
    if (mine !== round) return;
    setText($("requests-problem"), "");
    drawRecent(recent);
    if (way) drawWay(way);
  } catch (error) {
    if (mine !== round) return;
    setText($("requests-problem"), error.message);
    if (error.status === 404) $("way").hidden = true;
  }
  timer = setTimeout(() => refresh(mine), REFRESH_MS);
}

let answered = [];
let recents = []; // as they were answered last

/** Says of which routers the requests are missing: those that the fleet has and that have not answered. */
function tellMissing() {
  const missing = picture.routers.map((router) => router.router_id).filter((id) => !answered.includes(id));
  const text = answered.length && missing.length
    ? `${missing.join(", ")} did not answer, so requests of that router are missing.` : "";
  setText($("requests-note"), [$("requests-note").dataset.more || "", text].filter(Boolean).join(" "));
}

function drawRecent(recent) {
  answered = recent.routers;
  recents = recent.requests;
  drawRows();
  $("requests-note").dataset.more = (recent.truncated ? `The latest ${recent.requests.length}. ` : "")
    + `Of tenant ${recent.tenant}. Routers remember their last 4,096 requests until they are restarted.`;
  tellMissing();
}

function drawRows() {
  const words = $("request-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = recents.filter((one) => {
    const text = `${one.id} ${one.model} ${stateOf(one)} ${one.workers.join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const body = $("requests-table").tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const rows = found.map((one) => filled(known.get(one.id) || newRow(one.id), one));
  if (!rows.length) rows.push(make("tr", {}, make("td", {colspan: 10}, "no such requests")));
  // rows that stay are not moved, so that a focused link keeps its focus
  for (const row of [...body.rows]) if (!rows.includes(row)) row.remove();
  rows.forEach((row, at) => { if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] || null); });
}

/** Says what a request does, or how it ended; one that a worker has accepted starts until it has its first token. */
function stateOf(one) {
  return one.code || (one.state === "running" && one.first_token_ms === null && !one.completion_tokens ? "starting" : one.state);
}

function newRow(id) {
  const row = make("tr", {}, ...Array.from({length: 10}, (_, at) => make("td", {class: at > 4 ? "number" : null})));
  row.dataset.id = id;
  row.cells[1].append(make("a", {href: `#requests/${encodeURIComponent(id)}`}, id));
  return row;
}

function filled(row, one) {
  const texts = [clock(one.received_at_ms), one.id, one.model, stateOf(one), one.workers.join(" → ") || "–",
    number(one.prompt_tokens), percent(share(one.cached_tokens, one.prompt_tokens)), number(one.completion_tokens),
    one.first_token_ms === null ? "–" : time(one.first_token_ms), time(one.total_ms)];
  texts.forEach((text, at) => { if (at !== 1) setText(row.cells[at], text); });
  row.cells[3].className = one.code ? "problem" : "";
  if (one.id === shownId) row.setAttribute("aria-current", "true");
  else row.removeAttribute("aria-current");
  return row;
}

function drawWay({request, story, spans, router_id: router, first_token_ms: first}) {
  hasEnded = !["waiting", "running"].includes(request.state);
  setText($("way-title"), `Request ${request.id}`);
  $("way-more").hidden = false;
  replaceIfNew($("way-story"), story.map((sentence) => element("li", sentence)));
  const total = Math.max(request.total_ms, 0.001);
  replaceIfNew($("way-times"), spans.map(([kind, where, begin, end]) => {
    const bar = make("span", {class: `bar ${kind}`});
    bar.style.setProperty("--from", `${100 * share(begin, total)}%`);
    bar.style.setProperty("--size", `${100 * share(end - begin, total)}%`);
    return make("li", {}, element("span", where || `router ${router}`, "where"), element("span", KINDS[kind] || kind, "what"),
      make("span", {class: "track", "aria-hidden": "true"}, bar), element("span", time(end - begin), "number"));
  }));
  fillList($("way-facts"), [
    ["Received", new Date(request.received_at_ms).toLocaleString()],
    ["Model", request.model],
    ["State or end", stateOf({...request, first_token_ms: first})],
    ["First token", first === null ? "–" : time(first)],
    ["In all", time(request.total_ms)],
    ["Prompt", `${number(request.prompt_tokens || 0)} tokens, ${number(request.cached_tokens || 0)} cached, `
      + `${number(request.fetched_tokens || 0)} of these from other workers`],
    ["Answer", `${number(request.completion_tokens || 0)} tokens`],
    ["API key", request.key_id || "–"],
  ]);
  drawGaps(request.gaps || []);
}

function drawGaps(gaps) {
  const most = Math.max(1, ...gaps);
  const first = gaps.findIndex((count) => count > 0);
  const last = gaps.findLastIndex((count) => count > 0);
  const made = first < 0 ? [element("li", "known at the request's end")]
    : gaps.slice(first, last + 1).map((count, at) => {
      const bucket = first + at;
      const label = bucket === 0 ? "below 1 ms" : bucket === 13 ? "4,096 ms and more"
        : `${number(2 ** (bucket - 1))} to ${number(2 ** bucket)} ms`;
      const bar = make("span", {class: "bar decode"});
      bar.style.setProperty("--from", "0%");
      bar.style.setProperty("--size", `${100 * count / most}%`);
      if (!count) bar.hidden = true;
      return make("li", {}, element("span", label, "where"), make("span", {class: "track", "aria-hidden": "true"}, bar),
        element("span", number(count), "number"));
    });
  replaceIfNew($("way-gaps"), made);
}

function time(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10000 ? 0 : 1)} s`;
  return `${ms.toFixed(ms >= 10 ? 0 : 1)} ms`;
}
