"""One of two ranks of training engines on the rehearsal device: `device.py ranks.py RANK PORT PART FOLDER`.

The checks are those of deepspeed_ranks.py and fsdp2_ranks.py, whose reference is plain PyTorch on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed.ops.adam
import deepspeed_ranks as shared
import fsdp2_ranks
import torch
from deepspeed_ranks import FOLDER, LOSS, batch, digest, model, spec

from executor.engines import device, training
from executor.engines.memory import Meter


class NoCompiler(torch.optim.Optimizer):
    """DeepSpeedCPUAdam where it cannot be built, which would take minutes here."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the rehearsal builds no CPUAdam")


deepspeed.ops.adam.DeepSpeedCPUAdam = NoCompiler


def check_moves(**options: Any) -> dict[str, Any]:
    """Host memory and back after a step: bytes that stay, copies that waited, and what came back."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    engine: Any = training.build(spec(model("llama"), **options))
    engine.train(batch(0), LOSS)
    wanted, meter = digest(engine), Meter()
    meter.start()
    engine.offload()
    found = {"asleep": meter.read()["allocated"] - before, "peak": meter.read()["peak"] - before}
    counted = torch.ops.rehearsal.counts()
    engine.reload(states=False)
    found["forward"] = shared.close_to(
        engine.logprobs(shared.samples(3, 1)), engine.logprobs(shared.samples(3, 1))
    )
    engine.offload()
    engine.reload()
    again = torch.ops.rehearsal.counts()
    engine.offload(FOLDER / "offload", weights=False)
    engine.reload()
    found |= {"kept": digest(engine) == wanted, "late": again[0] - counted[0], "pageable": again[1]}
    engine.train(batch(1), LOSS)
    engine.close()
    return found | {"device": str(device.own()), "drawn": float(torch.rand(1, device="cuda"))}


def deepspeed_checks() -> dict[str, Callable[[], Any]]:
    expected = shared.plain(model("llama"), shared.STEPS)
    names = ("zero1 packed", "zero2 recompute", "zero3 packed recompute")
    stages = {name: partial(shared.check_stage, name, shared.STAGES[name], expected) for name in names}
    half = {
        name: partial(shared.check_stage, name, shared.BF16[name], None)
        for name in ("bf16 zero3 fp32 sums", "bf16 zero3 offload")
    }
    resumed = {
        f"{n} resumed": partial(shared.check_resumed, n, (shared.STAGES | shared.BF16)[n])
        for n in (*names, *half)
    }
    moves = {f"moves zero{zero}": partial(check_moves, zero=zero) for zero in (1, 3)}
    others = {
        "tp": partial(shared.check_tensor_parallel, 0, "llama"),
        "lora": partial(shared.check_lora, 3),
        "value": shared.check_value_head,
        "scoring": shared.check_scoring,
    }
    return {**moves, **others, **stages, **half, **resumed}


def fsdp2_checks() -> dict[str, Callable[[], Any]]:
    expected = shared.plain(model("llama"), shared.STEPS)
    names = ("zero2 packed", "zero3 packed recompute", "zero3 offload")
    options = {name: fsdp2_ranks.STAGES[name] | {"backend": "fsdp2"} for name in names}
    stages = {name: partial(shared.check_stage, name, options[name], expected) for name in names}
    resumed = {f"{name} resumed": partial(shared.check_resumed, name, options[name]) for name in names}
    return {
        "moves zero3": partial(check_moves, zero=3, backend="fsdp2"),
        **stages,
        **resumed,
        "lora": partial(shared.check_lora, 3, backend="fsdp2"),
        "scoring": fsdp2_ranks.check_scoring,
    }


if __name__ == "__main__":
    shared.main({"deepspeed": deepspeed_checks, "fsdp2": fsdp2_checks})
