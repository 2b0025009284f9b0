// The little Markdown that models write, made into elements. What it does not know stays text.

import { el } from "./dom.js";

const FENCE = /^\s*```\s*([\w+#.-]*)\s*$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,3})[.)]\s+(.*)$/;
const HEADING = /^\s*#{1,6}\s+(.*?)\s*#*$/;
const EMPHASIS = /\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])([^*]+?)\*/y;

/** Elements for a text, which may be cut off anywhere. */
export const markdown = (text) => blocks(text.split("\n")).map((block) => block.element);

/** Elements in `parent` for a text that grows. What has been settled is never made again. */
export class GrowingMarkdown {
  #parent;
  #rest = "";
  #open = [];

  constructor(parent) {
    this.#parent = parent;
  }

  /** More text came; `draw` shows it. */
  add(text) {
    this.#rest += text;
  }

  draw() {
    const rows = this.#rest.split("\n");
    const found = blocks(rows);
    for (const element of this.#open) element.remove();
    this.#parent.append(...found.map((block) => block.element));
    // The last may grow, and while its first row is not whole that may yet belong to the one before.
    const open = found.slice(-2);
    this.#open = open.map((block) => block.element);
    if (open.length) this.#rest = rows.slice(open[0].row).join("\n");
  }
}

/** The blocks of a text, each an `element` and the `row` that it begins at. */
function blocks(rows) {
  const found = [];
  let at = 0;
  while (at < rows.length) {
    const fence = FENCE.exec(rows[at]);
    if (fence) {
      let end = at + 1;
      while (end < rows.length && !/^\s*```\s*$/.test(rows[end])) end += 1;
      found.push({ row: at, element: codeBlock(rows.slice(at + 1, end).join("\n")) });
      at = end + 1;
      continue;
    }
    const heading = HEADING.exec(rows[at]);
    if (heading) {
      found.push({ row: at, element: el("h3", {}, inline(heading[1])) });
      at += 1;
      continue;
    }
    const pattern = BULLET.test(rows[at]) ? BULLET : NUMBER.test(rows[at]) ? NUMBER : null;
    if (pattern) {
      const items = [];
      const row = at;
      const first = pattern === NUMBER ? NUMBER.exec(rows[at])[1] : null;
      for (let item; at < rows.length && (item = pattern.exec(rows[at])); at += 1) items.push(item.at(-1));
      const entries = items.map((item) => el("li", {}, inline(item)));
      found.push({ row, element: first === null ? el("ul", {}, entries) : el("ol", { start: first }, entries) });
      continue;
    }
    if (!rows[at].trim()) {
      at += 1;
      continue;
    }
    const row = at;
    while (at < rows.length && rows[at].trim() && !startsBlock(rows[at])) at += 1;
    found.push({ row, element: paragraph(rows.slice(row, at)) });
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
  const closing = closingRuns(text);
  let at = 0; // what is before it is in `parts`
  const special = /`+|\*/g;
  for (let found; (found = special.exec(text)); ) {
    const [mark] = found;
    let element = null;
    let end = found.index + mark.length;
    if (mark[0] === "`") {
      const close = closing.get(found.index);
      if (close !== undefined) {
        element = el("code", {}, text.slice(end, close));
        end = close + mark.length;
      }
    } else {
      EMPHASIS.lastIndex = found.index;
      const emphasis = EMPHASIS.exec(text);
      if (emphasis) {
        element = emphasis[1] ? el("strong", {}, emphasis[1]) : el("em", {}, emphasis[2]);
        end = EMPHASIS.lastIndex;
      }
    }
    special.lastIndex = end;
    if (!element) continue;
    parts.push(text.slice(at, found.index), element);
    at = end;
  }
  parts.push(text.slice(at));
  return parts.filter(Boolean);
}

/** For each run of backticks where the next one of the same length is, as CommonMark pairs them. */
function closingRuns(text) {
  const closing = new Map();
  const latest = new Map();
  for (const run of [...text.matchAll(/`+/g)].reverse()) {
    const length = run[0].length;
    if (latest.has(length)) closing.set(run.index, latest.get(length));
    latest.set(length, run.index);
  }
  return closing;
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
