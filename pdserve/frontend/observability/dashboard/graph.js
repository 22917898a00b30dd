// The graph: drawn if there is room, else tiles, those with problems first. Its links: a table.

import { $, duration, h, lasting, many, percent, rate, s, short, show, whole } from "./dom.js";

const MOST_DRAWN = 8; // processes in a column
const LEAST_WIDTH = 820;
const MOST_LABELS = 4; // above this number of links of a kind, only those with problems get labels
const MOST_ROWS = 60;
const MANY = 24; // above this number of tiles, healthy ones are small
const [HEAD, HEIGHT, GAP] = [50, 68, 16];
const TITLES = ["Frontends", "Decode workers", "Prefill workers"];
const WORDS = { "waiting to restart": "down", stopped: "down", "does not answer": "silent" };
const COLUMN = { frontend: 0, decode: 1, both: 1, prefill: 2 };

// For all views: problem levels by process and link, names by instance id, links.
function read(state) {
  const levels = new Map();
  for (const { about, level } of state.problems)
    for (const key of [...(about.length === 1 ? about : []), about.join(" ")]) if (!levels.has(key)) levels.set(key, level);
  const names = new Map(state.nodes.filter((node) => node.instance).map((node) => [node.instance.id, node.name]));
  const links = state.nodes.flatMap((node) => node.links.map((link) => {
    const to = names.get(link.to) ?? link.to;
    return { ...link, from: node.name, target: to, level: link.up ? levels.get(`${node.name} ${to}`) : "bad" };
  }));
  return { levels, names, links };
}

export function showGraph(state) {
  const width = $("graph").clientWidth;
  const columns = TITLES.map((_, column) => state.nodes.filter((node) => COLUMN[node.role] === column));
  const drawn = width >= LEAST_WIDTH && columns.every((nodes) => nodes.length <= MOST_DRAWN);
  show($("graph"), drawn ? drawing(state, columns, width) : tiles(state, columns));
}

const inLine = (state) => state.nodes.reduce((sum, { role, load }) => sum + (role === "frontend" ? load?.waiting ?? 0 : 0), 0);

function admission(state) {
  const refused = state.moments.at(-1)?.refused ?? 0;
  return { text: `In line ${whole(inLine(state))}${refused ? ` · 429 ${refused.toFixed(1)}/s` : ""}`, level: refused ? "bad" : "",
    why: "requests that wait at the frontends to be admitted; those refused with 429" };
}

function queue(state) {
  const { queue_depth: depth, queue_limit: limit } = state;
  return { text: `Prefill queue ${whole(depth)}${limit ? ` of ${whole(limit)}` : ""}`, share: limit ? Math.min(1, depth / limit) : 0,
    level: read(state).levels.get("queue") ?? "",
    why: limit ? "prompts not yet pulled by prefill workers; at its limit, decode workers compute prompts themselves"
      : "prompts not yet pulled by prefill workers; decode workers send prompts by estimates, without a limit" };
}

function works(node, state) {
  if (!node.load) return short(node.why || node.state, 34);
  const model = state?.models.length > 1 && node.instance?.model ? `${node.instance.model} · ` : "";
  return `${model}${whole(node.load.running)} running · ${whole(node.load.waiting)} ${node.role === "frontend" ? "in line" : "waiting"}`;
}

function details(node) {
  const { instance, load } = node;
  const seconds = node.seconds === null ? "" : ` ${lasting(node.seconds)}`;
  return [
    `${instance?.id ?? node.name}: ${node.state}${seconds}`,
    instance?.model && `model ${instance.model}`,
    node.why && `last end: ${node.why}`,
    node.restarts && many(node.restarts, "restart"),
    load && works(node),
    load && instance?.kv_tokens && `KV ${percent(load.kv_usage)} of ${whole(instance.kv_tokens)} tokens; ${whole(load.tokens)} outstanding`,
    instance?.host && `${instance.host}, process ${instance.pid}${instance.gpus.length ? `, GPU ${instance.gpus.join(", ")}` : ""}`,
  ].filter(Boolean).join("\n");
}

const statusOf = (node, levels) =>
  levels.get(node.name) ?? { ready: "ok", draining: "info", starting: "info" }[node.state] ?? "bad";

// drawn

function drawing(state, columns, width) {
  const { levels, names, links } = read(state);
  const count = columns[2].length ? 3 : 2;
  const box = Math.min(216, (width - 2 * 152) / 3);
  const gap = (width - 2 - count * box) / (count - 1);
  const left = (column) => 1 + column * (box + gap);
  const tallest = Math.max(1, ...columns.map((nodes) => nodes.length)) * (HEIGHT + GAP) - GAP;
  const places = new Map();
  columns.forEach((nodes, column) => nodes.forEach((node, index) => {
    const own = nodes.length * (HEIGHT + GAP) - GAP;
    places.set(node.name, { column, x: left(column), y: HEAD + (tallest - own) / 2 + index * (HEIGHT + GAP) });
  }));
  const height = HEAD + tallest + 2;
  const fewLinks = (kind) => links.filter((link) => link.kind === kind).length <= MOST_LABELS;
  const known = links.filter((link) => places.has(link.target)).sort((a, b) => Boolean(a.level) - Boolean(b.level)); // trouble on top
  const paths = known.map((link) => curve(link, places, box));
  const said = state.nodes.map((node) => `${node.name} ${node.state}`).join(", ");
  return s("svg", { width, height, role: "group", "aria-label": `The graph: ${said}` },
    columns.slice(0, count).map((_, column) =>
      s("text", { class: "heading", x: left(column) + box / 2, y: 22, "text-anchor": "middle" }, TITLES[column])),
    pill(admission(state), left(0) + box, gap),
    count === 3 && pill(queue(state), left(1) + box, gap),
    paths.map((path, index) => line(known[index], path)),
    state.nodes.map((node) => box_(node, places.get(node.name), box, levels, state)),
    paths.map((path, index) => (fewLinks(known[index].kind) || known[index].level) && label(known[index], path)));
}

function pill({ text, share, level, why }, x, gap) {
  const width = Math.min(gap - 12, 176);
  const from = x + (gap - width) / 2;
  return s("g", { class: `pill ${level}` }, s("title", {}, why),
    s("path", { class: "rule", d: `M${x + 2} 18H${from}M${from + width} 18H${x + gap - 2}` }),
    s("rect", { x: from, y: 4, width, height: 28, rx: 14 }),
    share > 0 && s("rect", { class: "fill", x: from + 14, y: 26, width: (width - 28) * share, height: 2 }),
    s("text", { x: from + width / 2, y: 22, "text-anchor": "middle" }, text));
}

function curve(link, places, box) {
  const [a, b] = [places.get(link.from), places.get(link.target)];
  const [y0, y1] = [a.y + HEIGHT / 2, b.y + HEIGHT / 2];
  if (a.column === b.column) return { x0: a.x + box, x1: b.x + box, y0, y1, bend: a.x + box + 70 };
  const [x0, x1] = a.column < b.column ? [a.x + box, b.x] : [a.x, b.x + box];
  return { x0, x1, y0, y1, bend: (x0 + x1) / 2, far: Math.abs(a.column - b.column) > 1 };
}

function line(link, { x0, x1, y0, y1, bend }) {
  const width = 1.2 + Math.min(4, Math.sqrt(link.requests));
  return s("path", { class: `link ${link.kind} ${link.requests ? "busy" : ""} ${link.level ?? ""} ${link.up ? "" : "down"}`,
    d: `M${x0} ${y0}C${bend} ${y0} ${bend} ${y1} ${x1} ${y1}`, "stroke-width": width.toFixed(1) }, s("title", {}, linkDetails(link)));
}

// At a share `t` of the way along the line, where neighbouring lines are far apart.
function label(link, { x0, x1, y0, y1, bend, far }) {
  const t = far ? 0.14 : link.kind === "kv" ? 0.62 : 0.36;
  const at = (a, b, c, d) => (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t * t * c + t ** 3 * d;
  const text = !link.up ? "down" : link.kind === "kv"
    ? link.pulls ? `${duration(link.pull_seconds)} · ${rate(link.bytes_per_second)}` : ""
    : [link.requests || "", link.round_trip !== null && duration(link.round_trip)].filter(Boolean).join(" · ");
  const [x, y, width] = [at(x0, bend, bend, x1), at(y0, y0, y1, y1), text.length * 6.2 + 6];
  return text && s("g", { class: `label ${link.level ?? ""}` },
    s("rect", { x: x - width / 2, y: y - 8, width, height: 16 }), s("text", { x, y: y + 4, "text-anchor": "middle" }, text));
}

function linkDetails(link) {
  return [
    link.kind === "kv" ? `KV from ${link.target} to ${link.from}` : `${link.from} to ${link.target}`,
    link.up ? `${whole(link.requests)} in flight` : "down",
    link.round_trip !== null && `round trip ${duration(link.round_trip)}`,
    link.pulls && `${many(link.pulls, "request")} read, the last ones in ${duration(link.pull_seconds)} at ${rate(link.bytes_per_second)}`,
    link.failures && `${many(link.failures, "failure")}, the last: ${link.failure}`,
  ].filter(Boolean).join("\n");
}

function box_(node, { x, y }, width, levels, state) {
  const status = statusOf(node, levels);
  const usage = node.load && node.role !== "frontend" ? node.load.kv_usage : null;
  const track = width * (width < 200 ? 0.25 : 0.36);
  return s("g", { class: `node ${status}`, transform: `translate(${x} ${y})`, tabindex: 0, role: "img", "data-key": node.name,
    "aria-label": details(node) }, s("title", {}, details(node)),
  s("rect", { class: "frame", width, height: HEIGHT, rx: 8 }),
  s("circle", { class: "dot", cx: 16, cy: 17, r: 4.5 }),
  s("text", { class: "name", x: 27, y: 21 }, short(node.name, Math.floor(width / 9))),
  node.state !== "ready" && s("text", { class: "state", x: width - 12, y: 21, "text-anchor": "end" }, WORDS[node.state] ?? node.state),
  s("text", { x: 12, y: 40 }, short(works(node, state), Math.floor(width / 7.2))),
  usage === null
    ? s("text", { class: "quiet", x: 12, y: 57 }, node.load ? frontendNote(node) : node.seconds === null ? "" : lasting(node.seconds))
    : [
      s("rect", { class: "track", x: 12, y: 50, width: track, height: 6, rx: 3 }),
      s("rect", { class: "fill", x: 12, y: 50, width: track * Math.min(1, usage), height: 6, rx: 3 }),
      s("text", { class: "quiet", x: width - 12, y: 57, "text-anchor": "end" },
        `KV ${percent(usage)}${node.load.tokens ? ` · ${compact(node.load.tokens)} tok` : ""}`),
    ]);
}

const compact = (value) => (value < 1000 ? String(value) : `${(value / 1000).toFixed(value < 10000 ? 1 : 0)}k`);
const frontendNote = (node) => (node.seconds === null ? "" : `up ${lasting(node.seconds)}`);

// as tiles

function tiles(state, columns) {
  const { levels } = read(state);
  const rank = (node) => ["bad", "warn", "info", "ok"].indexOf(statusOf(node, levels));
  return columns.map((nodes, column) => nodes.length > 0 && h("div", {},
    h("h2", {}, TITLES[column], h("span", { class: "quiet" }, ` ${nodes.length}`),
      column === 1 && chip(admission(state)), column === 2 && chip(queue(state))),
    h("ul", { class: nodes.length > MANY ? "tiles many" : "tiles" }, [...nodes].sort((a, b) => rank(a) - rank(b)).map((node) =>
      h("li", { class: `node ${statusOf(node, levels)}`, "data-key": node.name, title: details(node), tabindex: 0 },
        h("b", {}, node.name), node.state !== "ready" && h("span", { class: "state" }, ` ${WORDS[node.state] ?? node.state}`),
        h("span", { class: "works" }, works(node, state)),
        node.load && node.role !== "frontend" && h("span", { class: "quiet" }, `KV ${percent(node.load.kv_usage)}`))))));
}

const chip = ({ text, level }) => h("span", { class: `chip ${level}` }, text);

// the links

export function showLinks(state) {
  const links = read(state).links.sort((a, b) => Boolean(b.level) - Boolean(a.level) || b.requests - a.requests);
  const columns = ["from", "to", "", "in flight", "round trip", "KV reads", "time each", "bandwidth", "failures"];
  show($("links"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((text) => h("th", {}, text)))),
    h("tbody", {}, links.slice(0, MOST_ROWS).map((link) => h("tr", { class: link.level ?? "", "data-key": `${link.from} ${link.target} ${link.kind}` },
      [link.from, link.target, link.up ? link.kind : `${link.kind}, down`, whole(link.requests), duration(link.round_trip),
        link.kind === "kv" ? whole(link.pulls) : "", link.kind === "kv" ? duration(link.pull_seconds) : "",
        link.kind === "kv" ? rate(link.bytes_per_second) : "",
        link.failures ? `${whole(link.failures)}: ${short(link.failure, 80)}` : "0"].map((text) => h("td", {}, text))))))),
  links.length > MOST_ROWS && h("p", { class: "quiet" }, `and ${links.length - MOST_ROWS} more`));
}
