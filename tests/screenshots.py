"""Take the README's pictures, or with a folder those of every page: ``python -m tests.screenshots [FOLDER]``.

A real run of four ranks on four simulated GPUs, in a real browser, light and dark, wide and narrow.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from ddp_core.config import from_dict, to_yaml
from ddp_core.runs import Store, stop
from tests.dashboard.conftest import APP, ROOT, Dashboard, find_chromium, serve
from tests.fake_nvml import FakeNvml

expect.set_options(timeout=60_000)

LOOKS = (("light", 1400), ("dark", 1400), ("light", 700), ("dark", 700))
# When the curves have a shape.
SOME_WAY_IN = "() => Number(document.querySelector('[aria-label=Loss].ddp-chart')?.dataset.lastX) > 500"


def main(folder: Path, *, every_page: bool) -> None:
    """Take the run page's pictures, or those of every page, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        fake = FakeNvml(Path(scratch) / "nvml", gpus=4)
        done = threading.Event()
        mover = threading.Thread(target=_move, args=(fake, done))
        mover.start()
        browser = find_chromium(playwright)
        env = fake.env() | {"DDP_LEASES": f"{scratch}/leases"}
        try:
            with serve(Path(scratch), Path(scratch) / "store", env, APP, ()) as site:
                _story(browser, site, folder, every_page)
        finally:
            done.set()
            mover.join()
            browser.close()
            for run in Store(Path(scratch) / "store").runs():
                stop(run, 0, wait=True)


def _story(browser: Browser, site: Dashboard, folder: Path, every_page: bool) -> None:
    page = _page(browser, "light", 1400)
    page.goto(site.url)
    _use_all_gpus(page, epochs=1000 if every_page else 200)
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/run?run=digits-1")
    expect(page.locator(".pill").first).to_have_text("running")
    pages = {"run": "run?run=digits-1"} | ({"gpus": "gpus", "runs": "runs", "launch": ""} if every_page else {})
    for name, path in pages.items():
        for theme, width in LOOKS if every_page else LOOKS[:2]:
            other = _page(browser, theme, width)
            other.goto(f"{site.url}{path}")
            expect(other.locator(".panel").first).to_be_visible()
            if name == "run":
                other.wait_for_function(SOME_WAY_IN)
            if name == "launch":
                for group in other.locator("[class*=st-key-group_] summary").all():
                    group.click()
            _shoot(other, folder / f"{name}-{theme}{'' if width == 1400 else '-narrow'}.png")
            other.close()
    page.get_by_role("button", name="Stop", exact=True).click()
    if every_page:
        _shoot(page, folder / "stopping-light.png", wait_ms=300)
    expect(page.locator(".panel[data-panel=header]")).to_contain_text("no process left")
    if every_page:
        _shoot(page, folder / "stopped-light.png")


def _use_all_gpus(page: Page, epochs: int) -> None:
    """Give the form the demo on all four GPUs, as YAML."""
    config = from_dict({"launch": {"gpus": [0, 1, 2, 3]}, "training": {"epochs": epochs}})
    page.get_by_role("tab", name="YAML").click()
    text = page.get_by_role("textbox", name="Config as YAML")
    text.fill(to_yaml(config))
    text.press("Control+Enter")
    page.get_by_role("tab", name="Form").click()
    expect(page.get_by_test_id("stMultiSelect")).to_be_visible()


def _page(browser: Browser, theme: str, width: int) -> Page:
    scheme = "dark" if theme == "dark" else "light"
    height = 1180 if width > 1000 else 1000
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(120_000)
    return context.new_page()


def _shoot(page: Page, path: Path, wait_ms: int = 2500) -> None:
    # The charts of a page that was just opened get a round or two of samples to draw.
    page.wait_for_timeout(wait_ms)
    page.screenshot(path=path, full_page=True, animations="disabled")
    print(path)


def _move(fake: FakeNvml, done: threading.Event) -> None:
    start = time.monotonic()
    while not done.wait(0.5):
        fake.animate(time.monotonic() - start)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    main(Path(chosen[0]) if chosen else ROOT / "docs" / "images", every_page=bool(chosen))
