// The choice among the chats that are kept.

import { byId, el } from "./dom.js";

export class ChatBar {
  #shown = "";

  /** Calls `onChoose` with the id of a chat, or with "" for a new one, `onDelete` and `onUndo`. */
  constructor({ onChoose, onDelete, onUndo }) {
    byId("chat-choice").addEventListener("change", () => onChoose(byId("chat-choice").value));
    byId("new-chat").addEventListener("click", () => onChoose(""));
    byId("delete-chat").addEventListener("click", onDelete);
    byId("undo-delete").addEventListener("click", onUndo);
  }

  /** Shows the chats, `id` of the one that is open ("" for a new one), and whether a deletion can be undone. */
  show(chats, id, canUndo) {
    const now = JSON.stringify([chats.map((chat) => [chat.id, chat.title]), id]);
    if (now !== this.#shown) {
      this.#shown = now;
      const options = [el("option", { value: "" }, "New chat"), ...chats.map((chat) => el("option", { value: chat.id }, chat.title))];
      byId("chat-choice").replaceChildren(...options);
      byId("chat-choice").value = id;
    }
    this.#replace(byId("delete-chat"), !id);
    this.#replace(byId("undo-delete"), !canUndo);
  }

  // A button that goes must not take the focus with it.
  #replace(button, isHidden) {
    const hadFocus = document.activeElement === button;
    button.hidden = isHidden;
    if (isHidden && hadFocus) byId("chat-choice").focus();
  }
}
