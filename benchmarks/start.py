"""From the click on Start to the first loss on the chart, against bare torchrun of the same training to its first step.

Run: ``python -m benchmarks.start [--rounds 3] [--nproc 4]``. Target: at most 1 s more than bare torchrun. All take
turns, so that a machine that is slow for a while is slow for all. ``ddp launch`` is measured too: what it takes longer
than bare torchrun is ours, what the click takes longer than that is the browser's share of the same cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

from ddp_core.config import RunConfig, from_dict, to_yaml
from ddp_core.runs import RunDir, Store, stop
from ddp_core.runs.command import torchrun_command, torchrun_environment
from tests.dashboard.conftest import APP, Dashboard, find_chromium, serve

expect.set_options(timeout=120_000)
FIRST_LOSS = "() => Number(document.querySelector('[aria-label=Loss].ddp-chart')?.dataset.points) > 0"


def bare(folder: Path, config: RunConfig) -> float:
    """Seconds from starting torchrun to the first line of a metric in rank 0's log."""
    run_dir = folder / f"bare-{time.monotonic_ns()}"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(config))
    environment = torchrun_environment(config, run_dir, mark="bare", gpus=[])
    start = time.perf_counter()
    process = subprocess.Popen(
        torchrun_command(config, run_dir), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seconds = _first_step(RunDir(run_dir), start)
    process.send_signal(signal.SIGTERM)
    process.wait()
    return seconds


def launched(folder: Path, config: RunConfig) -> float:
    """Seconds from ``ddp launch`` to the first line of a metric in rank 0's log."""
    file = folder / "run.yaml"
    file.write_text(to_yaml(config))
    store = Store(folder / "launched")
    run_id = store.next_id(config.name)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ddp_core.cli", "launch", str(file), "--store", str(store.root)], check=True)
    run = store.run(run_id)
    seconds = _first_step(run, start)
    stop(run, 5, wait=True)
    return seconds


def _first_step(run: RunDir, start: float) -> float:
    log = run.rank_log(0, 0)
    while not (log.exists() and b'"step":1,' in log.read_bytes()):
        time.sleep(0.01)
    return time.perf_counter() - start


def clicked(browser: Browser, site: Dashboard, config: RunConfig) -> tuple[float, float]:
    """Seconds from the click to the run's page and to the first loss drawn on its chart."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(site.url)
    button = page.get_by_role("button", name="Start", exact=True)
    page.get_by_role("textbox", name="Processes", exact=True).fill(str(config.launch.nproc_per_node))
    expect(page.get_by_test_id("stCode").first).to_contain_text(f"--nproc-per-node {config.launch.nproc_per_node}")
    expect(button).to_be_enabled()
    # Nobody clicks before the page is there; it is once what the next page needs is loaded too.
    page.wait_for_function("() => window.Plotly")
    page.wait_for_load_state("networkidle")
    start = time.perf_counter()
    button.click()
    page.locator(".panel[data-panel=header] .pill").wait_for()
    shown = time.perf_counter() - start
    page.wait_for_function(FIRST_LOSS, timeout=120_000)
    drawn = time.perf_counter() - start
    run_id = page.url.rpartition("=")[2]
    stop(Store(site.store).run(run_id), 5, wait=True)
    page.close()
    return shown, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nproc", type=int, default=4, help="ranks")
    args = parser.parse_args()
    config = from_dict({"launch": {"nproc_per_node": args.nproc}})
    bares, launches, clicks, pages = [], [], [], []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = find_chromium(playwright)
        with serve(folder, folder / "store", {"DDP_LEASES": f"{name}/leases"}, APP, ()) as site:
            for _ in range(args.rounds):
                bares.append(bare(folder, config))
                launches.append(launched(folder, config))
                shown, drawn = clicked(browser, site, config)
                pages.append(shown)
                clicks.append(drawn)
        browser.close()
    print(f"{args.nproc} ranks on {os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.1f}")
    print(f"{'':<44}{'median s':>10}{'min':>8}{'max':>8}{'ratio':>8}")
    for label, values in (
        ("bare torchrun to its first step", bares),
        ("ddp launch to its first step", launches),
        ("click Start to the run's page", pages),
        ("click Start to the first loss on the chart", clicks),
    ):
        middle = statistics.median(values)
        ratio = middle / statistics.median(bares)
        print(f"{label:<44}{middle:>10.2f}{min(values):>8.2f}{max(values):>8.2f}{ratio:>8.2f}")
    pairs = [click - base for click, base in zip(clicks, bares, strict=True)]
    print(f"click minus bare, by pair: {', '.join(f'{pair:+.2f} s' for pair in pairs)}")


if __name__ == "__main__":
    main()
