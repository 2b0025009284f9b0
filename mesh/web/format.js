// Numbers as people read them.

export function ms(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 0 : 1)} s`;
  return `${value.toFixed(value >= 100 ? 0 : 1)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), units.length - 1);
  const number = value / 1000 ** power;
  return `${number.toFixed(number < 10 && power > 0 ? 1 : 0)} ${units[power]}`;
}

export function number(value, digits = 1) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);

export function layers([start, stop]) {
  return stop - start === 1 ? `layer ${start}` : `layers ${start} to ${stop - 1}`;
}

export function timeOfDay(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
