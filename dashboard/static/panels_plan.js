// The launch page's plan: what one click on Start will do, in numbers.
import { DASH, Table, h, integer, setClass, setText } from "./panels_dom.js";
import { loadPlotly } from "./plotly_loader.js";

export function plan(root, context) {
  const facts = ["Effective batch", "Steps", "Samples", "Learning rate"].map((name) => [name, h("dd"), h("span", { class: "muted" })]);
  const grid = h("dl", { class: "plan" }, ...facts.map(([name, value, detail]) => h("div", {}, h("dt", {}, name), value, detail)));
  const columns = [
    {
      title: "Rank",
      cell: (row, td) => {
        if (!td.firstChild) td.append(h("i", { class: "dot", style: `background:${context.color(row.rank)}` }), h("span"));
        setText(td.lastChild, row.rank);
      },
    },
    { title: "Samples", class: "num", help: "Of the training set, in one epoch", cell: (row, td) => setText(td, integer(row.samples)) },
    {
      title: "First of the shuffled order", class: "num left",
      cell: (row, td) => setText(td, `${row.first.map(integer).join(", ")}${row.samples > row.first.length ? ", …" : ""}`),
    },
  ];
  const table = new Table(columns, (row) => row.rank, { empty: "The training set has no samples that can be counted.", label: "Split of the samples" });
  const box = h("div", { class: "scroll-y split" }, table.element);
  const note = h("p", { class: "hint" });
  root.append(h("h2", {}, "Plan"), grid, h("h2", {}, "Split of the samples"), box, note);

  function update({ plan: p, stale }) {
    setClass(root, "stale", stale);
    const set = (i, value, detail) => {
      setText(facts[i][1], value);
      setText(facts[i][2], detail);
    };
    const factors = [`${integer(p.batch_size)} per process`, `${integer(p.nproc_per_node)} processes`];
    if (p.accumulation > 1) factors.push(`${integer(p.accumulation)} added up`);
    set(0, integer(p.effective_batch), `${factors.join(" × ")} = ${integer(p.effective_batch)}`);
    const steps = p.steps_per_epoch * p.epochs;
    set(1, p.steps_per_epoch ? integer(steps) : DASH, `${integer(p.steps_per_epoch)} per epoch × ${integer(p.epochs)} epochs`);
    set(2, integer(p.train_samples), `${integer(p.val_samples)} for validation`);
    const scaled = p.lr_scaling !== "none";
    facts[3][1].parentElement.hidden = !scaled;
    setClass(grid, "four", scaled);
    if (scaled) {
      const ratio = `${integer(p.effective_batch)} / ${integer(p.lr_batch)}`;
      const short = (lr) => String(Number(lr.toPrecision(4)));
      set(3, short(p.lr), `${short(p.base_lr)} × ${p.lr_scaling === "sqrt" ? `√(${ratio})` : ratio}`);
    }
    table.update(p.ranks);
    const uneven = p.padded ? [p.padded, "seen twice"] : p.dropped ? [p.dropped, "left out"] : null;
    setText(note, uneven
      ? `${integer(uneven[0])} sample${uneven[0] === 1 ? " is" : "s are"} ${uneven[1]} in an epoch, so that all ranks have as many. Validation counts each sample once.`
      : p.ranks.length ? "The samples divide evenly; none is seen twice or left out in an epoch." : "");
  }

  update(context.data);
  // The next page is the run's, with its charts: what they need can be here by then.
  requestIdleCallback(() => loadPlotly(context.base, context.data.plotly).catch(() => {}), { timeout: 3000 });
  return { update };
}
