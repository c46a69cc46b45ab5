// How a chart looks around its plot. In the page once, however many charts there are.

export function addStyles() {
  if (document.getElementById("ddp-chart-style")) return;
  const style = document.createElement("style");
  style.id = "ddp-chart-style";
  style.textContent = `
.ddp-chart { display: flex; flex-direction: column; position: relative; width: 100%; color: var(--st-text-color);
  font-family: var(--st-font); font-size: 12px; line-height: 1.3; overflow: hidden; container-type: inline-size; }
.ddp-chart-head { display: flex; align-items: center; gap: 6px; height: 22px; flex: none; padding: 0 10px 0 4px; white-space: nowrap; }
.ddp-chart-title { font-weight: 600; font-size: 13px; }
.ddp-chart-unit { color: var(--ddp-muted); }
.ddp-chart-lost { color: var(--st-red-text-color, #b3261e); overflow: hidden; text-overflow: ellipsis; }
.ddp-chart-legend { margin-left: auto; display: flex; align-items: center; gap: 10px; height: 100%; overflow: hidden; color: var(--ddp-muted); }
.ddp-chart button { all: unset; cursor: pointer; color: inherit; border-radius: 3px; }
.ddp-chart button:focus-visible { outline: 2px solid var(--st-primary-color); outline-offset: 1px; }
.ddp-chart-legend button { display: inline-flex; align-items: center; gap: 4px; }
.ddp-chart-legend button[aria-pressed=false] { opacity: 0.4; text-decoration: line-through; }
.ddp-chart-legend i, .ddp-chart-tip i { width: 14px; height: 2px; background: var(--ddp-color); }
.ddp-chart i.ddp-chart-dashed { background: repeating-linear-gradient(90deg, var(--ddp-color) 0 4px, transparent 4px 5px); }
.ddp-chart-legend b { font-weight: 500; color: var(--st-text-color); font-variant-numeric: tabular-nums; }
.ddp-chart-legend b:not(:empty) { min-width: 1.6em; text-align: right; }
.ddp-chart .ddp-chart-back { color: var(--st-primary-color); }
.ddp-chart-body { position: relative; flex: 1; min-height: 0; }
.ddp-chart-plot { position: absolute; inset: 0; }
.ddp-chart-note { position: absolute; inset: 8px 10px 34px 46px; display: flex; align-items: center; justify-content: center;
  text-align: center; color: var(--ddp-muted); pointer-events: none; text-wrap: balance; }
.ddp-chart-note[hidden] { display: none; }
.ddp-chart-error { color: var(--st-red-text-color, #b3261e); }
.ddp-chart-cross { position: absolute; top: 8px; bottom: 34px; width: 1px; background: var(--ddp-line); pointer-events: none; }
.ddp-chart-tip { position: absolute; top: 10px; z-index: 5; pointer-events: none; padding: 5px 8px; border-radius: 4px;
  background: var(--st-background-color); border: 1px solid var(--st-border-color); box-shadow: 0 2px 8px rgba(0,0,0,.12);
  display: grid; grid-template-columns: auto auto auto; column-gap: 6px; align-items: center; font-size: 11px; line-height: 1.45; }
.ddp-chart-tip[hidden], .ddp-chart-cross[hidden] { display: none; }
.ddp-chart-tip header { grid-column: 1 / -1; color: var(--ddp-muted); white-space: nowrap; }
.ddp-chart-tip span { white-space: nowrap; }
.ddp-chart-tip b { font-weight: 500; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@container (max-width: 420px) { .ddp-chart-legend { gap: 5px; } .ddp-chart-legend b { display: none; }
  .ddp-chart-lost:not([hidden]) ~ .ddp-chart-legend { display: none; }
  .ddp-chart-legend button { gap: 3px; } .ddp-chart-legend i { width: 9px; } }`;
  document.head.append(style);
}
