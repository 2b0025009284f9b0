// The question for an API key, where the server wants one.

import { byId, setText } from "./dom.js";
import { ApiError, getJson, keepKey, keptKey } from "./api.js";

/** Shows the question, with `why` if a key was refused; calls `onOpen` when one fits. */
export function askForKey(why, onOpen) {
  if (!byId("gate").hidden) return;
  byId("gate").hidden = false;
  byId("columns").hidden = true;
  byId("tabs").hidden = true;
  setText(byId("gate-error"), keptKey() ? why : "");
  byId("key").focus();
  byId("gate-form").onsubmit = async (event) => {
    event.preventDefault();
    keepKey(byId("key").value.trim());
    try {
      await getJson("/v1/models");
    } catch (error) {
      keepKey("");
      const reason = error instanceof ApiError ? error.message : "The server cannot be reached. Try again in a moment.";
      setText(byId("gate-error"), reason);
      byId("key").select();
      return;
    }
    byId("key").value = "";
    byId("gate").hidden = true;
    onOpen();
  };
}
