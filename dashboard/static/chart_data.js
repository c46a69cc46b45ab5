// The points of a chart: the overview, which grows, and the finer window that a zoom asked for.

const MINUTE_MS = 60000;

/** Plotly draws dates as UTC, so local time is UTC moved by the zone's offset at that moment. */
export const timeAxis = {
  fromSeconds: (ts) => ts * 1000 - new Date(ts * 1000).getTimezoneOffset() * MINUTE_MS,
  toSeconds: (ms) => (ms + new Date(ms).getTimezoneOffset() * MINUTE_MS) / 1000,
  lastMinute: () => {
    const now = timeAxis.fromSeconds(Date.now() / 1000);
    return [now - MINUTE_MS, now];
  },
  ticks: [
    { dtickrange: [null, 1000], value: "%H:%M:%S.%2f" },
    { dtickrange: [1000, 60000], value: "%H:%M:%S" },
    { dtickrange: [60000, 86400000], value: "%H:%M" },
    { dtickrange: [86400000, null], value: "%b %e" },
  ],
};

export class Curves {
  constructor(time) {
    this.time = time;
    this.overview = new Map();
    this.window = null;
  }

  /** A position on the x axis, as Plotly gives it, in the server's terms. */
  toWire(x) {
    if (!this.time) return Number(x);
    return timeAxis.toSeconds(typeof x === "number" ? x : Date.parse(`${String(x).replace(" ", "T")}Z`));
  }

  read(trace) {
    const x = this.time ? trace.x.map(timeAxis.fromSeconds) : trace.x;
    const bad = trace.bad.map(([at, what]) => [this.time ? timeAxis.fromSeconds(at) : at, what]);
    return { x, y: trace.y, bad };
  }

  replace(traces) {
    this.overview = new Map(traces.map((trace) => [trace.key, this.read(trace)]));
    this.sort();
  }

  add(traces) {
    for (const trace of traces) {
      const points = this.read(trace);
      const known = this.overview.get(trace.key);
      if (!known) {
        this.overview.set(trace.key, points);
        this.sort();
        continue;
      }
      for (let i = 0; i < points.x.length; i += 1) {
        known.x.push(points.x[i]);
        known.y.push(points.y[i]);
      }
      known.bad.push(...points.bad);
    }
  }

  /** Ranks in order, the mean last so that it lies on top. */
  sort() {
    if (!this.overview.has("mean")) return;
    const place = ([key]) => (key === "mean" ? Infinity : Number(key));
    this.overview = new Map([...this.overview].sort((a, b) => place(a) - place(b)));
  }

  setWindow(window) {
    if (window === null) {
      this.window = null;
      return;
    }
    this.window = new Map();
    for (const trace of window.traces) if (trace.x.length) this.window.set(trace.key, this.read(trace));
  }

  keys() {
    return [...this.overview.keys()];
  }

  /** What is drawn of a curve: the finer points where there are some, else the overview's. */
  shown(key) {
    const all = this.overview.get(key);
    const fine = this.window?.get(key);
    if (!fine) return all;
    const left = lowerBound(all.x, fine.x[0]);
    const right = lowerBound(all.x, fine.x.at(-1) + (this.time ? 0.5 : 1e-9));
    return {
      x: [...all.x.slice(0, left), ...fine.x, ...all.x.slice(right)],
      y: [...all.y.slice(0, left), ...fine.y, ...all.y.slice(right)],
    };
  }

  bad(key) {
    return this.overview.get(key).bad;
  }

  /** The point of a curve that is nearest to x, as {x, y}; y is null where a value is missing. */
  nearest(key, x) {
    const { x: xs, y: ys } = this.shown(key);
    if (!xs.length) return null;
    let i = lowerBound(xs, x);
    if (i === xs.length || (i > 0 && x - xs[i - 1] < xs[i] - x)) i -= 1;
    return { x: xs[i], y: ys[i] };
  }

  /** Number of points with a value, the mean's not counted. */
  count() {
    let count = 0;
    for (const [key, { x, y, bad }] of this.overview) {
      if (key === "mean") continue;
      count += this.time ? y.reduce((n, value) => n + (value !== null), 0) : Math.max(x.length, bad.length);
    }
    return count;
  }

  last(key) {
    return this.overview.get(key).y.at(-1) ?? null;
  }

  lastX() {
    const ends = [...this.overview.values()].filter(({ x }) => x.length).map(({ x }) => x.at(-1));
    if (!ends.length) return null;
    const last = ends.reduce((a, b) => Math.max(a, b));
    return this.time ? timeAxis.toSeconds(last) : last;
  }

  span() {
    return this.lastX();
  }

  most() {
    let most = 0;
    for (const { y } of this.overview.values()) for (const value of y) if (value > most) most = value;
    return most;
  }
}

function lowerBound(xs, x) {
  let lo = 0;
  let hi = xs.length;
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (xs[middle] < x) lo = middle + 1;
    else hi = middle;
  }
  return lo;
}
