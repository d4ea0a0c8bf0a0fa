"""What of the rollout engine is in GPU memory, and that vLLM's own code does what is asked of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs

from executor.coordination.engine_memory import EngineMemory
from executor.engines.protocols import RolloutSpec
from executor.engines.vllm.start import arguments
from executor.resolve import Job
from executor.settings import Settings
from executor.tasks import tiny
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.units import GIB

GENERATION, SYNC = ("wake", True), ("wake", False)


def engine(folder: Path, architecture: str, level: int) -> tuple[EngineMemory, list[tuple[Any, ...]]]:
    """With all that it asks of the replicas."""
    model = tiny.config(folder)
    made = runs.plan(architecture, "grpo", model)
    assert made.placement.rollout is not None
    rollout = replace(made.placement.rollout, sleep=level)  # type: ignore[arg-type]
    plan = replace(made, placement=replace(made.placement, rollout=rollout))
    asked: list[tuple[Any, ...]] = []
    memory = EngineMemory(
        Job(plan=plan, settings=Settings(), model=str(model), gpu=True, max_prompt=1),
        lambda method, *arguments, **_: asked.append((method, *arguments)) or {},  # type: ignore[func-returns-value]
        lambda step: asked.append(("resend",)),
    )
    return memory, asked


def test_only_weights_wake_for_a_sync_and_the_kv_cache_waits_for_the_generation(tmp_path: Path) -> None:
    memory, asked = engine(tmp_path, "hybrid", 2)
    memory.built()
    memory.for_generation(0)
    memory.rest(0)
    memory.for_sync(0)
    memory.for_generation(1)
    assert asked == [("release_kv_cache",), GENERATION, ("sleep", 2), SYNC, GENERATION]


def test_before_a_checkpoint_it_sleeps_and_lost_weights_are_sent_again(tmp_path: Path) -> None:
    memory, asked = engine(tmp_path, "hybrid", 2)
    memory.for_sync(0)
    memory.rest(0)
    memory.rest(0)
    assert asked == [("sleep", 2)]
    memory.for_generation(1)
    assert asked == [("sleep", 2), SYNC, ("resend",), GENERATION]


def test_weights_that_lie_in_host_memory_are_not_sent_again(tmp_path: Path) -> None:
    memory, asked = engine(tmp_path, "hybrid", 1)
    memory.rest(0)
    memory.for_generation(1)
    assert asked == [("sleep", 1), GENERATION]


@pytest.mark.parametrize(("architecture", "level"), [("naive", 0), ("async", 2)])
def test_an_engine_that_stays_or_never_idles_is_not_moved(
    architecture: str, level: int, tmp_path: Path
) -> None:
    memory, asked = engine(tmp_path, architecture, level)
    memory.built()
    memory.for_generation(0)
    memory.rest(0)
    memory.for_sync(0)
    assert not asked


# --- vLLM's own code ------------------------------------------------------------------------------


class Core:
    """What stands between `vllm.LLM` and its workers: vLLM's own methods over workers that only listen."""

    def __init__(self) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        self.asked: list[tuple[str, Any]] = []

        class Workers:
            sleeping_tags: set[str]
            is_sleeping, sleep = Executor.is_sleeping, Executor.sleep
            wake_up, discard = Executor.wake_up, Executor.discard

            def collective_rpc(_, name: str, args: Any = (), kwargs: Any = None) -> None:
                self.asked.append((name, args or kwargs))

        workers = Workers()
        workers.sleeping_tags = set()
        self.paused = False
        core = SimpleNamespace(
            model_executor=workers,
            pause_scheduler=lambda **_: setattr(self, "paused", True),
            resume_scheduler=lambda: setattr(self, "paused", False),
            is_scheduler_paused=lambda: self.paused,
            scheduler=SimpleNamespace(has_requests=lambda: False),
            batch_queue=None,
            _reset_caches=lambda: None,
        )
        for name in ("sleep", "wake_up", "release_kv_cache_memory"):
            setattr(self, name, getattr(EngineCore, name).__get__(core))


@pytest.fixture
def vllm_engine() -> Any:
    """Our engine over that core, as on a GPU."""
    pytest.importorskip("vllm.v1.engine.core")
    from executor.engines.vllm.engine import VllmEngine

    made = VllmEngine.__new__(VllmEngine)
    made._llm, made._device, made._asleep, made._requests = Core(), "cuda", set(), {}
    return made


@pytest.mark.slow
def test_vllm_maps_and_frees_what_the_ledger_says(vllm_engine: Any) -> None:
    core = vllm_engine._llm
    vllm_engine.release_kv_cache()
    assert (core.asked, core.paused) == ([("discard", (("kv_cache",),))], True)
    vllm_engine.wake()
    assert (core.asked.pop(), core.paused) == (("wake_up", {"tags": ["kv_cache"]}), False)
    vllm_engine.sleep(2)
    vllm_engine.wake(kv_cache=False)
    assert core.asked[-2:] == [("sleep", {"level": 2}), ("wake_up", {"tags": ["weights"]})]
    assert core.paused, "without a KV cache nothing is scheduled"
    vllm_engine.sleep(2)  # before a checkpoint: weights go, the KV cache is out already
    assert core.asked[-1] == ("sleep", {"level": 2})
    vllm_engine.wake()
    assert core.asked[-1] == ("wake_up", {"tags": ["weights", "kv_cache"]})
    assert not core.paused


@pytest.mark.slow
def test_vllm_starts_beside_a_trainer_that_rests_and_keeps_the_planned_kv_bytes() -> None:
    utils = pytest.importorskip("vllm.v1.worker.utils")
    spec = RolloutSpec(
        model="", layout=RolloutLayout(), max_model_len=64, max_num_seqs=8, kv_bytes=int(20 * GIB)
    )

    def starts(free: float | None) -> dict[str, Any]:
        handed = arguments(spec, "cuda", free)
        snapshot = SimpleNamespace(total_memory=80 * GIB, free_memory=60 * GIB, device_="cuda:0")
        cache = SimpleNamespace(gpu_memory_utilization=handed["gpu_memory_utilization"])
        utils.request_memory(snapshot, cache)
        return handed

    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        starts(None)
    assert starts(60 / 80)["kv_cache_memory_bytes"] == int(20 * GIB)
