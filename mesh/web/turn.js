// One turn of the conversation on the screen.

import { ms, number } from "./format.js";
import { el } from "./dom.js";
import { GrowingMarkdown } from "./markdown.js";
import { pictureView } from "./pictures.js";

/** What the user said and showed. */
export function userTurn({ content, pictures, numLost }) {
  const shown = (pictures ?? []).map((url, index) => pictureView(url, `Picture ${index + 1}`));
  const lost = numLost ? el("p", { class: "muted small" }, `Pictures that this browser did not keep: ${numLost}`) : null;
  const text = shown.length || lost ? content && el("div", {}, content) : content;
  return el("article", { class: "turn user", "aria-label": "You" }, el("div", { class: "text" }, shown, lost, text || null));
}

/** An answer that grows. */
export class AnswerTurn {
  #text = el("div", { class: "text" });
  #markdown = new GrowingMarkdown(this.#text);
  #foot = el("p", { class: "foot", hidden: true });
  #isDrawn = true;
  #isThinking = false;

  constructor() {
    this.said = "";
    this.foot = "";
    this.element = el(
      "article",
      // A screen reader hears of it once, when it is whole.
      { class: "turn answer", "aria-label": "Model", "aria-busy": "true", "aria-live": "off" },
      this.#text,
      this.#foot,
    );
  }

  /** It reasons before it answers, which is not shown. */
  think() {
    this.wait("Thinking…");
    this.#isThinking = true;
  }

  /** What it waits for before its first word, or nothing. */
  wait(note) {
    if (this.said || this.#isThinking || this.element.getAttribute("aria-busy") === "false") return;
    this.#foot.textContent = note;
    this.#foot.hidden = !note;
  }

  /** More text came; drawn once a frame at most. */
  add(text) {
    this.said += text;
    this.#markdown.add(text);
    this.#foot.hidden = true;
    if (!this.#isDrawn) return;
    this.#isDrawn = false;
    requestAnimationFrame(() => this.#draw());
  }

  /** It is over. */
  end(foot) {
    this.#draw();
    this.element.setAttribute("aria-busy", "false");
    this.foot = foot;
    this.#foot.textContent = foot;
    this.#foot.hidden = !foot;
  }

  /** It ended with an error, which stays on the screen. */
  fail(message) {
    this.end(message);
    this.#foot.classList.add("error");
    this.#foot.setAttribute("role", "alert");
  }

  #draw() {
    this.#isDrawn = true;
    this.#markdown.draw();
  }
}

/** What an answer took, in a line. */
export function costOf(usage, timings) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens read${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} written`);
  }
  if (timings?.predicted_per_second) parts.push(`${number(timings.predicted_per_second)} tokens/s`);
  if (timings) parts.push(`first after ${ms(timings.prompt_ms)}`);
  const trips = timings?.speculation?.tokens_per_window;
  if (trips > 1) parts.push(`${number(trips, 2)} a trip`);
  return parts.join(" · ");
}
