// The models, what each holds of the hosts, and the orders to load and unload them.

import { ApiError, getJson } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { bytes, layers } from "./format.js";
import { doneOf, stateOf } from "./catalog.js";

// Time for requests to end.
const UNLOAD_WAIT_S = 30;

export class ModelList {
  #rows = new Map();
  #rights = { load: false, unload: false };
  #models = [];

  /** Shows the models. Each keeps its row: the focus, and what a screen reader has read, stay where they are. */
  show(models, rights) {
    this.#models = models;
    this.#rights = { load: Boolean(rights?.load), unload: Boolean(rights?.unload) };
    byId("model-list-card").hidden = models.length < 2;
    const list = byId("model-list");
    models.forEach((model, index) => {
      const row = this.#rows.get(model.name) ?? this.#newRow(model.name);
      this.#fill(row, model);
      if (list.children[index] !== row.element) list.insertBefore(row.element, list.children[index] ?? null);
    });
    for (const [name, row] of this.#rows) {
      if (models.some((model) => model.name === name)) continue;
      if (row.element.contains(document.activeElement)) list.focus();
      row.element.remove();
      this.#rows.delete(name);
    }
  }

  #newRow(name) {
    const [state, where, parts] = [el("span", { class: "model-state" }), el("p", { class: "muted small" }), el("ul", { class: "loads" })];
    const button = el("button", { class: "quiet", type: "button", onclick: () => this.#order(name) });
    const head = el("div", { class: "model-head" }, el("span", { class: "model-name" }, name), state, button);
    const row = { element: el("li", {}, head, where, parts), state, where, parts, button, shown: "", isBusy: false };
    this.#rows.set(name, row);
    return row;
  }

  #fill(row, model) {
    setText(row.state, stateOf(model));
    const places = model.placement.map(({ host, layers: held }) => `${host}: ${layers(held)}`);
    setText(row.where, [model.bytes === null ? "" : bytes(model.bytes), ...places].filter(Boolean).join(" · "));
    const now = JSON.stringify(model.loading);
    if (row.shown !== now) {
      row.shown = now;
      row.parts.replaceChildren(...model.loading.map(loadOf));
    }
    const action = this.#actionOf(model);
    const hadFocus = document.activeElement === row.button;
    row.button.hidden = action === null;
    if (action === null) {
      if (hadFocus) byId("model-list").focus();
      return;
    }
    setText(row.button, action);
    row.button.setAttribute("aria-label", `${action} ${model.name}`);
    row.button.setAttribute("aria-disabled", String(row.isBusy));
  }

  /** What can be ordered, or null. What is under way can be ended by unloading it. */
  #actionOf(model) {
    if (model.isFirst || model.phase === "unloading") return null;
    if (model.phase === "unloaded" || model.phase === "waiting") return this.#rights.load ? "Load" : null;
    return this.#rights.unload ? "Unload" : null;
  }

  async #order(name) {
    const model = this.#models.find((each) => each.name === name);
    const row = this.#rows.get(name);
    const action = model && this.#actionOf(model);
    if (!action || row.isBusy) return;
    // An order to load waits until it is carried out; one to unload may come before that.
    row.isBusy = action === "Unload";
    row.button.setAttribute("aria-disabled", String(row.isBusy));
    tell(action === "Load" ? `${name} is to be loaded.` : `${name} is being unloaded.`, false);
    try {
      tell(await (action === "Load" ? loaded(name) : unloaded(name)), false);
    } catch (error) {
      const now = this.#models.find((each) => each.name === name);
      const isUnderWay = action === "Load" && error.status === 503 && now && !now.isLoaded && now.phase !== "unloaded";
      if (isUnderWay) tell(`${name}: ${stateOf(now)}.`, false);
      else tell(error instanceof ApiError ? error.message : "The server cannot be reached.", true);
    }
    row.isBusy = false;
    row.button.setAttribute("aria-disabled", "false");
  }
}

async function loaded(name) {
  await getJson("/mesh/load", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model: name }),
  });
  return `${name} is loaded.`;
}

async function unloaded(name) {
  const path = `/mesh/unload?model=${encodeURIComponent(name)}&wait_s=${UNLOAD_WAIT_S}`;
  const { ended } = await getJson(path, { method: "POST" });
  return `${name} was unloaded.${ended ? ` ${ended} answers were ended.` : ""}`;
}

function loadOf(stage) {
  const what = `${stage.host}, ${layers(stage.layers)}: ${stage.step}`;
  const fetched = stage.step === "fetching" ? `, ${bytes(stage.fetched_bytes)} of ${bytes(stage.fetch_bytes)}` : "";
  return el("li", {}, el("span", { class: "small muted" }, what + fetched), el("progress", { "aria-label": what, max: 1, value: doneOf(stage) }));
}

function tell(text, isError) {
  const said = byId("models-said");
  said.classList.toggle("error", isError);
  setText(said, text);
}
