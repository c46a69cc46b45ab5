// The page's one WebSocket, shared by all of its components.
//
//   import { hub } from "./hub.js";
//   const stop = hub(base).subscribe("run", { run: "digits-1" }, (payload) => …);   stop();
//
// A subscription survives a dropped connection: it is made again with the cursor that came with the last payload (or
// the one that options.cursor() gives), so that the server goes on where this page stopped.
// Charts draw through hub(base).draw(fn), which keeps the whole page's drawing within a share of the main thread.

const DOCUMENTS = new Set(["run", "runs", "machine"]); // each payload is whole: equal subscriptions share one
const RETRY_FIRST_MS = 250;
const RETRY_MOST_MS = 5000;
const QUIET_MS = 15000; // a socket that is silent for so long is asked whether it lives
const ANSWER_MS = 5000;
const IDLE_MS = 10000;
const FRAME_MS = 150; // at least so long between two rounds of drawing; more where drawing is slow
const FRAME_MOST_MS = 1500;
const DRAW_SHARE = 3; // rounds are this many times their own cost apart

class Hub {
  constructor(base) {
    this.url = base.replace(/^http/, "ws") + "ddp/live";
    this.subscriptions = new Map();
    this.documents = new Map();
    this.listeners = new Set();
    this.status = "connecting";
    this.nextId = 1;
    this.retryMs = RETRY_FIRST_MS;
    this.toDraw = new Set();
    this.roundAt = 0;
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) return;
      this.retryNow();
      if (this.socket?.readyState === WebSocket.OPEN) this.ask();
      this.schedule();
    });
  }

  /**
   * Follow a channel. Returns a function that ends it; its method update(params) changes the parameters.
   * onMessage gets each payload, {error} included.
   */
  subscribe(channel, params, onMessage, options = {}) {
    return DOCUMENTS.has(channel) ? this.share(channel, params, onMessage) : this.open(channel, params, onMessage, options);
  }

  share(channel, params, onMessage) {
    const key = channel + JSON.stringify(params);
    let shared = this.documents.get(key);
    if (!shared) {
      shared = { callbacks: new Set(), last: null };
      shared.stop = this.open(channel, params, (payload) => {
        shared.last = payload;
        for (const callback of [...shared.callbacks]) call(callback, payload);
      });
      this.documents.set(key, shared);
    }
    const callback = (payload) => onMessage(payload);
    shared.callbacks.add(callback);
    if (shared.last) queueMicrotask(() => shared.callbacks.has(callback) && call(callback, shared.last));
    return () => {
      shared.callbacks.delete(callback);
      if (shared.callbacks.size === 0 && this.documents.get(key) === shared) {
        this.documents.delete(key);
        shared.stop();
      }
    };
  }

  open(channel, params, onMessage, options = {}) {
    const id = this.nextId++;
    const subscription = { id, channel, params, onMessage, options, cursor: null };
    this.subscriptions.set(id, subscription);
    clearTimeout(this.idleTimer);
    if (this.socket?.readyState === WebSocket.OPEN) this.request(subscription);
    else this.connect();
    const stop = () => {
      if (!this.subscriptions.delete(id)) return;
      this.send({ op: "unsub", id });
      if (this.subscriptions.size === 0) {
        this.idleTimer = setTimeout(() => this.subscriptions.size === 0 && this.socket?.close(), IDLE_MS);
      }
    };
    stop.update = (next) => {
      subscription.params = next;
      this.send({ op: "update", id, params: next });
    };
    return stop;
  }

  /** Be told "connected", "reconnecting" (and at first "connecting"), now and at each change. */
  onStatus(callback) {
    this.listeners.add(callback);
    call(callback, this.status);
    return () => this.listeners.delete(callback);
  }

  /** Call fn in the page's next round of drawing; asking again before that is the same as asking once. */
  draw(fn) {
    this.toDraw.add(fn);
    this.schedule();
    return () => this.toDraw.delete(fn);
  }

  // --- the connection ---

  connect() {
    if (this.socket || this.subscriptions.size === 0) return;
    clearTimeout(this.retryTimer);
    const socket = new WebSocket(this.url);
    this.socket = socket;
    socket.onopen = () => {
      this.retryMs = RETRY_FIRST_MS;
      this.setStatus("connected");
      for (const subscription of this.subscriptions.values()) this.request(subscription);
      this.listen();
    };
    socket.onmessage = (event) => this.receive(event.data);
    socket.onclose = () => this.lost(socket);
  }

  lost(socket) {
    if (this.socket !== socket) return;
    this.socket = null;
    clearTimeout(this.quietTimer);
    if (this.subscriptions.size === 0) return;
    this.setStatus("reconnecting");
    this.retryTimer = setTimeout(() => this.connect(), this.retryMs * (0.75 + Math.random() / 2));
    this.retryMs = Math.min(this.retryMs * 2, RETRY_MOST_MS);
  }

  retryNow() {
    if (this.socket) return;
    this.retryMs = RETRY_FIRST_MS;
    this.connect();
  }

  request({ id, channel, params, options, cursor }) {
    const from = options.cursor ? options.cursor() : cursor;
    this.send(from === null || from === undefined ? { op: "sub", id, channel, params } : { op: "sub", id, channel, params, cursor: from });
  }

  send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  receive(text) {
    this.listen();
    for (const payload of JSON.parse(text)) {
      const subscription = this.subscriptions.get(payload.id);
      if (!subscription) continue;
      if (payload.cursor !== undefined) subscription.cursor = payload.cursor;
      call(subscription.onMessage, payload);
    }
  }

  // After sleep or behind a proxy a socket can be dead and not say so.
  listen() {
    clearTimeout(this.quietTimer);
    this.quietTimer = setTimeout(() => this.ask(), QUIET_MS);
  }

  ask() {
    const socket = this.socket;
    if (!socket) return;
    this.send({ op: "ping" });
    clearTimeout(this.quietTimer);
    this.quietTimer = setTimeout(() => {
      socket.close();
      this.lost(socket);
    }, ANSWER_MS);
  }

  setStatus(status) {
    if (this.status === status) return;
    this.status = status;
    for (const callback of [...this.listeners]) call(callback, status);
  }

  // --- drawing ---

  schedule() {
    if (this.roundTimer || this.toDraw.size === 0 || document.hidden) return;
    this.roundTimer = setTimeout(() => this.round(), Math.max(0, this.roundAt - performance.now()));
  }

  async round() {
    let cost = 0;
    // One drawing a task, so that a click never waits for all charts of a page.
    for (const fn of [...this.toDraw]) {
      if (document.hidden) break;
      if (!this.toDraw.delete(fn)) continue;
      const start = performance.now();
      try {
        await fn();
      } catch (error) {
        console.error(error);
      }
      cost += performance.now() - start;
      await new Promise((resolve) => setTimeout(resolve));
    }
    this.roundAt = performance.now() + Math.min(Math.max(FRAME_MS - cost, cost * DRAW_SHARE), FRAME_MOST_MS);
    this.roundTimer = null;
    this.schedule();
  }
}

function call(callback, value) {
  try {
    callback(value);
  } catch (error) {
    console.error(error);
  }
}

/** The hub of this page for an app's base URL, which ends in "/". */
export function hub(base) {
  // On the window, since the same module can be loaded more than once on a page.
  const hubs = (window.__ddpHubs ??= new Map());
  if (!hubs.has(base)) hubs.set(base, new Hub(base));
  return hubs.get(base);
}
