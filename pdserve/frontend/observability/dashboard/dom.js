// Elements, and numbers for people. Data becomes text here, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

const build = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes))
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};
export const h = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// Show these children in `parent`, and change as few of its elements as possible: focus, selection and tooltips stay.
export const show = (parent, ...children) => morphChildren(parent, h("div", {}, ...children));

function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName || old.dataset?.key !== fresh.dataset?.key) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const keyed = new Map([...old.children].filter((child) => child.dataset.key).map((child) => [child.dataset.key, child]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = child.dataset?.key;
    const found = key ? keyed.get(key) : at;
    keyed.delete(key); // further children with this key get new elements
    if (!found) old.insertBefore(child, at);
    else {
      if (found !== at) old.insertBefore(found, at);
      const next = found.nextSibling;
      morph(found, child);
      at = next;
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

export const whole = (value) => Math.round(value).toLocaleString("en");
export const percent = (share) => `${Math.round(share * 100)} %`;
export const short = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
export const many = (count, what) => `${whole(count)} ${what}${count === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.00995) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export const lasting = (seconds) => `for ${age(Math.max(1, seconds))}`;
export const age = (seconds) => (seconds < 1 ? "now" : seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds));

export function rate(bytes) {
  if (!bytes) return "–";
  const [unit, size] = [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]].find(([, least]) => bytes >= least) ?? ["B/s", 1];
  return `${Number((bytes / size).toPrecision(bytes / size >= 100 ? 3 : 2))} ${unit}`;
}

export const perSecond = (value) => (value < 10 ? Number(value.toFixed(1)).toString() : whole(value));
