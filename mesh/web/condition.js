// How the mesh is, in a word and, where it is needed, a sentence.

import { timeOfDay } from "./format.js";

/** Kind (good, wait, heal, bad), a word for the bar, and a sentence above the chat or null. */
export function conditionOf(status) {
  const phase = status.phase ?? "";
  const hasRing = Boolean(status.round_trips);
  if (status.ready) return { kind: "good", word: "Ready", sentence: null };
  if (hasRing && phase.startsWith("waiting for hosts")) {
    return { kind: "heal", word: "Waiting for a host", sentence: `No host has room for what was lost: ${phase.replace(/^waiting for hosts: /, "")}` };
  }
  if (hasRing && phase.startsWith("waiting for the model")) {
    return { kind: "heal", word: "Waiting for the model", sentence: `What was lost cannot be placed again: ${phase.replace(/^waiting for the model: /, "")}` };
  }
  if (hasRing) {
    const last = status.failures?.at(-1);
    const what = last ? `Layers ${span(last.layers)} on ${last.host} were lost.` : "A stage was lost.";
    const sentence = `${what} They are placed again; answers go on by themselves.`;
    return { kind: "heal", word: "Healing", sentence };
  }
  if ("phase" in status) return { kind: "wait", word: capital(phase), sentence: null };
  return { kind: "good", word: "Ready", sentence: null };
}

/** What went wrong lately, the latest first: when, and what. */
export function eventsOf(status) {
  return (status.failures ?? []).slice(-5).reverse().map((failure) => ({
    when: timeOfDay(failure.at_s),
    what: `${failure.host} lost layers ${span(failure.layers)}: ${failure.reason}`,
  }));
}

/** What to say right after a repair, which may have been too quick to be seen. */
export function healedSentence(status) {
  const last = status.failures?.at(-1);
  const what = last ? `Layers ${span(last.layers)} on ${last.host} were lost` : "A stage was lost";
  return `${what} and are placed again: healed in ${status.repairs.last_s.toFixed(1)} s.`;
}

/** One line on the repairs so far, or nothing. */
export function repairsOf({ repairs }) {
  if (!repairs?.count && !repairs?.moves) return "";
  const healed = repairs.count ? `Healed ${times(repairs.count)}, the last time in ${repairs.last_s.toFixed(1)} s.` : "";
  const moved = repairs.moves ? ` Layers moved ${times(repairs.moves)}.` : "";
  return (healed + moved).trim();
}

export const modelLine = ({ model }) =>
  model ? `${model.name ?? ""} · ${model.layers ?? "?"} layers · ${model.numeric_mode ?? ""}` : "";

// `[10, 20)` as people count.
const span = (layers) => layers.replace(/\[(\d+), (\d+)\)/g, (_, start, stop) => `${start} to ${stop - 1}`);
const times = (count) => (count === 1 ? "once" : count === 2 ? "twice" : `${count} times`);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
