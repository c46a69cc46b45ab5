// The run page's panels: header, ranks, hardware, checkpoints.
import {
  ACTIVE, DASH, ServerClock, Table, bytes, copy, duration, h, integer, intent, measure, number, pageLink, percent, rate, setClass,
  setPill, setText, setTitle, when,
} from "./panels_dom.js";
import { gpuColumns, setHost } from "./panels_gpus.js";
import { leftOut } from "./panels_text.js";

// A run in one of these states can go on from a checkpoint.
const RESUMABLE = new Set(["failed", "stopped", "lost"]);
const ASKED_MS = 8000; // how long a click is believed before the run's state shows what came of it
const STAGES = [
  ["queued", "Queued"],
  ["starting", "Starting"],
  ["joined", "Ranks joined"],
  ["running", "Training"],
];

/** The button Resume, with the checkpoints to choose from. */
function resumeButton(context) {
  const button = h("button", { type: "button", onclick: ask }, "Resume");
  const choice = h("select", { "aria-label": "Checkpoint to resume from" });
  const element = h("span", { class: "resume", hidden: true }, button, choice);
  let offered = "";
  let asked = -Infinity;

  function ask() {
    asked = performance.now();
    context.trigger("resume", { run: context.data.run, checkpoint: choice.value || null });
    button.disabled = true;
  }

  function draw(show, endReason) {
    const found = [...(show.checkpoints ?? [])].reverse();
    element.hidden = !(RESUMABLE.has(show.state) || endReason) || Boolean(show.problem) || !found.length;
    button.disabled = performance.now() - asked < ASKED_MS;
    const now = JSON.stringify(found.map(({ path }) => path));
    if (now === offered) return;
    offered = now;
    const chosen = choice.value;
    const name = ({ epoch, step, path }) => `epoch ${epoch}${/_step\d+\.pth$/.test(path) ? `, step ${step}` : ""}`;
    // Without a choice it is the newest whole one, as it will be then.
    choice.replaceChildren(...found.map((file, i) => h("option", { value: i ? file.path : "" }, `${name(file)}${i ? "" : " (newest)"}`)));
    choice.value = found.some(({ path }) => path === chosen) ? chosen : "";
  }

  return { element, draw };
}

/** State, progress, verdict, what the ranks warn of, and the buttons Stop, Resume and Run again. */
export function header(root, context) {
  const { data } = context;
  const pill = h("span", { class: "pill" });
  const title = h("h1", {}, data.run);
  const stop = h("button", { class: "stop", type: "button", onclick: () => askStop() }, "Stop");
  const again = pageLink(context, "", { from: data.run, form: intent() }, "Run again", { class: "button" });
  const resume = resumeButton(context);
  const line = h("p", { class: "status-line", role: "status" });
  const steps = STAGES.map(([key, label]) => h("li", { "data-stage": key }, label));
  const strip = h("ol", { class: "stages", "aria-label": "Stages" }, ...steps);
  const fill = h("i");
  const bar = h("div", { class: "progress", role: "progressbar", "aria-label": "Progress" }, fill);
  const tiles = Object.fromEntries(
    ["Epoch", "Step", "Progress", "Time left", "Throughput", "Elapsed", "Mean loss", "Val. accuracy"].map((name) => [
      name,
      h("dd", {}, DASH),
    ]),
  );
  const grid = h(
    "dl",
    { class: "tiles" },
    ...Object.entries(tiles).map(([name, value]) => h("div", {}, h("dt", {}, name), value)),
  );
  setTitle(tiles["Mean loss"].parentElement, "Mean of the ranks' latest losses");
  setTitle(tiles.Throughput.parentElement, "Samples per second, all ranks together");
  setTitle(tiles["Val. accuracy"].parentElement, "Accuracy on the whole validation set, all ranks together");
  const verdict = h("div", { class: "verdict", hidden: true });
  const noticed = h("ul", { class: "noticed", "aria-label": "Noticed", hidden: true });
  root.append(
    h("div", { class: "head" }, h("div", { class: "head-name" }, title, pill, strip), h("div", { class: "actions" }, stop, resume.element, again)),
    line, bar, grid, verdict, noticed,
  );

  const time = new ServerClock();
  let last = null;
  let stopAsked = 0;
  let layout = JSON.stringify([data.gpus ?? [], data.show?.state === "queued"]);
  let verdictOf = "";
  let noticedOf = "";

  function askStop() {
    stopAsked = performance.now();
    context.trigger("stop", data.run);
    draw();
  }

  function statusText(show) {
    if (show.state === "queued") return show.stage || "waiting to start";
    if (show.state === "starting") return show.stage || "starting";
    if (show.state === "stopping") {
      return `${show.stage || "asked the ranks to stop"} · ${Math.max(0, Math.floor(time.now() - show.since))} s`;
    }
    if (show.problem) return "its state cannot be read";
    if (show.state === "failed" && show.failure) return `failed ${show.step ? `at step ${integer(show.step)}, ` : ""}${when(show.ended)}`;
    if (show.state === "finished" && last.end_reason) return `Finished: ${last.end_reason}`;
    if (show.state !== "running") return show.reason || show.state;
    const attempt = show.attempt > 0 ? `, attempt ${show.attempt}` : "";
    return `${show.nproc_per_node} ranks on ${where(last)} of ${show.host}, since ${when(show.started)}${attempt}`;
  }

  function where({ show, gpus, ranks: byRank }) {
    const devices = Object.values(byRank ?? {}).map((rank) => rank.device);
    if (!show.gpus?.length || devices[0] === "cpu") return "the CPU";
    const indices = (gpus ?? []).map((gpu) => gpu.index);
    return indices.length ? `GPU${indices.length > 1 ? "s" : ""} ${indices.join(", ")}` : `${show.gpus.length} GPUs`;
  }

  function draw() {
    if (!last) return;
    const { show, progress = {}, ranks = {} } = last;
    const active = ACTIVE.has(show.state);
    const asked = stopAsked && performance.now() - stopAsked < ASKED_MS;
    setPill(pill, show.state);
    stop.hidden = !active;
    again.hidden = active;
    resume.draw(show, show.state === "finished" && last.end_reason);
    stop.disabled = show.state === "stopping" || (active && asked);
    setText(stop, stop.disabled ? "Stopping…" : "Stop");
    strip.hidden = !active || show.state === "stopping";
    const joined = show.joined ?? 0;
    const at = { queued: 0, starting: joined > 0 ? 2 : 1, running: 3 }[show.state] ?? 3;
    steps.forEach((step, i) => {
      setClass(step, "done", i < at);
      setClass(step, "now", i === at);
    });
    setText(steps[2], `Ranks joined ${joined}/${show.nproc_per_node ?? DASH}`);
    setText(line, statusText(show));
    setClass(line, "said", !active);
    setClass(line, "bad", show.state === "failed" || show.state === "lost");

    const fraction = show.state === "finished" && !last.end_reason ? 1 : (progress.fraction ?? 0);
    fill.style.width = `${(100 * fraction).toFixed(2)}%`;
    bar.dataset.state = show.state;
    bar.setAttribute("aria-valuenow", String(Math.round(100 * fraction)));
    const step = progress.step ?? show.step;
    const stepsTotal = progress.steps_total ?? show.steps_total;
    const epoch = progress.epoch ?? show.epoch;
    const epochs = progress.epochs ?? show.epochs;
    setText(tiles.Epoch, epoch ? `${integer(epoch)} / ${integer(epochs)}` : DASH);
    setText(tiles.Step, step ? `${integer(step)} / ${integer(stepsTotal)}` : DASH);
    setText(tiles.Progress, step && stepsTotal ? percent(fraction, fraction < 0.1 ? 1 : 0) : DASH);
    setText(tiles["Time left"], active && progress.eta_s != null ? duration(Math.round(progress.eta_s)) : DASH);
    setText(tiles.Throughput, active && progress.samples_per_s != null ? `${rate(progress.samples_per_s)} samples/s` : DASH);
    setText(tiles.Elapsed, duration(time.elapsed(show)));
    const losses = Object.values(ranks).map((r) => number(r.loss)).filter((x) => x !== null);
    const loss = losses.length ? losses.reduce((a, b) => a + b, 0) / losses.length : number(show.final?.loss);
    setText(tiles["Mean loss"], measure(loss));
    setClass(tiles["Mean loss"], "bad", loss !== null && !Number.isFinite(loss));
    const accuracies = Object.values(ranks).map((r) => number(r.val_accuracy)).filter((x) => x !== null);
    setText(tiles["Val. accuracy"], percent(accuracies[0] ?? show.final?.val_accuracy));
    drawVerdict(show);
    drawNoticed(last.noticed);
  }

  function drawNoticed(now) {
    const key = JSON.stringify(now ?? null);
    if (key === noticedOf) return;
    noticedOf = key;
    noticed.replaceChildren();
    const say = (kind, what, text) => noticed.append(h("li", { class: kind }, h("strong", {}, what), " ", text));
    const more = (count, shown) => count > shown.length && `${integer(count - shown.length)} earlier ones are among the events below.`;
    for (const event of now?.watch ?? []) {
      const facts = [event.tensor && `tensor ${event.tensor}`, event.step != null && `step ${integer(event.step)}`, event.epoch != null && `epoch ${integer(event.epoch)}`];
      const who = event.rank == null ? "The ranks differ:" : `Rank ${event.rank} differs:`;
      say("watch", who, [event.message, facts.filter(Boolean).join(", ")].filter(Boolean).join(" · "));
    }
    if (more(now?.watch_count, now?.watch ?? [])) say("watch", "And more:", more(now.watch_count, now.watch));
    if (now?.skipped) {
      const { count, last: event } = now.skipped;
      say("skipped", `${integer(count)} step${count === 1 ? "" : "s"} left out.`, `${count === 1 ? "" : "The last: "}${leftOut(event)}`);
    }
    for (const event of now?.warning ?? []) say("warning", `Rank ${event.rank} warns:`, event.message ?? "");
    if (more(now?.warning_count, now?.warning ?? [])) say("warning", "And more:", more(now.warning_count, now.warning));
    noticed.hidden = !noticed.children.length;
  }

  function drawVerdict(show) {
    const failure = show.failure;
    const key = JSON.stringify([show.state, failure, show.problem]);
    if (key === verdictOf) return;
    verdictOf = key;
    verdict.replaceChildren();
    verdict.hidden = true;
    if (show.problem) {
      verdict.append(
        h("p", { class: "sentence" }, h("strong", {}, "Not all of this run can be read: "), show.problem),
        h("p", { class: "hint" }, "Its config, metrics, output and checkpoints below come from the other files of the run directory."),
      );
      verdict.hidden = false;
    } else if (show.state === "failed" && failure) {
      const who = failure.rank == null ? "" : `Rank ${failure.rank} failed first: `;
      verdict.append(h("p", { class: "sentence" }, h("strong", {}, who), failure.message));
      if (failure.victims?.length) {
        const ranks = failure.victims.map((rank) => `rank ${rank}`).join(", ");
        verdict.append(h("p", { class: "hint" }, `Went down with it: ${ranks}.`));
      }
      if (failure.traceback) {
        const button = h("button", { class: "small", type: "button" }, "Copy");
        button.addEventListener("click", () => copy(failure.traceback, button));
        const box = h("pre", { tabindex: "0", "aria-label": "Traceback" }, failure.traceback);
        verdict.append(h("div", { class: "traceback" }, button, box));
        requestAnimationFrame(() => (box.scrollTop = box.scrollHeight));
      }
      verdict.hidden = false;
    } else if (show.state === "lost") {
      verdict.append(
        h("p", { class: "hint" }, "Nothing of this run is alive. Run again starts a new run with the same config; the checkpoints below are whole."),
      );
      verdict.hidden = false;
    }
  }

  function receive(message) {
    if (message.error) {
      setPill(pill, "unknown");
      setText(line, message.error);
      setClass(line, "bad", true);
      stop.hidden = again.hidden = strip.hidden = resume.element.hidden = true;
      return;
    }
    last = message;
    time.see(message.show);
    const now = JSON.stringify([message.show.gpus ?? [], message.show.state === "queued"]);
    if (now !== layout) {
      layout = now;
      context.trigger("changed", now); // which charts there are depends on the GPUs that the run got
    }
    draw();
  }

  if (data.show) receive({ show: data.show });
  const unsubscribe = context.subscribe("run", { run: data.run }, receive);
  const timer = setInterval(() => {
    if (!document.hidden && last && ACTIVE.has(last.show.state)) draw();
  }, 500);
  return {
    destroy: () => {
      clearInterval(timer);
      unsubscribe();
    },
  };
}

const stepParts = ["data_s", "forward_s", "backward_s", "optimizer_s"];

function dataShare(rank) {
  const parts = stepParts.map((name) => number(rank[name]));
  const total = parts.reduce((a, b) => a + (b ?? 0), 0);
  return parts[0] === null || total <= 0 ? null : parts[0] / total;
}

/** One line per rank with its latest numbers. */
export function ranks(root, context) {
  const { data } = context;
  const names = new Map();
  const text = (get) => (row, td) => setText(td, get(row));
  const columns = [
    {
      title: "Rank",
      cell: (row, td) => {
        if (!td.firstChild) {
          td.append(h("i", { class: "dot", style: `background:${context.color(row.rank)}` }), h("span"));
        }
        setText(td.lastChild, row.rank);
      },
    },
    {
      title: "Device",
      cell: (row, td) => {
        const gpu = names.get(row.gpu);
        setText(td, gpu ? `GPU ${gpu.index}` : row.device);
        setTitle(td, gpu ? `${gpu.name}, ${row.device}, ${gpu.uuid}` : "");
      },
    },
    { title: "Step", class: "num", cell: text((row) => integer(row.step)) },
    {
      title: "Loss", class: "num",
      cell: (row, td) => {
        setText(td, measure(row.loss));
        const loss = number(row.loss);
        setClass(td, "bad", loss !== null && !Number.isFinite(loss));
      },
    },
    { title: "Accuracy", class: "num", help: "Of this rank's latest batch", cell: text((row) => percent(row.accuracy)) },
    {
      title: "Grad norm", class: "num norms", help: "Norm of this rank's own gradient before averaging, at the steps at which the ranks are compared; else of the averaged one",
      cell: (row, td) => {
        const own = number(row.rank_grad_norm);
        const norm = own ?? number(row.grad_norm);
        setText(td, measure(norm));
        setTitle(td, own === null ? "" : `after averaging: ${measure(row.grad_norm)}`);
        setClass(td, "bad", norm !== null && !Number.isFinite(norm));
      },
    },
    { title: "Samples/s", class: "num", cell: text((row) => rate(row.samples_per_s)) },
    {
      title: "Data wait", class: "num", help: "Share of a step's time spent waiting for data",
      cell: (row, td) => {
        const share = dataShare(row);
        setText(td, percent(share, 0));
        setTitle(td, stepParts.map((name) => `${name.slice(0, -2)} ${number(row[name]) === null ? DASH : `${(1000 * row[name]).toFixed(1)} ms`}`).join(", "));
      },
    },
    { title: "CPU", class: "num", help: "100 % is one core", cell: text((row) => (number(row.cpu) === null ? DASH : `${Math.round(row.cpu)} %`)) },
    { title: "Memory", class: "num", help: "Resident, with the rank's loader processes", cell: text((row) => bytes(row.memory)) },
  ];
  const table = new Table(columns, (row) => row.rank, { empty: "No rank has reported yet.", label: "Ranks" });
  const note = h("p", { class: "hint" });
  root.append(h("h2", {}, "Ranks"), table.element, note);
  const destroy = context.subscribe("run", { run: data.run }, (message) => {
    if (message.error) return;
    names.clear();
    for (const gpu of message.gpus ?? []) names.set(gpu.uuid, gpu);
    const rows = Object.entries(message.ranks ?? {}).map(([rank, values]) => ({ rank: Number(rank), ...values }));
    table.update(rows.sort((a, b) => a.rank - b.rank));
    setClass(root, "no-norms", !rows.some((row) => number(row.rank_grad_norm ?? row.grad_norm) !== null));
    const skipped = Object.entries(message.skipped ?? {}).filter(([, count]) => count > 0);
    const words = skipped.map(([rank, count]) => `rank ${rank}: ${count}`).join(", ");
    setText(note, words ? `Lines of the log that could not be read and were skipped: ${words}.` : "");
  });
  return { destroy };
}

/** The run's GPUs and the host in numbers. */
export function hardware(root, context) {
  const { data } = context;
  const table = new Table(gpuColumns(context), (gpu) => gpu.uuid, { label: "GPUs of this run" });
  const host = h("p", { class: "facts" });
  const none = h("p", { class: "empty", hidden: true }, "This run uses no GPU.");
  const title = h("h2");
  root.append(title, table.element, none, host);
  const destroy = context.subscribe("run", { run: data.run }, (message) => {
    if (message.error) return;
    // Before the first sample there are as many rows as there will be, so that nothing below moves.
    const coming = message.show.gpus.map((uuid) => ({ uuid, index: "", name: "not sampled yet" }));
    table.update(message.gpus?.length ? message.gpus : coming);
    setText(title, ACTIVE.has(message.show.state) ? "Hardware" : "Hardware, as it was last sampled");
    none.hidden = message.show.gpus.length > 0 || message.show.state === "queued";
    setHost(host, message.host);
  });
  return { destroy };
}

/** The checkpoints that are there, newest first. */
export function checkpoints(root, context) {
  const text = (get) => (row, td) => setText(td, get(row));
  const columns = [
    { title: "File", class: "mono", cell: (row, td) => {
      setText(td, row.path.split("/").pop());
      setTitle(td, row.path);
    } },
    { title: "Epoch", class: "num", cell: text((row) => integer(row.epoch)) },
    { title: "Step", class: "num", cell: text((row) => integer(row.step)) },
    { title: "Size", class: "num", cell: text((row) => bytes(row.size)) },
    { title: "Folder", class: "mono path", cell: text((row) => row.path.replace(/\/[^/]*$/, "/")) },
  ];
  const table = new Table(columns, (row) => row.path, {
    empty: "No checkpoint yet; rank 0 writes one after every epoch.",
    label: "Checkpoints",
  });
  root.append(table.element);
  const receive = (message) => message.show && table.update([...(message.show.checkpoints ?? [])].reverse());
  if (context.data.show) receive({ show: context.data.show });
  return { destroy: context.subscribe("run", { run: context.data.run }, receive) };
}
