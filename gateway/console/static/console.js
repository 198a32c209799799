// The frame of the page: signs the viewer in and shows the part that the address names, such as `#requests/ID`.
// A part is a module and a section of one name. `open(section, argument)` fills the section if it is empty and shows what
// is there; `close()` ends what the part does while it is seen.

import {$, make, setText} from "./dom.js";
import {follow, unfollow} from "./live.js";
import {CallError, forget, hasKey, me, onRefusal, signIn} from "./session.js";

const PARTS = ["fleet", "requests", "chat", "operate", "keys", "usage"];
const RETRY_MS = 2000;

let shown = null; // the module of the part that is open
let isSignedIn = false;

async function start(key) {
  try {
    await signIn(key);
  } catch (error) {
    if (error instanceof CallError && error.status === 401) return;
    show(`not connected: ${error.message}; trying again`, true);
    setTimeout(() => start(key), RETRY_MS);
    return;
  }
  isSignedIn = true;
  $("login").hidden = true;
  $("main").hidden = false;
  setText($("viewer"), hasKey() ? [me.name, me.tenant, me.role].filter(Boolean).join(", ") : "");
  $("leave").hidden = !hasKey();
  drawParts();
  follow(show);
  await route();
}

function drawParts() {
  const made = PARTS.filter((part) => me.can.includes(part)).map((part) => make("li", {},
    make("a", {href: `#${part}`, id: `to-${part}`}, part[0].toUpperCase() + part.slice(1))));
  $("parts").replaceChildren(...made);
  $("nav").hidden = made.length < 2;
}

async function route() {
  if (!isSignedIn) return;
  const [asked, ...rest] = location.hash.slice(1).split("/");
  const part = me.can.includes(asked) && PARTS.includes(asked) ? asked : "fleet";
  const module = await import(`./${part}.js`);
  if (!isSignedIn) return;
  if (shown) shown.close();
  shown = module;
  for (const each of PARTS) {
    $(each).hidden = each !== part;
    const link = $(`to-${each}`);
    if (link && each === part) link.setAttribute("aria-current", "page");
    else if (link) link.removeAttribute("aria-current");
  }
  document.title = part === "fleet" ? "Tokenbus" : `Tokenbus: ${part}`;
  module.open($(part), decoded(rest.join("/")));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function login(problem) {
  if (shown) shown.close();
  shown = null;
  isSignedIn = false;
  unfollow();
  for (const part of PARTS) $(part).replaceChildren();
  for (const dialog of document.querySelectorAll("dialog")) dialog.close(); // they may show what only that key may see
  $("main").hidden = $("nav").hidden = $("leave").hidden = true;
  $("login").hidden = false;
  setText($("viewer"), "");
  setText($("login-problem"), problem);
  show("not signed in", false);
  $("key").focus();
}

function show(text, isBad) {
  setText($("status"), text);
  $("status").className = isBad ? "bad" : text === "live" ? "live" : "";
}

onRefusal((error) => {
  const problem = hasKey() ? `The gateway does not accept this key: ${error.message}` : "";
  forget();
  login(problem);
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  start(key);
});
$("leave").addEventListener("click", () => location.reload()); // no part of the page remembers anything then

function otherTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return (document.documentElement.dataset.theme || (isDark ? "dark" : "light")) === "dark" ? "light" : "dark";
}

const drawTheme = () => setText($("theme"), otherTheme() === "dark" ? "Dark" : "Light");
$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = otherTheme();
  drawTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTheme);
drawTheme();
addEventListener("hashchange", route);
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload(); // a browser that kept the page for its Back button kept the key as well
});

start("");
