"""The walk over open ports finds what may not be open; a real run is walked in tests/executor/test_runs.py."""

from __future__ import annotations

from pathlib import Path

import ports

from rlhfsim.frameworks.rlhfsim.listening import LISTENERS

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
