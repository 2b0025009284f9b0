// What speculation does: who proposes, how much of it holds, and whether it pays.

import { bytes, number, percent } from "./format.js";
import { el, svg } from "./dom.js";

const NAMES = {
  ngram: "the text itself",
  draft: "draft model",
  eagle3: "EAGLE-3 drafter",
  mtp: "multi-token prediction",
  dflash: "DFlash drafter",
  dspark: "DSpark drafter",
  dflash2: "DFlash2 drafter",
  assistant: "assistant beside the last stage",
  prediction: "prediction",
  history: "earlier answers",
};

/** The panel's content. */
export function speculationPanel(speculation) {
  if (!speculation) return [el("p", { class: "muted" }, "No figures until the model is loaded.")];
  if (speculation.mode === "off") {
    return [el("p", { class: "muted" }, "Off: every token takes a whole trip. Start the server with another --speculate.")];
  }
  if (!speculation.windows) return [el("p", { class: "muted" }, "Figures come with the first answer.")];
  const share = speculation.proposed ? speculation.accepted / speculation.proposed : null;
  const { measured_tokens_per_s: now, plain_tokens_per_s: plain } = speculation;
  const gain = now && plain ? now / plain : null;
  const found = [
    el(
      "dl",
      { class: "figures" },
      figure("tokens a trip", number(speculation.tokens_per_window, 2)),
      figure("accepted", percent(share)),
      figure("times as fast as off", gain === null ? "–" : `${number(gain, 2)}×`),
    ),
  ];
  const who = Object.entries(speculation.proposers).map(
    ([name, counts]) => `${NAMES[name] ?? name}: ${counts.accepted} of ${counts.drafted} tokens`,
  );
  found.push(el("p", { class: "small" }, who.length ? `Proposed by ${who.join("; ")}.` : "No proposals yet."));
  const shares = speculation.acceptance_per_position.slice(0, 16);
  if (shares.length) found.push(acceptanceBars(shares, "Accepted, by position in the window", "position"));
  for (const [name, counts] of Object.entries(speculation.proposers)) {
    const depths = (counts.conditional_acceptance_per_depth ?? []).slice(0, 16);
    const title = `Accepted of ${NAMES[name] ?? name}, by depth, where all before was accepted`;
    if (depths.length) found.push(acceptanceBars(depths, title, "depth"));
  }
  if (speculation.features) found.push(featuresLine(speculation.features));
  if (speculation.tail_drafts) found.push(tailDraftsLine(speculation.tail_drafts));
  if (speculation.reason) found.push(el("p", { class: "muted small reason" }, `Controller: ${speculation.reason}.`));
  return found;
}

function figure(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

function featuresLine(features) {
  const share = features.wanted ? features.received / features.wanted : null;
  const off = features.off ? ` Off: ${features.off}.` : "";
  const text = `Hidden states for the drafter: ${percent(share)} of ${features.wanted} rows arrived, ${bytes(features.bytes)}.${off}`;
  return el("p", { class: "small" }, text);
}

function tailDraftsLine(drafts) {
  const off = drafts.off ? ` Off: ${drafts.off}.` : "";
  return el("p", { class: "small" }, `Drafted beside the last stage: ${drafts.tokens} tokens in ${drafts.drafts} drafts.${off}`);
}

function acceptanceBars(shares, title, unit) {
  const [width, height, foot] = [360, 84, 16];
  const step = width / Math.max(shares.length, 6);
  const said = shares.map((share, index) => `${unit} ${index + 1}: ${percent(share)}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${said}` });
  shares.forEach((share, index) => {
    const x = index * step + 2;
    const bar = { x, width: step - 4, rx: 3 };
    const full = height - foot;
    picture.append(svg("rect", { ...bar, class: "bed", y: 0, height: full }));
    picture.append(svg("rect", { ...bar, class: "bar", y: full * (1 - share), height: full * share }));
    picture.append(svg("text", { x: x + step / 2 - 2, y: height - 3 }, String(index + 1)));
  });
  return el("div", {}, el("p", { class: "muted small" }, title), el("div", { class: "bars" }, picture));
}
