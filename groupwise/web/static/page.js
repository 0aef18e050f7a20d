// What pages do by themselves: they draw their plots, and bring themselves up to date when the server says that something is new.
// Everything else is links and forms. What comes from elsewhere is put into pages as text, never as markup, but for pages of this server.

const WIDTH = 700;
const AT = document.body.dataset.at; // what stands before all our paths
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => style(`--c${index % 8}`);

// --- plots ---------------------------------------------------------------------------------------

const drawn = new Map(); // element -> uPlot

function short(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function faded(name, share) {
  return `color-mix(in srgb, ${name} ${share}%, transparent)`;
}

function axes() {
  const line = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
  const whole = [1, 2, 5].flatMap((each) => [...Array(7).keys()].map((power) => each * 10 ** power)).sort((a, b) => a - b);
  return [{ ...line, size: 34, incrs: whole }, { ...line, size: 58, values: (_, ticks) => ticks.map(short) }];
}

function show(element, data, series, bands, label) {
  const before = drawn.get(element);
  before?.destroy();
  element.replaceChildren();
  if (!data[0]?.length) {
    const none = document.createElement("span");
    none.className = "none";
    none.textContent = "nothing recorded yet";
    element.append(none);
    return;
  }
  const box = () => ({ width: element.clientWidth, height: element.clientHeight - 30 });
  const made = new uPlot(
    {
      ...box(),
      scales: { x: { time: false }, y: { range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : uPlot.rangeNum(low, high, 0.1, true)) } },
      axes: axes(),
      series: [{ label, value: (_, value) => short(value) }, ...series],
      bands,
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      legend: { live: true },
    },
    data,
    element,
  );
  drawn.set(element, made);
}

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    drawn.get(target)?.setSize({ width: target.clientWidth, height: target.clientHeight - 30 });
  }
});

// One axis for curves of different steps: uPlot joins them.
function joined(curves) {
  return curves.length ? uPlot.join(curves.map((columns) => [columns.x, ...columns.ys])) : [[]];
}

function place(first, last) {
  return first.map((each, index) => (each + last[index]) / 2);
}

async function fetched(runs, names) {
  const query = new URLSearchParams([...runs.map((run) => ["run", run]), ...names.map((name) => ["name", name]), ["columns", WIDTH]]);
  const answer = await fetch(`${AT}/curves?${query}`, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`curves: ${answer.status}`);
  return (await answer.json()).runs;
}

async function drawCurves(element) {
  const runs = JSON.parse(element.dataset.runs);
  const plot = JSON.parse(element.dataset.plot);
  const names = plot.lines.flatMap((line) => (line.spread ? [line.metric, line.spread] : [line.metric]));
  const found = await fetched(runs, names);
  const curves = [];
  const series = [];
  const bands = [];
  let below = null; // of a stack
  const add = (x, ys, described) => {
    curves.push({ x, ys });
    series.push(...described);
  };
  runs.forEach((run, nth) => {
    plot.lines.forEach((line, index) => {
      const curve = found[run]?.[line.metric];
      if (!curve?.first.length) return;
      const ink = colour(runs.length > 1 ? nth : index);
      const x = place(curve.first, curve.last);
      const label = runs.length > 1 ? run : line.label || line.metric;
      const spread = line.spread && found[run][line.spread];
      const thinned = curve.first.some((each, at) => each !== curve.last[at]);
      let mean = curve.mean;
      if (plot.stacked) {
        mean = mean.map((value, at) => (value ?? 0) + (below?.[at] ?? 0));
        below = mean;
      }
      const main = { label, stroke: ink, width: 1.8, value: (_, value) => short(value), points: { show: x.length < 2 }, spanGaps: true };
      if (plot.stacked) main.fill = faded(ink, 22);
      const low = spread ? mean.map((value, at) => (value == null ? null : value - (spread.mean[at] ?? 0))) : curve.low;
      const high = spread ? mean.map((value, at) => (value == null ? null : value + (spread.mean[at] ?? 0))) : curve.high;
      const at = series.length + 1;
      if (!plot.stacked && (spread || thinned) && runs.length < 5) {
        const edge = { stroke: "transparent", width: 0, points: { show: false }, class: "edge" };
        add(x, [mean, high, low], [main, { ...edge, label: "to" }, { ...edge, label: "from" }].map((each) => ({ ...each, value: (_, value) => short(value) })));
        bands.push({ series: [at + 1, at + 2], fill: faded(ink, 16) });
      } else {
        add(x, [mean], [main]);
      }
    });
  });
  show(element, joined(curves), series, bands, "step");
}

function drawGiven(element) {
  const given = JSON.parse(element.dataset.curves);
  const curves = given.map((curve) => ({ x: curve.k, ys: [curve.y] }));
  const series = given.map((curve, index) => ({ label: curve.label, stroke: colour(index), width: 2, value: (_, value) => short(value), points: { show: true, size: 6 }, spanGaps: true }));
  show(element, joined(curves), series, [], "k");
}

async function draw(element) {
  try {
    if (element.dataset.curves) drawGiven(element);
    else await drawCurves(element);
    element.dataset.drawn = "yes";
  } catch (error) {
    if (drawn.has(element)) return; // what is shown stays until the server answers again
    const none = document.createElement("span");
    none.className = "none";
    none.textContent = "The curve could not be loaded.";
    element.replaceChildren(none);
  }
}

// Those that are seen, as they come into sight; a run may have a hundred of them.
const seen = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      target.dataset.visible = isIntersecting ? "yes" : "";
      if (isIntersecting && target.dataset.drawn !== "yes") draw(target);
    }
  },
  { rootMargin: "200px" },
);

function watchPlots() {
  for (const element of document.querySelectorAll(".plot")) {
    seen.observe(element);
    resized.observe(element);
  }
}

function redraw() {
  for (const element of document.querySelectorAll(".plot")) {
    element.dataset.drawn = "";
    if (element.dataset.visible === "yes") draw(element);
  }
}

// --- up to date ----------------------------------------------------------------------------------

let underway = false;
let again = false;

// The same page once more; regions of it that are marked as fresh replace those of before, unless somebody is at work in them.
async function refresh() {
  if (underway) {
    again = true;
    return;
  }
  underway = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (answer.redirected && new URL(answer.url).pathname === `${AT}/sign-in`) return location.reload();
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const region of document.querySelectorAll("[data-fresh]")) {
      const other = fresh.getElementById(region.id);
      if (!other || region.contains(document.activeElement) || region.querySelector("input:checked, details[open]")) continue;
      if (other.innerHTML !== region.innerHTML) region.replaceChildren(...other.childNodes);
    }
    if (document.querySelectorAll(".plot").length !== fresh.querySelectorAll(".plot").length && document.activeElement === document.body) {
      return location.reload();
    }
    redraw();
    document.body.dataset.refreshed = String(Number(document.body.dataset.refreshed || 0) + 1);
  } catch {
    // the server is away: the stream says when it is there again
  } finally {
    underway = false;
    if (again) {
      again = false;
      refresh();
    }
  }
}

function listen(address) {
  const lamp = document.getElementById("live");
  let lost = false;
  let stream = null;
  const begin = () => {
    stream = new EventSource(address);
    stream.onopen = () => {
      lamp?.classList.add("on");
      if (lost) refresh();
      lost = false;
    };
    stream.onerror = () => {
      lamp?.classList.remove("on");
      lost = true;
    };
    stream.addEventListener("changed", refresh);
  };
  // A page that nobody sees holds no connection; seen again, it asks for all that it missed.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      stream?.close();
      stream = null;
      lost = true;
    } else if (!stream) begin();
  });
  begin();
}

// --- logs ----------------------------------------------------------------------------------------

const LOG_EVERY = 2000; // milliseconds
const PIECES = 16; // that are asked for at once
const MOST_OF_LOG = 1_000_000; // characters that stay in the page

function add(element, text) {
  const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
  element.append(document.createTextNode(text));
  let size = element.textContent.length;
  while (size > MOST_OF_LOG && element.childNodes.length > 1) {
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
    const found = await answer.json();
    if (found.text) add(element, found.text);
    if (epoch && found.epoch && String(found.epoch) !== epoch) add(element, `\n— attempt ${found.epoch} —\n`);
    epoch = String(found.epoch ?? "");
    offset = String(found.offset);
    return found.ended ? "ended" : found.text ? "more" : "nothing";
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

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme")?.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("theme", next);
    redraw();
  });
  dark.addEventListener("change", redraw);
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

// j and k go from one rollout to the next, / to the search, as in other lists of long things.
function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "")) return;
    if (event.key === "/") {
      const search = document.querySelector('input[type="search"]');
      if (search) {
        event.preventDefault();
        search.focus();
      }
    }
    if (event.key !== "j" && event.key !== "k") return;
    const links = [...document.querySelectorAll(".rollout header a:first-child")];
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at + (event.key === "j" ? 1 : -1)))]?.focus();
  });
}

watchPlots();
theme();
colours();
keys();
for (const element of document.querySelectorAll("[data-log]")) follow(element);
if (document.body.dataset.live) listen(document.body.dataset.live);
