// Panels of text: what happened to a run, and what its ranks print.
import { Table, clock, fullTime, h, setText, setTitle } from "./panels_dom.js";
import { Terminal } from "./panels_terminal.js";

const EVENTS_SHOWN = 500;

/** Events, the newest first. */
export function events(root, context) {
  let all = [];
  let number = 0;
  const columns = [
    {
      title: "Time",
      cell: (event, td) => {
        setText(td, clock(event.ts));
        setTitle(td, fullTime(event.ts));
      },
    },
    {
      title: "Event",
      cell: (event, td) => {
        setText(td, event.rank === undefined || event.rank === null ? event.event : `${event.event} · rank ${event.rank}`);
        td.parentElement.dataset.event = event.event;
      },
    },
    { title: "", class: "grow", cell: (event, td) => setText(td, sentence(event)) },
  ];
  const table = new Table(columns, (event) => event.number, { empty: "Nothing has happened yet.", label: "Events" });
  const box = h("div", { class: "scroll-y", tabindex: "0" }, table.element);
  root.append(box);
  const destroy = context.subscribe("events", { run: context.data.run }, (message) => {
    if (!message.events) return;
    if (message.reset) all = [];
    for (const event of message.events) all.push({ ...event, number: number++ });
    if (all.length > EVENTS_SHOWN) all = all.slice(-EVENTS_SHOWN);
    const newestFirst = [...all].sort((a, b) => b.ts - a.ts || b.number - a.number);
    table.update(newestFirst);
  });
  return { destroy };
}

function sentence(event) {
  if (event.message) return event.message;
  if (event.event === "checkpoint") return `${String(event.path ?? "").split("/").pop()} after epoch ${event.epoch}, step ${event.step}`;
  if (event.event === "resumed") return `from ${String(event.checkpoint ?? "").split("/").pop()}, epoch ${event.epoch}, step ${event.step}`;
  if (event.event === "skipped") return leftOut(event);
  if (event.event === "end") return `${event.outcome}: ${event.reason}`;
  return event.state ?? "";
}

/** A step that was not taken, in words. */
export function leftOut(event) {
  const ranks = event.ranks?.length ? ` on rank ${event.ranks.join(", ")}` : "";
  return `step ${event.step} was left out: the ${event.what ?? "gradient"} was NaN or infinite${ranks}`;
}

/** A rank's output, followed at its end. */
export function output(root, context) {
  const { data } = context;
  const ranks = Array.from({ length: data.nproc_per_node }, (_, rank) => rank);
  let rank = 0;
  let stream = "stdout";
  let unsubscribe = () => {};
  const screen = h("pre", { class: "terminal", tabindex: "0", "aria-label": "Output" });
  const empty = h("p", { class: "empty overlay" });
  const picker =
    ranks.length <= 8
      ? h("div", { class: "segments", role: "group", "aria-label": "Rank" }, ...ranks.map((r) =>
          h("button", { type: "button", "data-rank": r, onclick: () => choose(r, stream) },
            h("i", { class: "dot", style: `background:${context.color(r)}` }), String(r))))
      : h("select", { "aria-label": "Rank", onchange: (e) => choose(Number(e.target.value), stream) },
          ...ranks.map((r) => h("option", { value: r }, `rank ${r}`)));
  const streams = h("div", { class: "segments", role: "group", "aria-label": "Stream" }, ...["stdout", "stderr"].map((name) =>
    h("button", { type: "button", "data-stream": name, onclick: () => choose(rank, name) }, name)));
  const follow = h("input", { type: "checkbox", checked: true });
  const bar = h("div", { class: "toolbar" }, h("span", { class: "muted" }, "Rank"), picker, streams,
    h("label", { class: "check" }, follow, " Follow"));
  root.append(bar, h("div", { class: "terminal-box" }, screen, empty));
  const terminal = new Terminal(screen);

  const toEnd = () => (screen.scrollTop = screen.scrollHeight);
  follow.addEventListener("change", () => follow.checked && toEnd());
  // Scrolling up is a wish to read: stop following; scrolling to the end is a wish to follow again.
  screen.addEventListener("scroll", () => {
    follow.checked = screen.scrollHeight - screen.scrollTop - screen.clientHeight < 24;
  });

  function choose(newRank, newStream) {
    rank = newRank;
    stream = newStream;
    for (const button of picker.querySelectorAll("button")) button.setAttribute("aria-pressed", String(Number(button.dataset.rank) === rank));
    for (const button of streams.children) button.setAttribute("aria-pressed", String(button.dataset.stream === stream));
    unsubscribe();
    terminal.clear();
    setText(empty, `Rank ${rank} has written nothing to ${stream} so far.`);
    empty.hidden = false;
    unsubscribe = context.subscribe("log", { run: data.run, rank, stream }, (message) => {
      if (message.text === undefined) return;
      if (message.reset) terminal.clear();
      if (message.cut) terminal.write("\x1b[2m… earlier lines are in the run's logs folder\x1b[0m\n");
      terminal.write(message.text);
      empty.hidden = !terminal.empty;
      if (follow.checked) toEnd();
    });
  }

  choose(0, "stdout");
  return { destroy: () => unsubscribe() };
}
