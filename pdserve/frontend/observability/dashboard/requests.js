// Recent requests and their receipts: where each went, why, and how long every part of its way took.

import { $, age, duration, h, many, s, short, show, whole } from "./dom.js";

const MOST = 30;
const MOST_NARROW = 12; // on a page too narrow for the chat beside it
const MOST_DETOURS = 4;
const MOST_ALIKE = 3;
const FILTERS = {
  all: () => true,
  migrated: (receipt) => receipt.retries > 0 || has(receipt, "migration"),
  fallback: (receipt) => has(receipt, "fallback"),
  failed: (receipt) => failed(receipt),
};

let state = null;
let filter = "all";
let shown = []; // receipts, each with the time of its report
const open = new Set(); // ids of requests whose timeline is shown

const has = (receipt, name) => receipt.hops.some((hop) => hop.name === name);
const failed = (receipt) => receipt.status >= 400 || (receipt.error !== "" && !receipt.running);

// Whether the request waits in admission: that hop is its last one, and ends now.
function waits({ hops, seconds }) {
  const last = hops.at(-1);
  return last?.name === "admission" && seconds - last.start - last.seconds < 0.001;
}

// The reason without its prefix `local` or `remote`: `cheaper` for `local-cheaper`.
export const why = ({ prefill, reason }) => (reason.startsWith(`${prefill}-`) ? reason.slice(prefill.length + 1) : reason);

// The list stays while a row is open, pointed at or focused: a busy graph has other rows within a second.
const isRead = () => shown.some((receipt) => open.has(receipt.request_id)) || $("requests").querySelector(":focus-visible") !== null
  || (matchMedia("(hover: hover)").matches && $("requests").matches(":hover"));

// The share of prompt tokens with KV from a prefix cache, of the recent prompts computed on one side.
function hits(side, receipts) {
  const done = receipts.filter((receipt) => receipt.prefill === side && receipt.prompt_tokens > 0);
  const sum = (name) => done.reduce((total, receipt) => total + receipt[name], 0);
  return sum("cached_tokens") && `${whole((100 * sum("cached_tokens")) / sum("prompt_tokens"))} % of ${side} prompts cached`;
}

export function showRequests(found, anew = false) {
  state = found;
  const fresh = state.receipts.map((receipt) => ({ ...receipt, told: performance.now() }));
  const held = !anew && shown.length > 0 && isRead();
  const most = matchMedia("(max-width: 1180px)").matches ? MOST_NARROW : MOST;
  shown = held ? shown.map((old) => fresh.find((receipt) => receipt.request_id === old.request_id) ?? old)
    : fresh.filter(FILTERS[filter]).filter((receipt, index) => index < most || open.has(receipt.request_id));
  $("held").hidden = !held;
  $("hits").textContent = ["local", "remote"].map((side) => hits(side, state.receipts)).filter(Boolean).join(", ");
  if (!shown.length) {
    const none = filter === "all" ? "No requests yet." : "None of the recent requests.";
    return show($("requests"), h("p", { class: "quiet" }, none));
  }
  const columns = ["came", "request", "status", "prefill", "cached", "tokens", "TTFT", "took"];
  show($("requests"), h("table", { class: "requests" },
    h("thead", {}, h("tr", {}, columns.map((text) => h("th", {}, text)))),
    h("tbody", {}, shown.flatMap(row))));
}

function row(receipt) {
  const id = receipt.request_id;
  const isOpen = open.has(id);
  const kind = failed(receipt) ? "bad" : receipt.retries || has(receipt, "fallback") ? "warn" : "";
  const note = has(receipt, "migration") ? "migrated" : has(receipt, "fallback") ? "fallback" : "";
  const cells = [
    [age(receipt.age + (performance.now() - receipt.told) / 1000)],
    [h("button", { type: "button", class: "plain", "data-request": id, "aria-expanded": String(isOpen), title: id },
      short(id, 14)), state.models.length > 1 && h("span", { class: "quiet" }, ` ${receipt.model}`),
    receipt.key && h("span", { class: "quiet" }, ` ${receipt.key}`)],
    [receipt.running ? (waits(receipt) ? "in line" : "running") : receipt.status || "–", note && h("span", { class: "chip warn" }, note)],
    [receipt.prefill || "–", receipt.reason && h("span", { class: "quiet" }, ` ${why(receipt)}`)],
    [receipt.cached_tokens ? whole(receipt.cached_tokens) : "–"],
    [receipt.prompt_tokens ? `${whole(receipt.prompt_tokens)} + ${whole(receipt.output_tokens)}` : "–"],
    [duration(receipt.ttft)],
    [duration(receipt.seconds)],
  ];
  return [
    h("tr", { class: kind, "data-key": id }, cells.map((cell) => h("td", {}, cell))),
    isOpen && h("tr", { class: "opened", "data-key": `${id} opened` }, h("td", { colspan: 8 }, timeline(receipt, state))),
  ];
}

// From instance id to name (`decode-0`), if present.
export function nameIn(graph) {
  const names = new Map((graph?.nodes ?? []).filter((node) => node.instance).map((node) => [node.instance.id, node.name]));
  return (id) => names.get(id) ?? id;
}

// A line of facts, and each hop as a bar on the request's time axis.
export function timeline(receipt, graph) {
  const name = nameIn(graph);
  const total = Math.max(receipt.seconds, ...receipt.hops.map((hop) => hop.start + hop.seconds), 1e-6);
  const share = (seconds) => `${((100 * seconds) / total).toFixed(2)}%`;
  const facts = [receipt.request_id, receipt.model, receipt.path, receipt.key && `key ${receipt.key}`,
    receipt.instances.map(name).join(" → "), receipt.retries && many(receipt.retries, "migration"),
    receipt.trace_id && `trace ${receipt.trace_id}`].filter(Boolean);
  return h("div", { class: "timeline" },
    h("p", { class: "quiet" }, facts.join(" · ")),
    receipt.error && h("p", { class: "bad" }, receipt.error),
    h("ol", {}, receipt.hops.map((hop) => {
      const detour = hop.name === "migration" || hop.name === "fallback";
      return h("li", { class: detour ? "warn" : "" },
        h("b", {}, hop.name),
        s("svg", { "aria-hidden": "true" }, detour
          ? s("circle", { cx: share(hop.start), cy: 6, r: 4 })
          : s("rect", { class: `hop ${hop.name}`, x: share(hop.start), y: 1, width: share(Math.max(hop.seconds, total / 150)), height: 10, rx: 2 })),
        h("span", { class: "took" }, detour ? `at ${duration(hop.start)}` : duration(hop.seconds)),
        h("span", { class: "why" }, hop.instance && hop.why.startsWith(hop.instance) ? hop.why : [name(hop.instance), hop.why].filter(Boolean).join(": ")));
    })));
}

// Equal migrations and fallbacks are one line: a worker's end is one event for all its requests.
export function showDetours(found) {
  const alike = new Map();
  for (const receipt of found.receipts)
    for (const hop of receipt.hops.filter(({ name }) => name === "migration" || name === "fallback")) {
      const [key, ago] = [`${hop.name} ${hop.instance} ${hop.why}`, receipt.age - hop.start];
      if (!alike.has(key)) alike.set(key, { hop, ago, ids: [] });
      const one = alike.get(key);
      one.ago = Math.min(one.ago, ago);
      one.ids.push(receipt.request_id);
    }
  const detours = [...alike.values()].sort((a, b) => a.ago - b.ago).slice(0, MOST_DETOURS);
  show($("detours"), detours.length
    ? h("ul", {}, detours.map(({ hop, ago, ids }) => h("li", {},
      h("span", { class: "chip warn" }, hop.name), h("span", { class: "quiet" }, `${ids.length > 1 ? ` ${ids.length} times, last` : ""} ${ago < 1 ? "now" : `${age(ago)} ago`}`),
      h("span", { class: "why" }, hop.why || "no reason told"),
      h("span", { class: "whose" }, ids.slice(0, MOST_ALIKE).map((id) =>
        h("button", { type: "button", class: "plain", "data-request": id, title: id }, short(id, 10))), ids.length > MOST_ALIKE && `and ${ids.length - MOST_ALIKE} more`))))
    : h("p", { class: "quiet" }, "None among the recent requests."));
}

$("requests").addEventListener("click", (event) => {
  const id = event.target.closest("tr:not(.opened)")?.querySelector("[data-request]")?.dataset.request;
  if (id === undefined || String(getSelection())) return;
  if (!open.delete(id)) open.add(id);
  showRequests(state);
});
$("detours").addEventListener("click", (event) => {
  const id = event.target.closest("[data-request]")?.dataset.request;
  if (id === undefined) return;
  open.add(id);
  choose("all");
  $("requests").querySelector(`[data-request="${CSS.escape(id)}"]`)?.focus();
});
$("filter").addEventListener("click", (event) => event.target.value && choose(event.target.value));

function choose(chosen) {
  filter = chosen;
  for (const button of $("filter").children) button.setAttribute("aria-pressed", String(button.value === filter));
  showRequests(state, true);
}
