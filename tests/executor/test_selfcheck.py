"""The first minute moves at most a gigabyte, however large the states are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor import selfcheck
from executor.samples import Transfer


class Workers:
    """Engines whose log-probs agree; what they are asked is kept."""

    most_ranks = 1

    def __init__(self, state_bytes: float) -> None:
        self.job = SimpleNamespace(
            settings=SimpleNamespace(logprob_tolerance=0.1), limits=SimpleNamespace(state_bytes=state_bytes)
        )
        self.asked: list[str] = []
        self.moved = 0

    def score(self, call: Any, samples: list[Any], step: int) -> list[Any]:
        return [s.rollout_logprobs for s in samples]

    def sync(self, step: int) -> Transfer:
        self.asked.append("sync")
        return Transfer(version=1, bytes=16, buckets=1, seconds=0.0, checksum="")

    def save_and_compare(self, folder: Path, limit: int) -> int:
        self.asked.append("save_and_compare")
        self.moved += limit
        return limit

    def save(self, folder: Path) -> None:
        self.asked.append("save")

    def restore(self, folder: Path) -> None:
        self.asked.append("restore")


@pytest.mark.parametrize(
    ("size", "expected"),
    [(240e9, ["save_and_compare", "sync"]), (10e6, ["save", "learn", "restore", "sync"])],
)
def test_the_check_moves_at_most_a_gigabyte(
    size: float, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(size)
    sample = SimpleNamespace(rollout_logprobs=np.zeros(3, np.float32), sampled=np.ones(3, np.bool_))
    monkeypatch.setattr(selfcheck, "_samples", lambda *_: [sample])
    monkeypatch.setattr(selfcheck, "_rewarded", lambda samples: samples)
    loop = SimpleNamespace(learn=lambda *_: workers.asked.append("learn") or SimpleNamespace(transfer=None))
    said: list[str] = []
    selfcheck.self_check(workers, loop, tmp_path, said.append)  # type: ignore[arg-type]
    assert workers.asked == expected
    assert workers.moved <= 1e9
