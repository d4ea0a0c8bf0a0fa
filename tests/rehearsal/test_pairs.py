"""Two processes on a CUDA device of the host's memory: handles that die with their owner, collectives that wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import programs
import pytest

pytestmark = pytest.mark.slow
LIMIT_S, SIZE_BYTES = 3.0, 4 * 2**20
LATE = "collective-late: actor rank {} in actor.train: a rank came late, died, or waits in another collective"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pairs")
    programs.run(folder, [str(programs.HERE / "pairs.py"), str(folder)], REHEARSAL_GPUS=f"{folder}/gpu-")
    found: dict[str, Any] = json.loads((Path(folder) / "pairs.json").read_text())
    return found


def test_a_handle_shows_the_owner_s_memory_and_what_is_not_waited_for_is_not_there(pairs: Any) -> None:
    seen = pairs["handles"]
    assert (seen["first"], seen["before"], seen["after"]) == (2.0**20 - 1, 2.0**20 - 1, 1.0)
    assert seen["others"] >= 2 * SIZE_BYTES, "the driver counts every process of a GPU"


def test_freed_memory_is_kept_until_its_reader_closes_it(pairs: Any) -> None:
    assert (pairs["handles"]["kept"], pairs["handles"]["left"]) == (SIZE_BYTES, 0)


def test_a_handle_of_a_process_that_ended_is_named_with_its_remedy(pairs: Any) -> None:
    assert pairs["handles"]["freed"].startswith("ipc-handle-freed: rollout replica 0 in actor.sync: ")
    assert "take another weight path" in pairs["handles"]["freed"]


@pytest.mark.parametrize("what", ["order", "shape", "late_beyond", "lost"])
def test_ranks_that_do_not_meet_end_at_the_limit_with_rank_call_and_remedy(pairs: Any, what: str) -> None:
    first, second = pairs[what]["said"]
    assert first.startswith(LATE.format(0))
    assert "TORCH_DISTRIBUTED_DEBUG" in first
    assert second is None if what == "lost" else second.startswith(LATE.format(1))
    assert pairs[what]["seconds"] < 4 * LIMIT_S


def test_under_torch_s_own_check_each_rank_s_collective_is_named(pairs: Any) -> None:
    assert pairs["detailed"]["said"][0].startswith("collective-order: actor rank 0 in actor.train: ")
    assert "(rank 0 ALLREDUCE, rank 1 BROADCAST)" in pairs["detailed"]["said"][0]


def test_a_rank_that_is_late_within_the_limit_is_waited_for(pairs: Any) -> None:
    assert pairs["late_within"]["said"] == [8.0, 8.0]


def test_nan_of_one_rank_is_found_on_all_with_its_rank(pairs: Any) -> None:
    for said in pairs["not_a_number"]["said"]:
        assert said.startswith(
            "not-finite: policy/loss is nan in iteration 3, first on rank 1 of the policy "
        )
