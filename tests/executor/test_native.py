"""Weights by vLLM's own transfer engines: its code with a fake of CUDA and NCCL below it, and what it accepts."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import run

from executor.coordination.worker import Worker
from executor.engines.protocols import ChannelSpec
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import GatheredWeights, Named
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.engine_numbers import SYNC_BUCKET_BYTES
from rlhfsim.units import MIB

HERE = Path(__file__).resolve().parent
EXACT, SEEN = 1e-5, 0.1


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, fork_server: str) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("native")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parents[1]), str(HERE)])
    run(fork_server, [["native_facts.py", str(folder)]], PYTHONPATH=path)
    seen: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_vllms_engines_bring_the_trainers_weights_to_both_workers(facts: Any, transport: str) -> None:
    seen = facts[transport]
    assert min(seen["stale"]) > SEEN
    assert max(seen["synced"]) < EXACT
    assert {received["bytes"] for received in seen["received"]} == {facts["bytes"]}
    assert min(received["buckets"] for received in seen["received"]) >= 2


@pytest.mark.slow
def test_every_end_of_every_channel_counts_the_same_bytes(facts: Any) -> None:
    versions = {"ipc": (1, 2), "broadcast": (3, 4)}
    for transport, ranks in (("ipc", (0, 1)), ("broadcast", (0,))):
        for version, received in zip(versions[transport], facts[transport]["received"], strict=True):
            sums = {facts["sent"][f"sent-{transport}-{version}-{rank}"]["checksum"] for rank in ranks}
            assert sums == {received["checksum"]}
    assert facts["exits"] == [0, 0]
    assert len(facts["sent"]) == 6


def weights() -> GatheredWeights:
    named = [("embed", torch.ones(40, 8)), ("norm", torch.ones(8, dtype=torch.bfloat16))]

    def gather() -> Iterator[list[Named]]:
        for entry in named:
            yield [entry]

    return GatheredWeights(gather)


def channel(**changes: Any) -> ChannelSpec:
    fields: dict[str, Any] = {
        "name": "native",
        "transport": "ipc",
        "host": "127.0.0.1",
        "port": 0,
        "receivers": 1,
        "folder": "/tmp",
        "bucket_bytes": 64,
        "timeout_s": 1.5,
        "device": "cuda",
    }
    return ChannelSpec(**(fields | changes))


def test_the_wheel_accepts_what_it_is_handed() -> None:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from executor.engines.vllm.transfer import NativeSender

    for transport, backend in (("ipc", "ipc"), ("broadcast", "nccl")):
        end = NativeSender(channel(transport=transport), None)
        end.source.weights = weights()
        info = end._init_info()
        assert (info.backend, info.packed, info.is_sender) == (backend, True, True)
        assert info.backend in WeightTransferTrainerFactory._registry
        assert info.packed_buffer_size_bytes == 40 * 8 * 4, "the largest tensor, where a bucket is smaller"
    worker = NCCLWeightTransferInitInfo(master_address="a", master_port=1, rank_offset=1, world_size=3)
    assert worker.rank_offset == 1
    assert SYNC_BUCKET_BYTES >= 512 * MIB


def test_a_source_describes_and_yields_the_models_own_weights() -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    from executor.engines.vllm.transfer import BucketSource

    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
    source = BucketSource()
    source.weights = GatheredWeights(lambda: iter([[named] for named in model.named_parameters()]))
    assert source.metadata() == ModuleSource(model).metadata()
    for (name, tensor), (other, parameter) in zip(source, ModuleSource(model), strict=True):
        assert name == other
        assert torch.equal(tensor, parameter)
    assert source.weights.sent_bytes == 2 * sum(p.numel() for p in model.parameters())


def test_vllm_does_around_an_update_what_reload_does() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    for engine in (IPCWeightTransferEngine, NCCLWeightTransferEngine):
        assert "initialize_layerwise_reload(self.model)" in inspect.getsource(engine.start_weight_update)
        assert "finalize_layerwise_reload(self.model" in inspect.getsource(engine.finish_weight_update)
        assert "self.model.load_weights" in inspect.getsource(engine.receive_weights)
    assert "self._packed_importer.close()" in inspect.getsource(IPCWeightTransferEngine.shutdown)


def test_workers_of_several_replicas_get_ranks_of_their_own_in_the_group() -> None:
    from executor.engines.vllm.transfer import NativeReceiver

    for index, own in ((0, 0), (1, 1), (4, 0), (5, 1)):
        told: list[Any] = []
        receiver = object.__new__(NativeReceiver)
        receiver.index, receiver.ipc = index, False
        receiver.engine = SimpleNamespace(  # type: ignore[assignment]
            parallel_config=SimpleNamespace(rank=own), parse_init_info=dict, init_transfer_engine=told.append
        )
        receiver._act("init_weight_transfer_engine", {"rank_offset": 1, "world_size": 7})
        assert told[0]["rank_offset"] + own == 1 + index


@pytest.mark.parametrize("failing", [False, True])
def test_a_collective_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    from executor.engines.vllm.transfer import NativeSender

    spec = channel(folder=str(tmp_path), timeout_s=60.0 if failing else 1.5)
    control = Control(spec, master=True)
    end, never = NativeSender(spec, control), threading.Event()
    monkeypatch.setattr(end, "_run", never.wait)
    if failing:
        control.fail("receiver 0: out of memory")
    with pytest.raises(RlhfsimError) as caught:
        end.send("0/", 1, weights())
    never.set()
    assert caught.value.code == ("weight-sync-failed" if failing else "weight-sync-timeout")


@pytest.mark.parametrize(
    ("transport", "device", "full"), [("ipc", "cuda", 3), ("ipc", "cpu", 1), ("broadcast", "cuda", 1)]
)
def test_a_rank_without_a_worker_on_its_gpu_fills_buffers_too_where_vllm_joins_all_ranks(
    transport: str, device: str, full: int
) -> None:
    asked: list[int] = []

    class Engine:
        def buckets(self, size: int, senders: Any) -> Iterator[list[Named]]:
            asked.extend(senders)
            return iter([])

    spec = channel(transport=transport, device=device)
    rank: Any = SimpleNamespace(
        _fakes=None, _routes={"actor.sync": ({0: spec}, None)}, _identity=SimpleNamespace(ranks=3)
    )
    Worker._send(rank, Engine(), "actor.sync", 1)
    assert asked == list(range(full))


def test_weights_are_sent_on_the_gpu_of_the_rank_and_what_fails_there_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor.engines import device
    from executor.engines.vllm.transfer import NativeSender

    spec, used = channel(folder=str(tmp_path), timeout_s=60.0), list[Any]()
    end = NativeSender(spec, Control(spec, master=True))
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(device, "own", lambda: gpu)
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)

    def run() -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(end, "_run", run)
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        end.send("0/", 1, weights())
    assert used == [gpu]
