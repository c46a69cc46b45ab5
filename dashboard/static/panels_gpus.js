// GPUs in numbers: the columns every GPU table shares, and the machine's table on the GPUs page.
import { DASH, Table, bytes, bytesOf, counted, h, number, pageLink, setBar, setClass, setText, setTitle } from "./panels_dom.js";

function figure(field, format, fraction) {
  return (gpu, td) => {
    const value = number(gpu[field]);
    const lost = gpu.status === "lost";
    const why = gpu.missing?.[field] ?? (lost ? "the GPU is lost" : "not reported");
    setBar(td, value === null ? null : fraction(gpu, value), value === null ? DASH : format(gpu, value), value === null ? why : "");
    setClass(td, "missing", value === null);
  };
}

/** Columns of a table of GpuSamples: zero is 0, a missing value is a dash whose tooltip says why. */
export function gpuColumns(context) {
  return [
    {
      title: "GPU",
      cell: (gpu, td) => {
        if (!td.firstChild) td.append(h("i", { class: "dot" }), h("span"), h("em"));
        td.firstChild.style.background = gpu.index === "" ? "" : context.color(gpu.index);
        setText(td.children[1], `${gpu.index}  ${gpu.name ?? ""}`);
        setText(td.children[2], gpu.status === "lost" ? "lost" : "");
        setTitle(td, gpu.uuid);
        setClass(td.parentElement, "lost", gpu.status === "lost");
      },
    },
    { title: "Busy", class: "num wide", help: "Share of time in which a kernel was running", cell: figure("busy", (_, v) => `${Math.round(v)} %`, (_, v) => v / 100) },
    { title: "Memory", class: "num wide", cell: figure("memory_used", (gpu, v) => bytesOf(v, gpu.memory_total), (gpu, v) => (number(gpu.memory_total) ? v / gpu.memory_total : null)) },
    { title: "Power", class: "num wide", cell: figure("power_w", (gpu, v) => (number(gpu.power_limit_w) ? `${Math.round(v)} / ${Math.round(gpu.power_limit_w)} W` : `${Math.round(v)} W`), (gpu, v) => (number(gpu.power_limit_w) ? v / gpu.power_limit_w : null)) },
    { title: "Temperature", class: "num", cell: figure("temperature_c", (_, v) => `${Math.round(v)} °C`, () => null) },
    { title: "SM clock", class: "num extra", cell: figure("sm_clock_mhz", (_, v) => `${Math.round(v)} MHz`, () => null) },
  ];
}

function processWords(process) {
  const memory = number(process.memory_used);
  const name = process.name ? `${process.name} (pid ${process.pid})` : `pid ${process.pid}`;
  return memory === null ? name : `${name} ${bytes(memory)}`;
}

/** The host in one line. */
export function setHost(element, host) {
  if (!host) return setText(element, "");
  const facts = [
    ["Host CPU", number(host.cpu) === null ? DASH : `${Math.round(host.cpu)} %`],
    ["memory", bytesOf(host.memory_used, host.memory_total)],
    ["load", number(host.load1) === null ? DASH : host.load1.toFixed(1)],
    ["disk free", bytes(host.disk_free)],
  ];
  if (element.children.length !== facts.length) {
    element.replaceChildren(...facts.map(([name]) => h("span", {}, `${name} `, h("b"))));
  }
  facts.forEach(([, value], i) => setText(element.children[i].lastChild, value));
}

/** Every GPU of the machine and who uses it. */
export function machine(root, context) {
  const users = (gpu, td) => {
    const key = JSON.stringify([gpu.run, gpu.processes, gpu.status]);
    if (td.dataset.key === key) return;
    td.dataset.key = key;
    const parts = [];
    if (gpu.run) parts.push(pageLink(context, "run", { run: gpu.run }, gpu.run));
    const processes = gpu.processes ?? [];
    const words = processes.map(processWords);
    if (words.length) parts.push(h("span", { class: "muted", title: words.join("\n") }, words.slice(0, 2).join(", ") + (words.length > 2 ? ` and ${words.length - 2} more` : "")));
    td.replaceChildren(...(parts.length ? parts : [h("span", { class: "muted" }, gpu.status === "lost" ? DASH : "free")]));
  };
  const columns = [...gpuColumns(context), { title: "Used by", class: "users", cell: users }];
  const title = h("p", { class: "found" });
  const table = new Table(columns, (gpu) => gpu.uuid, { label: "GPUs of this machine" });
  const none = h("div", { class: "notice", hidden: true });
  const host = h("p", { class: "facts" });
  root.append(title, table.element, none, host);
  let shown = "";
  const destroy = context.subscribe("machine", {}, (message) => {
    const { gpus, host: hostSample } = message;
    setHost(host, hostSample);
    if (!gpus) return;
    const found = gpus.gpus ?? [];
    const names = counted(found.map((gpu) => gpu.name ?? "unnamed GPU"));
    setText(title, found.length ? `${found.length === 1 ? "1 × " : ""}${names}, driver ${gpus.driver ?? "unknown"}` : "");
    title.hidden = found.length === 0;
    table.update(found);
    const problem = gpus.error ?? (found.length ? "" : "this machine has no NVIDIA GPU");
    if (problem === shown) return;
    shown = problem;
    none.hidden = !problem;
    none.replaceChildren(
      h("p", { class: "sentence" }, h("strong", {}, found.length ? "The driver stopped answering: " : "No GPU to show: "), problem),
      h("p", { class: "hint" }, "Runs train on the CPU with gloo meanwhile. If this machine has an NVIDIA GPU, check that nvidia-smi works in a terminal; after a driver update, reload the driver or reboot. This page looks again by itself."),
    );
  });
  return { destroy };
}
