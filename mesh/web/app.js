// What begins first: it listens to the mesh and tells the parts of the page.

import { ApiError } from "./api.js";
import { askForKey } from "./gate.js";
import { byId, focusByMouse, setText } from "./dom.js";
import { Chat } from "./chat.js";
import { catalogOf } from "./catalog.js";
import { conditionOf, healedSentence, modelLine } from "./condition.js";
import { ModelList } from "./models.js";
import { Recent } from "./recent.js";
import { showPanel } from "./panel.js";
import { startTabs } from "./tabs.js";
import { startTheme } from "./theme.js";
import { watchStatus } from "./poll.js";

const HEALED_MS = 10000;

const recent = new Recent();
let numRepairs = null;
let healedMs = -Infinity;
const chat = new Chat({ onLocked });
const modelList = new ModelList();
startTheme();
startTabs();
const watch = watchStatus({ onStatus, onAway, onLocked });

function onStatus(status, nowMs) {
  open();
  recent.add(status, nowMs);
  const condition = conditionOf(status);
  if (numRepairs !== null && status.repairs?.count > numRepairs) healedMs = nowMs;
  numRepairs = status.repairs?.count ?? null;
  if (condition.kind === "good" && nowMs - healedMs < HEALED_MS) condition.sentence = healedSentence(status);
  show(condition);
  setText(byId("model"), modelLine(status));
  // While the mesh heals, what is sent waits for it; while it loads, it is refused.
  const canSend = condition.kind === "good" || (condition.kind === "heal" && condition.word === "Healing");
  chat.setReady(canSend, condition.sentence ?? `The mesh is still busy: ${status.phase ?? "starting"}.`);
  chat.setContext(status.model?.context ?? null);
  const models = catalogOf(status);
  // Embedding models do not chat.
  chat.setModels(models.filter(({ kind }) => kind !== "embeddings"));
  modelList.show(models, status.rights);
  showPanel(status, recent, condition);
}

function onAway(error) {
  if (!byId("gate").hidden) return;
  open();
  const isLimited = error instanceof ApiError && error.status === 429;
  const why = error instanceof ApiError ? error.message : "The server does not answer. This page tries again every second.";
  show({ kind: isLimited ? "wait" : "bad", word: isLimited ? "Waiting" : "Not reachable", sentence: why });
  chat.setReady(false, why);
}

function onLocked(why) {
  show({ kind: "wait", word: "Locked", sentence: null });
  setText(byId("model"), "");
  askForKey(why, () => watch.again());
}

function open() {
  if (!byId("columns").hidden) return;
  byId("columns").hidden = false;
  byId("tabs").hidden = false;
  focusByMouse(byId("prompt"));
}

function show({ kind, word, sentence }) {
  byId("state").dataset.kind = kind;
  setText(byId("state-text"), word);
  const banner = byId("banner");
  banner.hidden = !sentence;
  setText(banner, sentence ?? "");
}
