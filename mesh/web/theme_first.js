// Before anything is painted: the colours chosen last time, so that nothing flashes.
const chosen = localStorage.getItem("spanmesh.theme");
if (chosen === "light" || chosen === "dark") {
  document.documentElement.dataset.theme = chosen;
}
