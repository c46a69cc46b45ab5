"""Who may ask our own routes, which are outside Streamlit's protections.

The dashboard has no login on loopback, so a web page that the user visits elsewhere must not reach it
through the user's browser: neither directly (its ``Origin`` gives it away, also on a WebSocket, which no
same-origin policy covers) nor by a name that resolves to this machine (DNS rebinding; the ``Host`` gives it away).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from streamlit import config

_DEFAULT_PORTS = {"http": "80", "https": "443", "ws": "80", "wss": "443"}


class Guard:
    """An ASGI app in front of another one that refuses foreign hosts and origins, with 403.

    Args:
        app: What is guarded, for HTTP and WebSockets.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        refusal = refuse(Headers(scope=scope))
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008, reason=refusal)(scope, receive, send)
        else:
            await PlainTextResponse(refusal, status_code=403)(scope, receive, send)


def refuse(headers: Mapping[str, str]) -> str | None:
    """Say why a request is refused, or None if it is not.

    Args:
        headers: The request's headers, looked up without regard to case.
    """
    host = headers.get("host", "")
    name, port = _split(host)
    if not name or not _is_ours(name):
        return f"{host!r} is not an address of this dashboard; if it should be, set DDP_ALLOWED_HOSTS={name or 'NAME'}"
    origin = headers.get("origin")
    if origin is not None:
        # "null" (a sandboxed page, a file) has no host and so matches none.
        scheme = urlsplit(origin).scheme
        from_name, from_port = _split(origin.partition("://")[2])
        default = _DEFAULT_PORTS.get(scheme, "")
        if (from_name, from_port or default) != (name, port or default):
            return "requests from another site are refused"
    return None


def _split(host: str) -> tuple[str, str]:
    """Split ``name:port`` or ``[address]:port``; the port may be missing."""
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return "", ""
    if parts.path or parts.query or parts.username is not None:
        return "", ""
    return name.rstrip("."), "" if port is None else str(port)


def _is_ours(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost") or name in _configured():
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # Listening everywhere, the machine's addresses are all right: rebinding needs a name.
    return address.is_loopback or _listens_everywhere()


def _configured() -> set[str]:
    names = os.environ.get("DDP_ALLOWED_HOSTS", "").split(",")
    names += [config.get_option("server.address") or "", config.get_option("browser.serverAddress") or ""]
    return {name.strip().lower().strip("[]") for name in names} - {"", "0.0.0.0", "::"}


def _listens_everywhere() -> bool:
    return (config.get_option("server.address") or "") in ("", "0.0.0.0", "::")
