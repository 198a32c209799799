// Chats with a model through the gateway's own API, as any client does. The conversation is in this module's memory and
// nowhere else. What models, tools and people have written is set as text.

import {element, make, number, setText} from "./dom.js";
import {CallError, ask, call, eventsOf, me} from "./session.js";

const EXAMPLE_TOOLS = [{type: "function", function: {name: "get_weather", description: "Get the weather in a city.",
  parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}];
const EXAMPLE_SCHEMA = {type: "object", properties: {answer: {type: "string"}}, required: ["answer"],
  additionalProperties: false};
const EFFORTS = [["", "as the model does"], ["none", "off"], ["low", "low"], ["medium", "medium"], ["high", "high"]];
const CHOICES = [["", "where they help"], ["required", "at least one"], ["none", "none"]];
const WIDE = "(min-width: 62rem)";
const END_PX = 60; // so near to its end, the page follows an answer that grows
const COPIED_MS = 2000;
const SHORT_S = 0.02; // in less time, no speed can be told

let entries = []; // {role: "user", content}, or {role: "assistant", content, reasoning, calls, parts, finish, failure}
let running = null; // {entry, controller, phase} of the answer that is being made
let owner = null; // the tenant whose conversation it is
let session = ""; // keeps the conversation on one worker
let models = [];
let parts = null; // the elements of the section; null before it is built
let isFollowing = true;
let isAsked = false;
const abilities = new Map(); // what models can do, by their names

export function open(section) {
  if (!section.firstChild) {
    if (owner !== me.tenant) forget();
    owner = me.tenant;
    build(section);
    entries.forEach(show);
    drawAll();
  }
  readModels();
  parts.text.focus({preventScroll: true});
}

export function close() {}

function forget() {
  stop();
  entries = [];
  models = [];
  abilities.clear();
  session = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The page

function build(section) {
  const field = (title, control) => make("label", {}, title, control);
  const options = (pairs) => pairs.map(([value, title]) => make("option", {value}, title));
  const numeric = (attributes) => make("input", {type: "number", placeholder: "model's own", ...attributes});
  const area = (attributes) => {
    const made = make("textarea", {rows: 2, spellcheck: "false", ...attributes});
    made.addEventListener("input", () => fit(made));
    return made;
  };
  parts = {
    model: make("select", {on: {change: modelChosen}}), adapter: make("select", {on: {change: nameSettings}}),
    effort: make("select", {}, ...options(EFFORTS)),
    system: area({spellcheck: "true", placeholder: "Answer in one sentence."}),
    temperature: numeric({min: 0, max: 2, step: "any"}), top_p: numeric({min: 0, max: 1, step: "any"}),
    max_tokens: numeric({min: 1, step: 1}), seed: numeric({min: -1, step: 1, max: Number.MAX_SAFE_INTEGER, placeholder: "random"}),
    tools: area({"aria-describedby": "tools-problem"}), choice: make("select", {}, ...options(CHOICES)),
    foldTitle: element("summary", "Settings"), toolsTitle: element("summary", "Tools"), toolsProblem: make("p", {id: "tools-problem", class: "problem"}),
    schema: area({"aria-describedby": "schema-problem"}),
    schemaTitle: element("summary", "JSON schema"), schemaProblem: make("p", {id: "schema-problem", class: "problem"}),
    problem: make("p", {class: "problem", role: "alert"}),
    log: make("div", {class: "log", role: "log", "aria-label": "Conversation"}),
    empty: make("p", {class: "hint"}, "The conversation stays in this tab and is gone when it is closed."),
    phase: make("p", {class: "hint", role: "status"}), progress: make("p", {class: "hint", "aria-hidden": "true"}),
    text: make("textarea", {rows: 1, "aria-label": "Message", placeholder: "Message", enterkeyhint: "send"}),
    send: make("button", {class: "send"}, "Send"),
    stop: make("button", {type: "button", class: "send danger", hidden: true, on: {click: () => stop(true)}}, "Stop"),
  };
  parts.adapterField = field("Adapter", parts.adapter);
  parts.effortField = field("Reasoning", parts.effort);
  const example = (target, value) => make("button", {type: "button", on: {click: () => {
    target.value = JSON.stringify(value, null, 1);
    target.dispatchEvent(new Event("input"));
    target.focus();
  }}}, "Example");
  parts.toolsFold = make("details", {}, parts.toolsTitle, field("Tools, as JSON", parts.tools), parts.toolsProblem,
    make("div", {class: "row"}, field("Calls", parts.choice), example(parts.tools, EXAMPLE_TOOLS)));
  parts.settings = make("form", {class: "settings", "aria-label": "Settings", on: {submit: (event) => event.preventDefault()}},
    field("Model", parts.model), parts.adapterField, parts.effortField,
    make("details", {}, element("summary", "System prompt and sampling"), field("System prompt", parts.system),
      make("div", {class: "pairs"}, field("Temperature", parts.temperature), field("Top p", parts.top_p),
        field("Most tokens", parts.max_tokens), field("Seed", parts.seed))),
    parts.toolsFold,
    make("details", {}, parts.schemaTitle, field("Schema of the answer", parts.schema), parts.schemaProblem,
      example(parts.schema, EXAMPLE_SCHEMA)));
  parts.fold = make("details", {class: "fold", open: matchMedia(WIDE).matches}, parts.foldTitle, parts.settings);
  parts.tools.addEventListener("input", () => checkJson(parts.tools, parts.toolsProblem, readTools));
  parts.schema.addEventListener("input", () => checkJson(parts.schema, parts.schemaProblem, readSchema));
  parts.text.addEventListener("input", () => fit(parts.text));
  const composer = make("form", {class: "composer", "aria-label": "New message", on: {submit: sendText}},
    make("div", {class: "row"}, parts.phase, parts.progress), parts.problem, parts.text, parts.send, parts.stop);
  onEnter(parts.text, () => composer.requestSubmit());
  section.append(make("div", {class: "row"}, element("h2", "Chat"),
    make("button", {type: "button", on: {click: newChat}}, "New chat"),
    element("p", "Enter sends, Shift+Enter begins a line, Escape stops.", "hint")),
  make("div", {class: "chat"}, parts.fold, make("div", {class: "talk"}, parts.log, parts.empty, composer)));
  for (const part of section.children) {
    part.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && running) stop(true);
    });
  }
  parts.showsWays = me.can.includes("requests");
}

addEventListener("scroll", () => {
  const page = document.scrollingElement;
  isFollowing = page.scrollTop + innerHeight >= page.scrollHeight - END_PX;
}, {passive: true});

/** Makes a text box as high as its text; the style sheet bounds it. */
function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function onEnter(area, act) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    act();
  });
}

function follow() {
  if (isFollowing) document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}

// Settings

async function readModels() {
  const chosen = parts.model.value;
  try {
    models = (await ask("../v1/models")).data;
    setText(parts.problem, models.length ? "" : "No model is served now.");
  } catch (error) {
    setText(parts.problem, `The models can't be listed: ${error.message}`);
  }
  const named = [...new Set([chosen, ...models.filter((model) => !model.parent).map((model) => model.id)])].filter(Boolean);
  const usable = named.filter((name) => !abilities.has(name) || abilities.get(name).includes("completion"));
  const made = usable.map((name) => make("option", {value: name},
    name + (models.some((model) => model.id === name) ? "" : " (not served now)")));
  parts.model.replaceChildren(...made);
  if (usable.includes(chosen)) parts.model.value = chosen;
  await modelChosen();
}

async function modelChosen() {
  const name = parts.model.value;
  const adapters = models.filter((model) => model.parent === name).map((model) => model.id);
  const before = parts.adapter.value;
  parts.adapter.replaceChildren(make("option", {value: ""}, "none"),
    ...adapters.map((id) => make("option", {value: id}, id.slice(name.length + 1))));
  if (adapters.includes(before)) parts.adapter.value = before;
  parts.adapterField.hidden = !adapters.length;
  nameSettings();
  if (name && !abilities.has(name)) {
    try {
      const {capabilities} = await ask("../api/show", {json: {model: name}});
      if (capabilities.length) abilities.set(name, capabilities); // none: it has never been loaded
    } catch {
      // then all is offered, and the gateway says what the model can't do
    }
  }
  if (name !== parts.model.value) return; // another has been chosen since
  const can = abilities.get(name) || ["completion", "thinking", "tools"];
  parts.effortField.hidden = !can.includes("thinking");
  parts.toolsFold.hidden = !can.includes("tools");
  if (can.includes("completion")) return;
  parts.model.selectedOptions[0].remove(); // such as one that makes embeddings
  await modelChosen();
}

/** Names the model where the settings are folded, as they are on a phone. */
function nameSettings() {
  const name = parts.adapter.value || parts.model.value;
  setText(parts.foldTitle, name ? `Settings: ${name}` : "Settings");
}

function checkJson(area, problem, read) {
  let said = "";
  try {
    read(area.value);
  } catch (error) {
    said = error.message;
  }
  setText(problem, said);
  area.setCustomValidity(said);
  area.setAttribute("aria-invalid", String(Boolean(said)));
  const tools = parts.tools.value.trim() && parts.tools.validity.valid ? readTools(parts.tools.value) : [];
  setText(parts.toolsTitle, tools.length ? `Tools: ${tools.map((tool) => tool.function.name).join(", ")}` : "Tools");
  setText(parts.schemaTitle, parts.schema.value.trim() ? "JSON schema: set" : "JSON schema");
}

/** Returns tools in the API's form; a function without its wrapping counts as one. Throws Error. */
function readTools(text) {
  if (!text.trim()) return [];
  const given = readJson(text);
  return (Array.isArray(given) ? given : [given]).map((one, at) => {
    const tool = one && one.function ? one : {type: "function", function: one};
    if (!tool.function || typeof tool.function.name !== "string") throw new Error(`Tool ${at + 1} has no name.`);
    return tool;
  });
}

function readSchema(text) {
  if (!text.trim()) return null;
  const given = readJson(text);
  if (typeof given !== "object" || given === null || Array.isArray(given)) throw new Error("A schema is an object.");
  return given;
}

function readJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
}

/** Whether the settings can be sent; if not, those at fault are shown. */
function areSettingsValid() {
  const wrong = [...parts.settings.querySelectorAll("input:invalid, textarea:invalid")];
  for (const each of wrong) each.closest("details").open = true;
  if (wrong.length) parts.fold.open = true;
  return parts.settings.reportValidity();
}

function requestFor(entry, isContinued) {
  const before = entries.slice(0, entries.indexOf(entry));
  const schema = readSchema(parts.schema.value);
  const tools = parts.toolsFold.hidden ? [] : readTools(parts.tools.value);
  const body = {
    model: parts.adapter.value || parts.model.value, messages: messagesOf(before), stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true}, return_progress: true, session_id: session,
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (parts[name].value !== "") body[name] = Number(parts[name].value);
  }
  if (parts.effort.value && !parts.effortField.hidden) body.reasoning_effort = parts.effort.value;
  if (tools.length) body.tools = tools;
  if (tools.length && parts.choice.value && !isContinued) body.tool_choice = parts.choice.value;
  // A constraint holds for new text only, so what continues an answer can't be held to it.
  if (schema && !isContinued) body.response_format = {type: "json_schema", json_schema: {name: "answer", schema}};
  if (isContinued) {
    body.messages.push(messageOf(entry));
    body.continue_final_message = true;
  }
  return body;
}

function messagesOf(before) {
  const system = parts.system.value.trim() ? [{role: "system", content: parts.system.value}] : [];
  return system.concat(before.flatMap((entry) => {
    if (entry.role === "user") return [{role: "user", content: entry.content}];
    const results = usableCalls(entry).map((each) => ({role: "tool", tool_call_id: each.id, content: each.result}));
    return entry.content || results.length ? [messageOf(entry), ...results] : [];
  }));
}

function messageOf(entry) {
  const made = {role: "assistant", content: entry.content};
  const calls = usableCalls(entry);
  if (entry.reasoning) made.reasoning_content = entry.reasoning;
  if (calls.length) {
    made.tool_calls = calls.map((each) => ({id: each.id, type: "function",
      function: {name: each.name, arguments: each.arguments}}));
  }
  return made;
}

/** The calls of an answer that have a result: not those of one that was stopped within them. */
function usableCalls(entry) {
  return entry.calls.filter((each) => each.result !== null);
}

// Acts

function sendText(event) {
  event.preventDefault();
  const content = parts.text.value;
  const last = entries.at(-1);
  if (running || !content.trim() || !areSettingsValid()) return;
  if (isWaitingForResults(last)) {
    setText(parts.problem, "The model waits for the results of its calls: type them in, or ask again.");
    last.view.body.querySelector("textarea").focus();
    return;
  }
  parts.text.value = "";
  fit(parts.text);
  add({role: "user", content});
  askModel();
}

function isWaitingForResults(entry) {
  return Boolean(entry) && entry.role === "assistant" && entry.finish === "tool_calls"
    && entry.calls.some((each) => each.result === null);
}

function add(entry) {
  entries.push(entry);
  show(entry);
  drawAll();
  return entry;
}

function cut(from) {
  stop();
  for (const entry of entries.splice(from)) entry.view.article.remove();
}

function askModel() {
  isFollowing = true;
  const name = parts.adapter.value || parts.model.value;
  answer(add({role: "assistant", model: name, content: "", reasoning: "", calls: [], parts: [], finish: "", failure: null}), false);
}

function askAgain() {
  if (!areSettingsValid()) return;
  cut(entries.length - 1);
  askModel();
  parts.text.focus();
}

function continueAnswer(entry) {
  if (!areSettingsValid()) return;
  isFollowing = true;
  entry.content = entry.content.trimEnd(); // a token begins with its space, and could not be continued after it
  Object.assign(entry, {finish: "", failure: null});
  entry.view.text.data = entry.content;
  answer(entry, true);
  parts.text.focus();
}

/** Ends the answer that is being made: when its connection closes, the gateway cancels the request. */
function stop(byHand = false) {
  if (running) running.controller.abort();
  running = null;
  if (byHand) parts.text.focus();
}

function newChat() {
  cut(0);
  forget();
  drawAll();
  setText(parts.problem, "");
  readModels();
  parts.text.focus();
}

async function answer(entry, isContinued) {
  const controller = new AbortController();
  const mine = running = {entry, controller, phase: "Waiting for the first token", progress: ""};
  const part = {id: "", startedAt: performance.now(), firstAt: 0, lastAt: 0, firstTokens: 0, usage: null};
  let isComplete = false;
  setText(parts.problem, "");
  drawAll();
  try {
    const json = requestFor(entry, isContinued);
    entry.hasSchema = Boolean(json.response_format);
    const response = await call("../v1/chat/completions", {json, signal: controller.signal});
    entry.parts.push(Object.assign(part, {id: response.headers.get("x-request-id") || ""}));
    for await (const event of eventsOf(response)) {
      if (event === "data: [DONE]") isComplete = true;
      else if (event.startsWith("data: ")) take(mine, part, JSON.parse(event.slice(6)));
      else if (event.startsWith(": loading")) mine.progress = event.slice(2);
      drawSoon();
    }
    if (!isComplete) throw new TypeError("the stream has no end");
    if (!abilities.has(parts.model.value)) modelChosen(); // it is loaded now
  } catch (error) {
    entry.finish = controller.signal.aborted ? "stopped" : "failed";
    entry.failure = controller.signal.aborted ? null : failureOf(error, entry);
    if (error instanceof CallError && ["model_not_found", "no_worker"].includes(error.code)) readModels();
  }
  if (running === mine) running = null;
  if (!entries.includes(entry)) return;
  drawAll();
  follow();
  if (isWaitingForResults(entry) && [parts.text, document.body].includes(document.activeElement)) {
    entry.view.body.querySelector("textarea").focus();
  }
}

/** Takes an event of the answer. Throws CallError for one that is an error. */
function take(mine, part, event) {
  const {entry} = mine;
  if (event.error) {
    const isServers = event.error.type === "server_error";
    throw new CallError(0, event.error.code || "", event.error.message, {param: event.error.param, mayRetry: isServers});
  }
  if (event.usage) part.usage = event.usage;
  if (event.prompt_progress) {
    const {processed, total} = event.prompt_progress;
    mine.progress = processed < total ? `${number(processed)} of ${number(total)} tokens of the prompt are computed` : "";
  }
  const choice = event.choices[0];
  if (!choice) return;
  const {content, reasoning_content: reasoning, tool_calls: calls = []} = choice.delta;
  if (content || reasoning || calls.length) {
    part.lastAt = performance.now();
    if (!part.firstAt) Object.assign(part, {firstAt: part.lastAt, firstTokens: event.usage ? event.usage.completion_tokens : 1});
    Object.assign(mine, {phase: content || calls.length ? "Answering" : "Reasoning", progress: ""});
  }
  entry.content += content || "";
  entry.reasoning += reasoning || "";
  for (const each of calls) {
    const known = entry.calls[each.index] = entry.calls[each.index] || {id: "", name: "", arguments: "", result: null};
    known.id = each.id || known.id;
    known.name += each.function.name || "";
    known.arguments += each.function.arguments || "";
  }
  if (choice.finish_reason) entry.finish = choice.finish_reason;
}

/** Says in words what went wrong: [what, the gateway's message, what helps]. */
function failureOf(error, entry) {
  const kept = entry.content || entry.reasoning ? " What has come until then is kept." : "";
  if (!(error instanceof CallError)) {
    return [`The connection to the gateway broke before the answer was complete.${kept}`, "",
      "Ask again, or continue the answer, when the gateway is back."];
  }
  const field = error.param && !error.message.startsWith(error.param) ? ` (${error.param})` : "";
  let hint = error.mayRetry ? "The same request may succeed later." : "";
  if (error.retryMs) hint = `It may succeed in ${(error.retryMs / 1e3).toLocaleString("en", {maximumFractionDigits: 1})} s.`;
  return [`The gateway could not answer.${kept}`, error.message + field, hint];
}

// Drawing

function show(entry) {
  const isUser = entry.role === "user";
  const text = document.createTextNode(entry.content);
  const view = entry.view = {
    text, body: make("div", {class: "body"}), textBox: make("div", {class: "text", dir: "auto"}, text),
    actions: make("div", {class: "row"}),
    article: make("article", {class: entry.role}),
  };
  if (!isUser) {
    view.reasoning = document.createTextNode(entry.reasoning);
    view.thoughtsTitle = element("summary", "Reasoning");
    view.thoughts = make("details", {class: "thoughts", hidden: true}, view.thoughtsTitle,
      make("div", {class: "text", dir: "auto"}, view.reasoning));
    view.calls = make("div", {class: "calls"});
    view.failure = make("div", {class: "failure", hidden: true});
    view.numbers = make("div", {class: "numbers"});
    view.body.append(view.thoughts, view.textBox, view.calls, view.failure, view.numbers);
  } else {
    view.body.append(view.textBox);
  }
  view.article.append(element("h3", isUser ? "You" : entry.model), view.body, view.actions);
  parts.log.append(view.article);
}

function drawSoon() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    if (!running) return;
    drawText(running.entry);
    drawPhase();
    follow();
  });
}

function grow(node, text) {
  if (text.length > node.length) node.appendData(text.slice(node.length));
}

function drawText(entry) {
  const {view} = entry;
  grow(view.text, entry.content);
  grow(view.reasoning, entry.reasoning);
  view.thoughts.hidden = !entry.reasoning;
  const isThinking = running && running.entry === entry && !entry.content && !entry.calls.length;
  setText(view.thoughtsTitle, isThinking ? "Reasoning …" : "Reasoning");
  entry.calls.forEach((each, at) => {
    const card = view.calls.children[at] || view.calls.appendChild(make("div", {class: "call", role: "group"},
      element("h4", ""), element("pre", ""), make("div", {class: "result"})));
    card.setAttribute("aria-label", `Call of ${each.name}`);
    setText(card.children[0], each.name);
    setText(card.children[1], pretty(each.arguments));
  });
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text; // it is still growing, or was cut off
  }
}

function drawPhase() {
  setText(parts.phase, running ? running.phase : "");
  setText(parts.progress, running ? running.progress : "");
}

function drawAll() {
  parts.send.hidden = Boolean(running);
  parts.stop.hidden = !running;
  parts.empty.hidden = entries.length > 0;
  drawPhase();
  entries.forEach((entry, at) => {
    if (entry.role === "user") return drawActions(entry, userActions(entry, at));
    const isRunning = Boolean(running) && running.entry === entry;
    entry.view.article.setAttribute("aria-busy", String(isRunning));
    drawText(entry);
    drawResults(entry);
    drawFailure(entry);
    entry.view.numbers.replaceChildren(...entry.parts.map((part) => numbersOf(entry, part, isRunning)));
    drawActions(entry, isRunning ? [] : answerActions(entry, at === entries.length - 1));
  });
}

function drawActions(entry, actions) {
  entry.view.actions.replaceChildren(...actions.map(([title, act]) =>
    make("button", {type: "button", on: {click: (event) => act(event.target)}}, title)));
}

function userActions(entry, at) {
  if (entry.isEdited) return [];
  return [["Copy", (button) => copy(entry.content, button)], ["Edit", () => edit(entry, at)]];
}

function answerActions(entry, isLast) {
  const made = entry.content ? [["Copy", (button) => copy(entry.content, button)]] : [];
  const isShort = ["length", "stopped", "failed"].includes(entry.finish);
  if (isLast && isShort && entry.content.trim() && !entry.calls.length) made.push(["Continue", () => continueAnswer(entry)]);
  if (isLast) made.push(["Ask again", askAgain]);
  return made;
}

function drawResults(entry) {
  const isAsking = isWaitingForResults(entry) && entries.at(-1) === entry;
  entry.calls.forEach((each, at) => {
    const place = entry.view.calls.children[at].lastChild;
    if (each.result !== null) place.replaceChildren(element("h4", "Result"), element("pre", each.result));
    else if (!isAsking) place.replaceChildren(...(running ? [] : [element("p", "It has no result.", "hint")]));
    else if (!place.querySelector("textarea")) place.replaceChildren(resultField(entry, each));
  });
  const button = entry.view.calls.querySelector(":scope > button");
  if (isAsking && !button) {
    const give = make("button", {type: "button", on: {click: () => giveResults(entry)}},
      entry.calls.length > 1 ? "Send the results" : "Send the result");
    entry.view.calls.append(give);
  } else if (!isAsking && button) button.remove();
}

function resultField(entry, each) {
  const area = make("textarea", {rows: 1, placeholder: "What the tool answers", spellcheck: "false"});
  area.addEventListener("input", () => fit(area));
  onEnter(area, () => {
    const next = [...entry.view.calls.querySelectorAll("textarea")].find((one) => !one.value && one !== area);
    if (next) next.focus();
    else giveResults(entry);
  });
  return make("label", {}, `Result of ${each.name}`, area);
}

function giveResults(entry) {
  if (!areSettingsValid()) return;
  const areas = [...entry.view.calls.querySelectorAll("textarea")];
  entry.calls.forEach((each, at) => { each.result = areas[at].value; });
  askModel();
  parts.text.focus({preventScroll: true});
}

function drawFailure(entry) {
  const {failure} = entry.view;
  failure.hidden = !entry.failure;
  failure.replaceChildren(...(entry.failure || []).filter(Boolean).map((text, at) => element("p", text, at ? "" : "problem")));
}

function numbersOf(entry, part, isRunning) {
  const said = [];
  const {usage} = part;
  const isLast = part === entry.parts.at(-1);
  if (usage) {
    const cached = usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
    said.push(usage.completion_tokens === 1 ? "1 token" : `${number(usage.completion_tokens)} tokens`,
      `prompt ${number(usage.prompt_tokens)}, ${number(cached)} of them cached`);
  }
  if (part.firstAt) said.push(`first token ${((part.firstAt - part.startedAt) / 1e3).toFixed(2)} s`);
  const seconds = (part.lastAt - part.firstAt) / 1e3;
  if (usage && seconds > SHORT_S) said.push(`${number((usage.completion_tokens - part.firstTokens) / seconds)} tokens/s`);
  if (isLast && entry.finish === "length") said.push("ended at the most tokens that were allowed");
  if (isLast && entry.finish === "stopped") said.push("stopped");
  if (isLast && entry.hasSchema && entry.finish === "stop") said.push(isJson(entry.content) ? "valid JSON" : "not valid JSON");
  const way = part.id && parts.showsWays && !isRunning
    ? make("a", {href: `#requests/${encodeURIComponent(part.id)}`}, "Its way through the fleet") : null;
  return make("p", {class: "hint"}, isRunning ? "" : said.join(" · "), way ? " · " : null, way);
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function edit(entry, at) {
  const area = make("textarea", {"aria-label": "Edited message"});
  area.value = entry.content;
  const close = () => {
    entry.isEdited = false;
    entry.view.body.replaceChildren(entry.view.textBox);
    drawAll();
  };
  const send = () => {
    if (!area.value.trim() || !areSettingsValid()) return;
    cut(at);
    add({role: "user", content: area.value});
    askModel();
    parts.text.focus({preventScroll: true});
  };
  entry.isEdited = true;
  entry.view.body.replaceChildren(area, make("div", {class: "row"},
    make("button", {type: "button", on: {click: send}}, "Send again"),
    make("button", {type: "button", on: {click: close}}, "Cancel"),
    element("p", "What follows this message is dropped.", "hint")));
  area.addEventListener("input", () => fit(area));
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
    entry.view.actions.lastChild.focus();
  });
  onEnter(area, send);
  drawAll();
  fit(area);
  area.focus();
}

async function copy(text, button) {
  let isDone = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // pages that did not come over HTTPS, or from this machine, have no clipboard
    const area = make("textarea", {readonly: true, "aria-hidden": "true", tabindex: -1});
    area.value = text;
    document.body.append(area);
    area.select();
    isDone = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  setText(button, isDone ? "Copied" : "Could not copy");
  setTimeout(() => setText(button, "Copy"), COPIED_MS);
}
