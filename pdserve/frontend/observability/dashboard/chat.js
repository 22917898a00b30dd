// A conversation with a model: its answers as they come, and where each was prefilled, from its headers and receipt.

import { $, duration, h, many, show } from "./dom.js";
import { nameIn, timeline, why } from "./requests.js";
import { ask, NeedsKey } from "./server.js";

let conversation = [];
let stopping = null;
let graph = null;

export function showModels(state) {
  graph = state;
  const { models } = state;
  const chosen = $("model").value;
  show($("model"), models.map((name) => h("option", { "data-key": name, value: name }, name)));
  if (models.includes(chosen)) $("model").value = chosen;
}

async function send(text) {
  stopping = new AbortController();
  busy(true);
  const asked = conversation; // `clear` may replace it meanwhile
  asked.push({ role: "user", content: text });
  const answer = h("div", { class: "answer" });
  const about = h("div", { class: "about" });
  $("messages").append(h("div", { class: "question" }, text), answer, about);
  const told = { started: performance.now(), first: null, id: "", prefill: "", instance: "", content: "" };
  try {
    await stream(asked, told, answer);
  } catch (error) {
    if (stopping.signal.aborted) about.append(h("p", { class: "quiet" }, "stopped"));
    else about.append(h("p", { class: "bad" }, error instanceof NeedsKey ? "an API key is needed" : error.message));
  }
  if (told.content) asked.push({ role: "assistant", content: told.content });
  else asked.pop();
  await tell(told, about);
  busy(false);
}

async function stream(messages, told, answer) {
  const body = {
    model: $("model").value,
    messages,
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value) || undefined,
    stream: true,
  };
  const response = await ask("v1/chat/completions",
    { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: stopping.signal });
  told.id = response.headers.get("x-request-id") ?? "";
  told.prefill = response.headers.get("x-pdserve-prefill") ?? "";
  told.instance = response.headers.get("x-pdserve-instance") ?? "";
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error?.message ?? `status ${response.status}`);
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    answer.textContent = told.content;
    showEnd();
  };
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const text = event.choices?.[0]?.delta?.content ?? "";
    if (!text) continue;
    told.first ??= performance.now();
    told.content += text;
    drawing ||= requestAnimationFrame(draw); // tokens come faster than a page can be laid out
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done; ) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function tell(told, about) {
  if (!told.id) return;
  const receipt = await ask(`requests/${encodeURIComponent(told.id)}`)
    .then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
  const ttft = told.first === null ? null : (told.first - told.started) / 1000;
  const prefill = receipt?.prefill || told.prefill;
  about.append(h("p", { class: "quiet" }, [
    prefill && `prefill ${prefill}${receipt?.reason ? ` (${why(receipt)})` : ""}`,
    receipt?.prompt_tokens && `${many(receipt.cached_tokens, "token")} of ${receipt.prompt_tokens} cached`,
    `TTFT ${duration(ttft)}`,
    told.instance.split(",").map(nameIn(graph)).join(" → "),
  ].filter(Boolean).join(" · ")));
  if (receipt) about.append(h("details", {}, h("summary", {}, "where the time went"), timeline(receipt, graph)));
  showEnd();
}

const showEnd = () => ($("messages").scrollTop = $("messages").scrollHeight);

function busy(is) {
  const had = document.activeElement;
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (had === $("send")) $("stop").focus();
  if (had === $("stop")) $("prompt").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || !$("send").checkVisibility()) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("messages").addEventListener("toggle", (event) => event.target.scrollIntoView({ block: "nearest" }), true);
$("stop").addEventListener("click", () => stopping.abort());
$("clear").addEventListener("click", () => {
  stopping?.abort();
  conversation = [];
  $("messages").replaceChildren();
});
