"""How the dashboard is served, with no option given and from a folder that is not the project's."""

from __future__ import annotations

import psutil

from tests.dashboard.conftest import StartDashboard


def test_it_listens_on_loopback_only_and_sends_no_statistics_wherever_it_is_started(dashboard: StartDashboard) -> None:
    site = dashboard()
    connections = psutil.Process(site.pid).net_connections()
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    printed = site.log.read_text()
    assert f"http://127.0.0.1:{site.port}" in printed
    assert "usage statistics" not in printed
