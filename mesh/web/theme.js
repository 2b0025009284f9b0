// Light, dark, or as the system has it; kept for the next visit.

import { byId } from "./dom.js";

const KEPT = "spanmesh.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

export function startTheme() {
  const button = byId("theme");
  let theme = document.documentElement.dataset.theme ?? "system";

  function show() {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    byId("theme-name").textContent = theme;
  }

  button.addEventListener("click", () => {
    theme = NEXT[theme];
    if (theme === "system") localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, theme);
    show();
  });
  show();
}
