"""The live route of a real server, asked without a browser."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from websockets.exceptions import InvalidStatus

from dashboard import live
from tests.conftest import wait_for
from tests.dashboard.conftest import LIVE_APP, Dashboard, StartDashboard
from tests.dashboard.live_client import LiveClient
from tests.dashboard.synthetic import SyntheticRun, gpu_uuid
from tests.fake_nvml import FakeNvml

MakeRun = Callable[..., SyntheticRun]
STATIC, PLOTLY, LIVE = "/ddp/static/hub.js", "/ddp/plotly.min.js", "/ddp/live"


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask as it stands: no client that would tidy the path or the headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": f"127.0.0.1:{port}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def upgrade(port: int, **headers: str) -> int:
    """Status of asking for the WebSocket."""
    ask = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return get(port, LIVE, **ask, **{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}, **headers)[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},  # DNS rebinding: the page and we are one site
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": "192.168.0.7"},
        {"Host": ""},
    ],
    ids=str,
)
def test_foreign_origins_and_hosts_are_refused_on_every_route(charts: Dashboard, headers: dict[str, str]) -> None:
    assert upgrade(charts.port, **headers) == 403
    for path in (STATIC, PLOTLY):
        assert get(charts.port, path, **headers)[0] == 403


def test_our_own_addresses_are_served(charts: Dashboard) -> None:
    port = charts.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "localhost:9999"):
        assert get(port, STATIC, Host=host)[0] == 200
        # The scheme may differ: a proxy in front ends the TLS.
        assert upgrade(port, Host=host, Origin=f"http://{host}") == 101
        assert upgrade(port, Host=host, Origin=f"https://{host}") == 101
    assert upgrade(port, Host="localhost", Origin="https://localhost") == 101
    assert upgrade(port, Host="localhost:443", Origin="https://localhost") == 101


def test_a_named_host_and_a_base_path_are_served_once_configured(dashboard: StartDashboard) -> None:
    served = dashboard(
        None, {"DDP_ALLOWED_HOSTS": "gpu-box, dash.example"}, "--server.baseUrlPath=/team/ddp-1/", app=LIVE_APP
    )
    for path in (STATIC, PLOTLY):
        assert get(served.port, "/team/ddp-1" + path, Host="dash.example")[0] == 200
        assert get(served.port, "/team/ddp-1" + path, Host="other.example")[0] == 403
    with LiveClient(served.url) as client:
        client.wait(client.sub("machine"), lambda payload: payload["host"]["memory_total"])


@pytest.mark.parametrize(
    "path",
    [
        "/ddp/static/../live.py",
        "/ddp/static/%2e%2e/live.py",
        "/ddp/static/..%2flive.py",
        "/ddp/static/%2e%2e%2flive.py",
        "/ddp/static//etc/passwd",
        "/ddp/static/....//live.py",
        "/ddp/static/hub.js/../../live.py",
        "/ddp/static/",
        "/ddp/static/nothing.js",
    ],
)
def test_only_files_of_the_static_folder_are_served(charts: Dashboard, path: str) -> None:
    status, _, body = get(charts.port, path)
    assert status in (400, 404) or b"<!doctype html>" in body.lower()  # Streamlit answers unknown paths with its page
    assert b"import " not in body
    assert b"root:" not in body


def test_files_have_their_types_and_are_asked_for_again(charts: Dashboard) -> None:
    status, headers, body = get(charts.port, STATIC)
    assert status == 200
    assert headers["content-type"].partition(";")[0] in ("text/javascript", "application/javascript")
    assert headers["cache-control"] == "no-cache"
    assert body.startswith(b"//")
    assert get(charts.port, STATIC, **{"If-None-Match": headers["etag"]})[0] == 304


def test_plotly_comes_compressed_from_the_installed_package(charts: Dashboard) -> None:
    _, headers, packed = get(charts.port, PLOTLY + "?v=1", **{"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert "immutable" in headers["cache-control"]
    _, headers, plain = get(charts.port, PLOTLY)
    assert "content-encoding" not in headers
    assert len(packed) < len(plain) / 2
    assert gzip.decompress(packed) == plain
    assert b"plotly.js v" in plain[:300]


def test_a_chart_gets_a_picture_and_then_only_what_is_new(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=4)
    run.log(1, 50)
    with LiveClient(charts.url) as client:
        number = client.sub("metric", run=run.id, metric="loss")
        client.wait_curves(number, lambda c: len(c.get("mean", ())) == 50)
        run.log(51, 53)
        curves = client.wait_curves(number, lambda c: all(len(c[key]) == 53 for key in ("0", "1", "2", "3", "mean")))
        assert [x for x, _ in curves["2"]] == list(range(1, 54))
        for step, mean in curves["mean"]:
            assert mean == pytest.approx(sum(dict(curves[str(rank)])[step] for rank in range(4)) / 4)
        new = [payload for payload in client.payloads[number] if "add" in payload][-1]
        assert all(len(trace["x"]) <= 3 for trace in new["add"])


def test_a_dropped_connection_goes_on_where_it_was(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 100)
    with LiveClient(charts.url) as first:
        number = first.sub("metric", run=run.id, metric="loss")
        first.wait_curves(number, lambda c: len(c.get("mean", ())) == 100)
        cursor = first.payloads[number][-1]["cursor"]
    run.log(101, 140)
    with LiveClient(charts.url) as second:
        number = second.sub("metric", cursor, run=run.id, metric="loss")
        curves = second.wait_curves(number, lambda c: len(c.get("mean", ())) == 40)
        assert not any("snapshot" in payload for payload in second.payloads[number])
        assert [x for x, _ in curves["1"]] == list(range(101, 141))


@pytest.mark.parametrize(
    "change", [{"g": "other"}, {"n": 5}, {"n": {"0": 10**9}}, {"n": {"0": "x"}}, {"s": None}], ids=str
)
def test_a_cursor_that_does_not_fit_gives_a_new_picture(
    charts: Dashboard, synthetic: MakeRun, change: dict[str, object]
) -> None:
    run = synthetic(ranks=2)
    run.log(1, 10)
    with LiveClient(charts.url) as client:
        number = client.sub("metric", run=run.id, metric="loss")
        cursor = client.wait(number, lambda payload: "snapshot" in payload)["cursor"]
        number = client.sub("metric", cursor | change, run=run.id, metric="loss")
        assert len(client.wait(number, lambda payload: "snapshot" in payload)["snapshot"]) == 3


def test_points_taken_back_by_a_restart_are_taken_back_in_the_picture(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2)
    run.log(1, 30)
    with LiveClient(charts.url) as client:
        number = client.sub("metric", run=run.id, metric="loss")
        client.wait_curves(number, lambda c: len(c.get("mean", ())) == 30)
        for rank in range(2):
            run.event(rank, "start", attempt=1, world_size=2)
        run.log(21, 45, attempt=1, loss=7.0)  # further than it had come before
        curves = client.wait_curves(number, lambda c: c["mean"][-1] == (45, 7.0))
        assert [x for x, _ in curves["0"]] == list(range(1, 46))
        assert {y for x, y in curves["0"] if x > 20} == {7.0}


def test_a_log_that_is_cut_or_replaced_starts_a_new_picture(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    run.log(1, 30)
    with LiveClient(charts.url) as client:
        number = client.sub("metric", run=run.id, metric="loss")
        client.wait_curves(number, lambda c: len(c.get("0", ())) == 30)
        run.rank_log(0).write_bytes(b"")
        run.log(1, 3, loss=1.0)
        client.wait_curves(number, lambda c: c.get("0") == [(1, 1.0), (2, 1.0), (3, 1.0)])


def test_values_that_are_not_finite_are_named(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    for step, loss in enumerate((1.0, float("nan"), float("inf"), float("-inf")), start=1):
        run.log(step, step, loss=loss)
    with LiveClient(charts.url) as client:
        number = client.sub("metric", run=run.id, metric="loss")
        curves = client.wait_curves(number, lambda c: len(c.get("0", ())) == 4)
        assert [y for _, y in curves["0"]] == [1.0, None, None, None]
        bad = [mark for payload in client.payloads[number] for t in payload.get("snapshot", []) for mark in t["bad"]]
        assert bad == [[2.0, "NaN"], [3.0, "Infinity"], [4.0, "-Infinity"]]


def test_a_zoom_gets_the_finer_window_with_its_spike(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    run.log(1, 20000, loss=1.0)
    with LiveClient(charts.url) as client:
        number = client.sub("metric", run=run.id, metric="loss", points=300)
        client.wait_curves(number, lambda c: (c.get("0") or [(0, 0)])[-1][0] == 20000)
        assert len(client.curves(number)["0"]) <= 302
        client.send(op="update", id=number, params={"run": run.id, "metric": "loss", "window": [5000, 5100]})
        window = client.wait(number, lambda payload: payload.get("window"))["window"]
        assert window["traces"][0]["x"] == list(range(4999, 5102))
        client.send(op="update", id=number, params={"run": run.id, "metric": "loss"})
        client.wait(number, lambda payload: "window" in payload and payload["window"] is None)


def test_a_run_that_is_not_there_is_said_and_found_once_it_is(charts: Dashboard, synthetic: MakeRun) -> None:
    with LiveClient(charts.url) as client:
        for channel in ("run", "metric", "events", "log", "hardware"):
            number = client.sub(channel, run="nobody-1")
            assert "no run 'nobody-1'" in client.wait(number, lambda payload: "error" in payload)["error"]
        outside = client.sub("metric", run="../store", metric="loss")
        assert "no run" in client.wait(outside, lambda payload: "error" in payload)["error"]
        run = synthetic(ranks=1)
        run.log(1, 3)
        shutil.copytree(run.path, run.path.with_name("nobody-1"))
        client.wait_curves(2, lambda c: len(c.get("0", ())) == 3)


def test_an_unknown_channel_and_nonsense_leave_the_socket_alive(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    run.log(1, 2)
    with LiveClient(charts.url) as client:
        assert "channel" in client.wait(client.sub("nothing"), lambda payload: "error" in payload)["error"]
        for text in (
            "",
            "[]",
            "{}",
            "null",
            '{"op": "sub"}',
            '{"op": "sub", "id": "x", "channel": []}',
            "\x00",
            "[" * 1000,
        ):
            client.socket.send(text)
        for params in ({"run": run.id, "points": "many", "window": ["a", {}]}, {"run": [], "metric": {}}):
            client.sub("metric", **params)
        client.wait_curves(2, lambda c: len(c.get("0", ())) == 2)


def test_the_run_channel_tells_state_ranks_progress_and_skipped_lines(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=2, gpus=2)
    for rank in range(2):
        run.event(rank, "joined", device="cpu", gpu=gpu_uuid(rank), steps_total=200, epochs=2, steps_per_epoch=100)
    run.log(1, 50, samples_per_s=100.0)
    run.write(1, b"null\n")
    run.sample(time.time(), [{"busy": 0, "memory_used": 5}, {"busy": None}])
    with LiveClient(charts.url) as client:
        number = client.sub("run", run=run.id)
        found = client.wait(number, lambda payload: payload["progress"]["step"] == 50 and payload["gpus"])
        assert found["show"]["id"] == run.id
        assert found["progress"]["fraction"] == 0.25
        assert found["progress"]["samples_per_s"] == 200
        assert found["skipped"] == {"0": 0, "1": 1}
        assert found["ranks"]["1"]["gpu"] == gpu_uuid(1)
        assert found["ranks"]["1"]["memory"] == 301 << 20
        assert [gpu["busy"] for gpu in found["gpus"]] == [0, None]
        run.set_state(state="failed", reason="rank 1 raised")
        client.wait(number, lambda payload: payload["show"]["reason"] == "rank 1 raised")


def test_hardware_of_a_run_is_of_its_gpus_with_zero_missing_and_gaps_apart(
    charts: Dashboard, synthetic: MakeRun
) -> None:
    run = synthetic(ranks=1, gpus=2)
    run.sample(1000.0, [{"busy": 0, "memory_total": 80}, {}, {"busy": 99}])
    run.sample(1030.0, [{"busy": 7, "memory_total": 80}, {}, {"busy": 99}])
    with LiveClient(charts.url) as client:
        busy = client.sub("hardware", run=run.id, field="busy")
        curves = client.wait_curves(busy, lambda c: len(c.get(gpu_uuid(0), ())) == 3)
        assert [y for _, y in curves[gpu_uuid(0)]] == [0, None, 7]
        assert gpu_uuid(2) not in curves  # another one's GPU
        assert [y for _, y in curves[gpu_uuid(1)] if y is not None] == []
        memory = client.sub("hardware", run=run.id, field="memory_used")
        about = client.wait(memory, lambda payload: "about" in payload)["about"]
        assert (about["limit"], about["note"]) == (80, "not supported")


def test_events_of_supervisor_and_ranks_come_by_time(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    run.event(0, "checkpoint", path="model_epoch1.pth", epoch=1, step=10)
    (run.path / "events.jsonl").write_bytes(b'{"ts": 1, "event": "state", "message": "starting"}\n{"to')
    with LiveClient(charts.url) as client:
        number = client.sub("events", run=run.id)
        first = client.wait(number, lambda payload: len(payload["events"]) == 2)
        assert first["reset"] is True
        assert [event["event"] for event in first["events"]] == ["state", "checkpoint"]
        with (run.path / "events.jsonl").open("ab") as file:
            file.write(b'rn": 1}\n{"ts": 2, "event": "stage", "message": "training"}\n')
        assert client.wait(number, lambda p: not p["reset"] and p["events"])["events"][-1]["message"] == "training"


def test_a_long_log_is_a_bounded_tail_and_then_grows(charts: Dashboard, synthetic: MakeRun) -> None:
    run = synthetic(ranks=1)
    folder = run.path / "logs" / "none_abc" / "attempt_0" / "0"
    with LiveClient(charts.url) as client:
        number = client.sub("log", run=run.id, rank=0, stream="stdout")
        assert client.wait(number, lambda payload: payload.get("missing"))["text"] == ""
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_bytes(b"".join(b"line %d\n" % n for n in range(200_000)))
        tail = client.wait(number, lambda payload: payload["text"])
        assert tail["reset"] is True
        assert len(tail["text"]) <= 64 * 1024
        assert tail["text"].startswith("line ") and tail["text"].endswith("line 199999\n")
        with (folder / "stdout.log").open("ab") as file:
            file.write("größe ".encode() + "ü".encode()[:1])
            file.flush()
            more = client.wait(number, lambda payload: not payload["reset"])
            assert more["text"] == "größe "  # half a character waits for its other half
            file.write("ü".encode()[1:])
            file.flush()
            client.wait(number, lambda payload: payload["text"] == "ü")
        (folder / "stdout.log").write_bytes(b"new\n")
        client.wait(number, lambda payload: payload["reset"] and payload["text"] == "new\n")


def test_the_list_of_runs_follows_the_store(charts: Dashboard, synthetic: MakeRun) -> None:
    with LiveClient(charts.url) as client:
        number = client.sub("runs")
        run = synthetic(ranks=1)
        client.wait(number, lambda payload: run.id in [row["id"] for row in payload["runs"]])
        run.set_state(state="failed")
        client.wait(number, lambda p: ("failed", run.id) in [(row["state"], row["id"]) for row in p["runs"]])


def test_the_machines_gpus_are_sampled_and_a_lost_one_is_a_gap(dashboard: StartDashboard, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path, gpus=2)
    fake.set(0, busy=41)
    fake.set(1, busy=17)
    served = dashboard(None, fake.env(), app=LIVE_APP)
    with LiveClient(served.url) as client:
        number, machine = client.sub("hardware", run=None, field="busy"), client.sub("machine")
        curves = client.wait_curves(number, lambda c: sum(map(len, c.values())) >= 4)
        assert {points[-1][1] for points in curves.values()} == {41, 17}
        fake.lose(1)
        lost = client.wait(machine, lambda p: any(gpu["status"] == "lost" for gpu in p["gpus"]["gpus"]))["gpus"][
            "gpus"
        ][1]
        client.wait_curves(number, lambda c: c[lost["uuid"]][-1][1] is None)
        other = next(key for key in curves if key != lost["uuid"])
        assert client.curves(number)[other][-1][1] == 41


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The routes on a real server in this process, so that a test can look inside."""
    monkeypatch.setenv("DDP_STORE", str(tmp_path))
    monkeypatch.setattr(live, "LINGER_S", 0.2)
    app = Starlette(routes=[r for r in live.routes() if isinstance(r, WebSocketRoute)], lifespan=live.lifespan)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started, "the server")
    # What the kernel takes is taken; little of it, so that a test sees what we would keep.
    server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def test_all_tabs_share_one_feed_and_nothing_is_left_of_them(in_process: str, tmp_path: Path) -> None:
    run = SyntheticRun.create(tmp_path, ranks=2)
    run.log(1, 100)

    def visit() -> None:
        clients = [LiveClient(in_process) for _ in range(8)]
        for client in clients:
            client.sub("metric", run=run.id, metric="loss")
            client.sub("run", run=run.id)
            client.sub("runs")
        for client in clients:
            client.wait_curves(1, lambda c: len(c.get("mean", ())) == 100)
        assert sorted(live.LIVE.feeds) == [f"run {run.id}", "runs"]
        assert len(live.LIVE.connections) == 8
        for client in clients:
            client.close()

    def left() -> tuple[int, int, int]:
        wait_for(lambda: not live.LIVE.connections and not live.LIVE.feeds, "all to be gone")
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks(loop))

    loop = live.LIVE._sampling.get_loop()
    visit()
    first = left()
    for _ in range(4):
        visit()
    wait_for(lambda: left() <= first, f"no more threads, files and tasks than {first}")


def test_a_client_that_does_not_read_gets_the_newest_and_not_a_backlog(in_process: str, tmp_path: Path) -> None:
    run = SyntheticRun.create(tmp_path, ranks=1)
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    small.connect(("127.0.0.1", int(in_process.rstrip("/").rpartition(":")[2])))
    with LiveClient(in_process, sock=small, max_queue=1) as slow, LiveClient(in_process) as watcher:
        sleeping = slow.sub("metric", run=run.id, metric="loss")
        number = watcher.sub("metric", run=run.id, metric="loss")

        def caught_up(curves: dict[str, list[tuple[float, float]]]) -> bool:
            return bool(curves.get("0")) and curves["0"][-1][0] == last

        for last in range(1600, 40 * 1600, 1600):  # each more than a picture's points: 60 KB
            run.log(last - 1599, last)
            watcher.wait_curves(number, caught_up)
        curves = slow.wait_curves(sleeping, caught_up, timeout=20)
        assert curves["0"][-1] == watcher.curves(number)["0"][-1]
        assert len(slow.payloads[sleeping]) < len(watcher.payloads[number]) / 2


def test_a_failure_inside_a_feed_is_told_and_gets_better(
    in_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SyntheticRun.create(tmp_path, ranks=1)
    run.log(1, 3)
    with monkeypatch.context() as broken, LiveClient(in_process) as client:
        broken.setattr(live.runs, "show", lambda _: 1 / 0)
        number = client.sub("run", run=run.id)
        assert "ZeroDivisionError" in client.wait(number, lambda payload: "error" in payload)["error"]
        broken.undo()
        client.wait(number, lambda payload: "show" in payload)


def test_a_refused_socket_is_closed_before_it_is_accepted(charts: Dashboard) -> None:
    with pytest.raises(InvalidStatus) as refused:
        LiveClient(charts.url, origin="http://evil.example")
    assert refused.value.response.status_code == 403
