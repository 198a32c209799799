// Who looks at the page, and calls of the gateway in their name. The key is in this module's memory and nowhere else.

let key = "";
let whenRefused = () => {};

/** The viewer, as `GET /console/me` tells: {tenant, role, key_id, name, can}; null before that. */
export let me = null;

/** An answer with an error: `status`, `code` and `param` as the gateway gave them, `message` for the viewer, and whether
 * and in how many ms the same call may succeed (0: not known). */
export class CallError extends Error {
  constructor(status, code, message, {param = null, mayRetry = false, retryMs = 0} = {}) {
    super(message);
    Object.assign(this, {status, code, param, mayRetry, retryMs});
  }
}

/** Signs in with a key, or without one where none is needed. Throws CallError. */
export async function signIn(givenKey) {
  key = givenKey;
  me = await ask("me");
}

export function hasKey() {
  return key !== "";
}

/** Forgets the key. `handler` is called with a reason when the gateway has refused the key of a call. */
export function onRefusal(handler) {
  whenRefused = handler;
}

export function forget() {
  key = "";
  me = null;
}

/** Fetches a path, relative to `/console/`, with the viewer's key; `json` is a body. Throws CallError unless it is OK. */
export async function call(path, {json, headers = {}, ...options} = {}) {
  const sent = {...headers};
  if (key) sent.authorization = `Bearer ${key}`;
  if (json !== undefined) {
    sent["content-type"] = "application/json";
    Object.assign(options, {method: options.method || "POST", body: JSON.stringify(json)});
  }
  const response = await fetch(path, {cache: "no-store", ...options, headers: sent});
  if (response.ok) return response;
  const error = await problemOf(response);
  if (response.status === 401) whenRefused(error);
  throw error;
}

/** Fetches JSON, as `call` does. */
export async function ask(path, options) {
  return (await call(path, options)).json();
}

/** Yields the events of an event stream, and its comments, as their lines of text. */
export async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += decoder.decode(value, {stream: true});
    const events = rest.split("\n\n");
    rest = events.pop();
    yield* events;
  }
}

async function problemOf(response) {
  const mayRetry = response.headers.get("x-should-retry") === "true";
  const retryMs = Number(response.headers.get("retry-after-ms"));
  try {
    const {error} = await response.json();
    return new CallError(response.status, error.code || "", error.message, {param: error.param, mayRetry, retryMs});
  } catch {
    return new CallError(response.status, "", `the gateway answered with status ${response.status}`);
  }
}
