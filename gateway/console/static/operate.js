// Commands to workers: one, some, or all of a model. What they answer is shown beside the fleet as it is.

import {askFirst, element, labelled, make, number, percent, plural, setText} from "./dom.js";
import {onPicture, picture} from "./live.js";
import {call} from "./session.js";

const MAX_ROWS = 200;
const MAX_WORKERS = 1024; // of one command
const MAX_TOLD = 50;
const keyOf = (worker) => JSON.stringify([worker.model, worker.worker_id]);

const chosen = new Set(); // keys of workers
const said = new Map(); // what workers have answered last, by their keys
let view = null;

const ACTS = [
  {title: "Load", act: load},
  {title: "Unload…", act: unload},
  {title: "Drain…", act: drain},
  {title: "Clear cache…", act: clearCache},
  {title: "Load adapter…", act: loadAdapter},
  {title: "Unload adapter…", act: unloadAdapter},
  {title: "Add a model…", act: addModel},
];

export function open(section) {
  if (!section.firstChild) build(section);
  onPicture(draw);
  draw();
}

export function close() {
  onPicture(() => {});
}

function build(section) {
  chosen.clear();
  said.clear();
  view = {
    filter: make("input", {type: "search", placeholder: "name or state", autocomplete: "off", on: {input: draw}}),
    model: make("select", {on: {change: draw}}, make("option", {value: ""}, "all models")),
    all: make("input", {type: "checkbox", on: {change: chooseAll}}),
    count: make("p", {role: "status"}),
    buttons: ACTS.map(({title, act}) => make("button", {type: "button", on: {click: () => run(act)}}, title)),
    body: make("tbody"),
    told: make("ol", {class: "told", "aria-live": "polite", "aria-label": "What workers have answered"}),
    rows: new Map(),
  };
  const head = ["Chosen", "Worker", "Model", "State", "Running", "Waiting", "Last answer"];
  section.append(
    make("div", {class: "row"}, element("h2", "Workers"), labelled("Model", view.model), labelled("Filter", view.filter),
      labelled("Choose all that are shown", view.all), view.count),
    make("div", {class: "row acts", role: "group", "aria-label": "Commands to the chosen workers"}, ...view.buttons),
    make("div", {class: "wide tall", tabindex: 0, role: "region", "aria-label": "Workers to choose"},
      make("table", {}, make("thead", {}, make("tr", {}, ...head.map((title) => make("th", {scope: "col"}, title)))),
        view.body)),
    element("h2", "What workers have answered"), view.told,
  );
}

function shownWorkers() {
  const words = view.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...picture.workers.values()].filter((worker) => {
    const text = `${worker.worker_id} ${worker.state} ${worker.host}`.toLowerCase();
    return (!view.model.value || worker.model === view.model.value) && words.every((word) => text.includes(word));
  });
  return found.sort((one, other) => (keyOf(one) < keyOf(other) ? -1 : 1));
}

function chosenWorkers() {
  return [...picture.workers.values()].filter((worker) => chosen.has(keyOf(worker)));
}

function chooseAll() {
  for (const worker of shownWorkers()) {
    if (view.all.checked) chosen.add(keyOf(worker));
    else chosen.delete(keyOf(worker));
  }
  draw();
}

function draw() {
  const known = new Set([...picture.workers.values()].map(keyOf));
  for (const key of chosen) if (!known.has(key)) chosen.delete(key);
  for (const key of said.keys()) if (!known.has(key)) said.delete(key);
  drawModels();
  const found = shownWorkers();
  const keys = new Set(found.slice(0, MAX_ROWS).map(keyOf));
  for (const [key, row] of view.rows) {
    if (!keys.has(key)) {
      row.element.remove();
      view.rows.delete(key);
    }
  }
  let place = view.body.firstChild;
  for (const worker of found.slice(0, MAX_ROWS)) {
    const row = rowOf(worker);
    fill(row, worker);
    if (row.element === place) place = place.nextSibling;
    else view.body.insertBefore(row.element, place);
  }
  view.all.checked = found.length > 0 && found.every((worker) => chosen.has(keyOf(worker)));
  const more = found.length > MAX_ROWS ? `, the first ${MAX_ROWS} of ${number(found.length)} shown` : "";
  setText(view.count, `${number(chosen.size)} of ${number(picture.workers.size)} chosen${more}`);
  for (const button of view.buttons) button.disabled = chosen.size === 0;
}

function drawModels() {
  const models = [...new Set([...picture.workers.values()].map((worker) => worker.model))].sort();
  const shown = [...view.model.options].slice(1).map((option) => option.value);
  if (models.join("\n") === shown.join("\n")) return;
  const before = view.model.value;
  view.model.replaceChildren(make("option", {value: ""}, "all models"),
    ...models.map((model) => make("option", {value: model}, model)));
  view.model.value = models.includes(before) ? before : "";
}

function rowOf(worker) {
  const key = keyOf(worker);
  if (!view.rows.has(key)) {
    const box = make("input", {type: "checkbox", "aria-label": `Choose ${worker.worker_id} of ${worker.model}`,
      on: {change: () => {
        if (box.checked) chosen.add(key);
        else chosen.delete(key);
        draw();
      }}});
    const cells = Array.from({length: 6}, () => make("td"));
    view.rows.set(key, {element: make("tr", {}, make("td", {}, box), ...cells), box, cells});
  }
  return view.rows.get(key);
}

function fill(row, worker) {
  row.box.checked = chosen.has(keyOf(worker));
  const answer = said.get(keyOf(worker));
  const texts = [worker.worker_id, worker.model, worker.state, number(worker.running),
    number(worker.waiting + worker.booked), answer ? answer.text : ""];
  texts.forEach((text, at) => setText(row.cells[at], text));
  row.cells[2].className = worker.state;
  row.cells[5].className = answer && answer.isBad ? "problem" : "";
}

// The commands. Each returns the bodies to send, or nothing if the viewer thinks better of it.

async function run(act) {
  const workers = chosenWorkers();
  if (workers.length > MAX_WORKERS) {
    tell(`At most ${number(MAX_WORKERS)} workers can be told at a time; ${number(workers.length)} are chosen.`, true);
    return;
  }
  const bodies = await act(workers);
  await Promise.all((bodies || []).map(({to, ...body}) => send(body, to)));
}

async function send(body, workers) {
  const names = new Map(workers.map((worker) => [keyOf(worker), worker]));
  for (const key of names.keys()) said.set(key, {text: `${body.op}: asked`});
  draw();
  let failed = 0;
  try {
    const json = {...body, workers: workers.map((worker) => [worker.model, worker.worker_id])};
    const response = await call("control", {json});
    for await (const answer of lines(response.body.getReader())) {
      const {text, isBad} = textOf(body.op, answer);
      said.set(keyOf(answer), {text, isBad});
      if (answer.done) names.delete(keyOf(answer));
      if (isBad) {
        failed += 1;
        tell(`${answer.worker_id} of ${answer.model}: ${text}`, true);
      }
      draw();
    }
    const done = workers.length - failed - names.size;
    if (done) tell(`${body.op}: done by ${plural(done, "worker")}`, false);
    if (names.size) tell(`${body.op}: the gateway stopped listening to ${plural(names.size, "worker")}`, true);
  } catch (error) {
    for (const key of names.keys()) said.set(key, {text: error.message, isBad: true});
    tell(`${body.op}: ${error.message}`, true);
    draw();
  }
}

function textOf(op, answer) {
  if (!answer.ok) return {text: `${op}: ${answer.error ? answer.error.message : "refused"}`, isBad: true};
  if (!answer.done) return {text: `${op}: ${percent(answer.progress)}`, isBad: false};
  const now = answer.worker_ids ? `, serves as ${answer.worker_ids.join(", ")}` : "";
  return {text: `${op}: done${now}`, isBad: false};
}

async function* lines(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, {stream: true})).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

function tell(text, isBad) {
  if (!view) return;
  const at = new Date().toLocaleTimeString();
  view.told.prepend(make("li", {class: isBad ? "problem" : null}, make("time", {}, at), ` ${text}`));
  while (view.told.children.length > MAX_TOLD) view.told.lastChild.remove();
}

function byModel(workers) {
  const found = new Map();
  for (const worker of workers) found.set(worker.model, [...(found.get(worker.model) || []), worker]);
  return [...found];
}

/** Names a few workers, and counts many. */
function nameOf(workers) {
  return workers.length > 3 ? plural(workers.length, "worker") : workers.map((worker) => worker.worker_id).join(", ");
}

/** Says how many streams run at the workers, by model, and who else could continue them. */
function streamsOf(workers) {
  return byModel(workers).flatMap(([model, own]) => {
    const keys = new Set(own.map(keyOf));
    const sum = (field) => own.reduce((total, worker) => total + worker[field], 0);
    const others = [...picture.workers.values()].filter((one) => one.model === model && one.state === "ready"
      && !keys.has(keyOf(one))).length;
    const last = others ? `${plural(others, "other worker")} of ${model} can take them.`
      : `No other worker of ${model} can take them, and new requests for it find none.`;
    return [`${nameOf(own)} of ${model}: ${plural(sum("running"), "stream")} running and ${number(sum("waiting"))} waiting `
      + `there now. ${last}`];
  });
}

function load(workers) {
  return byModel(workers).map(([model, own]) => ({op: "load", model, to: own}));
}

async function unload(workers) {
  const lines = ["A worker that loads its model on demand frees its memory once its streams have ended, and loads it again "
    + "for the next request. Any other worker leaves for good; what still runs after its grace time moves elsewhere or ends."];
  const title = `Unload ${nameOf(workers)}?`;
  const answer = await askFirst({title, lines: [...streamsOf(workers), ...lines], action: "Unload", isDangerous: true});
  return answer && [{op: "unload", to: workers}];
}

async function drain(workers) {
  const grace = make("input", {name: "grace", type: "number", min: 0, max: 86400, placeholder: "the worker's own"});
  const then = make("select", {name: "then"}, make("option", {value: "move"}, "move to other workers"),
    make("option", {value: "stop"}, "end with what was generated"));
  const answer = await askFirst({
    title: `Drain ${nameOf(workers)}?`,
    lines: [...streamsOf(workers), "A drained worker takes no new requests, and leaves for good when its streams have ended or moved."],
    fields: [labelled("Seconds for streams to finish", grace), labelled("Streams that have not finished then", then)],
    action: "Drain", isDangerous: true,
  });
  if (!answer) return null;
  const body = {op: "drain", to: workers};
  if (answer.grace) body.grace_s = Number(answer.grace);
  if (answer.then === "stop") body.handover_s = 0;
  return [body];
}

async function clearCache(workers) {
  const blocks = workers.reduce((sum, worker) => sum + worker.cached_blocks + worker.host_blocks, 0);
  const answer = await askFirst({
    title: `Clear the cache of ${nameOf(workers)}?`,
    lines: [`${plural(blocks, "cached KV block")} are dropped, in memory and on the host. Prompts that were cached are `
      + "computed again. Streams that run go on."],
    action: "Clear", isDangerous: true,
  });
  return answer && [{op: "clear_cache", to: workers}];
}

async function loadAdapter(workers) {
  const answer = await askFirst({
    title: `Load a LoRA adapter into ${nameOf(workers)}`,
    lines: ["An adapter of the same name is replaced for new requests."],
    fields: [
      labelled("Name", make("input", {name: "adapter", required: true, autocomplete: "off"})),
      labelled("File or folder, as the workers see it", make("input", {name: "path", required: true, autocomplete: "off"})),
      labelled("Only for these tenants", make("input", {name: "tenants", placeholder: "all", autocomplete: "off"})),
    ],
    action: "Load",
  });
  if (!answer) return null;
  const body = {op: "load_adapter", adapter: answer.adapter, path: answer.path, to: workers};
  const tenants = answer.tenants.split(/[\s,]+/).filter(Boolean);
  if (tenants.length) body.tenants = tenants;
  return [body];
}

async function unloadAdapter(workers) {
  const answer = await askFirst({
    title: `Unload a LoRA adapter from ${nameOf(workers)}?`,
    lines: ["New requests for it are refused there. Streams that use it go on."],
    fields: [labelled("Name", make("input", {name: "adapter", required: true, autocomplete: "off"}))],
    action: "Unload", isDangerous: true,
  });
  return answer && [{op: "unload_adapter", adapter: answer.adapter, to: workers}];
}

async function addModel(workers) {
  const answer = await askFirst({
    title: `Add a model beside ${nameOf(workers)}`,
    lines: ["Each of the chosen workers' processes serves it too, or only fetches it from the Hub onto its machine."],
    fields: [
      labelled("File, folder or Hub name, as the workers see it", make("input", {name: "model", required: true,
        placeholder: "org/repo:Q4_K_M", autocomplete: "off", spellcheck: "false"})),
      labelled("What to do", make("select", {name: "op"}, make("option", {value: "load"}, "load and serve it"),
        make("option", {value: "pull"}, "only fetch it"))),
      labelled("Name that clients request", make("input", {name: "name", placeholder: "the file's name", autocomplete: "off"})),
      labelled("Replicas", make("input", {name: "replicas", type: "number", min: 1, max: 64, value: 1})),
    ],
    action: "Add",
  });
  if (!answer) return null;
  if (answer.op === "pull") return [{op: "pull", model: answer.model, to: workers}];
  const body = {op: "load", model: answer.model, replicas: Number(answer.replicas) || 1, to: workers};
  if (answer.name) body.served_name = answer.name;
  return [body];
}
