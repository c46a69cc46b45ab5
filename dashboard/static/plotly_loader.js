// plotly.js of the installed plotly package, 4.8 MB, loaded once a page.

let loading = null;

/** Load it; also before a chart is there, where one is likely to be next. */
export function loadPlotly(base, version) {
  loading ??= window.Plotly
    ? Promise.resolve()
    : new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `${base}ddp/plotly.min.js?v=${version}`;
        script.onload = resolve;
        script.onerror = () => {
          loading = null;
          script.remove();
          reject(new Error("plotly.js could not be loaded"));
        };
        document.head.append(script);
      });
  return loading;
}
