"""Launches on a CUDA device of the host's memory: it learns, and faults end it with one message."""

from __future__ import annotations

import json
from typing import Any

import programs
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # a fixture launches up to six runs
CLOSE = 1e-4


def launches(folder: Any, gpus: int, *cases: str) -> dict[str, Any]:
    """What the program wrote of each case."""
    programs.run_launches(folder, gpus, *cases)
    found: dict[str, Any] = json.loads((folder / "launches.json").read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = ("hybrid", "colocated", "expandable", "other", "small", "lost")
    return launches(tmp_path_factory.mktemp("two"), 2, *cases)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launches(tmp_path_factory.mktemp("three"), 3, "disaggregated", "asynchronous")


EIGHT = {
    "hybrid on eight": 0,
    "disaggregated on eight": 0,
    "asynchronous on eight": 2,
    "colocated on eight": 0,
}
"""Case -> staleness that its plan allows."""


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """8 trainers and 8 engines, or 4 of each apart: 20 to 110 minutes of two cores."""
    return launches(tmp_path_factory.mktemp("eight"), 8, *EIGHT)


def _learns(found: dict[str, Any], staleness: float) -> None:
    """Two iterations, and a third from the checkpoint by a second launch."""
    assert [row["step"] for row in found["rows"]] == [0, 1, 2]
    for row in found["rows"]:
        assert row["policy/grad_norm"] > 0
        assert row["staleness/max"] <= staleness
        assert row["staleness/max"] > 0 or row["mismatch/max_abs_dlogp"] < CLOSE
    assert "actor.sync" in found["spans"]


@pytest.mark.parametrize("case", ["hybrid", "colocated"])
def test_trainers_and_vllm_share_two_gpus(two: Any, case: str) -> None:
    _learns(two[case], 0)
    assert {"actor.generate.unload", "actor.generate.load"} <= set(two[case]["spans"])


@pytest.mark.parametrize(("case", "staleness"), [("disaggregated", 0), ("asynchronous", 2)])
def test_trainers_on_two_gpus_send_to_vllm_on_a_third(three: Any, case: str, staleness: float) -> None:
    _learns(three[case], staleness)


@pytest.mark.timeout(9000)
@pytest.mark.parametrize("case", EIGHT)
def test_eight_gpus_learn_sync_save_and_resume(eight: Any, case: str) -> None:
    _learns(eight[case], EIGHT[case])


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("expandable", "expandable-segments-ipc", "weight path ipc"),
        ("other", "another-gpu", "42 GB"),
        ("small", "out-of-memory", "ran out of memory in"),
        ("lost", "run-failed", "died in actor.train"),
    ],
)
def test_a_launch_ends_by_one_message(two: Any, case: str, code: str, words: str) -> None:
    assert two[case]["code"] == code, two[case]
    assert words in two[case]["message"]
    assert two[case]["help"]
