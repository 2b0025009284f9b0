// The little Markdown that models write, made into elements. What it does not know stays text.

import { el } from "./dom.js";

const FENCE = /^\s*```\s*([\w+#.-]*)\s*$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,3})[.)]\s+(.*)$/;
const HEADING = /^\s*#{1,6}\s+(.*?)\s*#*$/;
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])([^*]+?)\*/g;

/** Elements for a text, which may be cut off anywhere. */
export function markdown(text) {
  const found = [];
  const rows = text.split("\n");
  let at = 0;
  while (at < rows.length) {
    const fence = FENCE.exec(rows[at]);
    if (fence) {
      let end = at + 1;
      while (end < rows.length && !/^\s*```\s*$/.test(rows[end])) end += 1;
      found.push(codeBlock(rows.slice(at + 1, end).join("\n")));
      at = end + 1;
      continue;
    }
    const heading = HEADING.exec(rows[at]);
    if (heading) {
      found.push(el("h3", {}, inline(heading[1])));
      at += 1;
      continue;
    }
    const pattern = BULLET.test(rows[at]) ? BULLET : NUMBER.test(rows[at]) ? NUMBER : null;
    if (pattern) {
      const items = [];
      const first = pattern === NUMBER ? NUMBER.exec(rows[at])[1] : null;
      for (let item; at < rows.length && (item = pattern.exec(rows[at])); at += 1) items.push(item.at(-1));
      const entries = items.map((item) => el("li", {}, inline(item)));
      found.push(first === null ? el("ul", {}, entries) : el("ol", { start: first }, entries));
      continue;
    }
    if (!rows[at].trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    while (at < rows.length && rows[at].trim() && !startsBlock(rows[at])) at += 1;
    found.push(paragraph(rows.slice(begin, at)));
  }
  return found;
}

const startsBlock = (row) => [FENCE, BULLET, NUMBER, HEADING].some((pattern) => pattern.test(row));

function paragraph(rows) {
  const parts = rows.flatMap((row, index) => (index ? [el("br"), ...inline(row)] : inline(row)));
  return el("p", {}, parts);
}

function inline(text) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(at, match.index));
    if (match[1]) parts.push(el("code", {}, match[2]));
    else if (match[3]) parts.push(el("strong", {}, match[3]));
    else parts.push(el("em", {}, match[4]));
    at = match.index + match[0].length;
  }
  parts.push(text.slice(at));
  return parts.filter(Boolean);
}

function codeBlock(code) {
  const copy = el("button", { class: "quiet", type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const canCopy = Boolean(navigator.clipboard);
  return el("div", { class: "block" }, el("pre", { tabindex: "0" }, el("code", {}, code)), canCopy ? copy : null);
}
