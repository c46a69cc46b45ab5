"""A real dashboard and a real browser, for all tests of what the browser sees."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, sync_playwright

from tests.dashboard.synthetic import SyntheticRun

ROOT = Path(__file__).parents[2]
APP = ROOT / "dashboard" / "app.py"
LIVE_APP = Path(__file__).with_name("live_app.py")
CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


@dataclass
class Dashboard:
    """A dashboard that runs.

    Attributes:
        url: Its address, ending in ``/``.
        port: Its port on 127.0.0.1.
        pid: The server's process.
        store: Its folder of runs.
        log: What it printed.
    """

    url: str
    port: int
    pid: int
    store: Path
    log: Path


StartDashboard = Callable[..., Dashboard]


@contextlib.contextmanager
def serve(folder: Path, store: Path, env: dict[str, str], app: Path, options: tuple[str, ...]) -> Iterator[Dashboard]:
    """Run ``streamlit run`` on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"dashboard-{port}.log"
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    if app != APP:  # the dashboard brings its own settings, wherever it is started
        command += ["--server.headless", "true", "--server.address", "127.0.0.1"]
    command += options
    base = "".join(f"{o.partition('=')[2].strip('/')}/" for o in options if o.startswith("--server.baseUrlPath="))
    url = f"http://127.0.0.1:{port}/{base}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "DDP_STORE": str(store), **env}, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 30
        while not _healthy(f"{url}_stcore/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Dashboard(url, port, process.pid, store, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def find_chromium(playwright: Playwright) -> Browser:
    """Start the system's Chromium if there is one, else Playwright's own."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)


def chromium() -> str | None:
    """The system's Chromium if there is one, else None for Playwright's own."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with sync_playwright() as playwright:
        found = find_chromium(playwright)
        yield found
        found.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser of its own, empty of anything before."""
    found = browser.new_context(viewport={"width": 1400, "height": 900})
    found.set_default_timeout(15000)
    yield found
    found.close()


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """One tab."""
    return context.new_page()


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[StartDashboard]:
    """Start a dashboard: ``dashboard(store, env, *options, app=…)``; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(
            store: Path | None = None, env: dict[str, str] | None = None, *options: str, app: Path = APP
        ) -> Dashboard:
            return stack.enter_context(serve(tmp_path, store or tmp_path / "store", env or {}, app, options))

        yield start


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """A dashboard with the charts of :mod:`tests.dashboard.live_page`, shared by a module's tests."""
    folder = tmp_path_factory.mktemp("charts")
    (folder / "store").mkdir()
    with serve(folder, folder / "store", {}, LIVE_APP, ()) as found:
        yield found


@pytest.fixture
def synthetic(charts: Dashboard) -> Callable[..., SyntheticRun]:
    """Make a run directory in the store of ``charts``: ``synthetic(ranks=4)``."""

    def make(**options: int) -> SyntheticRun:
        return SyntheticRun.create(charts.store, **options)

    return make
