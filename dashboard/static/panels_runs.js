// The runs page: every run, newest first, live.
import {
  ACTIVE, DASH, ServerClock, Table, counted, duration, fullTime, h, intent, measure, number, pageLink, percent, setClass, setPill, setText,
  setTitle, when,
} from "./panels_dom.js";

export function list(root, context) {
  let runs = null;
  const time = new ServerClock();
  const asked = new Map();
  const filter = h("input", { type: "search", placeholder: "Filter by name, state or GPU", "aria-label": "Filter runs" });
  const count = h("span", { class: "muted" });
  const columns = [
    {
      title: "Run", class: "name",
      cell: (run, td) => {
        if (!td.firstChild) td.append(pageLink(context, "run", { run: run.id }, run.id));
      },
    },
    {
      title: "State",
      cell: (run, td) => {
        if (!td.firstChild) td.append(h("span"));
        setPill(td.firstChild, run.state);
        setTitle(td, run.problem || (ACTIVE.has(run.state) ? run.stage : run.reason) || "");
      },
    },
    {
      title: "Created",
      cell: (run, td) => {
        setText(td, when(run.created));
        setTitle(td, fullTime(run.created));
      },
    },
    {
      title: "Duration", class: "num",
      cell: (run, td) => {
        setText(td, duration(time.elapsed(run)));
      },
    },
    {
      title: "Loss", class: "num", help: "Mean of the ranks' losses: at the end, or now while the run goes on",
      cell: (run, td) => {
        const loss = number(run.latest?.loss);
        setText(td, measure(loss));
        setClass(td, "bad", loss !== null && !Number.isFinite(loss));
      },
    },
    { title: "Val. accuracy", class: "num", cell: (run, td) => setText(td, percent(run.latest?.val_accuracy)) },
    {
      title: "Ranks", class: "num extra",
      cell: (run, td) => setText(td, run.nproc_per_node),
    },
    {
      title: "GPUs", class: "fill",
      cell: (run, td) => {
        const names = run.gpu_names ?? [];
        setText(td, run.gpus?.length ? (names.length && names.every(Boolean) ? counted(names) : `${run.gpus.length} GPUs`) : run.state === "queued" ? DASH : "CPU");
        setTitle(td, (run.gpus ?? []).join("\n"));
      },
    },
    {
      title: "", class: "actions",
      cell: (run, td) => {
        if (!td.firstChild) {
          td.append(
            h("button", { class: "small", type: "button", onclick: () => stop(run.id) }, "Stop"),
            pageLink(context, "", { from: run.id, form: intent() }, "Run again", { class: "button small" }),
          );
        }
        const active = ACTIVE.has(run.state);
        const stopping = run.state === "stopping" || performance.now() - (asked.get(run.id) ?? -1e9) < 8000;
        td.firstChild.hidden = !active;
        td.firstChild.disabled = stopping;
        setText(td.firstChild, stopping ? "Stopping…" : "Stop");
        td.lastChild.hidden = active;
      },
    },
  ];
  const table = new Table(columns, (run) => run.id, { label: "Runs" });
  const none = h(
    "div", { class: "notice", hidden: true },
    h("p", { class: "sentence" }, h("strong", {}, "No runs yet")),
    h("p", { class: "hint" }, "The launch page is filled with a demo that runs on any machine. ", pageLink(context, "", {}, "Go to Launch")),
  );
  const nothing = h("p", { class: "empty", hidden: true }, "No run matches the filter.");
  const toolbar = h("div", { class: "toolbar" }, filter, count);
  root.append(toolbar, table.element, none, nothing);

  function stop(id) {
    asked.set(id, performance.now());
    context.trigger("stop", id);
    draw();
  }

  function draw() {
    if (!runs) return;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => {
      const text = `${run.id} ${run.state} ${(run.gpu_names ?? []).join(" ")}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    table.update(shown);
    none.hidden = runs.length > 0;
    nothing.hidden = runs.length === 0 || shown.length > 0;
    table.table.hidden = shown.length === 0;
    toolbar.hidden = runs.length === 0;
    const active = runs.filter((run) => ACTIVE.has(run.state)).length;
    const total = `${runs.length} run${runs.length === 1 ? "" : "s"}`;
    setText(count, words.length ? `${shown.length} of ${total}` : active ? `${total}, ${active} active` : total);
  }

  filter.addEventListener("input", draw);
  const unsubscribe = context.subscribe("runs", {}, (message) => {
    if (!message.runs) return;
    runs = message.runs;
    runs.forEach((run) => time.see(run));
    draw();
  });
  const timer = setInterval(() => {
    if (!document.hidden && runs?.some((run) => ACTIVE.has(run.state))) draw();
  }, 1000);
  return {
    destroy: () => {
      clearInterval(timer);
      unsubscribe();
    },
  };
}
