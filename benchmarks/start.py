"""From the click on Start to the first loss on the chart, against bare torchrun of the same training to its first step.

Run: ``python -m benchmarks.start [--rounds 3]``. Target: at most 1 s more than bare torchrun. The two take turns, so
that a machine that is slow for a while is slow for both.
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

from ddp_core.config import RunConfig, to_yaml
from ddp_core.runs import Store, stop
from ddp_core.runs.command import torchrun_command, torchrun_environment
from tests.dashboard.conftest import APP, Dashboard, find_chromium, serve

expect.set_options(timeout=120_000)
FIRST_LOSS = "() => Number(document.querySelector('[aria-label=Loss].ddp-chart')?.dataset.points) > 0"


def bare(folder: Path) -> float:
    """Seconds from starting torchrun to the first line of a metric in rank 0's log."""
    run_dir = folder / f"bare-{time.monotonic_ns()}"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(RunConfig()))
    environment = torchrun_environment(RunConfig(), run_dir, mark="bare", gpus=[])
    log = run_dir / "metrics" / "attempt_0" / "rank_0.jsonl"
    start = time.perf_counter()
    process = subprocess.Popen(
        torchrun_command(RunConfig(), run_dir), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (log.exists() and b'"step":1,' in log.read_bytes()):
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    process.send_signal(signal.SIGTERM)
    process.wait()
    return seconds


def clicked(browser: Browser, site: Dashboard) -> tuple[float, float]:
    """Seconds from the click to the run's page and to the first loss drawn on its chart."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(site.url)
    button = page.get_by_role("button", name="Start", exact=True)
    expect(button).to_be_enabled()
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
    args = parser.parse_args()
    bares, clicks, pages = [], [], []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = find_chromium(playwright)
        with serve(folder, folder / "store", {"DDP_LEASES": f"{name}/leases"}, APP, ()) as site:
            for _ in range(args.rounds):
                bares.append(bare(folder))
                shown, drawn = clicked(browser, site)
                pages.append(shown)
                clicks.append(drawn)
        browser.close()
    print(f"load average at the end {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{'':<44}{'median s':>10}{'min':>8}{'max':>8}{'ratio':>8}")
    for label, values in (
        ("bare torchrun to its first step", bares),
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
