// Plots: their curves are fetched thinned to the width of a screen and drawn as they come into sight. What is new is put into the plot that
// is there, so that whoever reads keeps the range, the hidden lines and the cursor; a range that is looked at closely is asked for once more,
// in finer columns. Other scripts of the page say that something has changed by the events "fresh" and "theme" of the document.

const WIDTH = 700; // columns of a picture
const SHADED = 5; // so many runs and more have lines at their edges: areas would hide each other
const AT = document.body.dataset.at; // what stands before all our paths
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => style(`--c${index % 8}`);
const dash = (index) => (index % 16 < 8 ? undefined : [7, 4]); // the colours begin again, in broken lines

const drawn = new Map(); // element -> { made, like, raw, thinned, range, zoom, turn }

function short(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function faded(name, share) {
  return `color-mix(in srgb, ${name} ${share}%, transparent)`;
}

// --- what is drawn -------------------------------------------------------------------------------

async function fetched(runs, names, range) {
  const near = range ? [["from", range[0]], ["to", range[1]]] : [];
  const query = new URLSearchParams([...runs.map((run) => ["run", run]), ...names.map((name) => ["name", name]), ["columns", WIDTH], ...near]);
  const answer = await fetch(`${AT}/curves?${query}`, { headers: { Accept: "application/json" } });
  return answer.ok ? (await answer.json()).runs : null;
}

// A curve that is fine within the range and coarse beside it.
function refined(coarse, fine, [from, to]) {
  const before = coarse.at.findIndex((at) => at >= from);
  const after = coarse.at.findIndex((at) => at > to);
  const [begin, end] = [before < 0 ? coarse.at.length : before, after < 0 ? coarse.at.length : after];
  return Object.fromEntries(Object.keys(coarse).map((key) => [key, [...coarse[key].slice(0, begin), ...fine[key], ...coarse[key].slice(end)]]));
}

// The values of another curve at the places of this one.
function beside(curve, other) {
  const found = new Map(other.at.map((at, index) => [at, other.mean[index]]));
  return curve.at.map((at) => found.get(at) ?? null);
}

const finite = (values) => values.filter((value) => value != null);

// For whoever does not see the plot.
function told(label, curve) {
  const values = finite(curve.mean);
  if (!values.length) return "";
  const [low, high] = [finite(curve.low), finite(curve.high)].map((each) => (each.length ? each : values));
  const least = low.reduce((a, b) => Math.min(a, b));
  const most = high.reduce((a, b) => Math.max(a, b));
  return `${label}: first ${short(values[0])}, last ${short(values.at(-1))}, lowest ${short(least)}, highest ${short(most)}.`;
}

// What a line is made of: itself, its spread, and what stands out in steps that share a column.
function pieces(curve, spread, thinned, ink, label, { many, shaded, nth }) {
  const main = { label, stroke: ink, width: 1.8, dash: dash(nth), points: { show: curve.at.length < 2 }, spanGaps: true };
  const edge = { points: { show: false }, spanGaps: true, class: many ? "edge-of-many" : "edge" };
  const bare = { ...edge, stroke: "transparent", width: 0 };
  const found = [{ ...main, values: curve.mean }];
  if (spread) {
    const by = beside(curve, spread);
    const far = (sign) => curve.mean.map((value, at) => (value == null || by[at] == null ? null : value + sign * by[at]));
    found.push({ ...bare, label: "+ spread", values: far(1), fill: faded(ink, 16) }, { ...bare, label: "− spread", values: far(-1) });
  }
  if (thinned) {
    const line = shaded && !spread ? bare : { ...edge, stroke: faded(ink, 55), width: 0.7, dash: dash(nth) };
    const fill = shaded ? faded(ink, spread ? 7 : 16) : undefined;
    found.push({ ...line, label: "highest", values: curve.high, fill }, { ...line, label: "lowest", values: curve.low });
  }
  return found;
}

async function curvesOf(element, range) {
  const runs = JSON.parse(element.dataset.runs);
  const plot = JSON.parse(element.dataset.plot);
  const names = plot.lines.flatMap((line) => (line.spread ? [line.metric, line.spread] : [line.metric]));
  const [whole, near] = await Promise.all([fetched(runs, names), range && fetched(runs, names, range)]).catch(() => []);
  if (!whole) return null; // the server is away
  const curve = (run, name) => {
    const coarse = whole[run]?.[name];
    return near?.[run]?.[name] && coarse ? refined(coarse, near[run][name], range) : coarse;
  };
  const lines = [];
  const words = [];
  let thinnedAtAll = false;
  runs.forEach((run, nth) => {
    plot.lines.forEach((line, index) => {
      const found = curve(run, line.metric);
      if (!found?.at.length) return;
      const many = runs.length > 1;
      const label = many ? run : line.label || line.metric;
      const coarse = whole[run][line.metric];
      const thinned = coarse.first.some((each, at) => each !== coarse.last[at]);
      thinnedAtAll ||= thinned;
      const place = many ? nth : index;
      const how = { many, shaded: runs.length < SHADED, nth: place };
      const made = pieces(found, line.spread && curve(run, line.spread), thinned && !plot.stacked, colour(place), label, how);
      lines.push(made.map((each) => ({ ...each, at: found.at })));
      words.push(told(label, coarse));
    });
  });
  return { lines, words, stacked: plot.stacked, thinned: thinnedAtAll, x: "step" };
}

function given(element) {
  const curves = JSON.parse(element.dataset.curves);
  const shaded = curves.length < SHADED;
  const lines = curves.map((curve, index) => {
    const ink = colour(index);
    const main = { label: curve.label, at: curve.k, values: curve.y, stroke: ink, dash: dash(index), width: 2, points: { show: true, size: 6 }, spanGaps: true };
    if (!finite(curve.low).length) return [main];
    const edge = { at: curve.k, points: { show: false }, spanGaps: true, class: shaded ? "edge" : "edge-of-many", ...(shaded ? { stroke: "transparent", width: 0 } : { stroke: faded(ink, 55), width: 0.7, dash: dash(index) }) };
    return [main, { ...edge, label: "95 % to", values: curve.high, fill: shaded ? faded(ink, 14) : undefined }, { ...edge, label: "95 % from", values: curve.low }];
  });
  const words = curves.map((curve) => told(curve.label, { mean: curve.y, low: curve.y, high: curve.y }));
  return { lines, words, stacked: false, thinned: false, x: "k" };
}

// --- plots ---------------------------------------------------------------------------------------

// Columns for uPlot: all lines over the places of all of them. In a stack each stands on those before it.
function columnsOf({ lines, stacked }) {
  const flat = lines.flat();
  const raw = flat.length ? uPlot.join(flat.map((line) => [line.at, line.values])) : [[]];
  if (!stacked) return { raw, data: raw };
  const sums = raw[0].map(() => 0);
  return { raw, data: [raw[0], ...raw.slice(1).map((values) => values.map((value, at) => (sums[at] += value ?? 0)))] };
}

function axes() {
  const line = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
  const whole = [1, 2, 5].flatMap((each) => [...Array(7).keys()].map((power) => each * 10 ** power)).sort((a, b) => a - b);
  return [{ ...line, size: 34, incrs: whole }, { ...line, size: 58, values: (_, ticks) => ticks.map(short) }];
}

function extent(low, high, stacked) {
  if (low == null || high == null) return [0, 1];
  if (stacked) return [Math.min(0, low), high > 0 ? uPlot.rangeNum(0, high, 0.1, true)[1] : 1];
  return low === high ? [low - 0.5, high + 0.5] : uPlot.rangeNum(low, high, 0.1, true);
}

const box = (element) => ({ width: element.clientWidth, height: parseFloat(getComputedStyle(element).minHeight) - 30 });

// Areas: between the two that follow each other where the first has a filling, and in a stack down to the line before.
function areas({ lines, stacked }) {
  const flat = lines.flat();
  if (stacked) return flat.slice(1).map((line, index) => ({ series: [index + 2, index + 1], fill: faded(line.stroke, 22) }));
  return flat.flatMap((line, index) => (line.fill ? [{ series: [index + 1, index + 2], fill: line.fill }] : []));
}

function make(element, shape, state) {
  const hidden = new Set(state.made?.series.filter((each) => !each.show).map((each) => each.label));
  state.made?.destroy();
  element.replaceChildren();
  const value = (_, __, series, at) => short(at == null ? null : state.raw[series][at]);
  const series = shape.lines.flatMap((pieces) =>
    pieces.map(({ at, values, fill, ...line }) => ({ ...line, value, show: !hidden.has(pieces[0].label), ...(shape.stacked && line.stroke === shape.lines[0][0].stroke ? { fill: faded(line.stroke, 22) } : {}) })),
  );
  state.made = new uPlot(
    {
      ...box(element),
      scales: { x: { time: false }, y: { range: (_, low, high) => extent(low, high, shape.stacked) } },
      axes: axes(),
      series: [{ label: shape.x, value: (_, value) => short(value) }, ...series],
      bands: areas(shape),
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      legend: { live: true, markers: { dash: (made, index) => (made.series[index].dash ? "dashed" : "solid") } },
      hooks: {
        setScale: [(_, scale) => scale === "x" && looked(element, state)],
        setSeries: [(made, index, how) => how.show != null && together(made, index, shape)],
      },
    },
    columnsOf(shape).data,
    element,
  );
  legend(state.made);
}

// The edges of a line go with it.
function together(made, index, { lines }) {
  let first = 1;
  for (const pieces of lines) {
    if (index === first) for (let at = first + 1; at < first + pieces.length; at += 1) made.setSeries(at, { show: made.series[index].show });
    first += pieces.length;
  }
  pressed(made);
}

const rows = (made) => [...made.root.querySelectorAll(".u-legend .u-series")];

// Its entries are buttons: a key does what a click does.
function legend(made) {
  made.root.querySelector(".u-legend").setAttribute("role", "none");
  rows(made).forEach((row, index) => {
    const button = row.querySelector("th");
    if (!index || !button) return;
    button.tabIndex = 0;
    button.setAttribute("role", "button");
    button.title = "Shows or hides this line";
    button.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      made.setSeries(index, { show: !made.series[index].show });
    });
  });
  pressed(made);
}

function pressed(made) {
  rows(made).forEach((row, index) => index && row.querySelector("th")?.setAttribute("aria-pressed", String(made.series[index].show)));
}

// Somebody chose a range, or all of it again.
function looked(element, state) {
  if (state.busy || !state.made) return;
  const { min, max } = state.made.scales.x;
  const places = state.made.data[0];
  state.range = min <= places[0] && max >= places.at(-1) ? null : [min, max];
  const zoom = state.range && [Math.max(0, Math.floor(min)), Math.max(0, Math.ceil(max))];
  if (String(zoom) === String(state.zoom)) return;
  state.zoom = zoom;
  if (state.thinned) draw(element);
}

function none(element, text) {
  drawn.get(element)?.made?.destroy();
  drawn.delete(element);
  const said = document.createElement("span");
  said.className = "none";
  said.textContent = text;
  element.replaceChildren(said);
}

function show(element, shape, state) {
  const { raw, data } = columnsOf(shape);
  if (!data[0].length) return none(element, "nothing recorded yet");
  const like = JSON.stringify([shape.x, shape.stacked, shape.lines.map((pieces) => pieces.map(({ label, stroke, dash }) => [label, stroke, dash]))]);
  const { range } = state;
  Object.assign(state, { raw, thinned: shape.thinned, busy: true });
  if (like !== state.like) make(element, shape, state);
  state.like = like;
  state.made.batch(() => {
    state.made.setData(data, !range);
    if (range) state.made.setScale("x", { min: range[0], max: range[1] });
  });
  Object.assign(state, { busy: false, range });
  const canvas = state.made.ctx.canvas;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", [element.getAttribute("aria-label"), ...shape.words].filter(Boolean).join(". "));
}

async function draw(element) {
  const state = drawn.get(element) ?? { turn: 0, zoom: null, range: null };
  const turn = (state.turn += 1);
  drawn.set(element, state);
  const shape = element.dataset.curves ? given(element) : await curvesOf(element, state.zoom);
  if (turn !== state.turn || !element.isConnected) return; // somebody has asked once more meanwhile
  if (shape) {
    show(element, shape, state);
    element.dataset.drawn = "yes";
  } else if (!state.made) {
    none(element, "The curve could not be loaded."); // what is shown stays until the server answers again
  }
}

// --- when ----------------------------------------------------------------------------------------

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const made = drawn.get(target)?.made;
    if (made && made.width !== target.clientWidth) made.setSize(box(target));
  }
});

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

function watch() {
  for (const element of drawn.keys()) {
    if (!element.isConnected) none(element, "");
  }
  for (const element of document.querySelectorAll(".plot")) {
    seen.observe(element);
    resized.observe(element);
  }
}

function redraw() {
  watch();
  for (const element of document.querySelectorAll(".plot")) {
    element.dataset.drawn = "";
    if (element.dataset.visible === "yes") draw(element);
  }
}

document.addEventListener("fresh", redraw);
document.addEventListener("theme", redraw); // colours are a part of what a plot is like
watch();
