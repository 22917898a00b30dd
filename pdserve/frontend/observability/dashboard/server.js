// Requests to the frontend that serves this page, with the API key if there is one.

import { $ } from "./dom.js";

const KEY = "pdserve-key";

export class NeedsKey extends Error {}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const forgetKey = () => sessionStorage.removeItem(KEY);

// Throws NeedsKey after asking the user for a key.
export async function ask(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers = { ...headers, authorization: `Bearer ${key}` };
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (answer.status !== 401) return answer;
  if (!$("ask-key").open && sessionStorage.getItem(KEY) === key) { // else a newer key is untried
    if (key) $("ask-key-why").textContent = "The server does not know this key. Another one?";
    $("ask-key").showModal();
  }
  throw new NeedsKey();
}

$("ask-key").addEventListener("close", () => {
  const key = $("key-value").value.trim();
  $("key-value").value = "";
  if (/^[!-~]+$/.test(key)) sessionStorage.setItem(KEY, key);
  dispatchEvent(new Event("pdserve-key"));
});
