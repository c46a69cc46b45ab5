// What every panel is made of: elements, tables that change in place, and numbers as people read them.
// Whatever comes from a run becomes a text node, never markup.

import * as format from "./format.js";

export const DASH = "–";
export const { clock } = format;

/** Make an element: h("td", {class: "num"}, "text", child, …). Strings become text nodes. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Change an element's text only when it is another one, so that a selection or a tooltip survives. */
export function setText(element, value) {
  const text = value === null || value === undefined ? DASH : String(value);
  if (element.textContent !== text) element.textContent = text;
}

export function setTitle(element, text) {
  if ((element.getAttribute("title") ?? "") === (text ?? "")) return;
  if (text) element.setAttribute("title", text);
  else element.removeAttribute("title");
}

export function setClass(element, name, on) {
  element.classList.toggle(name, Boolean(on));
}

/**
 * A table whose cells change in place.
 * columns: [{title, class?, help?, cell(row, td)}]; rows are told apart by key(row).
 */
export class Table {
  constructor(columns, key, { empty = "", label = "" } = {}) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    const head = columns.map((c) => h("th", { class: c.class, scope: "col", title: c.help }, c.title));
    this.body = h("tbody");
    this.table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...head)), this.body);
    this.empty = h("p", { class: "empty" }, empty);
    this.element = h("div", { class: "scroll-x" }, this.table, this.empty);
    this.update([]);
  }

  update(rows) {
    const wanted = new Set();
    let before = null;
    for (const row of rows) {
      const key = String(this.key(row));
      wanted.add(key);
      let line = this.rows.get(key);
      if (!line) {
        line = h("tr", {}, ...this.columns.map((c) => h("td", { class: c.class, "data-title": c.title })));
        this.rows.set(key, line);
      }
      this.columns.forEach((column, i) => column.cell(row, line.children[i]));
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== line) this.body.insertBefore(line, place);
      before = line;
    }
    for (const [key, line] of this.rows) {
      if (!wanted.has(key)) {
        line.remove();
        this.rows.delete(key);
      }
    }
    this.empty.hidden = rows.length > 0 || !this.empty.textContent;
    this.table.hidden = rows.length === 0;
  }
}

// --- numbers ---

const nonFinite = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

/** A number of the run's log, where NaN and ±Infinity are strings; null for anything else. */
export function number(value) {
  if (typeof value === "number") return value;
  return typeof value === "string" && value in nonFinite ? nonFinite[value] : null;
}

/** A loss or another measure: four significant digits, and a diverged one says so. */
export function measure(value) {
  const x = number(value);
  if (x === null) return DASH;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5)) return x.toExponential(2).replace("-", "−");
  return x.toFixed(Math.abs(x) >= 100 ? 1 : Math.abs(x) >= 10 ? 2 : Math.abs(x) >= 1 ? 3 : 4);
}

export function percent(fraction, digits = 1) {
  const x = number(fraction);
  return x === null || !Number.isFinite(x) ? DASH : `${(100 * x).toFixed(digits)} %`;
}

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function integer(value) {
  const x = number(value);
  return x === null || !Number.isFinite(x) ? DASH : grouped.format(x);
}

/** Samples per second and the like: whole from 100 on, else three digits. */
export function rate(value) {
  const x = number(value);
  if (x === null || !Number.isFinite(x)) return DASH;
  return x >= 100 ? grouped.format(x) : x.toPrecision(3);
}

/** Bytes as read from a message; a dash if there are none. */
export const bytes = (value) => format.bytes(number(value));

/** "9.4 of 80.0 GiB": one unit for both. */
export function bytesOf(used, total) {
  const a = number(used);
  const b = number(total);
  if (a === null || b === null) return bytes(used);
  const [size, unit] = b >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${(a / size).toFixed(1)} / ${(b / size).toFixed(1)} ${unit}`;
}

const two = (n) => String(n).padStart(2, "0");

/** Seconds in words; whole ones without a decimal. */
export function duration(seconds) {
  const s = number(seconds);
  if (s === null || !Number.isFinite(s)) return DASH;
  if (s < 10) return `${Number.isInteger(s) ? s : s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  const whole = Math.round(s);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${two(whole % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${two(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Local date and time, the date left out today. */
export function when(ts) {
  if (number(ts) === null) return DASH;
  const date = new Date(1000 * ts);
  const time = format.clock(ts);
  if (date.toDateString() === new Date().toDateString()) return time;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time.slice(0, 5)}`;
}

/** The same moment with date, zone and UTC, for tooltips. */
export function fullTime(ts) {
  if (number(ts) === null) return "";
  const date = new Date(1000 * ts);
  return `${date.toLocaleString(undefined, { timeZoneName: "short" })}  (${date.toISOString().slice(0, 19)}Z)`;
}

/**
 * The server's clock as far as its documents tell. A run's duration is (started, duration_s) at the moment the document
 * was made, so the newest such moment is the least that the clock can show now.
 */
export class ServerClock {
  constructor() {
    this.ahead = null;
  }

  see({ started, duration_s: seconds, state }) {
    if (started == null || seconds == null || !ACTIVE.has(state)) return;
    const ahead = started + seconds - Date.now() / 1000;
    if (this.ahead === null || ahead > this.ahead) this.ahead = ahead;
  }

  now() {
    return Date.now() / 1000 + (this.ahead ?? 0);
  }

  /** Whole seconds a run has taken so far, or its duration if it has ended; null before it started. */
  elapsed(run) {
    if (!ACTIVE.has(run.state) || run.started == null) return run.duration_s;
    return Math.max(0, Math.floor(this.now() - run.started));
  }
}

/** "2 × NVIDIA A, NVIDIA B": names with how often each is there. */
export function counted(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, n]) => (n > 1 ? `${n} × ${name}` : name)).join(", ");
}

// --- pieces that several panels show ---

export const ACTIVE = new Set(["queued", "starting", "running", "stopping"]);

export function setPill(element, state) {
  const name = String(state ?? "");
  if (element.dataset.state === name) return;
  element.dataset.state = name;
  element.className = `pill ${name}`;
  element.textContent = name;
}

/** A small bar behind a figure; fraction null leaves it empty. */
export function setBar(cell, fraction, text, title) {
  let bar = cell.firstElementChild;
  if (!bar) {
    bar = h("span", { class: "bar" }, h("i"), h("b"));
    cell.replaceChildren(bar);
  }
  const width = fraction === null || !Number.isFinite(fraction) ? 0 : Math.min(1, Math.max(0, fraction));
  bar.firstChild.style.width = `${(100 * width).toFixed(1)}%`;
  setText(bar.lastChild, text);
  setTitle(cell, title);
}

/** A link to another page of the dashboard: a real address, and a plain click stays in this session. */
export function pageLink(context, page, parameters, text, attributes = {}) {
  const query = new URLSearchParams(parameters).toString();
  return h(
    "a",
    {
      ...attributes,
      href: `${context.base}${page}${query ? `?${query}` : ""}`,
      onclick: (event) => {
        if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
        event.preventDefault();
        context.trigger("go", { page, parameters });
      },
    },
    text,
  );
}

/** A token for a "run again" link: however often this link is opened, it starts one run. */
export function intent() {
  const random = crypto.getRandomValues(new Uint8Array(6));
  return Array.from(random, (b) => b.toString(16).padStart(2, "0")).join("");
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy by hand";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
