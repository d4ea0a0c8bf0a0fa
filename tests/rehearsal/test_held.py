"""Memory of a step on the rehearsal device beside the ledger: within 5 % at every moment, or listed with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from lab.device_memory import CLOSE, measured, off

pytestmark = pytest.mark.long
OFFLOADED, PACKED = "dpo fsdp2 zero3 recompute offloaded", "grpo zero3 recompute packed"
POOLS = "CUDA's allocator keeps a pool for each stream, which the ledger counts and the device does not have"
FURTHER_OFF: dict[tuple[str, str], str] = {
    (OFFLOADED, "reference.logprob"): POOLS,
    (OFFLOADED, "actor.train"): POOLS,
    (PACKED, "actor.logprob"): "ZeRO-3 gathers whole matrices ahead, more than its prefetch bucket",
}
"""(Case, phase) -> why the ledger and the device differ there; docs/gpu.md says it too."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measured(tmp_path_factory.mktemp("held"))


def test_a_step_holds_what_its_plan_says_at_every_moment(found: Any) -> None:
    assert len(found) >= 12
    for case, rows in found.items():
        assert {"start", "actor.train"} <= {row["phase"] for row in rows}, case
        for row in rows:
            share = off(row)
            if share is None:  # all is on the host
                assert row["measured"] < 0.01 * max(r["measured"] for r in rows), (case, row)
            elif (case, row["phase"]) not in FURTHER_OFF:
                assert abs(share) <= CLOSE, (case, row)


def test_what_is_listed_as_further_off_is(found: Any) -> None:
    for case, phase in FURTHER_OFF:
        [row] = [row for row in found[case] if row["phase"] == phase]
        assert abs(off(row) or 0.0) > CLOSE, f"{case}, {phase}: within {CLOSE:.0%} now, take it off the list"
