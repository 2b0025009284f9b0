// The stages as a table, and the hosts that stand by.

import { bytes, layers, ms } from "./format.js";
import { el } from "./dom.js";

/** One row for each stage: the wire is the way to it, from the one before. */
export function stageTable(stages, trip) {
  const rows = stages.map((stage, index) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row", title: `${stage.host} at ${stage.address}` },
        el("span", { class: "num", "aria-hidden": "true" }, String(index + 1)),
        stage.host,
        el("span", { class: "layers" }, layers(stage.layers)),
        el("span", { class: "layers" }, stage.resident_bytes ? bytes(stage.resident_bytes) : ""),
      ),
      el("td", {}, ms(trip?.compute[index])),
      el("td", {}, ms(trip?.wire[index])),
      el("td", {}, ms(trip?.queue[index])),
    ),
  );
  if (trip) {
    const back = el("th", { scope: "row" }, el("span", { class: "muted" }, "way back"));
    rows.push(el("tr", {}, back, el("td"), el("td", {}, ms(trip.wire.at(-1))), el("td")));
  }
  const heads = ["Stage", "Compute", "Wire", "Queue"].map((head) => el("th", { scope: "col" }, head));
  return el(
    "table",
    {},
    el("caption", { class: "hidden" }, "Stages in order, with layers and memory: computing, way to the stage, waiting there"),
    el("thead", {}, el("tr", {}, heads)),
    el("tbody", {}, rows),
  );
}

/** What the hosts without a stage do. */
export function describeSpares(hosts) {
  const idle = hosts.filter((host) => !host.layers);
  return idle
    .map((host) => {
      if (host.leaving) return `${host.name} is leaving.`;
      if (!host.ready) return `${host.name} is starting.`;
      if (host.copies.length) return `${host.name} is a spare with replicas of ${host.copies.join(", ")}.`;
      return `${host.name} is a spare.`;
    })
    .join(" ");
}
