// The conversation: what was said, what is being said, and how to stop it.

import { byId, el, focusByMouse, setText } from "./dom.js";
import { ApiError, streamJson } from "./api.js";
import { AnswerTurn, costOf, userTurn } from "./turn.js";
import { ChatBar } from "./chat_bar.js";
import { dropChat, keepChat, keptChat, keptChats, newChat, onKeptElsewhere, titleOf } from "./chats.js";
import { PictureTray } from "./pictures.js";
import { readSettings, requestOf, writeSettings } from "./settings.js";
import { stateOf } from "./catalog.js";

const STARTERS = ["Who are you?", "Name three rivers and where they end.", "Write a haiku about the sea."];
// Nearer to the end than this, the view follows the answer.
const NEAR_PX = 80;
// What the server calls the model that it was started with, whatever its name.
const FIRST = "default";
// In the address, so that a chat is open again after a reload.
const OPEN = "#chat-";

/** What a message says and shows, in the form of a request. */
const partsOf = (content, pictures) => {
  if (!pictures?.length) return content;
  const shown = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...shown, ...(content ? [{ type: "text", text: content }] : [])];
};

export class Chat {
  #chat = newChat();
  // Of chats that are kept, with their titles.
  #kept = keptChats();
  #deleted = null;
  // One that the browser did not keep, or not with its pictures: it is too large, or nothing may be kept.
  #unkept = null;
  #isKeptInPart = false;
  // What became of pictures that were added.
  #note = "";
  // The model that was chosen, also while it is not listed.
  #wanted = null;
  #running = null;
  #isReady = false;
  #why = "";
  #context = null;
  #models = [];
  #bar;
  #tray;
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
    byId("starters").append(
      ...STARTERS.map((text) => el("li", {}, el("button", { type: "button", onclick: () => this.#send(text) }, text))),
    );
    this.#bar = new ChatBar({
      onChoose: (id) => this.#choose(id),
      onDelete: () => this.#delete(),
      onUndo: () => this.#undo(),
    });
    this.#tray = new PictureTray(byId("chat"), (note) => this.#noteOf(note));
    onKeptElsewhere(() => this.#listAgain());
    byId("model-choice").addEventListener("change", () => {
      this.#wanted = byId("model-choice").value;
      this.#show();
    });
    addEventListener("hashchange", () => this.#openNamed());
    this.#openNamed();
    this.#show();
  }

  /** Tokens that a session of the first model holds: an answer must be asked to be shorter. */
  setContext(context) {
    this.#context = context;
  }

  /** What the mesh serves, and would load; where that is one model there is no choice. */
  setModels(models) {
    const choice = byId("model-choice");
    const optionOf = ({ name, isFirst, isLoaded, isOffered }) => ({
      value: isFirst ? FIRST : name,
      text: isLoaded || !isOffered ? name : `${name} (is loaded first)`,
    });
    const options = models.map(optionOf);
    const isSame = JSON.stringify(options) === JSON.stringify(this.#models.map(optionOf));
    this.#models = models;
    this.#noteLoading();
    this.#showTokens();
    if (isSame) return this.#allowPictures();
    choice.replaceChildren(...options.map(({ value, text }) => el("option", { value }, text)));
    this.#chooseModel(this.#wanted);
    byId("models").hidden = models.length < 2;
    this.#allowPictures();
  }

  /** Whether the mesh answers; while it heals, answers wait. */
  setReady(isReady, why) {
    this.#isReady = isReady;
    this.#why = why;
    this.#show();
  }

  /** End the answer that is being written; what there is of it stays. */
  stop() {
    this.#running?.controller.abort();
  }

  async #send(text) {
    const question = text.trim();
    if (this.#running || !this.#isReady || this.#tray.isBusy) return;
    if (!question && this.#tray.isEmpty) return;
    const chat = this.#chat;
    const pictures = this.#tray.takeAll();
    const message = { role: "user", content: question, ...(pictures.length ? { pictures } : {}) };
    byId("prompt").value = "";
    this.#fit();
    // The button that was pressed may go with it.
    if (byId("empty").contains(document.activeElement)) focusByMouse(byId("prompt"));
    chat.messages.push(message);
    chat.title ||= titleOf(question || "Picture");
    const turn = new AnswerTurn();
    byId("log").append(userTurn(message), turn.element);
    byId("log").scrollTop = byId("log").scrollHeight;
    // What answers is what was chosen from now on.
    this.#wanted = this.#chosen();
    const running = (this.#running = { controller: new AbortController(), turn, model: this.#chosen() });
    this.#deleted = null;
    this.#note = "";
    this.#keep(chat);
    this.#show();
    this.#noteLoading();
    setText(byId("said"), "The model answers.");
    try {
      await this.#read(chat, turn, running.controller.signal);
      setText(byId("said"), turn.said);
    } catch (error) {
      this.#failed(turn, error, running.controller.signal);
    }
    if (turn.said) chat.messages.push({ role: "assistant", content: turn.said, foot: turn.foot });
    // A question without an answer is not asked again with the next one.
    else chat.messages.pop();
    this.#keep(chat);
    if (this.#running === running) this.#running = null;
    this.#show();
  }

  async #read(chat, turn, signal) {
    let [usage, timings] = [null, null];
    for await (const event of streamJson("/v1/chat/completions", this.#request(chat), signal)) {
      const { content: text, reasoning_content: thought } = event.choices[0]?.delta ?? {};
      usage = event.usage ?? usage;
      timings = event.timings ?? timings;
      if (thought) turn.think();
      if (text) this.#follow(() => turn.add(text));
    }
    chat.tokens = usage?.total_tokens ?? chat.tokens;
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

  #request(chat) {
    const messages = chat.messages.map(({ role, content, pictures }) => ({ role, content: partsOf(content, pictures) }));
    return {
      model: this.#chosen(),
      stream: true,
      stream_options: { include_usage: true },
      ...requestOf(readSettings(), messages, this.#contextOf(this.#chosen())),
    };
  }

  #chosen() {
    return byId("model-choice").value || FIRST;
  }

  #modelOf(value) {
    return this.#models.find(({ name, isFirst }) => (value === FIRST ? isFirst : name === value));
  }

  #contextOf(value) {
    return this.#modelOf(value)?.context ?? this.#context;
  }

  #chooseModel(value) {
    const choice = byId("model-choice");
    this.#wanted = value;
    choice.value = value ?? FIRST;
    if (choice.selectedIndex < 0) choice.value = FIRST;
  }

  // While nothing was said yet: what the answer waits for.
  #noteLoading() {
    const model = this.#running && this.#modelOf(this.#running.model);
    this.#running?.turn.wait(model && !model.isLoaded ? `${model.name}: ${stateOf(model)}…` : "");
  }

  #follow(change) {
    const log = byId("log");
    const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
    change();
    if (isNear) requestAnimationFrame(() => (log.scrollTop = log.scrollHeight));
  }

  // Chats

  #keep(chat) {
    if (chat.isDeleted) return;
    chat.model = this.#chat === chat ? this.#chosen() : chat.model;
    chat.settings = this.#chat === chat ? readSettings() : chat.settings;
    const kept = chat.messages.length ? keepChat(chat, Date.now()) : "all";
    this.#unkept = kept === "all" ? null : chat;
    this.#isKeptInPart = kept === "texts";
    if (!chat.messages.length) dropChat(chat.id);
    this.#kept = keptChats();
    if (this.#chat === chat) this.#nameOpen();
  }

  #choose(id) {
    this.#deleted = null;
    const chat = id ? keptChat(id) : null;
    this.#open(chat ?? newChat());
    setText(byId("said"), chat ? `The chat “${chat.title}”.` : "A new chat.");
    if (!chat) focusByMouse(byId("prompt"));
  }

  #delete() {
    this.stop();
    this.#chat.isDeleted = true;
    dropChat(this.#chat.id);
    const deleted = this.#chat;
    this.#kept = keptChats();
    this.#open(newChat());
    this.#deleted = deleted;
    setText(byId("said"), "The chat is deleted.");
    this.#show();
    byId("undo-delete").focus();
  }

  #undo() {
    const chat = this.#deleted;
    if (!chat) return;
    this.#deleted = null;
    delete chat.isDeleted;
    keepChat(chat, chat.changedMs);
    this.#kept = keptChats();
    this.#open(chat);
    setText(byId("said"), "The chat is back.");
  }

  // An answer that is being written is stopped: it belongs to the chat that is left.
  #open(chat) {
    this.stop();
    this.#running = null;
    this.#chat = chat;
    const turns = chat.messages.map((message) => {
      const { role, content, foot } = message;
      if (role === "user") return userTurn(message);
      const turn = new AnswerTurn();
      turn.add(content);
      turn.end(typeof foot === "string" ? foot : "");
      return turn.element;
    });
    byId("log").replaceChildren(byId("empty"), ...turns);
    byId("log").scrollTop = byId("log").scrollHeight;
    writeSettings(chat.settings);
    if (chat.model !== null) this.#chooseModel(chat.model);
    this.#nameOpen();
    this.#show();
  }

  #openNamed() {
    const id = location.hash.startsWith(OPEN) ? location.hash.slice(OPEN.length) : "";
    const chat = id && id !== this.#chat.id ? keptChat(id) : null;
    if (chat) this.#open(chat);
  }

  #nameOpen() {
    const hash = this.#chat.messages.length ? OPEN + this.#chat.id : "";
    if (location.hash !== hash) history.replaceState(null, "", location.pathname + location.search + hash);
  }

  #listAgain() {
    this.#kept = keptChats();
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
    const isEmpty = byId("log").children.length < 2;
    byId("empty").hidden = !isEmpty;
    if (isEmpty) {
      setText(byId("empty-title"), this.#isReady ? "Ask something" : "Almost there");
      setText(byId("empty-text"), this.#isReady ? "Answers come from the model on your machines. Nothing leaves them." : this.#why);
    }
    const isKept = this.#kept.some(({ id }) => id === this.#chat.id);
    this.#allowPictures();
    this.#bar.show(this.#kept, isKept ? this.#chat.id : "", this.#deleted !== null);
    this.#showTokens();
  }

  #allowPictures() {
    this.#tray.setAllowed(this.#modelOf(this.#chosen())?.readsPictures ?? false);
  }

  #noteOf(note) {
    this.#note = note;
    setText(byId("said"), note);
    this.#show();
  }

  #showTokens() {
    const { tokens } = this.#chat;
    const context = this.#contextOf(this.#chosen());
    const held = typeof tokens !== "number" ? "" : `This chat holds ${tokens}${context === null ? "" : ` of ${context}`} tokens.`;
    const what = this.#isKeptInPart ? "its pictures: they are" : "it: it is";
    const lost = this.#unkept === this.#chat ? `This browser has no room to keep ${what} lost with this page.` : "";
    setText(byId("tokens"), [this.#note, held, lost].filter(Boolean).join(" "));
  }

  #fit() {
    const prompt = byId("prompt");
    prompt.rows = Math.min(8, Math.max(1, prompt.value.split("\n").length));
  }
}
