// Follows the gateway's events and keeps the picture of the fleet that they make, for all parts of the page.

import {Picture} from "./picture.js";
import {CallError, call, eventsOf} from "./session.js";

const SILENT_MS = 5000;
const RETRY_MS = [500, 1000, 2000, 4000];

let stop = new AbortController();
let lastEventAt = 0;
let isAsked = false;
let draw = () => {};
let tell = () => {};

/** The fleet as it is; another object after each time that the connection was lost. */
export let picture = new Picture();

/** Calls `handler` before the next frame whenever the picture has changed. Only the open part of the page draws. */
export function onPicture(handler) {
  draw = handler;
}

/** Follows until `unfollow`, or until the key is refused. `show(text, isBad)` says how the connection is. */
export async function follow(show) {
  tell = show;
  const mine = stop = new AbortController();
  for (let failures = 0; !mine.signal.aborted; failures += 1) {
    try {
      const response = await call("stream", {signal: mine.signal});
      picture = new Picture();
      failures = 0;
      for await (const event of eventsOf(response)) take(event);
      throw new Error("the gateway has ended the connection");
    } catch (error) {
      if (mine.signal.aborted || (error instanceof CallError && error.status === 401)) return;
      show(`not connected: ${error.message}; trying again`, true);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
}

export function unfollow() {
  stop.abort();
  lastEventAt = 0;
  picture = new Picture();
}

function take(text) {
  if (!text.startsWith("data: ")) return;
  if (!picture.apply(JSON.parse(text.slice(6)))) throw new Error("an event is missing");
  lastEventAt = Date.now();
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    tell(picture.problem ? `the fleet can't be seen: ${picture.problem}` : "live", Boolean(picture.problem));
    draw();
  });
}

setInterval(() => {
  if (lastEventAt && Date.now() - lastEventAt > SILENT_MS) tell("the gateway has sent nothing for some seconds", true);
}, 1000);
