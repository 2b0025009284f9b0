// Where there is no room for both, the chat and the mesh are tabs.

import { byId } from "./dom.js";

const VIEWS = ["chat", "mesh"];

export function startTabs() {
  const tabs = VIEWS.map((view) => byId(`tab-${view}`));

  function choose(view) {
    byId("columns").dataset.view = view;
    tabs.forEach((tab, index) => {
      tab.setAttribute("aria-selected", String(VIEWS[index] === view));
      tab.tabIndex = VIEWS[index] === view ? 0 : -1;
    });
  }

  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(VIEWS[index]));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      const other = 1 - index;
      choose(VIEWS[other]);
      tabs[other].focus();
    });
  });
  choose("chat");
}
