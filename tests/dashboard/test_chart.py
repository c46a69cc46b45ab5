"""The live chart in a real browser, fed by a real server from a run directory that grows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, WebSocketRoute, expect

from tests.conftest import wait_for
from tests.dashboard.conftest import Dashboard, StartDashboard
from tests.dashboard.synthetic import SyntheticRun, gpu_uuid

MakeRun = Callable[..., SyntheticRun]

# Each trace of a chart as {name: [[x, y], …]}, read from Plotly itself.
TRACES = """() => Object.fromEntries(document.querySelector(".ddp-chart .js-plotly-plot").data
    .map((t) => [t.name, Array.from(t.x, (x, i) => [x, t.y[i]])]))"""
RANGE = """() => document.querySelector(".ddp-chart .js-plotly-plot")._fullLayout.xaxis.range"""
COLORS = """() => document.querySelector(".ddp-chart .js-plotly-plot").data.map((t) => t.line?.color)"""
HUB = "window.__ddpHubs.values().next().value"


@pytest.fixture(scope="module")
def tabs(browser: Browser) -> Iterator[BrowserContext]:
    """One browser for the module, whose cache the tests share."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(15000)
    yield context
    context.close()


@pytest.fixture
def page(tabs: BrowserContext) -> Iterator[Page]:
    """One tab, which must not have complained when it is closed."""
    page = tabs.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    assert not complaints


def show(page: Page, charts: Dashboard, run: SyntheticRun, more: str = "") -> None:
    page.goto(f"{charts.url}?run={run.id}{more}")


def wait_drawn(page: Page, **dataset: object) -> None:
    """Wait until the first chart says that it has drawn this."""
    attributes = "".join(f'[data-{name.replace("_", "-")}="{value}"]' for name, value in dataset.items())
    try:
        page.wait_for_selector(f".ddp-chart{attributes}", state="attached")
    except Exception as error:
        drawn = page.evaluate("() => [...document.querySelectorAll('.ddp-chart')].map((e) => ({...e.dataset}))")
        raise AssertionError(f"not drawn: {dataset}; drawn: {drawn}") from error


def zoom(page: Page, left: float, right: float) -> None:
    """Drag over a part of the first chart's plot, given as fractions of its width."""
    box = page.locator(".ddp-chart .nsewdrag").first.bounding_box()
    assert box
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + left * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (left + right) / 2 * box["width"], y, steps=4)
    page.mouse.move(box["x"] + right * box["width"], y, steps=4)
    page.mouse.up()
    wait_drawn(page, zoomed="true")


def test_every_rank_and_the_labelled_mean_grow_as_lines_are_appended(
    page: Page, charts: Dashboard, synthetic: MakeRun
) -> None:
    run = synthetic(ranks=4)
    run.log(1, 20)
    show(page, charts, run)
    wait_drawn(page, points=80, last_x=20)
    run.log(21, 22, loss=3.0)
    wait_drawn(page, points=88, last_x=22)
    traces = page.evaluate(TRACES)
    assert list(traces) == ["rank 0", "rank 1", "rank 2", "rank 3", "mean", "not finite"]
    assert traces["rank 3"][-2:] == [[21, 3], [22, 3]]
    for rank in range(4):
        expected = 2 * math.exp(-7 / 400) + 0.1 * rank + 0.05 * math.sin(7 * 12.9898 + rank)
        assert traces[f"rank {rank}"][6] == [7, pytest.approx(expected)]
    mean = sum(traces[f"rank {rank}"][6][1] for rank in range(4)) / 4
    assert traces["mean"][6] == [7, pytest.approx(mean)]
    expect(page.locator(".ddp-chart-legend")).to_contain_text("mean3")
    assert len(set(page.evaluate(COLORS)[:5])) == 5


def test_zoom_survives_new_points_and_reruns_and_a_double_click_ends_it(
    page: Page, charts: Dashboard, synthetic: MakeRun
) -> None:
    run = synthetic(ranks=2)
    run.log(1, 400)
    show(page, charts, run)
    wait_drawn(page, last_x=400)
    zoom(page, 0.25, 0.5)
    zoomed = page.evaluate(RANGE)
    assert zoomed == [pytest.approx(100, abs=10), pytest.approx(200, abs=10)]
    for last in range(401, 406):
        run.log(last, last)
        wait_drawn(page, last_x=last)
    assert page.evaluate(RANGE) == zoomed
    page.get_by_role("button", name="rerun").click()
    run.log(406, 406)
    wait_drawn(page, last_x=406)
    assert page.evaluate(RANGE) == zoomed
    page.locator(".ddp-chart .nsewdrag").first.dblclick()
    wait_drawn(page, zoomed="false", last_x=406)
    wait_for(lambda: page.evaluate(RANGE) == [1, 406], "the whole range")
    run.log(407, 407)
    wait_drawn(page, last_x=407)
    wait_for(lambda: page.evaluate(RANGE) == [1, 407], "the range to follow the end")


def test_a_zoom_fetches_the_finer_window_and_a_single_spike_is_seen_before_and_after(
    page: Page, charts: Dashboard, synthetic: MakeRun
) -> None:
    run = synthetic(ranks=1)
    run.log(1, 15200)
    run.log(15201, 15201, loss=44.0)
    run.log(15202, 30000)
    show(page, charts, run)
    wait_drawn(page, last_x=30000)
    overview = page.evaluate(TRACES)["rank 0"]
    assert len(overview) <= 1502
    assert [15201, 44] in overview
    zoom(page, 0.5, 0.52)
    wait_drawn(page, windowed="true")
    lo, hi = page.evaluate(RANGE)
    shown = page.evaluate(TRACES)["rank 0"]
    # Every step that was logged, the spike among them.
    assert [x for x, _ in shown if lo <= x <= hi] == list(range(math.ceil(lo), math.floor(hi) + 1))
    assert [15201, 44] in shown
    run.log(30001, 30001)
    wait_drawn(page, last_x=30001)
    assert page.evaluate(TRACES)["rank 0"][-1][0] == 30001
    page.get_by_role("button", name="reset zoom").click()
    wait_drawn(page, windowed="false", zoomed="false")
    assert len(page.evaluate(TRACES)["rank 0"]) == len(overview) + 1


def test_a_reload_shows_the_same_and_goes_on(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 30)
    show(page, charts, run)
    wait_drawn(page, points=60)
    before = page.evaluate(TRACES)
    page.reload()
    wait_drawn(page, points=60)
    assert page.evaluate(TRACES) == before
    run.log(31, 31)
    wait_drawn(page, points=62)


def test_a_drop_is_said_and_made_up_for_without_missing_or_doubled_points(
    page: Page, charts: Dashboard, synthetic: MakeRun
) -> None:
    run = synthetic(ranks=2)
    run.log(1, 30)
    sockets: list[WebSocketRoute] = []
    down = False

    def proxy(socket: WebSocketRoute) -> None:
        if down:
            socket.close()
        else:
            socket.connect_to_server()
            sockets.append(socket)

    page.route_web_socket("**/ddp/live", proxy)
    show(page, charts, run)
    wait_drawn(page, last_x=30)
    down = True
    sockets[-1].close()
    lost = page.get_by_text("connection lost, reconnecting")
    expect(lost).to_be_visible()
    run.log(31, 50)
    down = False
    wait_drawn(page, last_x=50)
    run.log(51, 55)
    wait_drawn(page, last_x=55)
    expect(lost).to_be_hidden()
    for trace in ("rank 0", "rank 1", "mean"):
        assert [x for x, _ in page.evaluate(TRACES)[trace]] == list(range(1, 56))


def test_points_that_a_restart_does_again_are_replaced(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 30)
    show(page, charts, run)
    wait_drawn(page, last_x=30)
    run.log(21, 45, attempt=1, loss=7.0)
    wait_drawn(page, last_x=45, points=90)
    again = page.evaluate(TRACES)["rank 1"]
    assert [x for x, _ in again] == list(range(1, 46))
    assert {y for x, y in again if x > 20} == {7}


def test_eight_tabs_are_all_live(tabs: BrowserContext, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=4)
    run.log(1, 10)
    pages = [tabs.new_page() for _ in range(8)]
    for page in pages:
        show(page, charts, run)
    for page in pages:
        page.bring_to_front()  # a tab in the background rests
        wait_drawn(page, last_x=10)
    run.log(11, 12)
    for page in pages:
        page.bring_to_front()
        wait_drawn(page, last_x=12)
        page.close()


def test_a_diverged_loss_is_marked_at_the_edge_and_named(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    run.log(1, 9, loss=1.0)
    run.log(10, 10, loss=math.nan)
    run.log(11, 11, loss=math.inf)
    show(page, charts, run)
    wait_drawn(page, last_x=11)
    traces = page.evaluate(TRACES)
    assert [x for x, _ in traces["not finite"]] == [10, 11]
    assert traces["rank 0"][-1][1] is None
    box = page.locator(".ddp-chart .nsewdrag").first.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 20)
    tip = page.locator(".ddp-chart-tip")
    expect(tip).to_contain_text("step 10")
    expect(tip).to_contain_text("rank 0NaN")


def test_pointing_shows_every_rank_at_that_step(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=3)
    run.log(1, 101)
    show(page, charts, run)
    wait_drawn(page, last_x=101)
    page.locator(".ddp-chart .nsewdrag").first.hover()
    tip = page.locator(".ddp-chart-tip")
    expect(tip).to_contain_text("step 51")
    for name in ("rank 0", "rank 1", "rank 2", "mean"):
        expect(tip).to_contain_text(name)
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()


def test_a_legend_entry_hides_and_shows_its_curve_by_keyboard(
    page: Page, charts: Dashboard, synthetic: MakeRun
) -> None:
    run = synthetic(ranks=2)
    run.log(1, 40)
    show(page, charts, run)
    wait_drawn(page, last_x=40)
    visible = """() => document.querySelector(".ddp-chart .js-plotly-plot").data.map((t) => t.visible ?? true)"""
    page.locator(".ddp-chart-legend button").nth(1).focus()
    page.keyboard.press("Enter")
    wait_for(lambda: page.evaluate(visible)[:3] == [True, False, True], "rank 1 to be hidden")
    page.keyboard.press("Enter")
    wait_for(lambda: page.evaluate(visible)[:3] == [True, True, True], "rank 1 to be back")


def test_waiting_and_unknown_runs_say_so_and_nothing_jumps(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    show(page, charts, run)
    expect(page.locator(".ddp-chart-note")).to_have_text("waiting for the first step")
    expect(page.locator(".ddp-chart-note")).to_be_visible()
    before = page.locator(".ddp-chart").bounding_box()
    run.log(1, 5)
    wait_drawn(page, last_x=5)
    expect(page.locator(".ddp-chart-note")).to_be_hidden()
    assert page.locator(".ddp-chart").bounding_box() == before
    page.goto(f"{charts.url}?run=nobody-7")
    expect(page.locator(".ddp-chart-note")).to_contain_text("there is no run 'nobody-7'")


def test_the_theme_is_followed_without_a_reload(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 5)
    show(page, charts, run)
    wait_drawn(page, last_x=5)
    zoom(page, 0.3, 0.8)
    zoomed = page.evaluate(RANGE)
    light = page.evaluate(COLORS)
    page.evaluate("() => (window.sameDocument = true)")
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: page.evaluate(COLORS) != light, "other colours")
    assert page.evaluate("() => window.sameDocument")
    assert not set(page.evaluate(COLORS)[:3]) & set(light[:3])
    assert page.evaluate(RANGE) == zoomed


def test_a_chart_out_of_sight_rests_and_catches_up_when_seen(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 5)
    show(page, charts, run, "&hardware=1&machine=1")
    wait_drawn(page, last_x=5)
    page.set_viewport_size({"width": 1400, "height": 300})
    seen = page.locator('.ddp-chart[aria-label="Memory of the ranks"]')
    seen.scroll_into_view_if_needed()
    first = page.locator(".ddp-chart").first
    expect(first).not_to_be_in_viewport()
    run.log(6, 8)
    received = f"() => [...{HUB}.subscriptions.values()].find((s) => s.channel === 'metric').cursor.n['0']"
    wait_for(lambda: page.evaluate(received) == 8, "the points to come")
    run.sample(time.time(), [])
    expect(seen).to_have_attribute("data-points", "2")  # what is seen is drawn meanwhile
    assert first.get_attribute("data-last-x") == "5"
    first.scroll_into_view_if_needed()
    wait_drawn(page, last_x=8)


def test_charts_that_go_away_end_their_subscriptions(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 5)
    show(page, charts, run, "&hardware=1&machine=1")
    wait_drawn(page, last_x=5)
    assert page.evaluate(f"() => {HUB}.subscriptions.size") == 6
    for _ in range(2):
        page.locator("label", has_text="charts").click()
        wait_for(lambda: page.evaluate(f"() => {HUB}.subscriptions.size") == 0, "no subscription to be left")
        page.locator("label", has_text="charts").click()
        wait_for(lambda: page.evaluate(f"() => {HUB}.subscriptions.size") == 6, "them to be back")
        wait_drawn(page, last_x=5)


def test_gpu_charts_show_the_samples_with_gaps_and_units(page: Page, charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2, gpus=2)
    now = time.time()
    full: dict[str, Any] = {"busy": 0, "memory_used": 3 << 30, "memory_total": 80 << 30}
    for back in (60, 59, 20, 19):
        run.sample(now - back, [{**full, "busy": back}, full])
    show(page, charts, run, "&hardware=1")
    page.wait_for_selector('.ddp-chart[aria-label="Busy"][data-points="8"]')
    data = """(title) =>
        document.querySelector(`.ddp-chart[aria-label="${title}"] .js-plotly-plot`).data.map((t) => t.y)"""
    assert page.evaluate(data, "Busy")[:2] == [[60, 59, None, 20, 19], [0, 0, None, 0, 0]]
    page.wait_for_selector('.ddp-chart[aria-label="Memory"][data-points="8"]')
    assert page.evaluate(data, "Memory")[0] == [3, 3, None, 3, 3]
    expect(page.locator('.ddp-chart[aria-label="Memory"] .ddp-chart-unit')).to_have_text("GiB")
    expect(page.locator('.ddp-chart[aria-label="Busy"] .ddp-chart-legend button').nth(1)).to_have_attribute(
        "title", "GPU 1 · NVIDIA S100 (simulated) · click to hide or show"
    )
    run.sample(now, [{**full, "busy": 77}, {"busy": None}])
    page.wait_for_selector('.ddp-chart[aria-label="Busy"][data-points="9"]')
    assert page.evaluate(data, "Busy")[0][-1] == 77
    assert page.evaluate(data, "Busy")[1][-1] is None
    assert gpu_uuid(0) in page.evaluate(f"() => JSON.stringify([...{HUB}.subscriptions.values()].map((s) => s.cursor))")


def test_charts_find_their_server_below_a_base_path_and_on_any_page(page: Page, dashboard: StartDashboard) -> None:
    served = dashboard(None, None, "--server.baseUrlPath=/team/ddp")
    run = SyntheticRun.create(served.store)
    run.log(1, 7)
    page.goto(f"{served.url}run?run={run.id}")
    wait_drawn(page, last_x=7)
    run.log(8, 8)
    wait_drawn(page, last_x=8)
