// Keys of the fleet: list, create, change, rotate, revoke. A secret is shown once, and forgotten when its dialog closes.

import {askFirst, element, labelled, make, number, plural, setText, table} from "./dom.js";
import {ask, me} from "./session.js";

const COLUMNS = ["Id", "Tenant", "Name", "Role", "Models", "Limits", "Expires", "State", "Act"].map((title) => [title]);
const LIMITS = [
  ["requests_per_minute", "Requests a minute"], ["tokens_per_minute", "Tokens a minute"], ["tokens_per_day", "Tokens a day"],
  ["concurrency", "Open requests"], ["max_tokens", "max_tokens of a request"],
  ["connections", "Connections to brokers"],
];
const GRACES = [["0", "is invalid at once"], ["3600", "stays valid for an hour"], ["86400", "stays valid for a day"],
  ["604800", "stays valid for a week"]];
const PAUSE_MS = 250;
const words = (text) => text.split(/[\s,]+/).filter(Boolean);
const day = (seconds) => (seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "never");

let view = null;
let asked = 0;

export function open(section) {
  if (!section.firstChild) build(section);
  refresh();
}

export function close() {}

function build(section) {
  let waiting = 0;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, PAUSE_MS);
  };
  view = {
    filter: make("input", {type: "search", placeholder: "id, name or tenant", autocomplete: "off", on: {input: later}}),
    count: make("p", {role: "status"}),
    problem: make("p", {class: "problem", role: "alert"}),
    table: table("Table of keys", COLUMNS),
  };
  section.append(
    make("div", {class: "row"}, element("h2", "Keys"), labelled("Filter", view.filter),
      make("button", {type: "button", on: {click: create}}, "New key…"), view.count),
    view.problem, view.table,
  );
}

async function refresh() {
  const mine = asked += 1;
  try {
    const found = await ask(`keys?text=${encodeURIComponent(view.filter.value)}`);
    if (mine !== asked) return;
    setText(view.problem, found.problems.map((problem) => `This record can't be used: ${problem}`).join(" "));
    const shown = found.data.length < found.total ? `the first ${number(found.data.length)} of ` : "";
    setText(view.count, `${shown}${plural(found.total, "key")}; times are UTC`);
    view.table.querySelector("tbody").replaceChildren(...found.data.map(rowOf));
  } catch (error) {
    setText(view.problem, error.message);
  }
}

function rowOf(key) {
  const limits = LIMITS.filter(([name]) => key.limits[name]).map(([name, title]) => `${number(key.limits[name])} ${title}`);
  const act = (title, handler, style = null) => make("button", {type: "button", class: style,
    "aria-label": `${title.replace("…", "")} ${key.id}`, on: {click: () => handler(key)}}, title);
  const acts = key.state === "revoked" ? [] : [act("Change…", edit), " ", act("Rotate…", rotate), " ", act("Revoke…", revoke, "danger")];
  const cells = [key.id, key.tenant, key.name, key.role, key.models.join(", "), limits.join(", ") || "none",
    day(key.expires_at), key.state];
  return make("tr", {class: key.state === "valid" ? null : "ended"}, ...cells.map((text) => make("td", {}, text)),
    make("td", {}, ...acts));
}

const text = (name, attributes = {}) => make("input", {name, autocomplete: "off", spellcheck: "false", ...attributes});

/** Makes the fields of what a key may do, filled in as `key` has them. */
function fieldsOf(key) {
  return [
    labelled("Name", text("name", {maxlength: 200, value: key.name})),
    labelled("Role", make("select", {name: "role"}, ...["user", "viewer", "operator"].map((role) =>
      make("option", {value: role, selected: role === key.role}, role)))),
    labelled("Models, or patterns such as chat-*", text("models", {placeholder: "all", value: modelsOf(key)})),
    labelled("Expires", text("expires", {type: "date", value: key.expires_at ? day(key.expires_at).slice(0, 10) : ""})),
    labelled("Least priority value of its requests",
      text("priority", {type: "number", min: -1000, max: 1000, value: key.max_priority})),
    ...LIMITS.map(([name, title]) => labelled(title, text(name,
      {type: "number", min: 0, placeholder: "none", value: key.limits[name] || ""}))),
  ];
}

const modelsOf = (key) => (key.models.join() === "*" ? "" : key.models.join(", "));

/** Reads what `fieldsOf` made. */
function bodyOf(answer) {
  return {
    name: answer.name,
    role: answer.role,
    models: words(answer.models).length ? words(answer.models) : ["*"],
    expires_at: answer.expires ? Date.parse(`${answer.expires}T00:00:00Z`) / 1000 : null,
    max_priority: Number(answer.priority) || 0,
    limits: Object.fromEntries(LIMITS.map(([name]) => [name, Number(answer[name]) || 0])),
  };
}

async function create() {
  const fresh = {name: "", role: "user", models: ["*"], expires_at: null, max_priority: 0, limits: {}};
  const tenant = labelled("Tenant", text("tenant", {required: true, value: me.tenant}));
  const answer = await askFirst({title: "New key", fields: [tenant, ...fieldsOf(fresh)], action: "Create"});
  if (answer) await change("keys", {tenant: answer.tenant, ...bodyOf(answer)});
}

/** Changes a key in what differs from what the form showed, so that what others change meanwhile stays. */
async function edit(key) {
  const fields = fieldsOf(key);
  const before = bodyOf(valuesOf(fields));
  const lines = [`Key ${nameOf(key)}. It holds for requests from now on; the secret stays.`];
  if (key.id === me.key_id) lines.push("This is your own key.");
  const answer = await askFirst({title: `Change ${key.id}`, lines, fields, action: "Change"});
  if (!answer) return;
  const after = bodyOf(answer);
  const differs = (name) => JSON.stringify(after[name]) !== JSON.stringify(before[name]);
  const body = Object.fromEntries(Object.keys(after).filter(differs)
    .map((name) => [name, name === "expires_at" ? after[name] ?? "never" : after[name]]));
  if (Object.keys(body).length) await change(`keys/${key.id}/change`, body);
}

function valuesOf(fields) {
  return Object.fromEntries(fields.map((field) => field.querySelector("input, select")).map((one) => [one.name, one.value]));
}

async function rotate(key) {
  const grace = make("select", {name: "grace"}, ...GRACES.map(([value, title]) => make("option", {value}, title)));
  const answer = await askFirst({
    title: `Give ${key.id} a new secret?`,
    lines: [`Key ${nameOf(key)}. Clients that have the old secret need the new one.`],
    fields: [labelled("The old secret", grace)],
    action: "Rotate", isDangerous: true,
  });
  if (answer) await change(`keys/${key.id}/rotate`, {grace_s: Number(answer.grace)});
}

async function revoke(key) {
  const lines = [`Key ${nameOf(key)}. Its clients are refused from now on, for good. Open streams finish, unless the `
    + "gateway has --revoke-ends-streams."];
  if (key.id === me.key_id) lines.push("This is your own key: this page ends too.");
  const answer = await askFirst({title: `Revoke ${key.id}?`, lines, action: "Revoke", isDangerous: true});
  if (answer) await change(`keys/${key.id}/revoke`, {});
}

function nameOf(key) {
  return `${key.name ? `“${key.name}” ` : ""}of the tenant ${key.tenant}, role ${key.role}`;
}

async function change(path, json) {
  try {
    const changed = await ask(path, {json});
    setText(view.problem, changed.warning);
    if (changed.key) await showOnce(changed);
  } catch (error) {
    setText(view.problem, error.message);
    return;
  }
  await refresh();
}

/** Shows a secret until its dialog closes; then it is nowhere in the page. */
function showOnce({id, key}) {
  return new Promise((resolve) => {
    const secret = make("input", {readonly: true, size: 60, class: "secret", "aria-label": "The key"});
    secret.value = key; // a property, so that it is in no markup
    const state = make("p", {role: "status"});
    const copy = async () => {
      try {
        await navigator.clipboard.writeText(secret.value);
        setText(state, "Copied.");
      } catch {
        secret.select();
        setText(state, "The browser does not let this page copy: press Ctrl+C.");
      }
    };
    const dialog = make("dialog", {"aria-label": `The secret of ${id}`, on: {close: () => {
      secret.value = "";
      dialog.remove();
      resolve();
    }}},
    element("h2", `The secret of ${id}`), element("p", "It is shown this once. Keep it where secrets are kept."), secret, state,
    make("div", {class: "row"}, make("button", {type: "button", on: {click: copy}}, "Copy"),
      make("button", {type: "button", on: {click: () => dialog.close()}}, "I have it")));
    document.body.append(dialog);
    dialog.showModal();
    secret.select();
  });
}
