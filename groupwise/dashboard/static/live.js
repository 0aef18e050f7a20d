// Keeps a page up to date. The server says that something is new; then the page is fetched once more, and what differs in its fresh regions
// (data-fresh) is put in the place of what was there: element by element, so that what stays the same also stays as somebody left it, scrolled,
// opened, focused or chosen. What is being read is left alone until its reader asks for what is new.
//
// Elements of a list say by data-key (or id) which of them are the same. While there is no answer the lamp is off, and a line says since when.

const SIGN_IN = `${document.body.dataset.at}/sign-in`;
const FIRST_WAIT = 2000; // milliseconds, twice as many after each time without an answer
const LONGEST_WAIT = 30_000;
const MAX_SAID = 200; // characters of what went wrong

// --- putting in place ----------------------------------------------------------------------------

const OWN = new Set(["open", "data-visible", "data-drawn"]); // attributes that the browser's side has
const keyOf = (node) => node.dataset?.key || node.id || node.getAttribute?.("aria-labelledby") || "";
const classOf = (node) => node.getAttribute?.("class") ?? "";
const alike = (one, other) => one.nodeName === other.nodeName && classOf(one) === classOf(other);

// Makes an element what another one is.
function become(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  if (old.isEqualNode(next) || old.dataset.log) return; // a log grows by itself
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !OWN.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value && !OWN.has(name)) old.setAttribute(name, value);
  }
  if (!old.classList.contains("plot")) becomeInside(old, next);
}

function becomeInside(old, next) {
  const wanted = new Set([...next.children].map(keyOf));
  for (const child of [...old.children]) {
    if (keyOf(child) && !wanted.has(keyOf(child))) child.remove();
  }
  const keyed = new Map([...old.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let at = old.firstChild;
  for (const child of [...next.childNodes]) {
    const match = keyOf(child) ? keyed.get(keyOf(child)) : following(at, child);
    if (!match || match.nodeName !== child.nodeName) {
      old.insertBefore(child, at);
      continue;
    }
    keyed.delete(keyOf(child));
    while (at && at !== match && !keyOf(at)) at = without(at);
    if (at === match) at = at.nextSibling;
    else old.insertBefore(match, at);
    become(match, child);
  }
  while (at) at = without(at);
}

// The next one without a key that could be this child.
function following(from, child) {
  if (child.nodeType !== Node.ELEMENT_NODE) return from?.nodeType === child.nodeType ? from : null;
  for (let at = from; at && !keyOf(at); at = at.nextSibling) {
    if (alike(at, child)) return at;
  }
  return null;
}

function without(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

// A choice that somebody made is carried over; one that the page made may become another.
function chosenIn(region) {
  const inputs = [...region.querySelectorAll("input[type=checkbox], input[type=radio]")];
  const touched = new Set(inputs.filter((input) => input.checked !== input.defaultChecked).map((input) => input.name));
  return inputs.filter((input) => touched.has(input.name)).map((input) => [input, input.checked]);
}

// A region in another one is a part of that.
const regions = () => [...document.querySelectorAll("[data-fresh]")].filter((region) => !region.parentElement.closest("[data-fresh]"));
const served = new WeakMap(); // region -> what the server last said of it
for (const region of regions()) served.set(region, region.outerHTML);

function put(region, fresh) {
  served.set(region, fresh.outerHTML);
  const [focused, chosen] = [document.activeElement, chosenIn(region)];
  become(region, fresh);
  for (const [input, checked] of chosen) if (input.isConnected) input.checked = checked;
  if (document.activeElement !== focused && focused?.isConnected) focused.focus({ preventScroll: true });
}

// --- holding back --------------------------------------------------------------------------------

const held = new Map(); // region -> { fresh, sign }

function isMarked(region) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.rangeCount > 0 && selection.containsNode(region, true);
}

// A list that would move away under its reader.
function isRead(region) {
  const inside = document.activeElement !== region && region.contains(document.activeElement);
  const scrolled = region.getBoundingClientRect().top < 0;
  return inside || scrolled || [...region.querySelectorAll(".text")].some((text) => text.scrollTop > 0) || region.querySelector("details[open]") !== null;
}

// What to tell whoever is in the way of what is new; empty: nobody is.
function inTheWay(region, fresh) {
  const list = region.dataset.list;
  const there = new Set([...region.children].map(keyOf));
  const added = list ? [...fresh.children].filter((row) => keyOf(row) && !there.has(keyOf(row))).length : 0;
  if (added && (isRead(region) || isMarked(region))) return `${added}${added === fresh.children.length ? " or more" : ""} new ${list} – show`;
  return isMarked(region) ? "There is something new, which waits while text is marked – show" : "";
}

function offer(region, fresh, text) {
  const sign = held.get(region)?.sign ?? document.createElement("p");
  if (!held.has(region)) {
    sign.className = "news";
    sign.setAttribute("role", "status");
    const button = document.createElement("button");
    button.type = "button";
    button.addEventListener("click", () => {
      const { fresh } = held.get(region);
      settle(region);
      put(region, fresh);
      region.tabIndex = -1;
      region.focus({ preventScroll: true });
      if (region.dataset.list) region.scrollIntoView();
      changed();
    });
    sign.append(button);
    region.before(sign);
  }
  if (sign.firstChild.textContent !== text) sign.firstChild.textContent = text;
  held.set(region, { fresh, sign });
}

function settle(region) {
  held.get(region)?.sign.remove();
  held.delete(region);
}

function bring(region, fresh) {
  const same = served.get(region) === fresh.outerHTML;
  const text = same ? "" : inTheWay(region, fresh);
  if (text) return offer(region, fresh, text);
  settle(region);
  if (!same) put(region, fresh);
}

const changed = () => document.dispatchEvent(new Event("fresh"));

document.addEventListener("selectionchange", () => {
  for (const [region, { fresh }] of [...held]) if (!region.dataset.list && !isMarked(region)) bring(region, fresh);
});

// --- asking --------------------------------------------------------------------------------------

let underway = false;
let again = false;
let connected = false;
let since = ""; // when there was no answer for the first time
let wait = FIRST_WAIT;
let retry = 0;

function clock() {
  const now = new Date();
  return [now.getHours(), now.getMinutes()].map((number) => String(number).padStart(2, "0")).join(":");
}

function lamp() {
  const live = document.getElementById("live");
  const on = connected && !since;
  live?.classList.toggle("on", on);
  if (live) live.textContent = on ? "live" : "not live";
}

function answered(why) {
  clearTimeout(retry);
  if (why) {
    since ||= clock();
    retry = setTimeout(() => document.hidden || refresh(), wait);
    wait = Math.min(2 * wait, LONGEST_WAIT);
  } else {
    since = "";
    wait = FIRST_WAIT;
  }
  const line = document.getElementById("away");
  const text = why ? `No answer since ${since}: ${why}. What stands here is as it was before.` : "";
  if (line && line.textContent !== text) line.textContent = text;
  lamp();
}

// What an error page says, in short.
function saidOf(page) {
  const told = page.querySelector(".empty pre")?.textContent.trim() ?? "";
  return told.length > MAX_SAID ? `${told.slice(0, MAX_SAID)}…` : told.replace(/\.$/, "");
}

async function ask() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.redirected && new URL(answer.url).pathname === SIGN_IN) return location.reload();
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!answer.ok) return answered(saidOf(page) || `it says ${answer.status}`);
  answered("");
  for (const region of regions()) {
    const fresh = page.getElementById(region.id);
    if (fresh) bring(region, fresh);
  }
  changed();
  document.body.dataset.refreshed = String(Number(document.body.dataset.refreshed || 0) + 1);
}

async function refresh() {
  if (underway) {
    again = true;
    return;
  }
  underway = true;
  try {
    await ask();
  } catch {
    answered("the dashboard cannot be reached");
  } finally {
    underway = false;
    if (again) {
      again = false;
      refresh();
    }
  }
}

// The browser opens a stream again that broke off, but gives up where the answer is another one, as a proxy's while the server starts.
function listen(address) {
  let stream = null;
  let lost = true; // what changed between this page and its stream is told by nobody
  let reopen = 0;
  let pause = FIRST_WAIT;
  const end = () => {
    clearTimeout(reopen);
    stream?.close();
    stream = null;
    connected = false;
    lost = true;
    lamp();
  };
  const begin = () => {
    stream = new EventSource(address);
    stream.onopen = () => {
      connected = true;
      pause = FIRST_WAIT;
      lamp();
      if (lost) refresh();
      lost = false;
    };
    stream.onerror = () => {
      connected = false;
      lost = true;
      lamp();
      refresh(); // it says whether only the stream is away
      if (stream.readyState !== EventSource.CLOSED) return;
      reopen = setTimeout(begin, pause);
      pause = Math.min(2 * pause, LONGEST_WAIT);
    };
    stream.addEventListener("changed", refresh);
  };
  // A page that nobody sees holds no connection; seen again, it asks for all that it missed.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) end();
    else if (!stream) begin();
  });
  begin();
}

if (document.body.dataset.live) listen(document.body.dataset.live);
