// One colour per rank, the same everywhere; a GPU has the colour of its index. Okabe and Ito's palette for the
// colour-blind (https://jfly.uni-koeln.de/color/), made darker or lighter so that a thin line reads on either ground.

const LIGHT = ["#0072b2", "#d98200", "#009e73", "#c0569a", "#45a5dd", "#cc4b00", "#9a8a00", "#6e7781"];
const DARK = ["#4a9fe6", "#f0a830", "#2dbf94", "#e08fc2", "#8fd0f5", "#f5733d", "#e6da50", "#adb5bd"];
const DASHES = ["solid", "dot", "dash"];

/** Colour of a rank or a GPU's index. From 8 on they repeat, told apart by rankDash. */
export function rankColor(index, dark = isDark()) {
  const colors = dark ? DARK : LIGHT;
  return colors[index % colors.length];
}

/** Plotly's dash style of a rank: solid for the first eight. */
export function rankDash(index) {
  return DASHES[Math.floor(index / LIGHT.length) % DASHES.length];
}

/** Red, green, blue in 0..255 of any CSS colour, with alpha in 0..1. */
function channels(color) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = color;
  const text = context.fillStyle; // "#rrggbb", or "rgba(…)" if it is transparent
  if (text[0] === "#") return [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)).concat(1);
  return text.match(/[\d.]+/g).map(Number);
}

/** The same colour with another opacity. */
export function fade(color, alpha) {
  const [r, g, b] = channels(color);
  return `rgba(${r},${g},${b},${alpha})`;
}

/** Tell whether an element stands on a dark ground. */
export function isDark(element = document.querySelector(".stApp") ?? document.body) {
  return theme(element).dark;
}

/** Streamlit's theme as an element sees it: {text, background, secondary, border, primary, font, muted, grid, dark}. */
export function theme(element) {
  const style = getComputedStyle(element);
  const page = getComputedStyle(document.querySelector(".stApp") ?? document.body);
  const read = (name, fallback) => {
    const value = style.getPropertyValue(name).trim();
    return value && value !== "unset" ? value : fallback;
  };
  const background = read("--st-background-color", page.backgroundColor);
  const text = read("--st-text-color", page.color);
  const [r, g, b] = channels(background);
  return {
    text,
    background,
    secondary: read("--st-secondary-background-color", background),
    border: read("--st-border-color", fade(text, 0.2)),
    primary: read("--st-primary-color", text),
    font: read("--st-font", page.fontFamily),
    muted: fade(text, 0.62),
    grid: fade(text, 0.09),
    dark: 0.299 * r + 0.587 * g + 0.114 * b < 128,
  };
}
