// Plots: their curves are fetched thinned to the width of a screen and drawn as they come into sight. What is new is put into the plot that
// is there, so that whoever reads keeps the range, the hidden lines and the cursor; a range that is looked at closely is asked for once more,
// in finer columns. How all of them are drawn, smoothed, on a logarithmic axis or over time, is chosen once for all pages of this browser. Other
// scripts of the page say that something has changed by the events "fresh" and "theme" of the document.

const WIDTH = 700; // columns of a picture
const SHADED = 5; // so many runs and more have lines at their edges: areas would hide each other
const [TOTAL, CLOCK] = [" total", " clock"]; // no names of metrics
const AT = document.body.dataset.at; // what stands before all our paths
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => style(`--c${index % 8}`);
const dash = (index) => (index % 16 < 8 ? undefined : [7, 4]); // the colours begin again, in broken lines

const drawn = new Map(); // element -> { made, like, shape, raw, digits, room, range, span, zoom, turn, coming }

const isFar = (size) => size !== 0 && (size < 1e-3 || size >= 1e6); // from numbers that are read well as they are
const brief = (text) => text.replace("e+", "e");

function short(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  return isFar(Math.abs(value)) ? brief(value.toExponential(digits - 2)) : String(Number(value.toPrecision(digits)));
}

// A step as it is, or the middle of some that share a column.
function stepText(value) {
  return value == null ? "–" : String(Number(value.toFixed(1)));
}

const magnitude = (value) => Math.floor(Math.log10(Math.abs(value) || 1));

// Where somebody points: a step, or a time with as many digits as tell places of what is seen apart, and with its step where there is one run.
function placeText(value, { shape, span }) {
  if (!shape.timed || value == null) return stepText(value);
  const time = short(value, Math.min(9, 4 + Math.max(0, magnitude(value) - magnitude(span))));
  return shape.stepAt.has(value) ? `${time} (step ${stepText(shape.stepAt.get(value))})` : time;
}

function faded(name, share) {
  return `color-mix(in srgb, ${name} ${share}%, transparent)`;
}

// --- what is drawn -------------------------------------------------------------------------------

const inFile = JSON.parse(document.getElementById("curves")?.textContent ?? "null"); // where a run's page is one file, all of its curves

// Curves of runs, of a stack how high it is, and when each column was done.
async function fetched(runs, names, stacked, timed, range) {
  if (inFile) return range ? null : byRun(inFile[names.join("\n")]);
  const near = range ? [["from", range[0]], ["to", range[1]]] : [];
  const query = new URLSearchParams([...runs.map((run) => ["run", run]), ...names.map((name) => ["name", name]), ...(stacked ? names.map((name) => ["total", name]) : []), ...(timed ? [["times", "yes"]] : []), ["columns", WIDTH], ...near]);
  const answer = await fetch(`${AT}/curves?${query}`, { headers: { Accept: "application/json" } });
  if (!answer.ok) return null;
  return byRun(await answer.json());
}

function byRun({ runs: curvesOfRuns, totals = {}, times = {} }) {
  return Object.fromEntries(Object.entries(curvesOfRuns).map(([run, curves]) => [run, { ...curves, [TOTAL]: totals[run], [CLOCK]: times[run] }]));
}

// A curve that is fine within the range and coarse beside it.
function refined(coarse, fine, [from, to]) {
  const places = placesOf(coarse, false);
  const before = places.findIndex((at) => at >= from);
  const after = places.findIndex((at) => at > to);
  const [begin, end] = [before < 0 ? places.length : before, after < 0 ? places.length : after];
  return Object.fromEntries(Object.keys(coarse).map((key) => [key, [...coarse[key].slice(0, begin), ...fine[key], ...coarse[key].slice(end)]]));
}

function allRefined(coarse, fine, range) {
  const one = (name) => (fine[name] && coarse[name] ? refined(coarse[name], fine[name], range) : coarse[name]);
  return Object.fromEntries(Object.keys(coarse).map((name) => [name, one(name)]));
}

// Curves over all steps, and the same finer within a range, where one is looked at: of steps, or of seconds, in which each run has steps of its own.
async function coarseAndFine(runs, names, stacked, timed, zoom) {
  const near = (some, range) => fetched(some, names, stacked, timed, range).catch(() => null); // it stays coarse
  const [whole, inSteps] = await Promise.all([fetched(runs, names, stacked, timed), zoom && !timed ? near(runs, zoom) : null]);
  if (!whole || !zoom) return [whole, whole];
  const ranges = Object.fromEntries(runs.map((run) => [run, timed ? around(whole[run][CLOCK], zoom) : zoom]));
  const inTime = timed ? await Promise.all(runs.filter((run) => ranges[run]).map((run) => near([run], ranges[run]))) : [];
  const close = Object.assign({}, inSteps, ...inTime);
  const fine = Object.entries(whole).map(([run, coarse]) => [run, close[run] ? allRefined(coarse, close[run], ranges[run]) : coarse]);
  return [whole, Object.fromEntries(fine)];
}

// The values of another curve at the places of this one.
function beside(curve, other) {
  const meanAt = new Map(other.at.map((at, index) => [at, other.mean[index]]));
  return curve.at.map((at) => meanAt.get(at) ?? null);
}

const finite = (values) => values.filter((value) => value != null);

// Steps whose value was not a finite number.
const lostIn = (curve) => (curve.lost ?? []).reduce((sum, count) => sum + count, 0);

const UNITS = [["hours", 3600], ["minutes", 60], ["seconds", 1]];
const SHORTEST = 1e-3; // seconds between two places

// Seconds of columns that follow each other; a clock that was set back stands still, and so does what is not known.
function forward(times) {
  let before = -SHORTEST;
  return times.map((seconds) => (before = Math.max(seconds ?? 0, before + SHORTEST)));
}

// The steps of the columns within a range of seconds, and of those beside it: a column reaches further than the place that it has.
function around(clock, [from, to]) {
  const seconds = forward(clock.mean);
  const [before, after] = [seconds.findLastIndex((second) => second < from), seconds.findIndex((second) => second > to)];
  return seconds.length ? [clock.first[Math.max(0, before)], clock.last[after < 0 ? seconds.length - 1 : after]] : null;
}

// The axis of a plot over time: a column stands where its steps were done, of a stack where all steps of the column were.
function overTime(clocks, stacked) {
  const longest = clocks.flatMap((clock) => forward(clock.mean)).reduce((most, seconds) => Math.max(most, seconds), 0);
  const [x, unit] = UNITS.find(([, seconds]) => longest >= 2 * seconds) ?? UNITS.at(-1);
  const stepAt = new Map();
  const place = (nth, curve) => {
    const places = forward(stacked ? beside(curve, clocks[nth]) : curve.time).map((seconds) => seconds / unit);
    if (clocks.length === 1) placesOf(curve, stacked).forEach((step, index) => stepAt.set(places[index], step));
    return places;
  };
  return { x, unit, timed: true, stepAt, place, zoomed: (range) => range.map((end) => end * unit), over: `time in ${x}` };
}

function overSteps(stacked) {
  return { x: "step", unit: 1, timed: false, place: (_, curve) => placesOf(curve, stacked), zoomed: ([from, to]) => [Math.max(0, Math.floor(from)), Math.max(0, Math.ceil(to))], over: "the steps" };
}

// A column of a single step stands at that, but in a stack, whose parts have to stand upon each other.
function placesOf(curve, stacked) {
  return curve.at.map((at, index) => (stacked || curve.first[index] !== curve.last[index] ? at : curve.first[index]));
}

// For whoever does not see the plot.
function told(label, curve) {
  const values = finite(curve.mean);
  if (!values.length) return "";
  const [low, high] = [finite(curve.low), finite(curve.high)].map((bound) => (bound.length ? bound : values));
  const least = low.reduce((a, b) => Math.min(a, b));
  const most = high.reduce((a, b) => Math.max(a, b));
  const lost = lostIn(curve) ? `, ${lostIn(curve)} steps without a finite number` : "";
  return `${label}: first ${short(values[0])}, last ${short(values.at(-1))}, lowest ${short(least)}, highest ${short(most)}${lost}.`;
}

// A value of which there is no other would be no line.
const alone = (made, index) => finite(made.data[index]).length < 2;

// What a line is made of: itself, its spread, and what stands out in steps that share a column; of two edges the lower one comes first, and the
// upper one has the filling.
function pieces(curve, spread, thinned, ink, label, { many, shaded, nth, bounds }) {
  const main = { label, stroke: ink, width: 1.8, dash: dash(nth), points: { show: alone } };
  const edge = { points: { show: false }, class: many ? "edge-of-many" : "edge" };
  const bare = { ...edge, stroke: "transparent", width: 0 };
  const lines = [{ ...main, values: curve.mean }];
  if (spread) {
    const by = beside(curve, spread);
    const cut = (edge, value) => (bounds ? Math.max(Math.min(bounds[0], value), Math.min(Math.max(bounds[1], value), edge)) : edge); // no rollout earned more or less
    const far = (sign) => curve.mean.map((value, at) => (value == null || by[at] == null ? null : cut(value + sign * by[at], value)));
    lines.push({ ...bare, label: "− spread", values: far(-1), deep: true }, { ...bare, label: "+ spread", values: far(1), fill: faded(ink, 16) });
  }
  if (thinned) {
    const line = shaded && !spread ? bare : { ...edge, stroke: faded(ink, 55), width: 0.7, dash: dash(nth) };
    const fill = shaded ? faded(ink, spread ? 7 : 16) : undefined;
    lines.push({ ...line, label: "lowest", values: curve.low }, { ...line, label: "highest", values: curve.high, fill });
  }
  return lines;
}

// The parts of a stack are means where steps share a column; a line of its own says how high it was at most.
function summit(total, places, label) {
  const line = { stroke: style("--dim"), width: 0.8, dash: [3, 3], points: { show: false }, apart: true };
  return [{ ...line, label, at: places, values: total.high }];
}

const isThinned = (curve) => curve.first.some((value, index) => value !== curve.last[index]);
const isEmpty = (curve) => curve.high.every((value) => !value);

// A curve with all that is drawn of it.
function linesOf({ fine, coarse, spread, bounds, rank, label, places }, stacked, many, shaded) {
  const made = pieces(fine, spread, isThinned(coarse) && !stacked, colour(rank), label, { many, shaded, nth: rank, bounds });
  const hides = stacked && isEmpty(coarse) ? { width: 0 } : {}; // a layer of nothing would cover the line below it
  return made.map((line) => ({ ...line, ...hides, at: places }));
}

// The curves of a plot that there are: one for each of its lines, of each run.
function curvesIn(plot, runs, labels, whole, fine) {
  const many = runs.length > 1;
  const all = runs.flatMap((run, nth) =>
    plot.lines.map(({ metric, label, spread, bounds }, index) => ({
      bounds,
      nth,
      rank: many ? nth : index,
      label: many ? labels[nth] : label || metric,
      coarse: whole[run][metric],
      fine: fine[run][metric],
      spread: spread && fine[run][spread],
    })),
  );
  return all.filter((curve) => curve.fine?.at.length);
}

async function curvesOf(element, timed, zoom) {
  const [runs, labels, plot] = ["runs", "labels", "plot"].map((name) => JSON.parse(element.dataset[name]));
  const names = plot.lines.flatMap(({ metric, spread }) => (spread ? [metric, spread] : [metric]));
  const [whole, fine] = await coarseAndFine(runs, names, plot.stacked, timed, zoom).catch(() => []);
  if (!whole) return null; // the server is away
  const axis = timed ? overTime(runs.map((run) => fine[run][CLOCK]), plot.stacked) : overSteps(plot.stacked);
  const curves = curvesIn(plot, runs, labels, whole, fine).map((curve) => ({ ...curve, places: axis.place(curve.nth, curve.fine) }));
  const [many, shaded] = [runs.length > 1, runs.length < SHADED];
  const lines = curves.map((curve) => linesOf(curve, plot.stacked, many, shaded));
  if (plot.stacked && curves.some(({ coarse }) => isThinned(coarse))) {
    const total = fine[runs[0]][TOTAL];
    lines.push(summit(total, axis.place(0, total), "highest of all"));
  }
  return {
    ...axis,
    lines,
    words: curves.map(({ label, coarse }) => told(label, coarse)),
    lost: {
      steps: curves.reduce((sum, { coarse }) => sum + lostIn(coarse), 0),
      at: curves.flatMap(({ places, fine: { lost } }) => places.filter((_, index) => lost?.[index])),
    },
    stacked: plot.stacked,
    coarse: curves.some(({ coarse }) => coarse.at.some((at, index) => at !== coarse.first[index] || at !== coarse.last[index])),
    many,
  };
}

function given(element) {
  const curves = JSON.parse(element.dataset.curves);
  const shaded = curves.length < SHADED;
  const lines = curves.map((curve, index) => {
    const ink = colour(index);
    const main = { label: curve.label, at: curve.k, values: curve.y, stroke: ink, dash: dash(index), width: 2, points: { show: true, size: 6 } };
    if (!finite(curve.low).length) return [main];
    const edge = { at: curve.k, points: { show: false }, class: shaded ? "edge" : "edge-of-many", ...(shaded ? { stroke: "transparent", width: 0 } : { stroke: faded(ink, 55), width: 0.7, dash: dash(index) }) };
    return [main, { ...edge, label: "95 % from", values: curve.low }, { ...edge, label: "95 % to", values: curve.high, fill: shaded ? faded(ink, 14) : undefined }];
  });
  const words = curves.map((curve) => told(curve.label, { mean: curve.y, low: curve.y, high: curve.y }));
  return { ...overSteps(false), lines, words, stacked: false, coarse: false, x: "k", over: "k" };
}

// --- how it is drawn -----------------------------------------------------------------------------

const MAX_SMOOTHING = 0.99;

const here = new Map(); // what was chosen in this page, where the browser keeps nothing

function kept(name) {
  try {
    return here.get(name) ?? localStorage.getItem(name);
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
    here.delete(name);
  } catch {
    here.set(name, value);
  }
}

function chosen() {
  const smoothing = Math.min(MAX_SMOOTHING, Math.max(0, Number(kept("smoothing")) || 0));
  return { smoothing, logarithmic: kept("logarithmic") === "yes", timed: kept("over") === "time" };
}

// An exponential moving average, divided by how much of its weight lies on values that there are, as TensorBoard has it: sum = weight * sum +
// (1 - weight) * value from 0, over 1 - weight ** n; here without the sum, so that what is always the same stays exactly so. Where there is no
// value it stays as it was. It acts on the columns that are drawn: of a long run, whose steps share columns, it reaches over more steps than of a
// range that is looked at closely.
function smoothed(values, weight) {
  let [mean, left] = [0, 1];
  return values.map((value) => {
    if (value == null) return value;
    left *= weight;
    mean += ((1 - weight) / (1 - left)) * (value - mean);
    return mean;
  });
}

// A shape in the way that was chosen. Stacks are left as they are, since parts of a smoothed or logarithmic whole add up to nothing, and so are
// curves over k. On a logarithmic axis lines have gaps where they are not above 0; a plot with nothing above 0 keeps its axis.
function asChosen(shape) {
  const { smoothing, logarithmic } = chosen();
  if (shape.stacked || shape.x === "k") return shape;
  const log = logarithmic && shape.lines.some(([main]) => main.values.some((value) => value > 0));
  const whole = (line) => ({ ...line, positive: log });
  const lines = shape.lines.map(([main, ...edges]) => {
    if (!smoothing) return [whole(main), ...edges];
    const raw = { ...whole(main), label: "raw", stroke: faded(main.stroke, 35), width: 1, points: { show: false }, class: shape.many ? "edge-of-many" : "edge" };
    return [{ ...whole(main), values: smoothed(main.values, smoothing) }, raw, ...edges];
  });
  return { ...shape, lines, log };
}

// --- axes ----------------------------------------------------------------------------------------

// The power of ten of a number's first digit, and of its last one.
function powers(value) {
  const [digits, power] = Number(value.toPrecision(6)).toExponential().split("e");
  return [Number(power), Number(power) - (digits.split(".")[1] ?? "").length];
}

// All with as many digits as tell them apart.
function labels(ticks, step) {
  const [, finest] = powers(step);
  const exponential = (tick) => (Math.abs(tick) < step / 100 ? "0" : brief(tick.toExponential(Math.max(0, powers(tick)[0] - finest))));
  const plain = (tick) => (Math.abs(tick) < step / 100 ? 0 : tick).toFixed(Math.max(0, -finest));
  return ticks.map(isFar(Math.max(...ticks.map(Math.abs))) ? exponential : plain);
}

const DECADE = 4; // a logarithmic axis that is no wider than this factor is divided as any other

function logarithmicTicks(low, high, step) {
  if (high / low < DECADE) {
    const first = Math.ceil(low / step);
    return [...Array(Math.max(0, Math.floor(high / step) - first + 1)).keys()].map((at) => (first + at) * step);
  }
  const [begin, end] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const width = Math.log10(high / low);
  const between = width <= 1 ? [1, 2, 3, 5, 7] : width <= 2 ? [1, 2, 5] : [1];
  const decades = [...Array(end - begin + 1).keys()].map((at) => begin + at).filter((power) => power % Math.ceil(width / 6) === 0);
  return decades.flatMap((power) => between.map((digit) => Number(`${digit}e${power}`))).filter((tick) => tick >= low && tick <= high);
}

function logarithmicLabels(low, high, ticks, step) {
  return high / low < DECADE ? labels(ticks, step) : ticks.map((tick) => (isFar(tick) ? brief(tick.toExponential()) : String(tick)));
}

const NARROWEST = 58; // pixels of an axis, so that those of plots below each other are mostly the same

const measured = new Map(); // font and text, with 0 for each digit, none of which is wider -> pixels; to measure takes long

function measure({ ctx }, font, text) {
  const key = font + text.replace(/\d/g, "0");
  if (!measured.has(key)) {
    ctx.font = font;
    measured.set(key, ctx.measureText(key.slice(font.length)).width / devicePixelRatio);
  }
  return measured.get(key);
}

// As wide as its longest label.
function widthOf(made, texts, index, cycle) {
  const axis = made.axes[index];
  if (cycle > 2) return axis._size; // it has to come to an end
  const widest = Math.max(0, ...(texts ?? []).map((text) => measure(made, axis.font[0], text)));
  return Math.max(NARROWEST, Math.ceil(widest) + axis.ticks.size + axis.gap + 2);
}

function axes({ log, timed }) {
  const line = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
  const whole = [1, 2, 5].flatMap((digit) => [...Array(7).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
  const y = { ...line, size: widthOf };
  const even = { values: (_, ticks, __, ___, step) => labels(ticks, step) };
  const uneven = {
    splits: (_, __, low, high, step) => logarithmicTicks(low, high, step),
    filter: (_, ticks) => ticks,
    values: ({ scales }, ticks, __, ___, step) => logarithmicLabels(scales.y.min, scales.y.max, ticks, step),
  };
  const x = timed ? even : { incrs: whole };
  return [{ ...line, size: 34, ...x }, { ...y, ...(log ? uneven : even) }];
}

// A line that is the same everywhere, but for rounding, is seen from 0.
function extent(low, high, { stacked, log }) {
  const flat = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high));
  if (log) {
    const beside = flat ? 2 : (high / low) ** 0.08;
    return low > 0 ? [low / beside, high * beside] : [1, 10];
  }
  if (low == null || high == null || (low === 0 && high === 0)) return [0, 1];
  if (stacked || (flat && low > 0)) return [Math.min(0, low), high > 0 ? uPlot.rangeNum(0, high, 0.1, true)[1] : 1];
  return flat ? [uPlot.rangeNum(low, 0, 0.1, true)[0], 0] : uPlot.rangeNum(low, high, 0.1, true);
}

// --- plots ---------------------------------------------------------------------------------------

// Columns for uPlot: all lines over the places of all of them. In a stack each stands on those before it.
function columnsOf({ lines, stacked }) {
  const flat = lines.flat();
  const raw = flat.length ? uPlot.join(flat.map((line) => [line.at, line.values])) : [[]];
  if (stacked) {
    const sums = raw[0].map(() => 0);
    const upon = (values, index) => (flat[index].apart ? values : values.map((value, at) => (sums[at] += value ?? 0)));
    return { raw, data: [raw[0], ...raw.slice(1).map(upon)] };
  }
  const above = (values) => values.map((value) => (value <= 0 ? null : value));
  return { raw, data: raw.map((values, index) => (flat[index - 1]?.positive ? above(values) : values)) };
}

const box = (element) => ({ width: element.clientWidth, height: parseFloat(getComputedStyle(element).minHeight) - 30 });

// Areas: from a line that has a filling down to the one before, and so in a stack.
function areas({ lines, stacked }) {
  const flat = lines.flat();
  if (stacked) return flat.filter((line) => !line.apart).slice(1).map((line, index) => ({ series: [index + 2, index + 1], fill: faded(line.stroke, 22) }));
  return flat.flatMap((line, index) => (line.fill ? [{ series: [index + 1, index], fill: line.fill }] : []));
}

function make(element, shape, state) {
  const hidden = new Set(state.made?.series.filter((line) => !line.show).map((line) => line.label));
  state.made?.destroy();
  element.replaceChildren();
  const value = (_, __, series, at) => short(at == null ? null : state.raw[series][at], state.digits[series]);
  const series = shape.lines.flatMap((pieces) =>
    pieces.map(({ at, values, fill, deep, positive, ...line }) => ({ ...line, value, auto: !(deep && shape.log), show: !hidden.has(pieces[0].label), ...(shape.stacked && line.stroke === shape.lines[0][0].stroke ? { fill: faded(line.stroke, 22) } : {}) })),
  );
  state.made = new uPlot(
    {
      ...box(element),
      scales: { x: { time: false }, y: { distr: shape.log ? 3 : 1, range: (_, low, high) => extent(low, high, shape) } },
      axes: axes(shape),
      series: [{ label: shape.x, value: (made, value) => (value == null && made.cursor.left < 0 ? "last" : placeText(value, state)) }, ...series],
      bands: areas(shape),
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, ...(shape.timed && shape.many ? { dataIdx: (made, series, at) => latest(made.data[series], at) } : {}) },
      legend: { live: true, markers: { dash: (made, index) => (made.series[index].dash ? "dashed" : "solid") } },
      hooks: {
        setScale: [(_, scale) => scale === "x" && looked(element, state)],
        setSeries: [(made, index, how) => how.show != null && together(made, index, shape)],
        setLegend: [(made) => rest(made, shape)],
        draw: [(made) => marked(made, state.shape.lost)],
      },
    },
    columnsOf(shape).data,
    element,
  );
  legend(state.made);
}

// Runs have done their steps at times of their own: a line says what it was by then, unless it has ended before.
function latest(values, at) {
  if (values.findLastIndex((value) => value !== undefined) < at) return at;
  let before = at;
  while (before > 0 && values[before] === undefined) before -= 1;
  return before;
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

// While nobody points at the plot its legend says the last values that are seen: of a stack those of one step, else of each line its own.
function rest(made, { lines, stacked }) {
  const [from, to] = made.series[0].idxs;
  if (made.cursor.left >= 0 || to == null) return;
  const last = (series) => {
    let at = to;
    while (at >= from && made.data[series][at] == null) at -= 1;
    return at < from ? null : at;
  };
  const own = [];
  for (const pieces of lines) own.push(...Array(pieces.length).fill(stacked ? to : last(own.length + 1)));
  const places = new Set(own.filter((at) => at != null));
  made.setLegend({ idxs: [places.size === 1 ? [...places][0] : null, ...own] }, false);
  made.legend.idxs.fill(null); // or whoever points there next is taken to have been there
}

// Where there was no finite number stands a mark at the foot of the plot.
function marked(made, lost) {
  const { ctx, bbox } = made;
  ctx.save();
  ctx.fillStyle = style("--bad");
  for (const at of lost?.at ?? []) {
    const x = made.valToPos(at, "x", true);
    if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillRect(x - 1, bbox.top + bbox.height - 8, 2, 8);
  }
  ctx.restore();
}

function sayLost(element, lost) {
  const text = lost?.steps ? `${lost.steps} value${lost.steps === 1 ? " is not a finite number" : "s are not finite numbers"} (NaN or infinite): marked at the foot.` : "";
  const line = element.parentElement.querySelector(".lost") ?? document.createElement("p");
  line.className = "lost";
  if (line.textContent !== text) line.textContent = text;
  if (text && !line.isConnected) element.after(line);
}

// So many digits tell the values of a line apart.
function digitsOf(values) {
  const there = finite(values);
  const low = there.reduce((least, value) => Math.min(least, value), Infinity);
  const high = there.reduce((most, value) => Math.max(most, value), -Infinity);
  const alike = Math.floor(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low)));
  return alike > 0 && alike < 9 ? 4 + alike : 4;
}

// Every value has the room of the longest one of its line: what stands beside it does not move under whoever points at the plot.
function reserve(made, state) {
  rows(made).forEach((row, index) => {
    if (row.classList.contains("edge-of-many")) return; // it is not shown
    const text = (value) => (index ? short(value, state.digits[index]) : placeText(value, state));
    state.room[index] = state.raw[index].reduce((most, value) => Math.max(most, text(value).length), state.room[index] ?? 4);
    row.querySelector("td").style.minWidth = `${state.room[index] + 0.5}ch`;
  });
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
  state.span = spanOf(places, state.range);
  const zoom = state.range && state.shape.zoomed(state.range);
  if (String(zoom) === String(state.zoom)) return;
  state.zoom = zoom;
  if (state.shape.coarse) draw(element);
}

const spanOf = (places, range) => (range ? range[1] - range[0] : places.at(-1) - places[0]);

// A range that is looked at stays where it is when another unit of time is better; over another axis it is none.
function carry(state, { timed, unit }) {
  const before = state.shape;
  if (!before) return;
  if (before.timed !== timed) Object.assign(state, { range: null, zoom: null });
  else if (state.range) state.range = state.range.map((end) => (end * before.unit) / unit);
}

function none(element, text) {
  drawn.get(element)?.made?.destroy();
  drawn.delete(element);
  const said = document.createElement("span");
  said.className = "none";
  said.textContent = text;
  element.replaceChildren(said);
}

function show(element, plain, state) {
  const shape = asChosen(plain);
  const { raw, data } = columnsOf(shape);
  if (!data[0].length) return none(element, "nothing recorded yet");
  const like = JSON.stringify([shape.x, shape.stacked, shape.log, shape.lines.map((pieces) => pieces.map(({ label, stroke, dash, width }) => [label, stroke, dash, width]))]);
  carry(state, plain);
  const { range } = state;
  Object.assign(state, { shape: plain, raw, digits: raw.map(digitsOf), span: spanOf(data[0], range), busy: true });
  if (like !== state.like) {
    state.room = [];
    make(element, shape, state);
  }
  state.like = like;
  reserve(state.made, state);
  state.made.batch(() => {
    state.made.setData(data, !range);
    if (range) state.made.setScale("x", { min: range[0], max: range[1] });
  });
  rest(state.made, shape);
  sayLost(element, plain.lost);
  Object.assign(state, { busy: false, range });
  const canvas = state.made.ctx.canvas;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", [`${element.getAttribute("aria-label")} over ${shape.over}`, ...shape.words].filter(Boolean).join(". "));
}

const AGAIN = 10_000; // milliseconds after which a curve that did not come is asked for once more
const again = new WeakMap(); // element -> the timer of that

const isAsChosen = (shape) => shape.x === "k" || shape.timed === chosen().timed;

async function draw(element) {
  const state = drawn.get(element) ?? { turn: 0, zoom: null, range: null };
  const turn = (state.turn += 1);
  clearTimeout(again.get(element));
  const { timed } = chosen();
  state.coming = timed;
  drawn.set(element, state);
  const zoom = state.shape?.timed === timed ? state.zoom : null;
  const shape = element.dataset.curves ? given(element) : await curvesOf(element, timed, zoom);
  if (turn !== state.turn || !element.isConnected) return; // somebody has asked once more meanwhile
  state.coming = null;
  if (shape && !isAsChosen(shape)) return draw(element);
  if (shape) {
    show(element, shape, state);
    element.dataset.drawn = "yes";
    return;
  }
  if (!state.made) none(element, "The curve could not be loaded."); // what is shown stays until there is an answer
  again.set(element, setTimeout(() => element.isConnected && element.dataset.visible === "yes" && draw(element), AGAIN));
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

// What is printed has all of them.
addEventListener("beforeprint", () => {
  for (const element of document.querySelectorAll(".plot")) if (element.dataset.drawn !== "yes") draw(element);
});

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

// --- what is chosen ------------------------------------------------------------------------------

const bar = document.querySelector(".looks");
const [slider, logarithm, axis] = ["smoothing", "logarithmic", "over"].map((name) => bar?.querySelector(`[name=${name}]`));
let underway = 0;

function said() {
  if (!bar) return;
  const { smoothing, logarithmic, timed } = chosen();
  slider.value = smoothing;
  logarithm.checked = logarithmic;
  axis.value = timed ? "time" : "steps";
  bar.querySelector("output").textContent = smoothing.toFixed(2);
}

// Those that are seen at once, from what has come of them before as far as that will do; the others as they come into sight.
function drawAsChosen() {
  said();
  cancelAnimationFrame(underway);
  underway = requestAnimationFrame(() => {
    for (const [element, state] of drawn) {
      if (element.dataset.visible !== "yes") element.dataset.drawn = "";
      else {
        if (state.shape) show(element, state.shape, state);
        if (!(state.shape && isAsChosen(state.shape)) && state.coming !== chosen().timed) draw(element);
      }
    }
  });
}

bar?.addEventListener("input", () => {
  keep("smoothing", slider.value);
  keep("logarithmic", logarithm.checked ? "yes" : "no");
  keep("over", axis.value);
  drawAsChosen();
});
addEventListener("storage", drawAsChosen); // in another page
addEventListener("pageshow", (event) => event.persisted && drawAsChosen()); // this page was left and is come back to

document.addEventListener("fresh", redraw);
document.addEventListener("theme", redraw); // colours are a part of what a plot is like
said();
watch();
