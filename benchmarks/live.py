"""From a line in a rank's log to a drawn point: latency, zoom, server CPU and traffic, beside ``st.plotly_chart``.

A real server and a headless Chromium; a run directory with history, to which one line per rank is appended five
times a second. The same curves are shown by the live chart and, for comparison, by ``st.plotly_chart`` in a fragment
that runs five times a second and draws the same downsampled points::

    python -m benchmarks.live --ranks 4 --points 10000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from tests.dashboard.conftest import CHROMIUM_ARGS, chromium, serve
from tests.dashboard.synthetic import SyntheticRun

PER_SECOND = 5

APP = """
import streamlit as st
from dashboard.live import lifespan, routes
app = st.App("page.py", routes=routes(), lifespan=lifespan)
"""

PAGE = """
import streamlit as st
st.set_page_config(layout="wide")
run, how = st.query_params["run"], st.query_params["how"]
if how == "live chart":
    from dashboard.components.live_chart import live_chart
    live_chart(run, "loss", key="loss", title="Loss", height=400)
else:
    import plotly.graph_objects as go
    from ddp_core.runs import Store
    from ddp_core.telemetry.series import RunSeries
    if "series" not in st.session_state:
        st.session_state.series = RunSeries(Store().run(run).path)
    @st.fragment(run_every=0.2)
    def chart():
        series = st.session_state.series
        series.poll()
        figure = go.Figure(layout={"height": 400, "uirevision": "keep"})
        budget = max(250, min(1500, 6000 // max(len(series.ranks), 1)))
        for rank in [*series.ranks, None]:
            x, y = series.snapshot("loss", rank, points=budget)
            figure.add_scatter(x=x, y=y, mode="lines", name="mean" if rank is None else f"rank {rank}")
        st.plotly_chart(figure, key="loss")
    chart()
"""

# Notes for every step when it was first on the screen, looking at each frame at what Plotly has drawn.
WATCH = """() => {
  window.seen = new Map();
  let last = -1;
  const look = () => {
    const drawn = document.querySelector(".js-plotly-plot")?.calcdata?.[0];
    const x = drawn?.[drawn.length - 1]?.x ?? -1;
    for (let step = last + 1; step <= x; step += 1) if (last >= 0) window.seen.set(step, Date.now() / 1000);
    if (x > last) last = x;
    requestAnimationFrame(look);
  };
  look();
}"""
LAST = """() => {
  const drawn = document.querySelector(".js-plotly-plot")?.calcdata?.[0];
  return drawn?.[drawn.length - 1]?.x;
}"""
RANGE = """() => document.querySelector(".js-plotly-plot")._fullLayout.xaxis.range"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--points", type=int, default=10_000, help="points of history of each rank")
    parser.add_argument("--seconds", type=float, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp-benchmark-") as name, sync_playwright() as playwright:
        folder = Path(name)
        (folder / "app.py").write_text(APP)
        (folder / "page.py").write_text(PAGE)
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGS)
        found = {}
        for how in ("live chart", "st.plotly_chart"):
            run = SyntheticRun.create(folder / "store", ranks=options.ranks)
            run.log(1, options.points)
            with serve(folder, folder / "store", {}, folder / "app.py", ()) as server:
                found[how] = measure(browser, f"{server.url}?run={run.id}&how={how}", server.pid, run, options)
        browser.close()
    print(f"{options.ranks} ranks × {options.points:,} points, {PER_SECOND} appends a second, {options.seconds:g} s")
    print_table(found)


def measure(browser: Browser, url: str, pid: int, run: SyntheticRun, options: argparse.Namespace) -> dict[str, Any]:
    page = browser.new_page(viewport={"width": 1400, "height": 800})
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.enable")
    devtools.send("Performance.enable")
    received = [0]

    def count(event: dict[str, Any]) -> None:
        frame = event["response"]
        received[0] += len(frame["payloadData"]) * (3 / 4 if frame["opcode"] == 2 else 1)

    devtools.on("Network.webSocketFrameReceived", count)
    opened = time.time()
    page.goto(url)
    step = options.points
    wait_for_step(page, step)
    first_chart = time.time() - opened
    page.evaluate(WATCH)
    step = append(page, run, step, PER_SECOND)[-1][0]  # a second to settle
    wait_for_step(page, step)

    server = psutil.Process(pid)
    cpu, busy, bytes_before, begin = server.cpu_times(), task_seconds(devtools), received[0], time.time()
    written = append(page, run, step, round(options.seconds * PER_SECOND))
    seconds = time.time() - begin
    after, busy_after, bytes_after = server.cpu_times(), task_seconds(devtools), received[0]
    wait_for_step(page, written[-1][0])
    page.wait_for_timeout(50)
    seen = dict(page.evaluate("() => [...window.seen]"))
    latency = [1000 * (seen[step] - at) for step, at in written if step in seen]

    zoom(page)
    before = page.evaluate(RANGE)
    written = append(page, run, written[-1][0], 2 * PER_SECOND)
    wait_for_step(page, written[-1][0])
    kept = page.evaluate(RANGE) == before
    page.close()
    return {
        "first chart, ms": 1000 * first_chart,
        "append to drawn p50, ms": median(latency),
        "append to drawn p95, ms": quantiles(latency, n=20)[-1],
        "server CPU, ms/s": 1000 * (after.user + after.system - cpu.user - cpu.system) / seconds,
        "browser main thread, %": 100 * (busy_after - busy) / seconds,
        "received, KB/s": (bytes_after - bytes_before) / 1000 / seconds,
        "zoom kept": kept,
    }


def append(page: Page, run: SyntheticRun, step: int, count: int) -> list[tuple[int, float]]:
    """Append one line per rank, five times a second; give each step and when it was written."""
    written = []
    due = time.time()
    for new in range(step + 1, step + 1 + count):
        run.log(new, new)
        written.append((new, time.time()))
        due += 1 / PER_SECOND
        page.wait_for_timeout(max(0, 1000 * (due - time.time())))
    return written


def wait_for_step(page: Page, step: int) -> None:
    page.wait_for_function(f"({LAST})() >= {step}", timeout=120_000)


def task_seconds(devtools: Any) -> float:
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def zoom(page: Page) -> None:
    page.wait_for_selector(".nsewdrag", state="attached")
    box = page.locator(".nsewdrag").first.bounding_box()
    assert box
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], y, steps=5)
    page.mouse.up()
    page.wait_for_timeout(400)


def print_table(found: dict[str, dict[str, Any]]) -> None:
    (ours, mine), (other, theirs) = found.items()
    print(f"{'':26} {ours:>16} {other:>16} {'ratio':>8}")
    for name, value in mine.items():
        if isinstance(value, bool):
            print(f"{name:26} {'yes' if value else 'no':>16} {'yes' if theirs[name] else 'no':>16}")
        else:
            print(f"{name:26} {value:16.1f} {theirs[name]:16.1f} {value / theirs[name]:8.2f}")


if __name__ == "__main__":
    main()
