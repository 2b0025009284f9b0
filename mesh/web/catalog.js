// Every model that a status names, and how each is.

import { percent } from "./format.js";

/**
 * Models that are served and those that a request would have loaded: the first one, then the others by name. Each has a
 * `name`, whether it `isFirst`, `isLoaded` and `isOffered` by the library and `readsPictures`, its `phase`, `context` and
 * `bytes`, where it lies (`placement`: hosts and layers) and what is on its way there (`loading`).
 */
export function catalogOf(status) {
  const library = new Map((status.library ?? []).map((entry) => [entry.name, entry]));
  const served = (status.models ?? []).map((model, index) => ({
    name: model.name,
    isFirst: index === 0,
    isLoaded: model.ready !== false,
    isOffered: library.has(model.name),
    phase: model.ready === false ? model.lost || model.phase || "loading" : "loaded",
    readsPictures: Boolean(model.model?.projector),
    context: model.model?.context ?? library.get(model.name)?.context ?? null,
    bytes: model.model?.file_bytes ?? library.get(model.name)?.size_bytes ?? null,
    placement: (model.stages ?? []).map((stage) => ({ host: stage.host, layers: stage.layers })),
    loading: model.loading ?? [],
  }));
  const names = new Set(served.map(({ name }) => name));
  const others = [...library.values()]
    .filter(({ name }) => !names.has(name))
    .map((entry) => ({
      name: entry.name,
      isFirst: false,
      isLoaded: false,
      isOffered: true,
      phase: entry.phase,
      readsPictures: Boolean(entry.projector),
      context: entry.context,
      bytes: entry.size_bytes,
      placement: [],
      loading: [],
    }));
  // In an order that loading does not change.
  const [first, ...rest] = [...served, ...others];
  return first ? [first, ...rest.sort((one, other) => (one.name < other.name ? -1 : 1))] : [];
}

const PHASES = {
  loaded: "loaded",
  unloaded: "not loaded",
  waiting: "waits for others to make room",
  loading: "loading",
  unloading: "being unloaded",
};

/** How a model is, in a few words. */
export function stateOf(model) {
  const said = PHASES[model.phase] ?? model.phase;
  const share = shareOf(model);
  return share === null ? said : `${said}, ${percent(share)}`;
}

/** How much of a model's weights is where it belongs; null where nothing is on its way. */
export function shareOf({ loading }) {
  if (!loading.length) return null;
  const total = loading.reduce((sum, stage) => sum + stage.bytes, 0);
  const done = loading.reduce((sum, stage) => sum + stage.bytes * doneOf(stage), 0);
  return total ? done / total : 0;
}

/** How far one stage is: what is fetched first and then loaded counts half for each. */
export function doneOf(stage) {
  if (stage.step === "ready") return 1;
  if (!stage.fetch_bytes) return stage.step === "loading" ? stage.share : 0;
  return stage.step === "fetching" ? stage.share / 2 : 0.5 + stage.share / 2;
}
