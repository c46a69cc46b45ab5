// What is under the pointer: every curve's value at that step or moment, side by side.
import { digits, short, swatch } from "./format.js";

const ROWS_MOST = 12;
const BAD_WITHIN_PX = 6;

const words = { NaN: "NaN", Infinity: "+∞", "-Infinity": "−∞" };

/** Show the values under the pointer while it is over a chart's plot. */
export function attachTip(chart) {
  const { plot, body } = chart;
  const cross = document.createElement("div");
  cross.className = "ddp-chart-cross";
  const tip = document.createElement("div");
  tip.className = "ddp-chart-tip";
  cross.hidden = tip.hidden = true;
  body.append(cross, tip);
  let at = null;

  const hide = () => {
    at = null;
    cross.hidden = tip.hidden = true;
  };
  const show = () => {
    if (at === null || chart.dead) return;
    const axis = plot._fullLayout.xaxis;
    const pixel = at - plot._fullLayout._size.l;
    if (pixel < 0 || pixel > axis._length) return hide();
    const found = rows(chart, axis.p2c(pixel), (axis.p2c(1) - axis.p2c(0)) * BAD_WITHIN_PX);
    if (!found) return hide();
    const place = plot._fullLayout._size.l + axis.c2p(found.x);
    cross.style.left = `${place}px`;
    tip.replaceChildren(header(chart, found.x), ...found.rows.flatMap(row));
    cross.hidden = tip.hidden = false;
    const right = place + 14 + tip.offsetWidth > plot.clientWidth;
    tip.style.left = `${right ? Math.max(0, place - 14 - tip.offsetWidth) : place + 14}px`;
  };
  plot.addEventListener("mousemove", (event) => {
    if (event.buttons) return hide();
    const first = at === null;
    at = event.clientX - plot.getBoundingClientRect().left;
    if (first || !tip.pending) {
      tip.pending = true;
      requestAnimationFrame(() => {
        tip.pending = false;
        show();
      });
    }
  });
  plot.addEventListener("mouseleave", hide);
  chart.root.addEventListener("ddp:drawn", show);
}

function header(chart, x) {
  const element = document.createElement("header");
  element.textContent = chart.time ? new Date(x).toISOString().slice(11, 19) : `step ${digits(x)}`;
  return element;
}

function row({ color, dashed, name, value }) {
  const label = document.createElement("span");
  label.textContent = name;
  const figure = document.createElement("b");
  figure.textContent = value;
  return [swatch(color, dashed), label, figure];
}

function rows(chart, x, badWithin) {
  const { factor, unit } = chart.scale();
  const shown = chart.series().filter((series) => !chart.hidden.has(series.key));
  let nearest = null;
  const points = shown.map((series) => {
    const point = chart.curves.nearest(series.key, x);
    if (point && (nearest === null || Math.abs(point.x - x) < Math.abs(nearest - x))) nearest = point.x;
    return { series, point };
  });
  if (nearest === null) return null;
  // A value that is not finite is one point among many; near its mark it is meant.
  const marks = chart.time ? [] : shown.flatMap((series) => chart.curves.bad(series.key));
  const mark = marks.find(([at]) => at === nearest) ?? marks.find(([at]) => Math.abs(at - x) <= badWithin);
  if (mark) nearest = mark[0];
  const all = points.map(({ series, point }) => {
    const bad = mark && chart.curves.bad(series.key).find(([at]) => at === nearest);
    const y = (mark ? chart.curves.nearest(series.key, nearest) : point)?.y ?? null;
    let value = y === null ? "–" : `${short(y * factor, unit)}${unit ? `\u2009${unit}` : ""}`;
    if (bad) value = words[bad[1]];
    return { y, color: chart.color(series), dashed: series.mean, name: series.name, value };
  });
  if (all.length <= ROWS_MOST) return { x: nearest, rows: all };
  // Too many to list: the mean and the ends.
  const known = all.filter((r) => r.y !== null && !r.dashed).sort((a, b) => a.y - b.y);
  const ends = known.length ? [{ ...known.at(-1), name: `most: ${known.at(-1).name}` }, { ...known[0], name: `least: ${known[0].name}` }] : [];
  return { x: nearest, rows: [...all.filter((r) => r.dashed), ...ends] };
}
