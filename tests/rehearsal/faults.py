"""Faults and probes in one process of the rehearsal device: `device.py faults.py FOLDER` writes FOLDER/faults.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runs
import torch
from torch import Tensor

from executor.coordination.failures import PartFailed
from executor.coordination.gpu_faults import fault_of, stop_of
from executor.coordination.out_of_memory import out_of_memory
from executor.engines import checkpoints, device, states, training
from executor.engines.memory import Meter
from executor.engines.transformers import attention as varlen
from executor.engines.transformers.engine import TransformersEngine
from executor.microbench import attention, gemm, machine, memory, optimizer, train
from executor.microbench.setup import ProbeSetup
from executor.resolve import Job, engine_specs
from executor.settings import Settings
from executor.tasks import tiny
from executor.weight_transfer.packing import Digest
from rlhfsim.errors import RlhfsimError

FOLDER = Path(sys.argv[1])
CAPACITY, PINNED = 2**30, 2**26


class Engine(states.Movable):
    """One tensor of 4 MB."""

    def __init__(self) -> None:
        self.weight = torch.arange(2.0**20, device="cuda")

    def _movable(self, *, weights: bool) -> list[Tensor]:
        return [self.weight] if weights else []

    def moved(self) -> bool:
        """Whether it comes back from host memory as it was."""
        self.offload()
        self.reload()
        return bool(torch.equal(self.weight.cpu(), torch.arange(2.0**20)))


def fragments() -> dict[str, Any]:
    """Three iterations of scoring, ever longer, between small tensors that stay; the device full in the third."""
    folder = tiny.build(FOLDER / "tiny", layers=1)
    plan = runs.plan("hybrid", "grpo", folder)
    job = Job(plan=plan, settings=Settings(), model=str(folder), gpu=False, max_prompt=8)
    scorer, kept = TransformersEngine(engine_specs(job)["reference"]), list[Tensor]()
    [mlp] = [module for name, module in scorer.model.named_modules() if name.endswith("mlp")]
    mlp.register_forward_hook(lambda *_: kept.append(torch.ones(8, device="cuda")))

    def iterate(capacity: int) -> int:
        torch.ops.rehearsal.capacity(capacity)
        device.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        for number in range(3):
            try:
                scorer.logprobs([runs_sample(i, 32 * (number + 1)) for i in range(2)])
            except torch.OutOfMemoryError as error:
                failures.append((number, error))
        kept.clear()
        return int(torch.accelerator.max_memory_reserved())

    failures: list[tuple[int, torch.OutOfMemoryError]] = []
    iterate(iterate(CAPACITY) - 512)
    torch.ops.rehearsal.capacity(CAPACITY)
    number, error = failures[0]
    told = out_of_memory(plan, "reference.logprob", "reference rank 0", said=str(error))
    found = {"code": told.code, "message": told.what, "help": told.advice}
    return found | {"failures": len(failures), "iteration": number}


def runs_sample(number: int, length: int) -> Any:
    from test_advantages import sample

    return sample(number, 1.0, length=length)


def late() -> dict[str, Any]:
    """What the host reads of a copy before and after it waits, and an engine's moves, which wait."""
    host, there = torch.zeros(1000).pin_memory(), torch.ones(1000, device="cuda")
    host.copy_(there, non_blocking=True)
    before = float(host.sum())
    device.settle()
    return {"before": before, "after": float(host.sum()), "moved": Engine().moved()}


def no_pinned_memory() -> dict[str, Any]:
    big = Engine()
    big.weight = torch.zeros(PINNED // 4 + 1024, device="cuda")
    try:
        big.offload()
    except RlhfsimError as error:
        failed = PartFailed("actor rank 1", "raised", error.message, "actor.train.unload")
        fault = fault_of(failed)
        told = stop_of(failed, fault) if fault else error
        return {"code": told.code, "message": told.message, "help": told.help}
    return {}


def readings() -> dict[str, Any]:
    """What a call takes: of torch's allocator, and with a neighbour on the same device."""
    meter = Meter()
    meter.start()
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    torch.empty(2**22, dtype=torch.uint8, device="cuda")
    torch.ops.rehearsal.others(2**23)
    found = meter.read()
    torch.ops.rehearsal.others(0)
    return {key: found[key] for key in ("allocated", "peak", "device")} | {"held": held.nbytes}


def streams() -> dict[str, Any]:
    """A tensor that another stream still writes is kept if the allocator knows that stream."""
    host, side, found = torch.ones(4096).pin_memory(), torch.cuda.Stream(), {}
    for recorded in (True, False):
        target = torch.empty(4096, device="cuda")
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
            if recorded:
                device.keep_for_stream(target)
        del target
        reused = torch.zeros(4096, device="cuda")
        device.settle()
        found["kept" if recorded else "overwritten"] = float(reused.sum())
    return found


def random_numbers() -> bool:
    """Whether the device's random numbers go on after a restore as they did after the save."""
    kept = checkpoints._random()
    wanted = torch.rand(3, device="cuda")
    torch.rand(100, device="cuda")
    checkpoints._put_random(kept)
    return bool(torch.equal(torch.rand(3, device="cuda"), wanted))


def digests() -> bool:
    """Whether a checksum made on the device sees one changed byte."""
    sums = []
    for change in (0, 0, 1):
        tensor = torch.arange(5000, dtype=torch.int64, device="cuda")
        tensor[4000] += change
        digest = Digest()
        digest.add("weight", tensor)
        sums.append(digest.hex())
    return sums[0] == sums[1] != sums[2]


def probes() -> dict[str, int]:
    """Points of each micro-benchmark on the device, on small grids."""
    gemm.CUDA_QUICK = ((1.0, 8.0), (16.0, 32.0))
    attention.CUDA = ((2.0,), (16.0,), (1.0, 4.0), (32.0,))
    memory.COPIED = 2**22
    found = {}
    for module in (gemm, attention, memory, optimizer, train):
        scratch = FOLDER / module.__name__
        scratch.mkdir()
        found[module.__name__] = len(module.measure(ProbeSetup(device="cuda", scratch=scratch, quick=True)))
    described = machine.describe()
    return found | {"gpus": described.gpus, "gpu_memory": int(described.gpu_memory)}


def latent_attention() -> dict[str, Any]:
    """How far a pack's attention and its gradients are from those of each sequence, values narrower than keys."""
    found = {}
    for kind, width, narrow in (("latent", 24, 16), ("odd", 20, 20)):
        torch.manual_seed(0)
        sides = [torch.randn(1, h, 9, w) for h, w in ((4, width), (2, width), (2, narrow))]
        for where, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
            mine = [side.to(torch.bfloat16).to(where, dtype).requires_grad_() for side in sides]
            output, _ = varlen.attend(torch.nn.Identity(), *mine, None, lengths=(4, 5), scaling=0.2)
            output.float().square().sum().backward()
            found[where] = [t.detach().float().cpu() for t in (output, *(one.grad for one in mine))]
        pairs = zip(found["cuda"], found["cpu"], strict=True)
        found[kind] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return {kind: found[kind] for kind in ("latent", "odd")}


def transformer() -> dict[str, Any]:
    """A worker's own view, and the second device that there is not."""
    try:
        device.use(1)
        ordinal = ""
    except RuntimeError as error:
        ordinal = str(error)
    return {"device": training.check_device(gpu=True), "ordinal": ordinal, "why_not": device.why_not()}


CHECKS: tuple[Callable[[], Any], ...] = (
    *(fragments, late, no_pinned_memory, readings, streams),
    *(random_numbers, digests, probes, transformer, latent_attention),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = {check.__name__: check() for check in CHECKS}
    (FOLDER / "faults.json").write_text(json.dumps(answers))
