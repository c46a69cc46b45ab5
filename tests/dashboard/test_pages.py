"""The pages in a real browser: what they say, what they keep, and that they are live."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from ddp_core import runs
from ddp_core.config import LaunchConfig, RunConfig, to_yaml
from ddp_core.runs.state import RunStatus
from tests.conftest import wait_for
from tests.dashboard.conftest import APP, Dashboard, serve
from tests.dashboard.synthetic import SyntheticRun
from tests.fake_nvml import FakeNvml
from tests.runs import live

# Several of these wait for pages, and runs, on a machine that may be busy.
expect.set_options(timeout=20_000)

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """One dashboard for the module; each test brings its own runs."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "store").mkdir()
    with serve(folder, folder / "store", {}, APP, ()) as found:
        yield found
    live.cleared(runs.Store(folder / "store"))


def open_launch(page: Page, site: Dashboard, query: str = "") -> None:
    page.goto(f"{site.url}{query}")
    expect(page.get_by_role("button", name="Start")).to_be_visible()
    expect(page.locator(".panel[data-panel=plan] tbody tr").first).to_be_visible()


def box(page: Page, name: str):
    return page.get_by_role("textbox", name=name, exact=True)


def open_group(page: Page, key: str) -> None:
    group = page.locator(f".st-key-group_{key}")
    group.locator("summary").click()
    group.get_by_role("textbox").last.click(trial=True)  # until it has moved to its place


def notes(page: Page, field: str):
    return page.locator(f".st-key-field_{field} .field-note")


def choose(page: Page, field: str, option: str) -> None:
    entry = page.locator(f".st-key-field_{field} input")
    offered = page.get_by_role("option", name=option, exact=True)
    entry.evaluate("entry => entry.scrollIntoView({block: 'center'})")

    def chosen() -> bool:
        # The list closes when the page moves below it, as it does while a group opens.
        entry.fill("")
        entry.fill(option)
        try:
            offered.click(timeout=2000)
        except PlaywrightTimeout:
            return False
        return True

    wait_for(chosen, f"{option} is chosen")


def ended_run(site: Dashboard, **state: object) -> SyntheticRun:
    run = SyntheticRun.create(site.store)
    for rank in range(run.ranks):
        run.event(rank, "joined", device="cpu", gpu=None, steps_total=40, epochs=4, steps_per_epoch=10)
    run.log(1, 20, accuracy=0.5, samples_per_s=100.0)
    run.set_state(**{"started": time.time() - 60, "ended": time.time(), **state})
    return run


def output_file(run: SyntheticRun, rank: int = 0, stream: str = "stdout") -> Path:
    path = run.path / "logs" / "none_x" / "attempt_0" / str(rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# --- launch ---


def test_launch_page_says_what_start_will_do(page: Page, site: Dashboard):
    open_launch(page, site)
    plan = page.locator(".panel[data-panel=plan]")
    expect(plan).to_contain_text("16 per process × 4 processes = 64")
    expect(plan).to_contain_text("0, 4, 8, 12")
    expect(plan).to_contain_text("3 samples are seen twice")
    expect(page.locator(".page-title")).to_contain_text(re.compile("gloo|CUDA"))
    expect(page.get_by_test_id("stCode")).to_contain_text("torch.distributed.run --standalone --nproc-per-node 4")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_typing_changes_the_plan_and_what_is_wrong_stays_with_its_reason(page: Page, site: Dashboard):
    open_launch(page, site)
    open_group(page, "optimization")
    box(page, "Batch size").fill("8")
    box(page, "Learning rate").fill("fast")
    box(page, "Epochs").fill("7")
    expect(notes(page, "training_lr")).to_contain_text("number")
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    assert [box(page, n).input_value() for n in ("Batch size", "Learning rate", "Epochs")] == ["8", "fast", "7"]
    box(page, "Learning rate").fill("1e-3")
    expect(page.locator(".panel[data-panel=plan]")).to_contain_text("8 per process × 4 processes = 32")
    expect(page.locator(".panel[data-panel=plan]")).to_contain_text("45 per epoch × 7 epochs")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_start_opens_by_itself_once_what_was_in_the_way_is_gone(page: Page, site: Dashboard, tmp_path: Path):
    source = SyntheticRun.create(site.store)
    (source.path / "config.yaml").write_text(
        f"name: folder\nlaunch: {{gpus: none}}\ntraining: {{dataset: image_folder, data_dir: {tmp_path / 'images'}}}\n"
    )
    page.goto(f"{site.url}?from={source.id}")
    expect(notes(page, "training_data_dir")).to_contain_text("there is no folder")
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    for image in ("train/cat/1.png", "train/dog/1.png", "val/cat/2.png", "val/dog/2.png"):
        (tmp_path / "images" / image).parent.mkdir(parents=True)
        (tmp_path / "images" / image).touch()
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_a_group_counts_what_was_changed_and_what_is_to_mend_while_one_types(page: Page, site: Dashboard):
    open_launch(page, site)
    title = page.locator(".st-key-group_optimization summary")
    expect(title).to_have_text(re.compile("Optimization$"))
    open_group(page, "optimization")
    box(page, "Weight decay").fill("0.01")
    expect(title).to_have_text(re.compile("Optimization · 1 changed$"))
    box(page, "Label smoothing").fill("2")
    expect(title).to_have_text(re.compile("Optimization · 2 changed · 1 to mend$"))
    # Neither closes the group nor takes the cursor away.
    expect(box(page, "Label smoothing")).to_be_focused()
    expect(notes(page, "training_label_smoothing")).to_contain_text("less than 1")


def test_fields_that_mean_nothing_are_away_and_keep_their_values(page: Page, site: Dashboard):
    open_launch(page, site)
    open_group(page, "optimization")
    expect(box(page, "Warm-up epochs")).to_be_visible()
    expect(box(page, "Step factor")).to_have_count(0)
    choose(page, "training_schedule", "step")
    box(page, "Step factor").fill("0.5")
    expect(page.locator(".st-key-group_optimization summary")).to_contain_text("2 changed")
    choose(page, "training_schedule", "cosine")
    expect(box(page, "Step factor")).to_have_count(0)
    page.get_by_role("tab", name="YAML").click()
    expect(page.get_by_role("textbox", name="Config as YAML")).to_have_value(re.compile("step_factor: 0.5"))
    page.get_by_role("tab", name="Form").click()
    open_group(page, "optimization")
    choose(page, "training_schedule", "step")
    expect(box(page, "Step factor")).to_have_value("0.5")


def test_the_plan_multiplies_accumulation_in_and_scales_the_learning_rate(page: Page, site: Dashboard):
    open_launch(page, site)
    plan = page.locator(".panel[data-panel=plan]")
    expect(plan.get_by_text("Learning rate")).to_be_hidden()
    open_group(page, "optimization")
    box(page, "Gradient accumulation").fill("4")
    expect(plan).to_contain_text("16 per process × 4 processes × 4 added up = 256")
    expect(plan).to_contain_text("6 per epoch × 60 epochs")
    choose(page, "training_lr_scaling", "linear")
    expect(plan).to_contain_text("0.003 × 256 / 16")
    expect(plan.locator("dd").nth(3)).to_have_text("0.048")
    open_group(page, "ddp")
    page.get_by_text("Drop last samples").click()
    expect(plan).to_contain_text("1 sample is left out in an epoch")


def test_a_runs_checkpoint_can_be_chosen_to_resume_from_or_a_path_typed(page: Page, site: Dashboard):
    run = SyntheticRun.create(site.store)
    (run.path / "model_epoch7.pth").write_bytes(b"x")
    open_launch(page, site)
    open_group(page, "checkpoints")
    choose(page, "checkpoints_resume_from", f"{run.id} · epoch 7")
    expect(page.locator(".st-key-group_checkpoints summary")).to_contain_text("1 changed")
    page.get_by_role("tab", name="YAML").click()
    text = page.get_by_role("textbox", name="Config as YAML")
    expect(text).to_have_value(re.compile(f"resume_from: {run.path}/model_epoch7.pth"))
    page.get_by_role("tab", name="Form").click()
    open_group(page, "checkpoints")
    field = page.locator(".st-key-field_checkpoints_resume_from input")
    field.fill("/nowhere/model.pth")
    field.press("Enter")
    expect(notes(page, "checkpoints_resume_from")).to_contain_text("there is no checkpoint or run folder /nowhere")
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()


def test_a_message_above_the_form_does_not_move_the_form(page: Page, site: Dashboard):
    open_launch(page, site)
    tabs = page.get_by_role("tablist").first
    before = tabs.bounding_box()
    box(page, "Epochs").fill("-1")
    expect(page.locator(".st-key-launch_messages")).to_contain_text("Cannot start yet: Epochs")
    assert tabs.bounding_box() == before
    page.reload()
    expect(page.locator(".st-key-launch_messages")).to_contain_text("Cannot start yet: Epochs")
    expect(page.locator(".page-title")).to_contain_text(re.compile("gloo|CUDA"))


def test_yaml_mistake_names_the_field_and_nothing_is_lost(page: Page, site: Dashboard, tmp_path: Path):
    open_launch(page, site)
    page.get_by_role("tab", name="YAML").click()
    text = page.get_by_role("textbox", name="Config as YAML")
    expect(text).to_have_value(re.compile("batch_size: 16"))
    wrong = text.input_value().replace("batch_size: 16", "batchsize: 32").replace("epochs: 60", "epochs: 9")
    text.fill(wrong)
    text.press("Control+Enter")
    message = page.locator(".st-key-yaml_message")
    expect(message).to_contain_text("training.batchsize: unknown field; did you mean batch_size?")
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    page.get_by_role("tab", name="Form").click()
    expect(box(page, "Epochs")).to_have_value("60")
    page.get_by_role("tab", name="YAML").click()
    expect(text).to_have_value(wrong)
    text.fill(wrong.replace("batchsize", "batch_size"))
    text.press("Control+Enter")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    page.get_by_role("tab", name="Form").click()
    expect(box(page, "Epochs")).to_have_value("9")
    expect(box(page, "Batch size")).to_have_value("32")
    page.get_by_role("tab", name="YAML").click()
    (tmp_path / "mine.yaml").write_text("name: from-a-file\ntraining: {model: mlp}\n")
    page.locator("input[type=file]").set_input_files(tmp_path / "mine.yaml")
    expect(text).to_have_value(re.compile("name: from-a-file"))
    page.get_by_role("tab", name="Form").click()
    expect(box(page, "Name")).to_have_value("from-a-file")


def test_reload_and_a_visit_to_another_page_keep_what_was_typed(page: Page, site: Dashboard):
    open_launch(page, site)
    box(page, "Name").fill("my-own")
    expect(page.get_by_test_id("stCode")).to_contain_text("my-own-1")
    page.reload()
    expect(box(page, "Name")).to_have_value("my-own")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator(".panel[data-panel=list]")).to_be_visible()
    page.get_by_role("link", name="Launch", exact=True).click()
    expect(box(page, "Name")).to_have_value("my-own")


def test_double_click_and_second_tab_start_one_run_which_both_watch_to_its_stop(page: Page, site: Dashboard):
    config = RunConfig(name="once", launch=LaunchConfig(nproc_per_node=1, gpus="none", stop_grace_s=0))
    source = SyntheticRun.create(site.store)
    (source.path / "config.yaml").write_text(to_yaml(config))
    open_launch(page, site, f"?from={source.id}")
    expect(box(page, "Name")).to_have_value("once")
    second = page.context.new_page()
    second.goto(page.url)
    expect(box(second, "Name")).to_have_value("once")

    page.get_by_role("button", name="Start").click(click_count=2, delay=20)
    page.wait_for_url("**/run?run=once-1")
    second.get_by_role("button", name="Start").click()
    second.wait_for_url("**/run?run=once-1")
    for tab in (page, second):
        expect(tab.locator(".panel[data-panel=header] .pill")).to_have_text(re.compile("queued|starting|running"))
    assert not (site.store / "once-2").exists()

    page.get_by_role("button", name="Stop").click()
    for tab in (page, second):
        header = tab.locator(".panel[data-panel=header]")
        expect(header).to_contain_text(re.compile(r"no process left|cancelled before it started"))
        expect(header.get_by_role("link", name="Run again")).to_be_visible()
    page.get_by_role("link", name="Run again").click()
    expect(box(page, "Name")).to_have_value("once")
    assert len(list(site.store.glob("once-*"))) == 1


@pytest.mark.parametrize("pause", [0.06, 0.4])
def test_two_clicks_some_time_apart_start_one_run(page: Page, site: Dashboard, pause: float):
    name = f"twice{round(1000 * pause)}"
    config = RunConfig(name=name, launch=LaunchConfig(nproc_per_node=1, gpus="none", stop_grace_s=0))
    source = SyntheticRun.create(site.store)
    (source.path / "config.yaml").write_text(to_yaml(config))
    open_launch(page, site, f"?from={source.id}")
    start = page.get_by_role("button", name="Start").element_handle()
    start.evaluate("(button, ms) => { button.click(); setTimeout(() => button.click(), ms); }", 1000 * pause)
    page.wait_for_url(f"**/run?run={name}-1")
    runs.stop(runs.Store(site.store).run(f"{name}-1"), grace_s=0)
    expect(page.locator(".panel[data-panel=header] .pill")).to_have_text("stopped")
    assert not (site.store / f"{name}-2").exists()


# --- one run ---


def test_failed_run_shows_rank_message_and_traceback_as_text_and_never_as_html(page: Page, site: Dashboard):
    failure = {
        "rank": 2,
        "kind": "exception",
        "message": f"ValueError: {EVIL}",
        "traceback": f"in step\n{EVIL}",
        "victims": [0],
    }
    run = ended_run(site, state=RunStatus.FAILED, failure=failure, reason=EVIL)
    output_file(run).write_text(f"{EVIL}\n")
    run.event(1, "warning", message=EVIL)
    page.goto(f"{site.url}run?run={run.id}")
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("Rank 2 failed first: ValueError: <img src=x")
    expect(verdict).to_contain_text("Went down with it: rank 0.")
    expect(verdict.locator("pre")).to_contain_text("in step")
    expect(page.locator(".panel[data-panel=events]")).to_contain_text(EVIL)
    page.get_by_role("tab", name="Output").click()
    expect(page.locator(".terminal")).to_contain_text(EVIL)
    assert page.evaluate("window.hacked") is None
    assert page.locator("[data-panel] img, [data-panel] script").count() == 0


def test_run_page_is_live_without_a_rerun(page: Page, site: Dashboard):
    run = ended_run(site)
    output_file(run).write_bytes(b"one \x1b[31mred\x1b[0m\n10%\r55%\rdone\n")
    page.goto(f"{site.url}run?run={run.id}")
    ranks = page.locator(".panel[data-panel=ranks] tbody tr")
    expect(ranks.nth(3)).to_contain_text("20")
    ranks.first.evaluate("row => (row.dataset.mine = 'kept')")
    run.write(1, b'{"torn\n')
    run.log(21, 33, accuracy=0.75, samples_per_s=250.0)
    expect(ranks.nth(3)).to_contain_text("33")
    expect(ranks.nth(0)).to_contain_text("75.0 %")
    expect(page.locator(".tiles")).to_contain_text("33 / 40")
    run.event(0, "checkpoint", path=str(run.path / "model_epoch3.pth"), epoch=3, step=30)
    expect(page.locator(".panel[data-panel=events] tbody tr").first).to_contain_text("model_epoch3.pth after epoch 3")
    expect(page.locator(".panel[data-panel=ranks]")).to_contain_text("rank 1: 1")
    page.get_by_role("tab", name="Output").click()
    terminal = page.locator(".terminal")
    expect(terminal.locator(".fg1")).to_have_text("red")
    expect(terminal).to_contain_text("done")
    assert "55%" not in terminal.inner_text()
    with output_file(run).open("ab") as file:
        file.write(b"progress 1\rprogress 2")
    expect(terminal).to_contain_text("progress 2")
    assert "progress 1" not in terminal.inner_text()
    page.get_by_role("button", name="stderr").click()
    expect(page.locator(".terminal-box")).to_contain_text("Rank 0 has written nothing to stderr")
    assert ranks.first.get_attribute("data-mine") == "kept"


def test_chart_of_a_run_that_ended_with_nothing_to_draw_says_so(page: Page, site: Dashboard):
    run = SyntheticRun.create(site.store)
    page.goto(f"{site.url}run?run={run.id}")
    expect(page.locator('.ddp-chart[aria-label="Host CPU"] .ddp-chart-note')).to_have_text("no sample was taken")
    expect(page.locator('.ddp-chart[aria-label="Loss"] .ddp-chart-note')).to_have_text("no loss was logged")


def test_diverged_loss_is_shown_as_diverged(page: Page, site: Dashboard):
    run = ended_run(site)
    run.log(21, 22, loss=float("nan"))
    page.goto(f"{site.url}run?run={run.id}")
    expect(page.locator(".panel[data-panel=ranks] td.bad")).to_have_text(["NaN"] * 4)
    expect(page.locator(".tiles dd.bad")).to_have_text("NaN")


def test_what_the_ranks_warn_of_is_told_with_rank_tensor_and_step(page: Page, site: Dashboard):
    run = ended_run(site)
    page.goto(f"{site.url}run?run={run.id}")
    noticed = page.locator(".panel[data-panel=header] .noticed")
    expect(page.locator(".panel[data-panel=ranks] tbody tr")).to_have_count(4)
    expect(noticed).to_be_hidden()
    words = "rank 2's weights are no longer the other ranks'"
    run.watched(2, check="weights", tensor="features.0.weight", step=300, epoch=3, message=words)
    expect(noticed.locator("li.watch")).to_have_text(
        f"Rank 2 differs: {words} · tensor features.0.weight, step 300, epoch 3"
    )
    for step in (7, 8):
        run.event(0, "skipped", step=step, ranks=[1, 3], what="gradient", count=step - 6)
    expect(noticed.locator("li.skipped")).to_have_text(
        "2 steps left out. The last: step 8 was left out: the gradient was NaN or infinite on rank 1, 3"
    )
    run.event(3, "warning", message=EVIL)
    expect(noticed.locator("li.warning")).to_have_text(f"Rank 3 warns: {EVIL}")
    events = page.locator(".panel[data-panel=events]")
    expect(events.locator("tr[data-event=watch]")).to_contain_text(words)
    expect(events.locator("tr[data-event=skipped]")).to_have_count(2)
    for rank in range(3, 8):
        run.watched(rank, check="samples", tensor=None, step=None, epoch=1, message=f"violation {rank}")
    expect(noticed).to_contain_text("3 earlier ones are among the events below.")
    expect(noticed).not_to_contain_text("violation 4")
    expect(noticed).to_contain_text("violation 7")
    assert page.evaluate("window.hacked") is None


def test_a_run_that_finished_before_its_last_epoch_says_why(page: Page, site: Dashboard):
    run = ended_run(site)
    page.goto(f"{site.url}run?run={run.id}")
    bar = page.locator(".progress")
    expect(bar).to_have_attribute("aria-valuenow", "100")
    reason = "early stopping: validation loss has not improved for 3 epochs"
    run.event(0, "end", outcome="finished", reason=reason)
    expect(page.locator(".status-line")).to_have_text(f"Finished: {reason}")
    expect(bar).to_have_attribute("aria-valuenow", "50")
    expect(page.locator(".panel[data-panel=events] tr[data-event=end]")).to_contain_text(reason)


def test_gradient_norms_are_shown_where_they_are_logged_and_unknown_numbers_disturb_nothing(
    page: Page, site: Dashboard
):
    run = ended_run(site)
    page.goto(f"{site.url}run?run={run.id}")
    ranks = page.locator(".panel[data-panel=ranks]")
    norms = ranks.locator("td.norms")
    expect(norms).to_have_count(4)
    expect(norms.first).to_be_hidden()
    run.log(21, 22, grad_norm=1.25, comm_s=0.01, overlap_s=0.005, memory_peak=2.0**30, whatever=3.0)
    expect(norms).to_have_text(["1.250"] * 4)
    run.log(23, 23, grad_norm=1.5, rank_grad_norm=float("nan"))
    expect(norms).to_have_text(["NaN"] * 4)
    expect(norms.first).to_have_attribute("title", "after averaging: 1.500")
    expect(page.locator(".tiles")).to_contain_text("23 / 40")


def test_page_of_an_unknown_run_says_so_and_leads_to_the_runs(page: Page, site: Dashboard):
    page.goto(f"{site.url}run?run=nowhere-1")
    expect(page.locator(".stMain")).to_contain_text("There is no run 'nowhere-1'")
    page.get_by_role("link", name="All runs").click()
    expect(page.locator(".panel[data-panel=list]")).to_be_visible()


def test_run_with_a_damaged_state_file_shows_what_can_be_read(page: Page, site: Dashboard):
    run = ended_run(site)
    (run.path / "state.json").write_text('{"version": 1, "id": "')
    (run.path / "model_epoch2.pth").write_bytes(b"x" * 2**20)
    page.goto(f"{site.url}run?run={run.id}")
    expect(page.locator(".verdict")).to_contain_text("damaged")
    expect(page.locator(".panel[data-panel=ranks] tbody tr").nth(3)).to_contain_text("20")
    page.get_by_role("tab", name="Checkpoints").click()
    expect(page.locator(".panel[data-panel=checkpoints]")).to_contain_text("model_epoch2.pth")


# --- all runs ---


def test_runs_page_lists_newest_first_filters_and_links(page: Page, dashboard, tmp_path: Path):
    site = dashboard(tmp_path / "store")
    page.goto(f"{site.url}runs")
    listed = page.locator(".panel[data-panel=list]")
    expect(listed).to_contain_text("No runs yet")
    expect(listed.get_by_role("link", name="Go to Launch")).to_have_attribute("href", site.url)
    for age in (300, 200, 100):
        run = SyntheticRun.create(site.store)
        run.set_state(created=time.time() - age, final={"loss": 0.125, "val_loss": 0.1, "val_accuracy": 0.975})
    rows = listed.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("fake-3")
    expect(rows.nth(0)).to_contain_text("97.5 %")
    expect(rows.nth(0).get_by_role("link", name="fake-3")).to_have_attribute("href", f"{site.url}run?run=fake-3")
    expect(rows.nth(0).get_by_role("link", name="Run again")).to_have_attribute(
        "href", re.compile(r"\?from=fake-3&form=")
    )
    page.get_by_role("searchbox").fill("fake-2")
    expect(rows).to_have_count(1)
    expect(listed).to_contain_text("1 of 3 runs")
    rows.nth(0).get_by_role("link", name="fake-2").click()
    page.wait_for_url("**/run?run=fake-2")
    expect(page.locator("[data-panel=header] h1")).to_have_text("fake-2")


# --- GPUs ---


def test_gpus_page_tells_zero_missing_and_lost_apart(page: Page, dashboard, tmp_path: Path):
    fake = FakeNvml(tmp_path, gpus=3)
    fake.set(0, busy=0)
    fake.fail(1, "nvmlDeviceGetPowerUsage", 3)
    site = dashboard(None, fake.env())
    page.goto(f"{site.url}gpus")
    rows = page.locator(".panel[data-panel=machine] tbody tr")
    expect(rows.nth(0).locator("td").nth(1)).to_have_text("0 %")
    power = rows.nth(1).locator("td").nth(3)
    expect(power).to_have_text("–")
    expect(power).to_have_attribute("title", re.compile("support"))
    fake.lose(2)
    expect(rows.nth(2)).to_contain_text("lost")
    expect(rows.nth(2).locator("td").nth(1)).to_have_text("–")
    expect(rows.nth(0).locator("td").nth(1)).to_have_text("0 %")
    fake.driver_gone()
    expect(page.locator(".notice")).to_be_visible()


# --- all pages ---


def test_back_and_forward_go_through_the_pages_as_they_were_opened(page: Page, site: Dashboard):
    run = ended_run(site)
    page.goto(f"{site.url}runs")
    heading = page.locator("h1")
    page.get_by_role("searchbox").fill(run.id)
    page.get_by_role("link", name=run.id, exact=True).click()
    expect(heading).to_have_text(run.id)
    expect(page).to_have_title(f"{run.id} · DDP runs")
    page.get_by_role("link", name="Run again").click()
    expect(heading).to_have_text("New run")
    expect(page).to_have_title("Launch · DDP runs")
    page.go_back()
    expect(heading).to_have_text(run.id)
    assert page.url == f"{site.url}run?run={run.id}"
    page.go_back()
    expect(heading).to_have_text("Runs")
    assert page.url == f"{site.url}runs"
    page.go_forward()
    expect(heading).to_have_text(run.id)


def test_no_page_asks_another_host_for_anything(browser: Browser, site: Dashboard):
    run = ended_run(site)
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path, panel in (("", "plan"), ("runs", "list"), (f"run?run={run.id}", "ranks"), ("gpus", "machine")):
        page.goto(f"{site.url}{path}")
        expect(page.locator(f".panel[data-panel={panel}]")).to_be_visible()
        wait_for(lambda: page.evaluate("document.fonts.status") == "loaded", "fonts loaded")
    page.close()
    assert [url for url in asked if not re.match(r"http://127\.0\.0\.1:|blob:|data:", url)] == []
