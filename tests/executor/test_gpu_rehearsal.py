"""Faults of GPUs, rehearsed without one: each ends in one message with cause, rank, phase and remedy, in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from fake_memory import CountedMemory
from planted_weights import some_weights
from ray.exceptions import RayTaskError
from test_advantages import sample
from test_engine_memory import engine
from test_transport import channel, gathered

from executor import refusals
from executor.coordination import failures
from executor.coordination.detectors import Expected, findings
from executor.coordination.engine_memory import EngineMemory
from executor.coordination.failures import PartFailed, collect
from executor.coordination.gpu_faults import check_devices
from executor.coordination.metrics import engine_metrics
from executor.coordination.others import Held
from executor.engines import device, learner
from executor.engines.learner import Learner
from executor.engines.states import HostMemory
from executor.engines.transformers.engine import TransformersEngine
from executor.resolve import Job, engine_specs
from executor.restart_loop import RestartLoop
from executor.settings import Settings
from executor.tasks import tiny
from executor.weight_transfer.channel import Receiver, Sender
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.units import GB, GIB


class Clock:
    """Ray and time for `collect`: a reference is (what it gives, the second at which it does)."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def is_initialized(self) -> bool:
        return True

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.now += timeout
        done = [ref for ref in refs if ref[1] <= self.now]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(ref, list):
            return [self.get(one, timeout) for one in ref]
        if isinstance(ref[0], Exception):
            raise ref[0]
        return ref[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failures, "ray", clock)
    monkeypatch.setattr(failures, "time", clock)
    return clock


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return runs.plan("hybrid", "grpo", tiny.config(tmp_path / "model"))


@pytest.fixture
def stopped(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RlhfsimError]:
    """The message of a run whose attempts all end with a failure."""
    job = Job(plan=plan, settings=Settings(), model="", gpu=True, max_prompt=1)
    files = SimpleNamespace(checkpoints=tmp_path / "none", scratch=tmp_path, logs=tmp_path / "logs")
    run: Any = SimpleNamespace(job=job, files=files, held={}, listener=SimpleNamespace(phase=lambda _: None))

    def ended(failure: Callable[[], object]) -> RlhfsimError:
        loop = RestartLoop(run=run, address=None, self_check=False, smallest_change=None)
        monkeypatch.setattr(RestartLoop, "_attempt", lambda *_: failure())
        with pytest.raises(RlhfsimError) as told:
            loop.until_the_end(None)
        assert told.value.help
        return told.value

    return ended


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def raised(error: Exception) -> RayTaskError:
    """As Ray hands on what a rank raised."""
    return RayTaskError("train", f"Traceback\n  line\n{type(error).__name__}: {error}", error)


# --- memory -----------------------------------------------------------------------------------------


def test_fragments_run_out_of_memory_in_the_third_iteration(
    clock: Clock, stopped: Callable[..., RlhfsimError], tmp_path: Path, one_thread: None
) -> None:
    """The real scoring engine in memory that counts: small tensors that stay cut the room of longer batches."""
    model = tiny.build(tmp_path / "built", layers=1)
    made = runs.plan("hybrid", "grpo", model)
    job = Job(plan=made, settings=Settings(), model=str(model), gpu=False, max_prompt=8)
    scorer, kept = TransformersEngine(engine_specs(job)["reference"]), list[torch.Tensor]()
    [mlp] = [module for name, module in scorer.model.named_modules() if name.endswith("mlp")]
    mlp.register_forward_hook(lambda *_: kept.append(torch.ones(8)))
    iterations: list[int] = []

    def iterate(capacity: int) -> CountedMemory:
        memory = CountedMemory(capacity)
        kept.clear()
        iterations.clear()
        with memory:
            for number in range(3):
                iterations.append(number)
                scorer.logprobs([sample(i, 1.0, length=32 * (number + 1)) for i in range(2)])
        return memory

    with pytest.raises(torch.OutOfMemoryError) as error:
        iterate(iterate(10**12).top - 1)
    assert iterations == [0, 1, 2]
    call = [((raised(error.value)), 1.0)]
    told = stopped(lambda: collect(call, ["reference rank 0"], "reference.logprob", 60.0))
    assert told.code == "out-of-memory"
    assert told.message.startswith("reference rank 0 ran out of memory in reference.logprob: ")
    assert "in smaller pieces (fragmentation)" in told.message
    assert "max_split_size_mb" in str(told.help), "the plan hands weights over by IPC"
    assert "expandable" not in str(told.help)


def test_an_engine_that_keeps_2_gb_asleep_is_stopped_before_the_trainer_runs_out(tmp_path: Path) -> None:
    made, _ = engine(tmp_path, "hybrid", 2)
    ledger = made._plan.prediction.ledger
    freed = sum(row.bytes for row in {(r.component): r for r in ledger if r.role == "rollout"}.values())
    others = max(
        sum(r.bytes for r in ledger if r.phase == p and r.role != "rollout")
        for p in {r.phase for r in ledger}
    )

    def asleep(kept: float, capacity: float) -> None:
        prediction = replace(made._plan.prediction, capacity_bytes=capacity)
        job = Job(
            plan=replace(made._plan, prediction=prediction),
            settings=Settings(),
            model="",
            gpu=True,
            max_prompt=1,
        )
        before = freed + 5 * GB
        reading = {"device_peak": before, "device": before - freed + kept}
        memory = EngineMemory(job, lambda *_, **__: {"rollout replica 0": reading}, lambda _: None)
        memory.rest(2)

    asleep(0.0, others + 2 * GB)
    asleep(2 * GIB, others + freed + 80 * GB)
    with pytest.raises(RlhfsimError, match=r"rollout replica 0 keeps .* in actor\.generate\.unload") as told:
        asleep(2 * GIB, others + 0.5 * GB)
    assert (told.value.code, bool(told.value.help)) == ("engine-keeps-memory", True)


def test_a_copy_from_memory_that_is_not_pinned_is_refused(
    clock: Clock, stopped: Callable[..., RlhfsimError], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, empty = torch.ones(64).untyped_storage(), torch.empty
    monkeypatch.setattr(device, "available", lambda: True)

    def not_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    def no_more(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return empty(*size, **options)

    for fake, why in ((not_pinned, "gave other memory"), (no_more, "no more of it")):
        monkeypatch.setattr(torch, "empty", fake)
        with pytest.raises(RlhfsimError) as error:
            next(HostMemory().pieces([storage]))
        monkeypatch.setattr(torch, "empty", empty)
        call = [(raised(error.value), 1.0)]
        told = stopped(lambda call=call: collect(call, ["actor rank 1"], "actor.train.unload", 60.0))
        assert told.code == "host-memory-not-pinned"
        assert told.message.startswith("actor rank 1 in actor.train.unload: ")
        assert why in told.message
        assert "check-machine" in str(told.help)


def test_expandable_segments_beside_ipc_are_refused_before_anything_starts(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def check(gpu: bool, **variables: str) -> None:
        job = Job(plan=plan, settings=Settings(variables=variables), model="", gpu=gpu, max_prompt=1)
        refusals.check(job)

    check(True, PYTORCH_ALLOC_CONF="max_split_size_mb:512")
    check(False, PYTORCH_ALLOC_CONF="expandable_segments:True")
    with pytest.raises(RlhfsimError, match="weight path ipc hands memory over by CUDA IPC") as told:
        check(True, PYTORCH_CUDA_ALLOC_CONF="expandable_segments: True")
    assert (told.value.code, "max_split" in str(told.value.help)) == ("expandable-segments-ipc", True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(RlhfsimError, match="expandable_segments"):
        check(True)


# --- between processes ------------------------------------------------------------------------------


def test_a_handle_whose_memory_is_gone_ends_both_ends_of_the_sync(
    clock: Clock, stopped: Callable[..., RlhfsimError], tmp_path: Path
) -> None:
    class Gone:
        """A route that opens the sender's memory when that is freed."""

        def __init__(self, *_: Any) -> None: ...

        def receive(self, prefix: str, load: Any) -> int:
            raise RuntimeError("CUDA error: invalid resource handle")

        def close(self) -> None: ...

    spec = channel("ipc", tmp_path, receivers=1, timeout_s=30)
    sender = Sender(spec)
    receiver = Receiver(spec, 0, Gone)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, gathered(some_weights()), 1)
        with pytest.raises(RuntimeError, match="invalid resource handle"):
            receiver.receive(1, lambda _: None)
        error = sending.exception(timeout=30)
    receiver.close()
    sender.close()
    assert isinstance(error, RlhfsimError)
    call = [(raised(error), 1.0)]
    told = stopped(lambda: collect(call, ["actor rank 0"], "actor.sync", 60.0))
    assert told.message.startswith("actor rank 0 raised in actor.sync: ")
    assert "was freed by its owner before the receiver opened it (CUDA IPC)" in told.message
    assert "weight path" in str(told.help)


def _collectives(orders: tuple[str, str]) -> list[str]:
    """What two ranks are told that enter these collectives under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    from torch._C import _distributed_c10d as c10d

    store, limit, said = dist.HashStore(), timedelta(seconds=20), ["", ""]  # type: ignore[attr-defined]

    def rank(number: int) -> None:
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), number, 2, limit)  # type: ignore[attr-defined]
            for name in ("work", "check")
        ]
        checked: Any = c10d._ProcessGroupWrapper(*groups)
        try:
            if orders[number] == "allreduce":
                checked.allreduce([torch.ones(4)]).wait()
            else:
                checked.broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()
        except RuntimeError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_ranks_in_different_collectives_are_named_with_what_each_runs(
    clock: Clock, stopped: Callable[..., RlhfsimError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert _collectives(("allreduce", "allreduce")) == ["", ""]
    calls = [(raised(RuntimeError(text)), 1.0) for text in _collectives(("allreduce", "broadcast"))]
    told = stopped(lambda: collect(calls, ["actor rank 0", "actor rank 1"], "actor.train", 60.0))
    assert told.code == "collective-order"
    assert "in actor.train: ranks entered different collectives" in told.message
    assert "(rank 0 ALLREDUCE, rank 1 BROADCAST)" in told.message


def test_a_rank_that_is_30_s_late_is_waited_for_within_the_limit_and_named_beyond_it(
    clock: Clock, stopped: Callable[..., RlhfsimError]
) -> None:
    refs, parts = [("first", 1.0), ("late", 30.0)], ["actor rank 0", "actor rank 1"]
    assert collect(refs, parts, "actor.train", 60.0) == ["first", "late"]
    clock.now = 0.0

    def attempt() -> object:
        clock.now = 0.0
        return collect(refs, parts, "actor.train", 20.0)

    told = stopped(attempt)
    assert told.message.startswith("actor rank 1 timed out in actor.train: actor.train took longer than 20 s")
    assert "a rank came late, died, or waits in another collective" in told.message
    assert "TORCH_DISTRIBUTED_DEBUG" in str(told.help)
    assert clock.now <= 22.0


def test_nan_of_one_rank_is_found_with_the_rank_in_the_sums_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[dict[str, torch.Tensor]] = [
        {"loss": torch.tensor(0.5)},
        {"loss": torch.tensor(torch.nan), "entropy": torch.tensor([1.0, 2.0])},
    ]

    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = ranks

    monkeypatch.setattr(learner.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(learner.dist, "all_gather_object", gather)
    rank: Any = SimpleNamespace(_counts=lambda: True)

    def row() -> dict[str, float]:
        step = learner.metrics.finish(Learner._reduced(rank, {}))
        return engine_metrics("actor", [step]) | {"step": 2.0}

    [found] = findings([row()], Expected())
    assert (found.code, found.severity) == ("not-finite", "stop")
    assert found.what == "policy/loss is nan in iteration 3, first on rank 1 of the policy"
    assert found.advice
    ranks[1]["loss"] = torch.tensor(0.25)
    assert not findings([row()], Expected())


def test_a_driver_that_sees_other_gpus_than_its_workers_stops_with_both_sizes(plan: Plan) -> None:
    planned = replace(plan, prediction=replace(plan.prediction, capacity_bytes=75 * GB))

    def held(total: float) -> Iterator[tuple[str, Held]]:
        yield "actor rank 0", Held(where="GPU 0 of node-a", bytes=0.0, total=85 * GB)
        yield "actor rank 1", Held(where="GPU 0 of node-b", bytes=0.0, total=total)

    check_devices(planned, dict(held(80 * GB)))
    with pytest.raises(RlhfsimError, match="actor rank 1 would start on GPU 0 of node-b with 42 GB") as told:
        check_devices(planned, dict(held(42 * GB)))
    assert "75 GB" in told.value.message
    other = replace(planned.hardware[0], profile="l40s")
    check_devices(replace(planned, hardware=(*planned.hardware, other)), dict(held(42 * GB)))
    assert "check-machine" in str(told.value.help)


def test_a_failure_of_no_known_kind_keeps_its_own_words(stopped: Callable[..., RlhfsimError]) -> None:
    def attempt() -> object:
        raise PartFailed("actor rank 0", "raised", "ValueError: no", "actor.train")

    told = stopped(attempt)
    assert told.code == "run-failed"
    assert told.message.startswith("actor rank 0 raised in actor.train: ValueError: no")
    assert str(told.help).startswith("read ")
