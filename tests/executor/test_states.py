"""Engines whose storages leave memory and come back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.engines import states
from executor.engines.states import Movable
from rlhfsim.errors import RlhfsimError


class Engine(Movable):
    def __init__(self) -> None:
        self.weight, self.momentum = torch.arange(9000.0), torch.ones(9000)
        self.model: Any = None
        self.module: Any = None

    def _movable(self, *, weights: bool) -> Iterable[Tensor]:
        return [self.weight, self.momentum] if weights else [self.momentum]


def test_what_left_comes_back_as_it_was(tmp_path: Path) -> None:
    engine = Engine()
    engine.offload(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "the states lie by themselves: weights may come alone"
    engine.reload()
    assert torch.equal(engine.weight, torch.arange(9000.0))
    assert torch.equal(engine.momentum, torch.ones(9000))
    assert not list(tmp_path.iterdir())


def test_the_weights_may_stay(tmp_path: Path) -> None:
    engine = Engine()
    engine.offload(tmp_path, weights=False)
    [file] = tmp_path.iterdir()
    assert file.stat().st_size == engine.momentum.untyped_storage().nbytes()
    assert torch.equal(engine.weight, torch.arange(9000.0))


def test_weights_come_alone_for_a_forward_pass_and_go_again(tmp_path: Path) -> None:
    engine = Engine()
    engine.offload(tmp_path)
    for _ in range(2):
        engine.reload(states=False)
        [file] = tmp_path.iterdir()
        assert file.stat().st_size == engine.momentum.untyped_storage().nbytes(), "the states are still there"
        assert torch.equal(engine.weight, torch.arange(9000.0))
        engine.offload(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    engine.reload()
    assert torch.equal(engine.weight, torch.arange(9000.0))
    assert torch.equal(engine.momentum, torch.ones(9000))


def test_an_engine_that_ends_while_it_is_away_leaves_no_file(tmp_path: Path) -> None:
    engine = Engine()
    engine.offload(tmp_path)
    engine.close()
    assert not list(tmp_path.iterdir())


def test_moving_twice_is_refused(tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(AssertionError, match="not offloaded"):
        engine.reload()
    engine.offload(tmp_path)
    with pytest.raises(AssertionError, match="already offloaded"):
        engine.offload(tmp_path)


def test_a_part_of_every_tensor_goes_to_a_file_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    assert engine.save_and_compare(tmp_path / "rank-0.pt", 8000) == 8000
    assert not list(tmp_path.iterdir())
    assert engine.save_and_compare(tmp_path / "rank-0.pt", 10**9) == 2 * 9000 * 4
    real = torch.load

    def spoilt(*arguments: object, **options: object) -> object:
        tensors = real(*arguments, **options)  # type: ignore[arg-type]
        tensors[1][3] += 1
        return tensors

    monkeypatch.setattr(torch, "load", spoilt)
    with pytest.raises(RlhfsimError, match="came back as other bytes"):
        engine.save_and_compare(tmp_path / "rank-0.pt", 8000)


def test_host_memory_is_allocated_once_and_gives_back_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "CHUNK_BYTES", 4096)
    host, tensors = states.HostMemory(), [torch.arange(3000.0), torch.arange(10), torch.zeros(0)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    places = set()
    for turn in range(2):
        wanted = [tensor.add_(turn).clone() for tensor in tensors]
        for data, kept in host.pieces(storages):
            kept.copy_(data)
        for tensor in tensors:
            tensor.zero_()
        for data, kept in host.pieces(storages):
            data.copy_(kept)
        assert all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))
        places.add(tuple(chunk.data_ptr() for chunk in host.chunks))
    assert len(places) == 1
    assert [len(chunk) for chunk in host.chunks] == [4096, 4096, 3888], "12,080 bytes"


def test_every_move_of_an_engine_uses_the_same_host_memory() -> None:
    engine = Engine()
    engine.offload()
    hosts = engine._hosts
    engine.reload()
    engine.offload()
    assert engine._hosts is hosts


def test_the_host_copy_of_a_gpu_storage_is_kept_until_its_bytes_are_written(tmp_path: Path) -> None:
    copies: list[Any] = []

    def cpu() -> torch.UntypedStorage:
        copies.append(weakref.ref(copy := torch.ones(4).untyped_storage()))
        return copy

    def write(_: memoryview) -> None:
        assert copies[-1]() is not None, "what is written is memory of nobody"

    away: Any = object.__new__(states.Storages)
    away._storages = [SimpleNamespace(cpu=cpu), SimpleNamespace(cpu=cpu)]
    away._file = SimpleNamespace(parent=tmp_path, open=lambda _: nullcontext(SimpleNamespace(write=write)))
    away._write()
    assert len(copies) == 2


def test_the_buckets_of_zero_3_leave_memory_with_the_engine() -> None:
    """They are as large as `reduce_bucket_size` and stay allocated between steps."""
    buckets = {torch.float32: SimpleNamespace(buffer=torch.ones(5), params=[])}
    optimizer = SimpleNamespace(ipg_buckets=buckets, master=torch.ones(3))
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1, bias=False), optimizer=optimizer)
    for weights, sizes in ((True, [1, 3, 5]), (False, [3, 5])):
        assert sorted(tensor.numel() for tensor in states.engine_tensors(engine, weights=weights)) == sizes
