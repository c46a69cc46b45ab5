"""The live route: one guarded WebSocket a page, over which every part of it gets what is new.

The client asks for channels, ``{"op": "sub", "id", "channel", "params", "cursor"?}``, changes their parameters
(``update``) and ends them (``unsub``); the server sends JSON arrays of ``{"id", …payload}``. What a channel
sends is in :mod:`dashboard.live_channels`, what is watched for it in :mod:`dashboard.live_feeds`.

All tabs share one feed per run. Its files are looked at by ``stat`` twenty times a second, in one worker thread;
the event loop only carries messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from streamlit import config

from dashboard.live_channels import CHANNELS, DOCUMENTS, Feed, Subscription
from dashboard.live_feeds import SHOW_EVERY_S, MachineFeed, RunFeed, StoreFeed
from dashboard.live_guard import Guard
from ddp_core import runs
from ddp_core.config import RunConfig

POLL_S = 0.05
FRAMES_APART_S = 0.1
LINGER_S = 5.0
"""A feed outlives its last subscriber by this, so that a reload or a short drop finds it where it was."""
SUBSCRIPTIONS_MOST = 500
STATIC = Path(__file__).parent / "static"

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Live:
    """The feeds and the threads they are read in. Everything here runs on the event loop."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()
        self.feeds: dict[str, tuple[RunFeed | StoreFeed, asyncio.Task[None]]] = {}

    async def start(self) -> None:
        """Begin to sample the machine."""
        self.store = runs.Store()
        self._worker = ThreadPoolExecutor(1, "ddp-live")
        self._lookers = ThreadPoolExecutor(3, "ddp-look")
        self.machine = MachineFeed(self.store.root)
        self._sampling = asyncio.create_task(self._sample())
        # Asking torch about the GPUs takes seconds once; the launch page should find the answer there.
        self._lookers.submit(runs.preflight, RunConfig())

    async def stop(self) -> None:
        """End all feeds and threads."""
        tasks = [self._sampling, *(task for _, task in self.feeds.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.feeds.clear()
        self._worker.shutdown(cancel_futures=True)
        self._lookers.shutdown(wait=False, cancel_futures=True)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the worker, which owns all series."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    async def aside(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may take a while and owns nothing."""
        return await asyncio.get_running_loop().run_in_executor(self._lookers, function, *args)

    def feed(self, channel: str, params: dict[str, Any]) -> Feed:
        """Find the feed of a channel, or start it."""
        run_id = params.get("run")
        if channel == "machine" or (channel == "hardware" and run_id is None):
            return self.machine
        key = "runs" if channel == "runs" else f"run {run_id}"
        if key not in self.feeds:
            made = StoreFeed(self.store, self.machine) if channel == "runs" else RunFeed(self.store, str(run_id))
            follow = self._follow_store(key, made) if isinstance(made, StoreFeed) else self._follow_run(key, made)
            self.feeds[key] = made, asyncio.create_task(follow)
        return self.feeds[key][0]

    def changed(self, feed: Feed) -> None:
        """Wake every connection that follows the feed."""
        for connection in self.connections:
            if any(sub.feed is feed for sub in connection.subscriptions.values()):
                connection.wake.set()

    def _used(self, feed: Feed) -> bool:
        return any(sub.feed is feed for c in self.connections for sub in c.subscriptions.values())

    async def _while_used(self, key: str, feed: Feed, every_s: float) -> AsyncIterator[None]:
        """Yield again and again until nobody has used the feed for a while; then forget it."""
        loop = asyncio.get_running_loop()
        used_at = loop.time()
        while True:
            if self._used(feed):
                used_at = loop.time()
            elif loop.time() - used_at > LINGER_S:
                del self.feeds[key]
                return
            yield
            await asyncio.sleep(every_s)

    async def _follow_run(self, key: str, feed: RunFeed) -> None:
        looking = asyncio.create_task(self._look(feed, SHOW_EVERY_S))
        try:
            async for _ in self._while_used(key, feed, POLL_S):
                behind = True
                while behind:
                    behind = False
                    with _reported(feed):
                        if await self.work(feed.poll):
                            self.changed(feed)
                        behind = not feed.caught_up
        finally:
            looking.cancel()

    async def _follow_store(self, key: str, feed: StoreFeed) -> None:
        looking = asyncio.create_task(self._look(feed, 0.5))
        try:
            async for _ in self._while_used(key, feed, 0.5):
                pass
        finally:
            looking.cancel()

    async def _look(self, feed: RunFeed | StoreFeed, every_s: float) -> None:
        """Keep a feed's document up to date."""
        while True:
            with _reported(feed):
                found: Any = await self.aside(feed.look)
                if found is not None and await self.work(feed.put, found):
                    self.changed(feed)
            await asyncio.sleep(every_s)

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            with _reported(self.machine):
                await self.work(self.machine.put, await self.aside(self.machine.sample))
            self.changed(self.machine)
            at = max(at + 1.0, loop.time())
            await asyncio.sleep(at - loop.time())


@contextlib.contextmanager
def _reported(feed: Feed) -> Iterator[None]:
    """Turn an exception into the feed's error, which its subscribers are told, and go on."""
    try:
        yield
    except Exception as error:
        _log.exception("a live feed failed")
        feed.error = f"{type(error).__name__}: {error}"
        feed.version += 1
        LIVE.changed(feed)


class Connection:
    """One page's WebSocket.

    A message is only made when the one before it is out, and from what is newest then, so a client that does
    not keep up costs no memory here.
    """

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.subscriptions: dict[int, Subscription] = {}
        self.wake = asyncio.Event()
        self.asked = asyncio.Event()
        self._answers: list[bytes] = []

    async def serve(self) -> None:
        """Carry messages both ways until the client is gone."""
        await self.socket.accept()
        LIVE.connections.add(self)
        sending = asyncio.create_task(self._send())
        try:
            while True:
                self._receive(await self.socket.receive_text())
        except (WebSocketDisconnect, KeyError):
            pass  # KeyError: a binary frame, which no client of ours sends
        finally:
            LIVE.connections.discard(self)
            self.subscriptions.clear()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _receive(self, text: str) -> None:
        try:
            message = orjson.loads(text)
            op, sub_id = message["op"], message.get("id")
            params = message.get("params") or {}
            if op == "ping":
                self._answers.append(b"")
            elif not isinstance(sub_id, int) or not isinstance(params, dict):
                return
            elif op == "unsub":
                self.subscriptions.pop(sub_id, None)
            elif op == "update" and sub_id in self.subscriptions:
                self.subscriptions[sub_id].update(params)
            elif op == "sub":
                self._subscribe(sub_id, str(message.get("channel")), params, message.get("cursor"))
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # not a message of ours
        self.wake.set()
        self.asked.set()

    def _subscribe(self, sub_id: int, channel: str, params: dict[str, Any], cursor: Any) -> None:
        if channel not in CHANNELS and channel not in DOCUMENTS:
            self._answers.append(b'{"id":%d,"error":"there is no such channel"}' % sub_id)
        elif len(self.subscriptions) >= SUBSCRIPTIONS_MOST:
            self._answers.append(b'{"id":%d,"error":"too many subscriptions on one page"}' % sub_id)
        else:
            self.subscriptions[sub_id] = Subscription(LIVE.feed(channel, params), channel, params, cursor)

    async def _send(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self.asked.clear()
            due = {sub_id: sub for sub_id, sub in self.subscriptions.items() if sub.due()}
            answers, self._answers = self._answers, []
            if due:
                answers += await LIVE.work(_render, due)
            if answers:
                try:
                    await self.socket.send_text(f"[{b','.join(filter(None, answers)).decode()}]")
                except (WebSocketDisconnect, RuntimeError):
                    return
                # What is new may wait and be sent together; what the client asks for does not.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.asked.wait(), FRAMES_APART_S)


def _render(due: dict[int, Subscription]) -> list[bytes]:
    parts = []
    for sub_id, sub in due.items():
        body = sub.render()
        if body is not None:
            parts.append(b'{"id":%d,' % sub_id + body[1:] if body != b"{}" else b'{"id":%d}' % sub_id)
    return parts


LIVE = Live()


@contextlib.asynccontextmanager
async def lifespan(_app: Any) -> AsyncIterator[None]:
    """Sample the machine for as long as the dashboard runs."""
    await LIVE.start()
    try:
        yield
    finally:
        await LIVE.stop()


async def _live(scope: Scope, receive: Receive, send: Send) -> None:
    await Connection(WebSocket(scope, receive, send)).serve()


class _Plotly:
    """plotly.js from the installed plotly package, compressed once."""

    def __init__(self) -> None:
        self._packed: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._packed is None:
            self._packed = await LIVE.aside(lambda: gzip.compress(_plotly_js().read_bytes(), 6))
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        body = self._packed
        if "gzip" in Request(scope).headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            body = await LIVE.aside(gzip.decompress, body)
        await Response(body, media_type="text/javascript", headers=headers)(scope, receive, send)


def _plotly_js() -> Path:
    # Found without importing plotly, which takes a second and 60 MB.
    spec = importlib.util.find_spec("plotly")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


class _Static(StaticFiles):
    """Our JavaScript and styles: always asked for again, answered with 304 unless they changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def routes() -> list[BaseRoute]:
    """The routes of our own, below the app's base path, all behind the guard."""
    base = (config.get_option("server.baseUrlPath") or "").strip("/")
    prefix = f"/{base}/ddp" if base else "/ddp"
    return [
        WebSocketRoute(f"{prefix}/live", Guard(_live)),
        Route(f"{prefix}/plotly.min.js", Guard(_Plotly())),
        Mount(f"{prefix}/static", Guard(_Static(directory=STATIC))),
    ]
