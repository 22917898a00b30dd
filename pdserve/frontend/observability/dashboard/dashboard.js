// The page: asks for the state each second while it is visible, and hands it to the parts that show it.

import { age, $, h, lasting, show } from "./dom.js";
import { showGraph, showLinks } from "./graph.js";
import { showCharts } from "./charts.js";
import { showDetours, showRequests } from "./requests.js";
import { showModels } from "./chat.js";
import { ask, forgetKey, hasKey, NeedsKey } from "./server.js";

const EVERY = 1000;
const PATIENCE = 8000;

let state = null;
let away = null; // since when the frontend does not answer, and why
let timer = 0;
let polling = false;

async function poll() {
  clearTimeout(timer);
  if (document.hidden || polling) return;
  polling = true;
  try {
    const answer = await ask("dashboard/state", { signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message ?? `status ${answer.status}`);
    state = await answer.json();
    away = null;
  } catch (error) {
    if (!(error instanceof NeedsKey)) away ??= { since: Date.now(), why: error.name === "Error" ? error.message : "" };
  }
  polling = false;
  timer = setTimeout(poll, EVERY); // before `render`, which may throw
  render();
}

function render() {
  document.body.classList.toggle("stale", away !== null);
  showLive();
  if (!state) return;
  showProblems();
  show($("models"), state.models.join(", "));
  show($("settings"), `set: ${state.settings.join("; ")}`);
  $("settings").hidden = !state.settings.length;
  show($("promise"), `promise ${state.promise}`);
  $("promise").hidden = !state.promise;
  showModels(state);
  showGraph(state);
  showLinks(state);
  showCharts(state.moments, state.tick, state.models);
  showRequests(state);
  showDetours(state);
}

function showLive() {
  const gone = away && `no answer for ${age((Date.now() - away.since) / 1000)}${away.why && `: ${away.why}`}; trying again`;
  $("live").className = away ? "bad" : state ? "ok" : "";
  show($("live"), gone ?? (state ? `live, from ${state.frontend}` : "connecting"));
  const whose = state?.everything ? "" : " (own requests)";
  $("key").hidden = !hasKey() && !state?.key;
  show($("key"), `forget key ${state?.key ?? ""}${state?.key ? whose : ""}`);
}

function showProblems() {
  const lines = state.problems.map((problem) =>
    h("p", { class: problem.level, "data-key": problem.text },
      h("b", {}, { bad: "Problem", warn: "Warning", info: "Note" }[problem.level]),
      h("span", {}, problem.text, problem.advice && h("span", { class: "quiet" }, `; ${problem.advice}`)),
      problem.seconds !== null && h("span", { class: "quiet", "aria-hidden": "true" }, lasting(problem.seconds))));
  if (away) lines.unshift(h("p", { class: "bad", "data-key": "away" }, h("b", {}, "Problem"),
    h("span", {}, `${state.frontend} does not answer: the page shows its last state`)));
  show($("problems"), lines.length ? lines : h("p", { class: "ok" }, h("b", {}, "All is well"),
    h("span", {}, `${state.nodes.filter((node) => node.state === "ready").length} processes are ready`)));
}

$("key").addEventListener("click", () => {
  forgetKey();
  state = null;
  location.reload();
});
document.addEventListener("visibilitychange", poll);
addEventListener("pdserve-key", poll);
new ResizeObserver(() => state && showGraph(state)).observe($("graph"));
setInterval(() => away && showLive(), 1000);
poll();
