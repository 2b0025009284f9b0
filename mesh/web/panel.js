// The mesh beside the chat: ring, stages, speculation, what went wrong lately.

import { bytes } from "./format.js";
import { byId, el, setText } from "./dom.js";
import { describeSpares, stageTable } from "./stages.js";
import { drawRing } from "./ring.js";
import { eventsOf, repairsOf } from "./condition.js";
import { speculationPanel } from "./speculation.js";

let shown = {};

/** Draws what changed. */
export function showPanel(status, recent, condition) {
  const stages = status.stages ?? [];
  const trip = recent.trip;
  draw("ring", [stages, trip, condition.kind], () => [drawRing(stages, trip, condition.kind)]);
  draw("stages", [stages, trip], () => (stages.length ? [stageTable(stages, trip)] : [waiting(status)]));
  const told = [describeSpares(status.hosts?.length ? status.hosts : []), speed(recent), recorded(status.recording)];
  setText(byId("spares"), told.filter(Boolean).join(" "));
  draw("speculation", status.speculation ?? null, () => speculationPanel(status.speculation));
  const events = eventsOf(status);
  const healed = repairsOf(status);
  byId("lately").hidden = !events.length && !healed;
  draw("events", [events, healed], () => [
    healed ? el("li", {}, healed) : null,
    ...events.map(({ when, what }) => el("li", {}, el("time", {}, when), what)),
  ]);
}

/** Replaces a part only if what it shows is another: a selection, or the focus, stays where it was. */
function draw(id, value, make) {
  const now = JSON.stringify(value);
  if (shown[id] === now) return;
  shown = { ...shown, [id]: now };
  byId(id).replaceChildren(...make().filter(Boolean));
}

function waiting(status) {
  const hosts = status.hosts?.length ?? 0;
  const there = hosts === 1 ? "One host is there." : `${hosts} hosts are there.`;
  return el("p", { class: "muted" }, `${hosts ? there : "No host has joined yet."} The stages show once they are loaded.`);
}

function speed(recent) {
  const rate = recent.tokensPerS;
  return rate > 0.05 ? `${rate.toFixed(1)} tokens/s in the last seconds, all answers together.` : "";
}

function recorded(recording) {
  if (!recording) return "";
  const off = recording.off ? ` Nothing is added now: ${recording.off}.` : "";
  return `${recording.conversations} answers are recorded, ${bytes(recording.bytes)}.${off}`;
}
