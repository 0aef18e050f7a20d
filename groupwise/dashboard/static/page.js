// What pages do by themselves beside plots (plots.js) and what brings them up to date (live.js): a log that grows, colours, and keys.
// Everything else is links and forms. What comes from elsewhere is put into pages as text, never as markup, but for pages of this server.

// --- logs ----------------------------------------------------------------------------------------

const LOG_EVERY = 2000; // milliseconds
const PIECES = 16; // that are asked for at once
const MAX_OF_LOG = 1_000_000; // characters that stay in the page

function add(element, text) {
  const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
  element.append(document.createTextNode(text));
  let size = element.textContent.length;
  while (size > MAX_OF_LOG && element.childNodes.length > 1) {
    const height = element.scrollHeight;
    size -= element.firstChild.length;
    element.firstChild.remove();
    element.scrollTop -= height - element.scrollHeight; // whoever reads further up stays there
  }
  if (atEnd) element.scrollTop = element.scrollHeight;
}

// What is new is put to the end, as text. An attempt may follow another.
async function follow(element) {
  let { epoch, offset } = element.dataset;
  const more = async () => {
    const query = new URLSearchParams({ epoch, offset });
    const answer = await fetch(`${element.dataset.log}?${query}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) return "nothing";
    const logs = await answer.json();
    if (epoch && logs.epoch && String(logs.epoch) !== epoch) add(element, `\n— attempt ${logs.attempt} —\n`);
    if (logs.text) add(element, logs.text);
    epoch = String(logs.epoch ?? "");
    offset = String(logs.offset);
    return logs.ended ? "ended" : logs.text ? "more" : "nothing";
  };
  element.scrollTop = element.scrollHeight;
  for (;;) {
    let said = "nothing";
    try {
      for (let piece = 0; !document.hidden && piece < PIECES; piece += 1) {
        said = await more();
        if (said !== "more") break;
      }
    } catch {
      // the server is away: it is asked again
    }
    if (said === "ended") return;
    await new Promise((resolve) => setTimeout(resolve, LOG_EVERY));
  }
}

// --- small things --------------------------------------------------------------------------------

function keep(theme) {
  try {
    if (theme) localStorage.setItem("theme", theme);
    else localStorage.removeItem("theme");
  } catch {
    // a browser that keeps nothing has it in this page
  }
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const said = () => document.dispatchEvent(new Event("theme"));
  document.getElementById("theme")?.addEventListener("click", () => {
    const other = dark.matches ? "light" : "dark"; // than the system's, which comes back by the next click
    if (document.documentElement.dataset.theme) {
      delete document.documentElement.dataset.theme;
      keep(null);
    } else {
      document.documentElement.dataset.theme = other;
      keep(other);
    }
    said();
  });
  dark.addEventListener("change", said);
}

function colours() {
  const paint = (choice) => {
    const tokens = document.querySelector(".tokens");
    tokens.classList.remove("by-logprob", "by-advantage", "by-ratio", "by-none");
    tokens.classList.add(`by-${choice.value}`);
    for (const scale of document.querySelectorAll(".scale")) scale.hidden = scale.dataset.of !== choice.value;
  };
  for (const choice of document.querySelectorAll('input[name="colour"]')) {
    choice.addEventListener("change", () => paint(choice));
    if (choice.checked) paint(choice); // a browser that comes back to a page may have another one than the page says
  }
}

// What stands behind a token, for whoever has no mouse to rest on it: the chosen one says it, by a click or the arrow keys.
function tokens() {
  const [box, line] = [document.querySelector(".tokens"), document.getElementById("token-facts")];
  if (!box || !line) return;
  let chosen = null;
  const choose = (token) => {
    if (!token) return;
    chosen?.classList.remove("chosen");
    chosen = token;
    chosen.classList.add("chosen");
    chosen.scrollIntoView({ block: "nearest" });
    line.textContent = `“${token.textContent}” ${token.title}`;
  };
  box.addEventListener("click", (event) => choose(event.target.closest(".token")));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const all = [...box.querySelectorAll(".token")];
    choose(chosen ? all[all.indexOf(chosen) + step] : all[0]);
  });
}

// How long ago something was goes on while a page is open; the server's clock counts.
const AGO_EVERY = 5000; // milliseconds
const UNITS = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const ahead = Number(document.body.dataset.now) - Date.now() / 1000;

function agos() {
  for (const time of document.querySelectorAll("time[data-at]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 + ahead - Number(time.dataset.at)));
    const [size, unit] = UNITS.find(([size]) => seconds >= size) ?? [1, "s"];
    const text = `${Math.floor(seconds / size)} ${unit} ago`;
    if (time.textContent !== text) time.textContent = text;
  }
}

// j and k go from one rollout to the next, / to the search, as in other lists of long things; ? shows all keys.
function keys() {
  const help = document.getElementById("keys");
  if (!help) return; // a run's page as one file
  document.getElementById("help").addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    if (help.open || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "")) return;
    if (event.key === "/") {
      const search = document.querySelector('input[type="search"]');
      if (search) {
        event.preventDefault();
        search.focus();
      }
    }
    if (event.key === "?") help.showModal();
    if (event.key === "d") document.getElementById("theme").click();
    if (event.key !== "j" && event.key !== "k") return;
    const links = [...document.querySelectorAll(".rollout header")].map((header) => header.querySelector("a")).filter(Boolean);
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at + (event.key === "j" ? 1 : -1)))]?.focus();
  });
}

theme();
// Settings are all there: a search hides those that do not have its words.
function settings() {
  const search = document.getElementById("settings-search");
  search?.form.addEventListener("submit", (event) => event.preventDefault());
  search?.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll(".settings tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}

colours();
tokens();
settings();
keys();
document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
setInterval(agos, AGO_EVERY);
for (const element of document.querySelectorAll("[data-log]")) follow(element);
