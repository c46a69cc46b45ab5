"""The whole story in one browser: a real server, four simulated GPUs, four real ranks under torchrun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from ddp_core.runs import RunDir, Store, processes
from tests.conftest import wait_for
from tests.dashboard.conftest import APP, Dashboard, serve
from tests.fake_nvml import FakeNvml
from tests.runs import live

# Real ranks start on a machine that may be busy.
expect.set_options(timeout=20_000)

# Each chart's traces as {chart: {trace: [last x, last y, points]}}, read from Plotly itself.
LAST = """() => Object.fromEntries([...document.querySelectorAll(".ddp-chart")].map((chart) => [
    chart.getAttribute("aria-label"),
    Object.fromEntries((chart.querySelector(".js-plotly-plot")?.data ?? [])
        .map((t) => [t.name, [t.x.at(-1), t.y.at(-1), t.x.length]]))]))"""
RANGE = """() => document.querySelector(".ddp-chart[aria-label=Loss] .js-plotly-plot")._fullLayout.xaxis.range"""
RANKS = ["rank 0", "rank 1", "rank 2", "rank 3"]
GPUS = ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]


class Story:
    """The machine, its dashboard and one tab that the tests of this module share, in order."""

    def __init__(self, fake: FakeNvml, site: Dashboard, page: Page) -> None:
        self.fake, self.site, self.page = fake, site, page

    @property
    def run(self) -> RunDir:
        return Store(self.site.store).run("story-1")

    def last(self, chart: str, page: Page | None = None) -> dict[str, Any]:
        found: dict[str, Any] = (page or self.page).evaluate(LAST).get(chart, {})
        return found

    def steps(self, page: Page | None = None) -> list[float]:
        """The newest step drawn of each rank; empty until all four are drawn."""
        traces = self.last("Loss", page)
        return [traces[rank][0] for rank in RANKS] if all(traces.get(r, [None])[0] for r in RANKS) else []


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    fake = FakeNvml(folder / "nvml", gpus=4)
    with serve(folder, folder / "store", fake.env(), APP, ()) as site:
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        context.set_default_timeout(30_000)
        yield Story(fake, site, context.new_page())
        context.close()
        live.cleared(Store(site.store))


def test_the_form_is_filled_and_start_opens_the_run(story: Story):
    page = story.page
    page.goto(story.site.url)
    expect(page.locator(".page-title")).to_contain_text("4 × NVIDIA S100 (simulated), driver 570.00 (simulated)")
    page.get_by_role("textbox", name="Name", exact=True).fill("story")
    page.get_by_role("textbox", name="Epochs", exact=True).fill("100000")
    page.get_by_role("radio", name="Choose…").or_(page.get_by_role("button", name="Choose…")).first.click()
    picker = page.get_by_test_id("stMultiSelect")
    for n in range(4):
        picker.locator("input").click()
        page.get_by_role("option", name=re.compile(rf"^{n} · NVIDIA")).click()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("stCode").first).to_contain_text("story-1")
    start = page.get_by_role("button", name="Start", exact=True)
    expect(start).to_be_enabled()
    start.click()
    header = page.locator(".panel[data-panel=header]")
    expect(header.locator("h1")).to_have_text("story-1")
    expect(header.locator(".pill")).to_have_text(re.compile("queued|starting"))
    assert page.url.endswith("/run?run=story-1")
    expect(header.locator(".pill")).to_have_text("running", timeout=60_000)
    expect(header).to_contain_text("Ranks joined 4/4")


def test_four_loss_traces_grow(story: Story):
    before = wait_for(story.steps, "all four ranks are drawn", 60)
    after = wait_for(lambda: (s := story.steps()) and min(s) > max(before) + 5 and s, "every rank's trace grows")
    assert len(after) == 4
    assert "mean" in story.last("Loss")


def test_four_gpu_traces_equal_the_driver_and_follow_it(story: Story):
    for base in (20, 60):
        for gpu in range(4):
            story.fake.set(gpu, busy=base + gpu, power_w=100 + base + gpu, temperature_c=base + 10 * gpu)
        for chart, value in (
            ("Busy", lambda n, base=base: base + n),
            ("Power", lambda n, base=base: 100 + base + n),
            ("Temperature", lambda n, base=base: base + 10 * n),
        ):
            wanted = [value(n) for n in range(4)]
            wait_for(
                lambda c=chart, w=wanted: [story.last(c).get(gpu, [0, None])[1] for gpu in GPUS] == w,
                f"{chart} shows {wanted}",
            )


def test_the_ranks_table_and_the_events_are_live(story: Story):
    rows = story.page.locator(".panel[data-panel=ranks] tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text(re.compile(r"\d MiB"))
    expect(story.page.locator(".panel[data-panel=events]")).to_contain_text("torchrun started")


def test_zoom_stays_while_points_arrive(story: Story):
    page = story.page
    box = page.locator(".ddp-chart[aria-label=Loss] .nsewdrag").first.bounding_box()
    assert box
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=5)
    page.mouse.up()
    page.wait_for_selector(".ddp-chart[aria-label=Loss][data-zoomed=true]", state="attached")
    zoomed = page.evaluate(RANGE)
    before = max(story.steps())
    wait_for(lambda: (s := story.steps()) and min(s) > before + 20, "points arrive while zoomed")
    assert page.evaluate(RANGE) == zoomed


def test_reload_shows_the_same_run_and_what_is_new(story: Story):
    before = max(story.steps())
    story.page.reload()
    expect(story.page.locator(".panel[data-panel=header] h1")).to_have_text("story-1")
    wait_for(lambda: (s := story.steps()) and min(s) > before, "the reloaded page goes on")


def test_several_tabs_are_all_live(story: Story):
    tabs = [story.page.context.new_page() for _ in range(2)]
    for tab in tabs:
        tab.goto(story.page.url)
    tabs.append(story.page)
    for tab in tabs:
        before = wait_for(lambda t=tab: story.steps(t), "the tab shows all ranks", 60)
        wait_for(lambda t=tab, b=before: (s := story.steps(t)) and min(s) > max(b), "the tab goes on", 60)
    for tab in tabs[:-1]:
        tab.close()


def test_the_gpus_page_says_which_run_holds_each_gpu(story: Story):
    tab = story.page.context.new_page()
    tab.goto(f"{story.site.url}gpus")
    rows = tab.locator(".panel[data-panel=machine] tbody tr")
    expect(rows).to_have_count(4)
    for n in range(4):
        expect(rows.nth(n)).to_contain_text("story-1")
    tab.close()


def test_a_gpu_that_falls_off_the_bus_is_lost_and_the_others_go_on(story: Story):
    page = story.page
    row = page.locator(".panel[data-panel=hardware] tbody tr").nth(3)
    story.fake.lose(3)
    expect(row).to_contain_text("lost", timeout=15_000)
    story.fake.set(0, busy=91)
    wait_for(lambda: story.last("Busy")["GPU 0"][1] == 91, "GPU 0 misses nothing")
    assert list(story.last("Busy"))[:4] == GPUS


def test_stop_leaves_nothing_and_says_so(story: Story):
    story.fake.restore(3)
    mark = story.run.state().mark
    assert len(processes.marked(mark)) >= 5
    header = story.page.locator(".panel[data-panel=header]")
    header.get_by_role("button", name="Stop").click()
    expect(header.locator(".pill")).to_have_text(re.compile("stopping|stopped"))
    expect(header).to_contain_text(
        re.compile(r"stopped in \d+\.\d s, no process left, GPU memory released"), timeout=30_000
    )
    assert processes.marked(mark) == []


def test_resume_goes_on_from_the_checkpoint_on_the_page_that_is_open(story: Story):
    header = story.page.locator(".panel[data-panel=header]")
    stopped_at = max(story.steps())
    expect(header.get_by_label("Checkpoint to resume from")).to_have_value("")
    header.get_by_role("button", name="Resume").click()
    expect(header.get_by_role("button", name="Resume")).to_be_hidden()
    expect(header.locator(".pill")).to_have_text("running", timeout=60_000)
    expect(header).not_to_contain_text("no process left")
    wait_for(lambda: (s := story.steps()) and min(s) > stopped_at, "the traces go on where they ended", 60)
    expect(story.page.locator(".panel[data-panel=events]")).to_contain_text("resumed from the newest whole checkpoint")
    assert story.run.state().attempt == 1
    header.get_by_role("button", name="Stop").click()
    expect(header).to_contain_text("no process left", timeout=30_000)


def test_run_again_gets_the_next_number_and_the_runs_page_shows_both(story: Story):
    page = story.page
    page.get_by_role("link", name="Run again").click()
    expect(page.get_by_role("textbox", name="Epochs", exact=True)).to_have_value("100000")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".panel[data-panel=header] h1")).to_have_text("story-2")
    page.get_by_role("link", name="Runs").click()
    rows = page.locator(".panel[data-panel=list] tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("story-2")
    expect(rows.nth(1)).to_contain_text("story-1")
    expect(rows.nth(1)).to_contain_text("stopped")
    rows.nth(0).get_by_role("button", name="Stop").click()
    expect(rows.nth(0)).to_contain_text("stopped", timeout=30_000)
