// Elements, made and found. Text goes in as text: nothing here ever parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes, listeners (`onclick`) and children; children that are null are left out. */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** Sets text only where it changed, so that screen readers are not told twice. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Puts the cursor there, unless that would open a phone's keyboard. */
export function focusByMouse(element) {
  if (matchMedia("(pointer: fine)").matches) element.focus();
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
