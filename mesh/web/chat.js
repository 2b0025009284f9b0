// The conversation: what was said, what is being said, and how to stop it.

import { byId, el, focusByMouse, setText } from "./dom.js";
import { ApiError, streamJson } from "./api.js";
import { AnswerTurn, costOf, userTurn } from "./turn.js";

const STARTERS = ["Who are you?", "Name three rivers and where they end.", "Write a haiku about the sea."];
// Nearer to the end than this, the view follows the answer.
const NEAR_PX = 80;
// What the server calls the model that it was started with, whatever its name.
const FIRST = "default";

export class Chat {
  #messages = [];
  #running = null;
  #isReady = false;
  #context = null;
  #models = [];
  #onLocked;

  constructor({ onLocked }) {
    this.#onLocked = onLocked;
    const [prompt, form] = [byId("prompt"), byId("composer")];
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(prompt.value);
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    prompt.addEventListener("input", () => this.#fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("starters").append(
      ...STARTERS.map((text) => el("li", {}, el("button", { type: "button", onclick: () => this.#send(text) }, text))),
    );
    this.#show();
  }

  /** Tokens that a session holds: an answer must be asked to be shorter. */
  setContext(context) {
    this.#context = context;
  }

  /** What the mesh serves; where that is one model there is no choice. */
  setModels(models) {
    const [choice, chosen] = [byId("model-choice"), this.#chosen()];
    const named = ({ name }, index) => ({ value: index ? name : FIRST, name });
    const isSame = models.length === this.#models.length && models.every(({ name }, index) => name === this.#models[index].name);
    this.#models = models;
    if (isSame) return;
    const options = models.map(named);
    choice.replaceChildren(...options.map(({ value, name }) => el("option", { value }, name)));
    choice.value = options.some(({ value }) => value === chosen) ? chosen : FIRST;
    byId("models").hidden = models.length < 2;
  }

  /** Whether the mesh answers; while it heals, answers wait. */
  setReady(isReady, why) {
    this.#isReady = isReady;
    if (!this.#messages.length) {
      setText(byId("empty-title"), isReady ? "Ask something" : "Almost there");
      setText(byId("empty-text"), isReady ? "Answers come from the model on your machines. Nothing leaves them." : why);
    }
    this.#show();
  }

  /** End the answer that is being written; what there is of it stays. */
  stop() {
    this.#running?.abort();
  }

  async #send(text) {
    const question = text.trim();
    if (!question || this.#running || !this.#isReady) return;
    byId("prompt").value = "";
    this.#fit();
    // The button that was pressed may go with it.
    if (byId("empty").contains(document.activeElement)) focusByMouse(byId("prompt"));
    byId("empty").hidden = true;
    this.#messages.push({ role: "user", content: question });
    const turn = new AnswerTurn();
    byId("log").append(userTurn(question), turn.element);
    byId("log").scrollTop = byId("log").scrollHeight;
    const running = (this.#running = new AbortController());
    this.#show();
    setText(byId("said"), "The model answers.");
    try {
      await this.#read(turn, running.signal);
      setText(byId("said"), turn.said);
    } catch (error) {
      this.#failed(turn, error, running.signal);
    }
    if (this.#running === running) {
      if (turn.said) this.#messages.push({ role: "assistant", content: turn.said });
      // A question without an answer is not asked again with the next one.
      else this.#messages.pop();
      this.#running = null;
    }
    this.#show();
  }

  async #read(turn, signal) {
    let [usage, timings] = [null, null];
    for await (const event of streamJson("/v1/chat/completions", this.#request(), signal)) {
      const { content: text, reasoning_content: thought } = event.choices[0]?.delta ?? {};
      usage = event.usage ?? usage;
      timings = event.timings ?? timings;
      if (thought) turn.think();
      if (text) this.#follow(() => turn.add(text));
    }
    this.#follow(() => turn.end(costOf(usage, timings)));
  }

  #failed(turn, error, signal) {
    if (signal.aborted) {
      turn.end("Stopped.");
      setText(byId("said"), "Stopped.");
    } else if (error instanceof ApiError) {
      turn.fail(error.message);
      if (error.status === 401) this.#onLocked(error.message);
    } else {
      turn.fail("The server cannot be reached. Your message is not lost: send it again when it is back.");
    }
  }

  #chosen() {
    return byId("model-choice").value || FIRST;
  }

  #request() {
    const model = this.#chosen();
    const context = this.#models.find(({ name }) => name === model)?.model?.context ?? this.#context;
    const asked = {
      model,
      messages: this.#messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(byId("temperature").value),
      max_tokens: Math.min((context ?? Infinity) - 1, Math.max(1, Math.round(Number(byId("max-tokens").value)) || 512)),
    };
    if (!byId("speculate").checked) asked.speculation = { mode: "off" };
    return asked;
  }

  #follow(change) {
    const log = byId("log");
    const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
    change();
    if (isNear) requestAnimationFrame(() => (log.scrollTop = log.scrollHeight));
  }

  #clear() {
    this.stop();
    this.#running = null;
    this.#messages = [];
    byId("log").replaceChildren(byId("empty"));
    byId("empty").hidden = false;
    setText(byId("said"), "A new chat.");
    byId("prompt").focus();
    this.#show();
  }

  #show() {
    const isRunning = this.#running !== null;
    const hadFocus = document.activeElement === byId(isRunning ? "send" : "stop");
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    byId("send").disabled = !this.#isReady;
    for (const button of byId("starters").querySelectorAll("button")) button.disabled = !this.#isReady;
    // The button that had the focus may be gone.
    if (hadFocus) focusByMouse(byId("prompt"));
  }

  #fit() {
    const prompt = byId("prompt");
    prompt.rows = Math.min(8, Math.max(1, prompt.value.split("\n").length));
  }
}
