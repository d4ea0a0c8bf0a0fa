"""Faults and losses that a desk review found and that no other test holds; docs/gpu.md lists them all."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor.coordination import worker_group
from executor.coordination.worker_group import WorkerGroup
from executor.tasks import tiny
from executor.tasks.text import Text
from executor.weight_transfer import control
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import Digest
from rlhfsim.specs.placement.engine_numbers import SYNC_BUCKET_BYTES
from rlhfsim.units import MIB

ROOT = Path(__file__).parents[2]


def test_the_tests_that_the_document_names_are_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "gpu.md").read_text())
    assert len(named) >= 23
    for file, test in named:
        sources = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {test}(" in source for source in sources), f"{file}::{test}"


def test_a_checksum_of_host_bytes_does_not_hold_up_a_transfer() -> None:
    data = torch.zeros(int(64 * MIB), dtype=torch.uint8)
    digest, began = Digest(), time.process_time()
    digest.add("weight", data)
    assert time.process_time() - began < 0.5  # at 0.03 GB/s: 2.2 s


def test_buckets_between_gpus_are_large() -> None:
    assert SYNC_BUCKET_BYTES >= 512 * MIB


def test_waiting_for_a_key_costs_a_small_share_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that comes after 5 ms, on a clock that only sleeping moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        control, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock_sleep(clock))
    )
    end: Any = SimpleNamespace(
        spec=SimpleNamespace(timeout_s=60.0), failure=lambda: None, _read=lambda key: None
    )
    end._exist = lambda keys, what: clock.now >= 0.005
    Control.wait(end, ["key"], "a key")
    assert clock.now - 0.005 < 0.0005


def clock_sleep(clock: SimpleNamespace) -> Any:
    """Sleeping moves the clock."""

    def sleep(seconds: float) -> None:
        clock.now += seconds

    return sleep


def test_texts_of_a_batch_are_decoded_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.config(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    text = Text(tmp_path)
    batches: list[int] = []
    rows = [np.asarray(text.encode("1+1="))] * 3

    def decode_batch(ids: Sequence[Sequence[int]], **_: Any) -> list[str]:
        batches.append(len(ids))
        return [""] * len(ids)

    monkeypatch.setattr(text, "_tokenizer", SimpleNamespace(decode_batch=decode_batch))
    assert text.decode(rows) == ["", "", ""]
    assert batches == [3]


def test_a_call_is_handed_to_all_ranks_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []
    waits: list[int] = []

    def actor(rank: int) -> Any:
        return SimpleNamespace(score=SimpleNamespace(remote=lambda *_: handed.append(rank)))

    def collect(refs: Sequence[Any], *_: Any) -> list[Any]:
        waits.append(len(handed))
        return list(refs)

    monkeypatch.setattr(worker_group, "collect", collect)
    spec: Any = SimpleNamespace(name="trainers")
    WorkerGroup(spec=spec, actors=[actor(rank) for rank in range(512)]).call("score", limit_s=60.0)
    assert waits == [512]
