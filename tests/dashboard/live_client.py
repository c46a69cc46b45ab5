"""A client of the live route that keeps what it is told, as the page does."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from websockets.sync.client import ClientConnection, connect


class LiveClient:
    """One connection; payloads are kept per subscription."""

    def __init__(self, url: str, **options: Any) -> None:
        self._open = contextlib.ExitStack()
        address = url.replace("http", "ws", 1) + "ddp/live"
        self.socket: ClientConnection = self._open.enter_context(connect(address, **options))
        self.payloads: dict[int, list[dict[str, Any]]] = {}
        self._drawn: dict[int, dict[str, list[tuple[float, float]]]] = {}

    def __enter__(self) -> LiveClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def sub(self, channel: str, cursor: Any = None, **params: Any) -> int:
        number = len(self.payloads) + 1
        self.payloads[number] = []
        self.send(op="sub", id=number, channel=channel, params=params, **({"cursor": cursor} if cursor else {}))
        return number

    def receive(self, timeout: float = 10) -> None:
        for payload in json.loads(self.socket.recv(timeout=timeout)):
            self.payloads.setdefault(payload["id"], []).append(payload)
            if "snapshot" in payload:
                self._drawn[payload["id"]] = {}
            for trace in [*payload.get("snapshot", ()), *payload.get("add", ())]:
                points = self._drawn.setdefault(payload["id"], {}).setdefault(trace["key"], [])
                points.extend(zip(trace["x"], trace["y"], strict=True))

    def wait(
        self, number: int, condition: Callable[[dict[str, Any]], object], what: str = "", timeout: float = 10
    ) -> Any:
        """Receive until a payload of this subscription is as wanted; give it."""
        deadline = time.monotonic() + timeout
        done = 0
        while True:
            for payload in self.payloads[number][done:]:
                if condition(payload):
                    return payload
            done = len(self.payloads[number])
            left = deadline - time.monotonic()
            assert left > 0, f"no such payload {what}: {self.payloads[number][-3:]}"
            self.receive(left)

    def curves(self, number: int) -> dict[str, list[tuple[float, float]]]:
        """What a page would draw after all payloads so far."""
        return self._drawn.get(number, {})

    def wait_curves(self, number: int, condition: Callable[[dict[str, Any]], object], timeout: float = 10) -> Any:
        """Receive until the drawn curves are as wanted; give them."""
        deadline = time.monotonic() + timeout
        while not condition(curves := self.curves(number)):
            left = deadline - time.monotonic()
            assert left > 0, {key: points[-3:] for key, points in curves.items()}
            self.receive(left)
        return curves
