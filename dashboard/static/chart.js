// One live chart: a picture first, then only new points. What it is given by Python is in components/live_chart.py, what
// comes over the wire in dashboard/live_channels.py.
import { Curves, timeAxis } from "./chart_data.js";
import { addStyles } from "./chart_style.js";
import { attachTip } from "./chart_tip.js";
import { short, swatch } from "./format.js";
import { hub } from "./hub.js";
import { loadPlotly } from "./plotly_loader.js";
import { fade, rankColor, rankDash, theme } from "./palette.js";

const DEBOUNCE_MS = 200;
const LOST_AFTER_MS = 1200; // a drop that is over before this is not worth a word
const LEGEND_MOST = 8;
const MANY = 25; // so many curves are told apart by pointing at them, not by their dashes
const MARKERS_MOST = 30; // so few points are each worth a mark

/** Called by Streamlit at every rerun with other data and at a change of theme. */
export default function mount({ data, parentElement }, base) {
  const wanted = JSON.stringify(data);
  let chart = parentElement.ddpChart;
  if (chart?.wanted === wanted) chart.restyle();
  else {
    chart?.destroy();
    chart = parentElement.ddpChart = new Chart(parentElement, data, base);
    chart.wanted = wanted;
  }
  const call = (chart.calls = (chart.calls ?? 0) + 1);
  return () => {
    // Streamlit also ends calls that a newer one has overtaken; the chart is the newer one's then.
    if (chart.calls !== call) return;
    chart.destroy();
    if (parentElement.ddpChart === chart) delete parentElement.ddpChart;
  };
}

class Chart {
  constructor(parent, data, base) {
    this.data = data;
    this.base = base;
    this.hub = hub(base);
    this.time = data.kind !== "ranks";
    this.curves = new Curves(this.time);
    this.revision = 0;
    this.view = 1; // the uirevision: another one forgets the zoom, and 0 would keep none
    this.hidden = new Set();
    this.window = null;
    this.visible = true;
    this.build(parent);
    this.restyle();
    const channel = this.time ? "hardware" : "metric";
    const of = { gpus: "gpus", host: "host", processes: "ranks" }[data.kind];
    this.params = this.time ? { run: data.run, of, field: data.field } : { run: data.run, metric: data.field };
    this.stop = this.hub.subscribe(channel, this.params, (payload) => this.receive(payload));
    this.stopStatus = this.hub.onStatus((status) => this.showStatus(status));
    this.seeing = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      this.redraw();
    });
    this.seeing.observe(this.root);
    this.sizing = new ResizeObserver(() => this.plot.clientWidth !== this.width && this.redraw());
    this.sizing.observe(this.root);
    this.loadPlotly();
  }

  loadPlotly() {
    loadPlotly(this.base, this.data.plotly).then(
      () => this.redraw(),
      () => !this.dead && (this.retry = setTimeout(() => this.loadPlotly(), 2000)),
    );
  }

  build(parent) {
    addStyles();
    const make = (name, tag = "div") => {
      const element = document.createElement(tag);
      element.className = `ddp-chart-${name}`;
      return element;
    };
    this.root = make("root");
    this.root.classList.add("ddp-chart");
    this.root.style.height = `${this.data.height}px`;
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", this.data.title);
    const head = make("head");
    this.title = make("title", "span");
    this.title.textContent = this.data.title;
    this.unit = make("unit", "span");
    this.legend = make("legend");
    this.lost = make("lost", "span");
    this.lost.hidden = true;
    this.lost.textContent = "connection lost, reconnecting…";
    this.back = make("back", "button");
    this.back.type = "button";
    this.back.textContent = "reset zoom";
    this.back.hidden = true;
    this.back.addEventListener("click", () => this.resetView());
    head.append(this.title, this.unit, this.lost, this.back, this.legend);
    this.plot = make("plot");
    this.note = make("note");
    this.note.setAttribute("role", "status");
    const body = make("body");
    body.append(this.plot, this.note);
    this.root.append(head, body);
    this.body = body;
    parent.append(this.root);
    this.showNote();
  }

  destroy() {
    if (this.dead) return;
    this.dead = true;
    this.stop();
    this.stopStatus();
    this.undraw?.();
    this.seeing.disconnect();
    this.sizing.disconnect();
    clearTimeout(this.debounce);
    clearTimeout(this.lostTimer);
    clearTimeout(this.retry);
    if (this.drawn) window.Plotly.purge(this.plot);
    this.root.remove();
  }

  // --- data ---

  receive(payload) {
    this.error = payload.error ?? null;
    if (payload.about) this.about = payload.about;
    if (payload.snapshot) this.curves.replace(payload.snapshot);
    if (payload.add) this.curves.add(payload.add);
    if (payload.window !== undefined) this.curves.setWindow(payload.window);
    this.redraw();
  }

  /** The traces as they are shown, in order: ranks or GPUs, then the mean. */
  series() {
    const keys = this.curves.keys();
    const whole = this.data.whole && keys.includes("mean") && this.curves.last("mean") !== null;
    return (whole ? ["mean"] : keys).map((key, place) => {
      const about = this.about?.traces?.[key] ?? {};
      const mean = key === "mean";
      const index = about.index ?? (mean ? -1 : Number(key));
      if (whole) return { key, place, mean: false, whole, index: 0, name: "all ranks", label: "all ranks" };
      const name = mean ? "mean" : (about.name ?? `rank ${key}`);
      return { key, place, mean, index, name, detail: about.detail, label: mean ? "mean" : name.replace(/^(rank|GPU) /, "") };
    });
  }

  color(series) {
    if (series.mean || series.whole || this.data.kind === "host") return this.theme.text;
    return rankColor(series.index, this.theme.dark);
  }

  /** What values are multiplied with for the axis, and its unit. */
  scale() {
    if (this.data.unit === "fraction") return { factor: 100, unit: "%" };
    if (this.data.unit !== "bytes") return { factor: 1, unit: this.data.unit };
    const most = this.about?.limit ?? this.curves.most();
    return most >= 2 ** 30 ? { factor: 2 ** -30, unit: "GiB" } : { factor: 2 ** -20, unit: "MiB" };
  }

  // --- drawing ---

  redraw() {
    if (this.dead || !window.Plotly || !this.visible) return;
    this.undraw = this.hub.draw((this.drawing ??= () => this.draw()));
  }

  async draw() {
    if (this.dead || !this.visible) return;
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const { factor, unit } = this.scale();
    const shown = this.series();
    this.many = shown.length > MANY;
    const points = this.curves.count();
    // Empty axes look the same whoever joins: while ranks start, the processor is theirs.
    const empty = points ? null : JSON.stringify([this.width, this.theme, unit]);
    if (!empty || empty !== this.emptyDrawn) await this.plotCurves(shown, unit, factor);
    this.emptyDrawn = empty;
    if (this.dead) return;
    this.unit.textContent = unit;
    this.showLegend(shown, factor);
    this.showNote();
    Object.assign(this.root.dataset, {
      points,
      lastX: this.curves.lastX() ?? "",
      traces: shown.length,
      draws: this.revision,
      zoomed: String(!this.back.hidden),
      windowed: String(this.curves.window !== null),
    });
    this.root.dispatchEvent(
      new CustomEvent("ddp:drawn", { bubbles: true, detail: { points, lastX: this.curves.lastX(), draws: this.revision } }),
    );
  }

  async plotCurves(shown, unit, factor) {
    const traces = shown.map((series) => this.trace(series, factor));
    traces.push(this.badTrace(shown));
    this.revision += 1;
    await window.Plotly.react(this.plot, traces, this.layout(unit, factor), {
      displaylogo: false,
      displayModeBar: "hover",
      doubleClick: false,
      modeBarButtons: [["zoom2d", "pan2d", "toImage"]],
      toImageButtonOptions: { filename: this.data.title, scale: 2 },
    });
    if (!this.drawn && !this.dead) this.listen();
  }

  trace(series, factor) {
    const { x, y } = this.curves.shown(series.key);
    return {
      type: "scatter",
      mode: x.length > MARKERS_MOST ? "lines" : "lines+markers",
      name: series.name,
      x,
      y: factor === 1 ? y : y.map((value) => (value === null ? null : value * factor)),
      visible: !this.hidden.has(series.key),
      line: {
        color: this.color(series),
        width: series.mean ? 2 : this.many ? 0.75 : 1.25,
        dash: series.mean ? "4px,3px" : this.many ? "solid" : rankDash(Math.max(series.index, 0)),
      },
      marker: { size: 4 },
      opacity: series.mean ? 1 : this.many ? 0.6 : 0.85,
      hoverinfo: "skip",
      showlegend: false,
    };
  }

  /** Values that are no points on the axis, marked at its upper edge. */
  badTrace(shown) {
    const marks = shown
      .filter((series) => !series.mean && !this.time && !this.hidden.has(series.key))
      .flatMap((series) => this.curves.bad(series.key).map(([x, what]) => ({ x, what, series })));
    return {
      type: "scatter",
      mode: "markers",
      name: "not finite",
      x: marks.map((mark) => mark.x),
      y: marks.map(() => 1),
      text: marks.map((mark) => `${mark.what} at step ${mark.x}, ${mark.series.name}`),
      yaxis: "y2",
      cliponaxis: false,
      marker: { symbol: "triangle-down", size: 8, color: marks.map((mark) => this.color(mark.series)) },
      hoverinfo: "skip",
      showlegend: false,
    };
  }

  layout(unit, factor) {
    const { muted, grid, font, border, text, primary } = this.theme;
    const axis = {
      color: muted,
      gridcolor: grid,
      linecolor: border,
      zeroline: false,
      tickfont: { size: 11, color: muted },
      ticks: "",
      fixedrange: false,
    };
    const limit = this.about?.limit;
    const range = this.data.yRange ?? (limit ? [0, limit * factor] : null);
    const room = range ? (range[1] - range[0]) * 0.03 : 0; // so that a line at the end is seen whole
    return {
      width: this.width,
      height: this.plot.clientHeight,
      margin: { l: 46, r: 10, t: 8, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: font, size: 11, color: text },
      hovermode: false,
      dragmode: "zoom",
      uirevision: this.view,
      datarevision: this.revision,
      showlegend: false,
      selectdirection: "h",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: fade(text, 0.35), activecolor: primary },
      xaxis: {
        ...axis,
        type: this.time ? "date" : "linear",
        showgrid: false,
        showline: true,
        title: { text: this.time ? "local time" : "step", font: { size: 11, color: muted }, standoff: 4 },
        nticks: Math.max(3, Math.floor(this.width / 110)),
        hoverformat: "d",
        ...(this.time ? { tickformatstops: timeAxis.ticks } : { tickformat: ",~r", separatethousands: true }),
        ...(this.curves.span() === null ? { range: this.time ? timeAxis.lastMinute() : [0, 10], showticklabels: false } : { autorange: true }),
      },
      yaxis: {
        ...axis,
        nticks: 6,
        ticksuffix: unit ? `\u2009${unit.split(" ")[0]}` : "", // "% of a core" would not fit
        showticksuffix: "last",
        exponentformat: "power",
        rangemode: this.data.fromZero ? "tozero" : "normal",
        ...(range ? { range: [range[0] - room, range[1] + room] } : { autorange: true }),
        ...(range || this.curves.count() ? {} : { showticklabels: false, showgrid: false }),
      },
      yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false },
    };
  }

  listen() {
    this.drawn = true;
    this.plot.on("plotly_relayout", (change) => this.onRelayout(change));
    this.plot.on("plotly_doubleclick", () => this.resetView());
    attachTip(this);
  }

  onRelayout(change) {
    if (!Object.keys(change).some((name) => /^[xy]axis\.(range|autorange)/.test(name))) return;
    this.back.hidden = false;
    this.root.dataset.zoomed = "true";
    const range = this.plot.layout.xaxis.range;
    clearTimeout(this.debounce);
    if (!Object.keys(change).some((name) => name.startsWith("xaxis."))) return;
    // As wide again on either side, so that a short pan shows what is there already.
    const [lo, hi] = range.map((end) => this.curves.toWire(end));
    this.debounce = setTimeout(() => this.askWindow([lo - (hi - lo) / 2, hi + (hi - lo) / 2]), DEBOUNCE_MS);
  }

  askWindow(window) {
    if (this.window === window) return;
    this.window = window;
    this.stop.update(window ? { ...this.params, window, points: 3000 } : this.params);
  }

  resetView() {
    clearTimeout(this.debounce);
    this.back.hidden = true;
    this.view += 1;
    this.curves.setWindow(null);
    this.askWindow(null);
    this.redraw();
  }

  // --- around the plot ---

  restyle() {
    this.theme = theme(this.root);
    this.root.style.setProperty("--ddp-muted", this.theme.muted);
    this.root.style.setProperty("--ddp-line", fade(this.theme.text, 0.25));
    this.redraw();
  }

  showLegend(shown, factor) {
    const text = JSON.stringify([shown.map((s) => [s.key, s.name, s.detail]), this.width]);
    if (text !== this.legendText) {
      this.legendText = text;
      const fill = (listed) => {
        const rest = shown.length - listed.length;
        const word = this.data.kind === "gpus" ? "GPU" : "rank";
        const named = this.data.kind !== "host" && listed.some((series) => !series.mean && !series.whole);
        const lead = rest ? `${rest} ${word}s` : named ? word : "";
        this.legend.replaceChildren(lead, ...listed.map((series) => this.legendItem(series)));
        this.listed = listed;
      };
      const brief = shown.filter((series) => series.mean);
      fill(shown.length > LEGEND_MOST + 1 ? brief : shown);
      if (this.legend.scrollWidth > this.legend.clientWidth) fill(brief);
    }
    // In place, so that a button that has the keyboard's focus keeps it.
    this.listed.forEach((series, place) => {
      const button = this.legend.querySelectorAll("button")[place];
      button.setAttribute("aria-pressed", String(!this.hidden.has(series.key)));
      button.firstChild.style.setProperty("--ddp-color", this.color(series));
      if (!series.mean && !series.whole && !this.time) return;
      const last = this.curves.last(series.key);
      button.lastChild.textContent = short(last === null ? null : last * factor, this.unit.textContent);
    });
  }

  legendItem(series) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.key = series.key;
    button.title = [series.name, series.detail, "click to hide or show"].filter(Boolean).join(" · ");
    button.append(swatch(this.color(series), series.mean), series.label, document.createElement("b"));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(series.key)) this.hidden.add(series.key);
      this.redraw();
    });
    return button;
  }

  showNote() {
    const waiting = this.time ? "waiting for the first sample" : "waiting for the first step";
    const words = this.error ?? (this.curves.count() ? "" : (this.about?.note ?? waiting));
    if (this.note.textContent !== words) this.note.textContent = words;
    this.note.hidden = !words;
    this.note.classList.toggle("ddp-chart-error", Boolean(this.error));
  }

  showStatus(status) {
    clearTimeout(this.lostTimer);
    if (status !== "reconnecting") this.lost.hidden = true;
    else this.lostTimer = setTimeout(() => (this.lost.hidden = false), LOST_AFTER_MS);
  }
}
