// One trip round the ring, drawn to scale: clockwise from the top, where the coordinator is.

import { ms } from "./format.js";
import { svg } from "./dom.js";

const SIZE = 280;
const MID = SIZE / 2;
const RADIUS = 108;
const GAP = 0.7;
// A stage that takes next to nothing is still to be seen.
const LEAST_DEGREES = 14;

/** The drawing, with a sentence for those who cannot see it. */
export function drawRing(stages, trip, kind) {
  const arcs = trip && kind === "good" ? measuredArcs(stages, trip) : idleArcs(stages, kind);
  const said = describe(stages, trip, kind);
  const picture = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": said });
  picture.append(svg("circle", { class: "track", cx: MID, cy: MID, r: RADIUS, fill: "none", "stroke-width": 1 }));
  for (const arc of arcs) picture.append(...drawArc(arc));
  picture.append(svg("rect", { class: "home", x: MID - 5, y: MID - RADIUS - 5, width: 10, height: 10, rx: 2 }));
  const [big, sub] = centre(trip, kind);
  picture.append(svg("text", { class: "big", x: MID, y: MID + 6 }, big));
  picture.append(svg("text", { class: "sub", x: MID, y: MID + 30 }, sub));
  return picture;
}

function measuredArcs(stages, trip) {
  const parts = [];
  stages.forEach((stage, index) => {
    parts.push({ kind: "wire", value: trip.wire[index] });
    if (trip.queue[index] > 0.01 * trip.total) parts.push({ kind: "queue", value: trip.queue[index] });
    parts.push({ kind: "compute", value: trip.compute[index], number: index + 1 });
  });
  parts.push({ kind: "wire", value: trip.wire.at(-1) });
  return laidOut(parts);
}

function idleArcs(stages, kind) {
  const parts = stages.map((stage, index) => ({
    kind: kind === "heal" ? "lost" : "idle",
    value: Math.max(1, stage.layers[1] - stage.layers[0]),
    number: index + 1,
  }));
  return laidOut(parts);
}

function laidOut(parts) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const least = parts.map((part) => (part.number ? Math.min(LEAST_DEGREES, 300 / parts.length) : 1.5));
  const spare = 360 - least.reduce((sum, degrees) => sum + degrees, 0);
  let at = 0;
  return parts.map((part, index) => {
    const degrees = least[index] + (spare * part.value) / total;
    const arc = { ...part, from: at, to: at + degrees };
    at += degrees;
    return arc;
  });
}

function drawArc({ kind, from, to, number }) {
  const width = kind === "wire" ? 3 : 14;
  const whole = to - from > 359;
  const path = whole
    ? svg("circle", { cx: MID, cy: MID, r: RADIUS, class: kind, fill: "none", "stroke-width": width })
    : svg("path", { d: arcPath(from + GAP, Math.max(to - GAP, from + GAP + 0.4)), class: kind, fill: "none", "stroke-width": width });
  if (!number) return [path];
  const [x, y] = pointAt((from + to) / 2);
  const calm = kind === "idle" || kind === "lost" ? "badge calm" : "badge";
  return [
    path,
    svg("circle", { class: calm, cx: x, cy: y, r: 11 }),
    svg("text", { class: "number", x, y: y + 4.3 }, String(number)),
  ];
}

function arcPath(from, to) {
  const [x1, y1] = pointAt(from);
  const [x2, y2] = pointAt(to);
  return `M${x1} ${y1}A${RADIUS} ${RADIUS} 0 ${to - from > 180 ? 1 : 0} 1 ${x2} ${y2}`;
}

function pointAt(degrees) {
  const angle = ((degrees - 90) * Math.PI) / 180;
  return [MID + RADIUS * Math.cos(angle), MID + RADIUS * Math.sin(angle)].map((value) => Math.round(value * 100) / 100);
}

function centre(trip, kind) {
  if (kind === "heal") return ["healing", "layers are placed again"];
  if (kind !== "good") return ["–", "no ring yet"];
  if (!trip) return ["–", "nothing sent yet"];
  return [ms(trip.total), trip.isLive ? "per trip, now" : "per trip, last seen"];
}

function describe(stages, trip, kind) {
  if (kind === "heal") return `The ring of ${stages.length} stages is being repaired.`;
  if (!trip || kind !== "good") return `A ring of ${stages.length} stages; no times yet.`;
  const sum = (values) => ms(values.reduce((total, value) => total + value, 0));
  return (
    `A trip round ${stages.length} stages takes ${ms(trip.total)}: ${sum(trip.compute)} computing, ` +
    `${sum(trip.queue)} waiting, ${sum(trip.wire)} on the wire. The table below has each stage.`
  );
}
