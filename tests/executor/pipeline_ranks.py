"""What every rank of the pipeline tests does: cases, samples, and one function a rank."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.engines.mesh import coordinates
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.samples import LossSpec, Sample
from executor.settings import Optimizer
from rlhfsim.specs.placement.layout import Layout

WORLD = 4
TEMPERATURE = 0.9
LEARN = Optimizer(learning_rate=1e-3, max_grad_norm=0.05)  # far below the norm: clipping counts
POLICY = LossSpec(
    name="policy", settings={"kl_coefficient": 0.01, "entropy_coefficient": 0.01, "correction": "truncated"}
)
VALUE = LossSpec(name="value", settings={})
CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "pp2 tp2": ("qwen3", Layout(pp=2, tp=2, zero=0, micro_batch=3, recompute="full"), {}),
    "pp2 tp2 zero1": ("qwen2-tied", Layout(pp=2, tp=2, zero=1, micro_batch=4), {}),
    "pp2 dp2 zero1": ("qwen2-tied", Layout(pp=2, dp=2, zero=1, micro_batch=2), {}),
    "pp4": ("llama", Layout(pp=4, zero=0), {"packing": True, "micro_tokens": 24, "score_tokens": 40}),
    "critic": ("llama", Layout(pp=2, dp=2, zero=1, micro_batch=3), {"head": "value", "seed": 3}),
    "host optimizer": ("qwen2-tied", Layout(pp=2, dp=2, zero=1, micro_batch=4, offload_optimizer="cpu"), {}),
    "bf16": ("qwen3", Layout(pp=2, tp=2, zero=1, micro_batch=4), {"precision": "bf16"}),
}
"""Model, layout and the rest of the spec."""


REWARD = EngineSpec(
    role="reward", model="llama", head="score", layout=Layout(pp=2, tp=2, zero=0, micro_batch=5)
)


def make_samples() -> list[Sample]:
    """Twelve samples of very different lengths."""
    draw = np.random.default_rng(0)
    samples = []
    for number in range(12):
        length = int(draw.integers(1, 12))
        noise = {
            name: draw.normal(-4, 0.3, length).astype(np.float32)
            for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs")
        }
        samples.append(
            Sample(
                id=number,
                group=number,
                prompt=draw.integers(0, 64, int(draw.integers(1, 9))),
                response=draw.integers(0, 64, length),
                advantages=draw.normal(0, 1, length).astype(np.float32),
                returns=draw.normal(0, 1, length).astype(np.float32),
                **noise,
            )
        )
    return samples


def shares(samples: list[Sample], layout: Layout) -> list[list[Sample]]:
    """Samples of each replica: unequal parts, so that the numbers of micro-batches differ."""
    return [samples] if layout.dp == 1 else [samples[:3], samples[3:]]


def mini_batch(mine: list[Sample], everyone: list[Sample]) -> MiniBatch:
    tokens = sum(sample.num_tokens for sample in everyone)
    return MiniBatch(samples=tuple(mine), global_tokens=tokens, global_sequences=len(everyone))


def run_case(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Everything that the tests look at, from one rank."""
    from executor.engines.pipeline.engine import PipelineEngine

    model, layout, extra = CASES[name]
    everyone = make_samples()
    mine = shares(everyone, layout)[coordinates(rank, layout).dp]
    spec = EngineSpec(
        role="actor",
        model=str(folder / model),
        layout=layout,
        optimizer=LEARN,
        temperature=TEMPERATURE,
        **extra,
    )
    loss = VALUE if spec.head == "value" else POLICY
    engine = PipelineEngine(spec)
    score = engine.values if spec.head == "value" else engine.logprobs
    found: dict[str, Any] = {"before": score(mine)}
    for _ in range(2):
        found["metrics"] = engine.train(mini_batch(mine, everyone), loss)
    buckets = [[(key, value.clone()) for key, value in bucket] for bucket in engine.buckets(20_000)]
    found |= {"bucket sizes": [len(bucket) for bucket in buckets], "buckets": len(buckets)}
    found["weights"] = {key: value for bucket in buckets for key, value in bucket}
    engine.save(folder / "checkpoints" / name)
    found["unlike"] = resumed(engine, folder, name, lambda: engine.train(mini_batch(mine, everyone), loss))
    found["poisoned"] = poisoned(engine, mine, everyone) if loss is POLICY else None
    engine.close()
    return found


def scored(folder: Path) -> list[list[float]]:
    """Scores of an engine without optimizer, before and after its weights were away."""
    from executor.engines.pipeline.engine import PipelineEngine

    engine = PipelineEngine(replace(REWARD, model=str(folder / REWARD.model)))
    before = engine.scores(make_samples())
    engine.offload(folder / "offload" / "reward")
    engine.reload()
    after = engine.scores(make_samples())
    engine.close()
    return [before, after]


def resumed(engine: Any, folder: Path, name: str, step: Any) -> int:
    """Bytes in which two steps after a load differ from two steps without; in between all is offloaded."""
    step()
    step()
    straight = [weight.parameter.detach().clone() for weight in engine.weights]
    engine.load(folder / "checkpoints" / name)
    step()
    away = folder / "offload" / name / str(engine.rank)
    engine.offload(away)
    assert sum(file.stat().st_size for file in away.iterdir()) > 2 * bytes_of(straight)
    engine.reload()
    step()
    pairs = zip(straight, (weight.parameter for weight in engine.weights), strict=True)
    return sum(int((first != second).sum()) for first, second in pairs)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def poisoned(engine: Any, mine: list[Sample], everyone: list[Sample]) -> tuple[float, int]:
    """(`skipped`, changed elements) of a step whose gradient is not a number."""
    before = [weight.parameter.detach().clone() for weight in engine.weights]
    broken = [replace(sample, advantages=np.full(sample.num_tokens, np.nan, np.float32)) for sample in mine]
    metrics = engine.train(mini_batch(broken, everyone), POLICY)
    pairs = zip(before, (weight.parameter for weight in engine.weights), strict=True)
    return metrics["skipped"], sum(int((first != second).sum()) for first, second in pairs)


def worker(rank: int, folder: Path, port: int) -> None:
    from executor.engines import training

    torch.set_num_threads(1)
    training.start(rank, WORLD, rank, "127.0.0.1", port, 60.0)
    found: dict[str, Any] = {name: run_case(rank, folder, name) for name in CASES}
    torch.save(found | {"scores": scored(folder)}, folder / f"found-{rank}.pt")
    training.stop()


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[2]))
