"""The walk over open ports finds what may not be open; a real run is walked in tests/executor/test_runs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ports
import pytest

from executor.coordination import cluster
from executor.coordination.worker import HOST, ProcessIdentity, TracedProcess
from rlhfsim.interchange.rlhfsim.listening import LISTENERS

SECURITY = (Path(__file__).parents[2] / "SECURITY.md").read_text()


def test_a_port_that_is_not_in_the_list_is_found() -> None:
    ray = (1, "ray::")
    assert ports.open_to_others({ray: {("::", 5), ("10.0.0.1", 6), ("127.0.0.1", 7)}}, "10.0.0.1") == []
    assert len(ports.open_to_others({ray: {("::", 5), ("0.0.0.0", 6)}}, "10.0.0.1")) == 1
    assert len(ports.open_to_others({(2, "python"): {("::", 5), ("10.0.0.9", 6)}}, "10.0.0.1")) == 2


def test_what_listens_is_documented() -> None:
    for program in ports.EVERYWHERE:
        assert f"`{program}`" in SECURITY
    assert all(x.server.split()[0].strip(",") in SECURITY for x in LISTENERS)


def test_a_cluster_that_is_started_here_listens_on_the_loopback_where_we_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}
    plan: Any = None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    for name in (
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "NCCL_SOCKET_IFNAME",
        "VLLM_HOST_IP",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster, "local_gpus", lambda: 8)
    monkeypatch.setattr("executor.coordination.cluster.ray.init", lambda **options: asked.update(options))
    cluster.connect(plan, None, {"NCCL_DEBUG": "INFO"})
    variables = asked["runtime_env"]["env_vars"]
    assert variables == {
        HOST: "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "NCCL_DEBUG": "INFO",
    }
    monkeypatch.setenv(HOST, "127.0.0.1")
    where = ProcessIdentity(pool="p")
    assert TracedProcess(where, "g").address()[0] == "127.0.0.1"
    token = tmp_path / ".ray" / "auth_token"
    assert (len(token.read_text()), token.stat().st_mode & 0o777) == (64, 0o600)
