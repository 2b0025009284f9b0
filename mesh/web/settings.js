// What a user wants of answers: instructions, how tokens are drawn, how many there may be.

import { byId } from "./dom.js";

// By field of a request; one that is left empty is left to the server.
const NUMBERS = {
  temperature: "temperature",
  top_p: "top-p",
  top_k: "top-k",
  min_p: "min-p",
  repetition_penalty: "repetition-penalty",
  seed: "seed",
};
const LONGEST = 512;

/** The settings as they are on the page. */
export function readSettings() {
  const found = { system: byId("system").value, max_tokens: byId("max-tokens").value, speculate: byId("speculate").checked };
  for (const [field, id] of Object.entries(NUMBERS)) found[field] = byId(id).value;
  return found;
}

/** Puts settings onto the page; what they do not name stays. */
export function writeSettings(settings) {
  byId("system").value = settings?.system ?? byId("system").value;
  byId("max-tokens").value = settings?.max_tokens ?? byId("max-tokens").value;
  byId("speculate").checked = settings?.speculate ?? byId("speculate").checked;
  for (const [field, id] of Object.entries(NUMBERS)) byId(id).value = settings?.[field] ?? byId(id).value;
}

/** Fields of a request for an answer to `messages`, in a session that holds `context` tokens, or null if unknown. */
export function requestOf(settings, messages, context) {
  const system = settings.system.trim();
  const asked = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    max_tokens: Math.min((context ?? Infinity) - 1, Math.max(1, Math.round(Number(settings.max_tokens)) || LONGEST)),
  };
  for (const field of Object.keys(NUMBERS)) {
    const text = settings[field].trim();
    if (text && Number.isFinite(Number(text))) asked[field] = Number(text);
  }
  if (!settings.speculate) asked.speculation = { mode: "off" };
  return asked;
}
