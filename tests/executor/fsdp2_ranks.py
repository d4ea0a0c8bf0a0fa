"""One rank of the checks in test_fsdp2.py, called as deepspeed_ranks.py, whose checks it shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed_ranks as shared
import torch
from deepspeed_ranks import FOLDER, LOSS, WORLD, batch, model, samples, spec, weights

from executor.engines import states, training
from executor.engines.protocols import MiniBatch
from executor.samples import LossSpec

DPO = LossSpec(name="dpo", settings={"beta": 0.5})
STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0, "micro_batch": 2},
    "zero2 packed": {"zero": 2, "micro_batch": 3, "packing": True},
    "zero3": {"zero": 3, "micro_batch": 2},
    "zero3 packed recompute": {
        "zero": 3,
        "micro_batch": 1,
        "packing": True,
        "micro_tokens": 20,
        "score_tokens": 30,
        "recompute": "full",
    },
    "zero3 offload": {"zero": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
}
BF16: dict[str, dict[str, Any]] = {
    "bf16 zero0": {"zero": 0, "precision": "bf16"},
    "bf16 zero2": {"zero": 2, "precision": "bf16"},
    "bf16 zero3 recompute": {"zero": 3, "precision": "bf16", "recompute": "full"},
}
HYBRID: dict[str, dict[str, Any]] = {
    "hsdp": {"zero": 3, "shards": 2},
    "hsdp zero2 packed": {"zero": 2, "shards": 2, "micro_batch": 3, "packing": True},
}
STEPS = 5


def pairs(step: int) -> MiniBatch:
    """A pair a rank."""
    everything = [
        replace(sample, group=number // 2, label=number % 2 == 0)
        for number, sample in enumerate(samples(2 * WORLD, step))
    ]
    mine = everything[2 * shared.RANK : 2 * shared.RANK + 2]
    tokens = sum(sample.num_tokens for sample in everything)
    return MiniBatch(samples=tuple(mine), global_tokens=tokens, global_sequences=2 * WORLD)


def check_against(family: str, loss: LossSpec, **options: Any) -> dict[str, Any]:
    """Losses, norms, weights and seconds a step of both backends on the same batches."""
    found: dict[str, Any] = {}
    ends = []
    for backend in ("deepspeed", "fsdp2"):
        engine = training.build(spec(model(family), zero=3, backend=backend, **options))
        seen, seconds = [], []
        for step in range(STEPS):
            began = time.monotonic()
            seen.append(engine.train(pairs(step) if loss is DPO else batch(step, WORLD), loss))
            seconds.append(time.monotonic() - began)
        ends.append(weights(engine))
        engine.close()
        found[backend] = {
            "losses": [m["loss"] for m in seen],
            "norms": [m["grad_norm"] for m in seen],
            "seconds": sorted(seconds)[STEPS // 2],
        }
    return found | {"weights": shared.distance(*ends)}


def check_bytes(zero: int) -> dict[str, Any]:
    """Bytes that a rank holds: between steps, and of gradients in a step."""
    engine: Any = training.build(spec(model("llama"), zero=zero, backend="fsdp2", precision="bf16"))
    engine.train(batch(0, WORLD), LOSS)
    held: dict[str, float] = {"weights": _held(engine.model)}
    held["optimizer"] = sum(_size(t) for t in states.nested_tensors(list(engine.optimizer.state.values())))
    some = samples(3 + shared.RANK, 7)
    before = engine.logprobs(some)
    engine.offload(FOLDER / "offload", weights=False)
    torch.distributed.barrier()
    held["away"] = sum(path.stat().st_size for path in (FOLDER / "offload").iterdir()) / WORLD
    held["changed"] = shared.close_to(before, engine.logprobs(some))
    torch.distributed.barrier()
    engine.reload()
    update, engine._update = engine._update, lambda: None
    engine.train(batch(1, WORLD), LOSS)
    held["gradients"] = sum(_size(p.grad) for p in engine.trained)
    engine._update = update
    engine.close()
    return held


def check_recompute() -> dict[str, int]:
    """Forward passes of the first layer in one step of one micro-batch."""
    counts = {}
    for recompute in ("none", "full"):
        engine: Any = training.build(
            spec(model("llama"), zero=3, backend="fsdp2", micro_batch=9, recompute=recompute)
        )
        calls: list[int] = []
        engine.model.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        engine.train(batch(0, WORLD), LOSS)
        engine.close()
        counts[recompute] = len(calls)
    return counts


def check_scoring() -> dict[str, Any]:
    """A frozen model in shards and one that is whole; a head that the checkpoint lacks."""
    some = samples(5 - 4 * shared.RANK, 3)  # rank 1 has fewer micro-batches
    options: dict[str, Any] = {"optimizer": None, "backend": "fsdp2"}
    whole = training.build(spec(model("qwen2"), zero=0, **options))
    wanted = whole.logprobs(some)
    engine = training.build(spec(model("qwen2"), zero=3, packing=True, offload_params="cpu", **options))
    found: dict[str, Any] = {"logprobs": shared.close_to(wanted, engine.logprobs(some))}
    engine.offload(FOLDER / "offload")
    engine.reload()
    found["reloaded"] = shared.close_to(wanted, engine.logprobs(some))
    found["held"] = _held(engine.model) / _held(whole.model)
    engine.close()
    head = [
        training.build(spec(model("qwen3"), zero=zero, head="score", seed=5, **options)).scores(some)
        for zero in (0, 3)
    ]
    return found | {"scores": max(abs(a - b) for a, b in zip(*head, strict=True))}


def _held(module: torch.nn.Module) -> int:
    return sum(_size(parameter) for parameter in module.parameters())


def _size(tensor: torch.Tensor) -> int:
    part = states.own_part(tensor)
    return part.numel() * part.element_size()


def first() -> dict[str, Callable[[], Any]]:
    expected = shared.plain(model("llama"), shared.STEPS)
    made = {
        name: partial(shared.check_stage, name, options | {"backend": "fsdp2"}, expected)
        for name, options in STAGES.items()
    }
    made |= {
        name: partial(shared.check_stage, name, options | {"backend": "fsdp2"}, None)
        for name, options in BF16.items()
    }
    return made | others() | compared()


def others() -> dict[str, Callable[[], Any]]:
    return {
        "value": partial(shared.check_value_head, backend="fsdp2"),
        **{f"lora zero{zero}": partial(shared.check_lora, zero, backend="fsdp2") for zero in (0, 3)},
        "lora bf16": partial(shared.check_lora, 3, backend="fsdp2", precision="bf16"),
        "scoring": check_scoring,
        "recompute": check_recompute,
    }


def compared() -> dict[str, Callable[[], Any]]:
    return {
        "grpo": partial(check_against, "llama", LOSS, micro_batch=2),
        "grpo packed": partial(check_against, "qwen2", LOSS, micro_batch=3, packing=True),
        "dpo": partial(check_against, "llama", DPO),
        "dpo packed": partial(check_against, "qwen3", DPO, packing=True),
        **{f"bytes zero{zero}": partial(check_bytes, zero) for zero in (0, 2, 3)},
    }


def hybrid() -> dict[str, Callable[[], Any]]:
    """Two copies of two shards each, and resumed."""
    expected = shared.plain(model("llama"), shared.STEPS)
    stages = {name: options | {"backend": "fsdp2"} for name, options in HYBRID.items()}
    found = {name: partial(shared.check_stage, name, options, expected) for name, options in stages.items()}
    return found | {f"{name} resumed": partial(shared.check_resumed, name, stages[name]) for name in stages}


def second() -> dict[str, Callable[[], Any]]:
    return {
        name: partial(shared.check_resumed, name, options | {"backend": "fsdp2"})
        for name, options in (STAGES | BF16).items()
    }


def resharded() -> dict[str, Callable[[], Any]]:
    expected = shared.plain(model("llama"), shared.STEPS)
    stages = {name: options | {"backend": "fsdp2"} for name, options in STAGES.items()}
    return {
        name: partial(shared.check_resharded, name, options, expected) for name, options in stages.items()
    }


if __name__ == "__main__":
    shared.main(
        {
            "first": first,
            "second": second,
            "others": others,
            "compared": compared,
            "hybrid": hybrid,
            "resharded": resharded,
        }
    )
