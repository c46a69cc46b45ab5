// A bounded view of what a terminal would show: "\r" starts the line again, colours are kept, the rest is dropped.
import { h } from "./panels_dom.js";

const LINES_KEPT = 2000;
const LINE_LIMIT = 4000;
// One escape sequence: CSI …, OSC … BEL/ST, or a two-character one.
const ESCAPE = /\x1b(?:\[([0-9;:?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/y;
const UNFINISHED = /\x1b(?:\[[0-9;:?]*[ -/]*|\][^\x07\x1b]*\x1b?)?$/;
const CONTROL = /[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]/g;

export class Terminal {
  constructor(screen) {
    this.screen = screen;
    this.clear();
  }

  get empty() {
    return this.lines === 0 && this.spans.length === 0;
  }

  clear() {
    this.screen.replaceChildren();
    this.rest = "";
    this.style = "";
    this.lines = 0;
    this.returned = false;
    this.spans = [];
    this.line = null;
  }

  /** Append text as it came; pieces may end anywhere, also inside an escape sequence. */
  write(text) {
    let input = this.rest + text;
    this.rest = "";
    const tail = UNFINISHED.exec(input);
    if (tail && tail[0].length < 256) {
      this.rest = tail[0];
      input = input.slice(0, tail.index);
    }
    const fresh = document.createDocumentFragment();
    let at = 0;
    while (at < input.length) {
      const next = input.slice(at).search(/[\n\r\x1b]/);
      const end = next < 0 ? input.length : at + next;
      if (end > at) this.put(input.slice(at, end));
      if (next < 0) break;
      at = end + 1;
      if (input[end] === "\n") this.newline(fresh);
      else if (input[end] === "\r") this.returned = true;
      else {
        ESCAPE.lastIndex = end;
        const match = ESCAPE.exec(input);
        if (match) {
          at = ESCAPE.lastIndex;
          if (match[2] === "m") this.color(match[1]);
          else if (match[2] === "K" && (match[1] === "2" || this.returned)) this.spans = [];
        }
      }
    }
    this.line?.remove();
    this.screen.append(fresh);
    this.line = this.spans.length ? this.render() : null;
    if (this.line) this.screen.append(this.line);
    let extra = this.screen.childElementCount - LINES_KEPT;
    while (extra-- > 0) this.screen.firstElementChild.remove();
  }

  put(text) {
    const clean = text.replace(CONTROL, "");
    if (!clean) return;
    if (this.returned) {
      this.spans = []; // a progress bar: only its last state is of interest
      this.returned = false;
    }
    this.spans.push([this.style, clean]);
  }

  newline(fresh) {
    this.returned = false;
    fresh.append(this.render());
    this.lines++;
    this.spans = [];
    // A burst of lines never builds more elements than are kept.
    if (fresh.childElementCount > LINES_KEPT) fresh.firstElementChild.remove();
  }

  render() {
    const line = h("div");
    let left = LINE_LIMIT;
    for (const [style, text] of this.spans) {
      const shown = text.length > left ? `${text.slice(0, left)}…` : text;
      line.append(style ? h("span", { class: style }, shown) : shown);
      left -= shown.length;
      if (left <= 0) break;
    }
    if (!this.spans.length) line.append("\n");
    return line;
  }

  color(codes) {
    let classes = new Set(this.style ? this.style.split(" ") : []);
    const numbers = (codes || "0").split(/[;:]/).map(Number);
    const paint = (kind, name) => {
      classes = new Set([...classes].filter((c) => !c.startsWith(kind)));
      if (name !== null) classes.add(`${kind}${name}`);
    };
    for (let i = 0; i < numbers.length; i++) {
      const n = numbers[i];
      if (n === 0) classes.clear();
      else if (n === 1) classes.add("bold");
      else if (n === 2) classes.add("dim");
      else if (n === 22) ["bold", "dim"].forEach((c) => classes.delete(c));
      else if (n >= 30 && n <= 37) paint("fg", n - 30);
      else if (n >= 90 && n <= 97) paint("fg", n - 90);
      else if (n === 39) paint("fg", null);
      else if (n === 38 || n === 48) i += numbers[i + 1] === 2 ? 4 : 2; // 256 colours: the plain text will do
    }
    this.style = [...classes].join(" ");
  }
}
