// Numbers as people read them. Missing values are a dash: never 0, never NaN by accident.

const MISSING = "–";
const MINUS = "−";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** About four significant digits: 0.5312, 12.35, 1234, 1.2e−5. */
export function digits(value, significant = 4) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : `${MINUS}∞`;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value).replace("-", MINUS);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(significant - 2).replaceAll("-", MINUS);
  const places = Math.max(0, significant - 1 - Math.floor(Math.log10(size || 1)));
  return value.toFixed(Math.min(places, significant)).replace("-", MINUS);
}

/** Bytes in binary units: 9.4 GiB. */
export function bytes(value) {
  if (!isNumber(value)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${power && Math.abs(value) < 100 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

/** The local time of UTC seconds: 14:03:59. */
export function clock(ts) {
  return new Date(ts * 1000).toTimeString().slice(0, 8);
}

/** A value where there is little room: whole percents, watts, degrees and megahertz; one place for memory. */
export function short(value, unit) {
  if (!isNumber(value)) return digits(value);
  if (unit === "GiB" || unit === "MiB") return value.toFixed(value < 1000 ? 1 : 0);
  return ["%", "W", "°C", "MHz"].includes(unit) ? String(Math.round(value)).replace("-", MINUS) : digits(value);
}

/** The little line in front of a curve's name; its color is the curve's. */
export function swatch(color, dashed = false) {
  const element = document.createElement("i");
  element.style.setProperty("--ddp-color", color);
  if (dashed) element.className = "ddp-chart-dashed";
  return element;
}
