// Four charts of the last 5 minutes. The pointer or the arrow keys choose the moment whose values are shown.

import { $, age, duration, h, perSecond, s, show } from "./dom.js";

const SPAN = 300;
const HEIGHT = 118;
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 6, 6, 18];

const CHARTS = [
  { name: "Time to first token", format: duration, series: [["p50", "ttft_p50", "one"], ["p95", "ttft_p95", "two"]] },
  { name: "Inter-token latency", format: duration, series: [["p50", "itl_p50", "one"], ["p95", "itl_p95", "two"]] },
  { name: "Requests/s", format: perSecond,
    series: [["all", "requests", "one"], ["kept", "kept", "two"], ["429", "refused", "warn"], ["5xx", "failed", "bad"]] },
  { name: "Tokens/s", format: perSecond, series: [["sent", "tokens", "one"]] },
];

let moments = [];
let tick = 2;
let of = ""; // names of the models, if there are several
let width = 240;
let pointed = null; // { chart, ago }: which moment's values are shown

export function showCharts(found, seconds, models) {
  [moments, tick, of] = [found, seconds, models.length > 1 ? ` (${models.join(" and ")})` : ""];
  draw();
}

function draw() {
  show($("charts"), CHARTS.map(card));
  const found = $("charts").querySelector("svg").clientWidth;
  if (!found || found === width) return;
  width = found;
  draw();
}

const x = (ago) => LEFT + (1 - ago / SPAN) * (width - LEFT - RIGHT);

function card(chart, index) {
  const shown = moments.filter((moment) => moment.age <= SPAN);
  const at = pointed?.chart === index ? nearest(shown, pointed.ago) : shown.at(-1);
  const values = chart.series.map(([name, field, kind]) => ({ name, kind, value: at?.[field] ?? null }));
  const said = values.map(({ name, value }) => `${name} ${value === null ? "none" : chart.format(value)}`).join(", ");
  return h("figure", { class: "card chart" },
    h("figcaption", {}, h("h2", {}, chart.name + of),
      h("span", { class: "quiet" }, pointed?.chart === index && at ? `${age(at.age)}${at.age < 1 ? "" : " ago"}` : "")),
    h("p", { class: "values" }, values.map(({ name, kind, value }) =>
      h("span", { class: kind }, `${name} `, h("b", {}, value === null ? "–" : chart.format(value))))),
    drawing(chart, index, shown, at, said));
}

function drawing(chart, index, shown, at, said) {
  const fields = chart.series.map(([, field]) => field);
  const known = shown.flatMap((moment) => fields.map((field) => moment[field])).filter((value) => value > 0);
  const { rules, share } = (chart.format === duration ? logarithmic : linear)(known);
  const y = (value) => TOP + (1 - share(value)) * (HEIGHT - TOP - BOTTOM);
  return s("svg", { height: HEIGHT, tabindex: 0, role: "img", "data-chart": index,
    "aria-label": `${chart.name} in the last 5 minutes; ${at ? age(at.age) : "now"}: ${said}` },
  rules.map((value) => [
    s("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { class: "axis", x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, value ? chart.format(value) : "0"),
  ]),
  [[SPAN, "−5 min", "start"], [0, "now", "end"]].map(([ago, text, anchor]) =>
    s("text", { class: "axis", x: x(ago), y: HEIGHT - 4, "text-anchor": anchor }, text)),
  chart.series.filter(([, field, kind]) => kind === "one" || shown.some((moment) => moment[field])).map(([, field, kind]) => s("path", { class: `line ${kind}`, d: path(shown, field, y) })).reverse(),
  pointed?.chart === index && at && s("line", { class: "pointer", x1: x(at.age), x2: x(at.age), y1: TOP, y2: HEIGHT - BOTTOM }));
}

// A line with gaps for missing values; a value between two gaps is a short dash.
function path(shown, field, y) {
  let [line, pen] = ["", false];
  for (const moment of shown) {
    const value = moment[field];
    if (value === null) pen = false;
    else {
      line += pen ? `L${x(moment.age).toFixed(1)} ${y(value).toFixed(1)}` : `M${(x(moment.age) - 1).toFixed(1)} ${y(value).toFixed(1)}h1`;
      pen = true;
    }
  }
  return line;
}

// Axes: the values of their rules, and the share of the height for a value.

function linear(values) {
  const most = Math.max(1, ...values);
  const power = 10 ** Math.floor(Math.log10(most / 2));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= (most / 2) * 0.999);
  return { rules: [0, step, 2 * step], share: (value) => value / (2 * step) };
}

function logarithmic(values) {
  const low = Math.floor(Math.log10(Math.min(0.1, ...values)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(0.1, ...values))));
  const decades = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
  const rules = high - low > 1 ? decades : [decades[0], 2 * decades[0], 5 * decades[0], decades[1]];
  return { rules, share: (value) => (Math.log10(value) - low) / (high - low) };
}

const nearest = (shown, ago) =>
  shown.reduce((best, moment) => (best && Math.abs(best.age - ago) <= Math.abs(moment.age - ago) ? best : moment), undefined);

function point(to) {
  pointed = to;
  draw();
}

$("charts").addEventListener("pointermove", (event) => {
  const drawing = event.target.closest("[data-chart]");
  if (!drawing) return pointed && point(null);
  const box = drawing.getBoundingClientRect();
  point({ chart: Number(drawing.dataset.chart), ago: (1 - (event.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * SPAN });
});
$("charts").addEventListener("pointerleave", () => point(null));
$("charts").addEventListener("focusout", () => point(null));
$("charts").addEventListener("keydown", (event) => {
  const drawing = event.target.closest("[data-chart]");
  const by = { ArrowLeft: tick, ArrowRight: -tick }[event.key];
  if (!drawing || !by) return;
  event.preventDefault();
  point({ chart: Number(drawing.dataset.chart), ago: Math.min(SPAN, Math.max(0, (pointed?.ago ?? 0) + by)) });
});
