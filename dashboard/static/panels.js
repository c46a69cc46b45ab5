// The entry: one component, several panels. Streamlit calls it at every rerun with other data and at every change of
// theme, each time for the same element; a panel is built once and told about new data.
import { hub } from "./hub.js";
import { oneEntryAStep } from "./one_step.js";
import { rankColor, theme } from "./palette.js";
import { h } from "./panels_dom.js";
import { machine } from "./panels_gpus.js";
import { plan } from "./panels_plan.js";
import { checkpoints, hardware, header, ranks } from "./panels_run.js";
import { list } from "./panels_runs.js";
import { events, output } from "./panels_text.js";

const PANELS = { checkpoints, connection, events, hardware, header, list, machine, output, plan, ranks };
const COLORS = 8;

oneEntryAStep();

/** The quiet word in the corner that says whether the page is live. */
function connection(root, context) {
  const word = h("span");
  root.append(h("span", { class: "connection", role: "status" }, h("i"), word));
  const stop = context.hub.onStatus((status) => {
    root.firstChild.dataset.status = status;
    word.textContent = { connected: "live", reconnecting: "reconnecting" }[status] ?? "";
  });
  return { destroy: stop };
}

export default function panel({ data, parentElement, setTriggerValue }, base) {
  let mounted = parentElement.ddpPanel;
  if (!mounted) {
    const root = h("div", { class: "panel", "data-panel": data.panel });
    parentElement.append(root);
    const live = hub(base);
    const context = {
      base,
      data,
      hub: live,
      color: (index) => `var(--rank-${index % COLORS})`,
      trigger: (name, value) => mounted.trigger(name, value),
      subscribe: (channel, params, receive) => live.subscribe(channel, params, receive),
    };
    mounted = { root, trigger: setTriggerValue, calls: 0 };
    parentElement.ddpPanel = mounted;
    mounted.panel = PANELS[data.panel](root, context) ?? {};
    mounted.seen = JSON.stringify(data);
  }
  mounted.trigger = setTriggerValue;
  const call = ++mounted.calls;
  const { dark } = theme(mounted.root);
  for (let i = 0; i < COLORS; i++) mounted.root.style.setProperty(`--rank-${i}`, rankColor(i, dark));
  const now = JSON.stringify(data);
  if (now !== mounted.seen) {
    mounted.seen = now;
    mounted.panel.update?.(data);
  }
  return () => {
    // Streamlit also cleans up after a call that a later one overtook; the panel belongs to the last one.
    if (parentElement.ddpPanel !== mounted || call !== mounted.calls) return;
    mounted.panel.destroy?.();
    mounted.root.remove();
    parentElement.ddpPanel = undefined;
  };
}
