"""What runs in the process of a check: `python -m lab.first_contact.probes NAME STREAM SMALL`.

Each function yields rows (what, unit, seen, expected); rows are written as they come, so that what was seen
before a failure is kept. Imports stand inside: a machine may lack any package.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.first_contact.checks import append

Row = dict[str, Any]
GIB = 2**30


def machine(small: bool) -> Iterator[Row]:
    """GPU, driver, versions, compilers."""
    yield _fact("Python", platform.python_version())
    for tool in ("nvidia-smi", "nvcc", "c++", "ninja"):
        yield _fact(tool, shutil.which(tool) or "absent")
    if shutil.which("nvidia-smi"):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,power.limit",
            "--format=csv,noheader",
        ]
        yield _fact(
            "GPU by the driver",
            subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip(),
        )
    from importlib.metadata import PackageNotFoundError, version

    for name in (
        "torch",
        "transformers",
        "deepspeed",
        "ray",
        "vllm",
        "flash-attn",
        "pydantic",
        "simpy",
        "bitsandbytes",
    ):
        try:
            yield _fact(name, version(name))
        except PackageNotFoundError:
            yield _fact(name, "absent")
    import torch

    yield _fact("CUDA of torch", str(torch.version.cuda))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        yield {"what": "memory that torch sees", "unit": "GiB", "seen": total / GIB}
        yield {"what": "free after the context", "unit": "GiB", "seen": free / GIB}


def ledger(small: bool) -> Iterator[Row]:
    """Activation peaks of forward and backward, transformers' modules without DeepSpeed."""
    from lab.first_contact.steps import plain_step
    from rlhfsim.memory.activations import MicroBatches, training_activations
    from rlhfsim.specs.model.presets import resolve_model
    from rlhfsim.specs.placement.layout import Layout

    cases = [
        ("qwen2.5-0.5b", None, 8192),
        ("llama-3.1-8b", 4, 8192),
        ("qwen3-30b-a3b", 2, 8192),
        ("gemma-2-2b", 4, 8192),
    ]
    for name, layers, tokens in [("smollm2-135m", 2, 256)] if small else cases:
        model = resolve_model(name)
        for recompute in ("none", "full"):
            seen = plain_step(name, layers=layers, tokens=tokens, recompute=recompute == "full")
            layout = Layout(recompute=recompute)
            priced = training_activations(
                model.scaled(layers) if layers else model,
                layout,
                "deepspeed",
                MicroBatches(tokens=tokens, count=1),
            )
            what = f"{name} x{layers or model.num_layers} layers, {tokens} tokens, recompute {recompute}"
            yield {"what": what, "unit": "GiB", "expected": priced.peak / GIB, "seen": seen / GIB}


def attention(small: bool) -> Iterator[Row]:
    """Seconds and bytes of scaled dot product by kernel, causal, 32 query and 8 key/value heads of 128."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = "cpu" if small else "cuda"
    lengths, heads, groups, width = ((256,) if small else (4096, 8192, 16384)), 32, 8, 128
    kernels = [SDPBackend.MATH] if small else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for length in lengths:
        q, k, v = (
            torch.randn(1, n, length, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for n in (heads, groups, groups)
        )
        for kernel in kernels:
            name = f"{kernel.name.lower()}, {length} tokens"

            def both(kernel: Any = kernel, q: Any = q, k: Any = k, v: Any = v) -> None:
                with sdpa_kernel([kernel]):
                    out = torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    )
                out.backward(torch.ones_like(out))

            try:
                seconds, peak = _timed(both, device)
            except RuntimeError as error:
                yield _fact(name, str(error).splitlines()[0][:100])
                continue
            flop = 3.5 * 2 * heads * width * length**2  # forward 2 products, backward 5, half of them masked
            yield {"what": f"{name}, forward and backward", "unit": "TFLOP/s", "seen": flop / seconds / 1e12}
            if peak:
                # out, its gradient, dq, fp32 dq, dk and dv once a query head, dk and dv, log-sum-exps
                signature = length * (width * heads * (2 + 2 + 2 + 4 + 4) + width * groups * 4 + 8 * heads)
                yield {
                    "what": f"{name}, peak",
                    "unit": "GiB",
                    "expected": signature / GIB,
                    "seen": peak / GIB,
                    "tolerance": 0.3,
                }


def copies(small: bool) -> Iterator[Row]:
    """GB/s between host and device."""
    import torch

    device, size = ("cpu", 2**24) if small else ("cuda", 2**30)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    for pinned in (False,) if small else (False, True):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        for what, target, source in ((f"{kind} to device", there, here), (f"device to {kind}", here, there)):
            seconds, _ = _timed(
                lambda target=target, source=source: target.copy_(source, non_blocking=True), device
            )
            yield {"what": what, "unit": "GB/s", "seen": size / seconds / 1e9}


def ipc(small: bool) -> Iterator[Row]:
    """A tensor of 256 MiB opened by another process on the same GPU."""
    import torch
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    queue, answer = context.Queue(), context.Queue()
    child = context.Process(target=_open, args=(queue, answer))
    child.start()
    tensor = torch.ones(2**26, device="cuda")
    begun = time.monotonic()
    queue.put(tensor)
    total = answer.get(timeout=50)
    child.join(10)
    yield {
        "what": "sum seen by the other process",
        "unit": "",
        "expected": float(2**26),
        "seen": total,
        "tolerance": 0.0,
    }
    yield {"what": "first opening, its CUDA context included", "unit": "s", "seen": time.monotonic() - begun}


def _open(queue: Any, answer: Any) -> None:
    tensor = queue.get()
    answer.put(float(tensor.double().sum()))
    del tensor


def cpu_adam(small: bool) -> Iterator[Row]:
    """Whether it compiles, and its step."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    begun = time.monotonic()
    parameter = torch.nn.Parameter(torch.zeros(10**8))
    optimizer = DeepSpeedCPUAdam([parameter])
    yield {"what": "built in", "unit": "s", "seen": time.monotonic() - begun}
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    begun = time.monotonic()
    optimizer.step()
    yield {"what": "step of 1e8 elements", "unit": "s", "seen": time.monotonic() - begun}


def deepspeed(small: bool) -> Iterator[Row]:
    """Peaks of the executor's engine: states, buffers, activations."""
    from lab.first_contact.steps import engine_steps

    yield from engine_steps(small)


def fsdp2(small: bool) -> Iterator[Row]:
    """Peak of a step under fully_shard on one rank."""
    from lab.first_contact.steps import fsdp_step

    yield from fsdp_step(small)


def dpo(small: bool) -> Iterator[Row]:
    """A DPO launch, killed and resumed."""
    from lab.first_contact.engines import dpo_run

    yield from dpo_run(small)


def rollout(small: bool) -> Iterator[Row]:
    """vLLM by itself."""
    from lab.first_contact.engines import rollout_engine

    yield from rollout_engine(small)


def measure(small: bool) -> Iterator[Row]:
    """The micro-benchmarks of `rlhfsim profile measure --quick`, each as soon as it is done."""
    from dataclasses import asdict

    from executor.microbench.probes import PROBES as BENCHMARKS
    from executor.microbench.run import measure as run

    class Silent:
        def started(self, *_: object) -> None: ...
        def ended(self, *_: object) -> None: ...

    for benchmark in BENCHMARKS[:1] if small else BENCHMARKS:
        session = run([benchmark], Silent(), quick=True)
        yield {"what": benchmark.name, "seen": "measured", "machine": asdict(session.machine)}
        for m in session.measured:
            at = " ".join(f"{x:g}" for x in m.at)
            yield {"what": f"{m.name} {at}".strip(), "unit": m.unit, "seen": m.value, "measured": asdict(m)}
        for absent in session.missing:
            yield _fact(f"{absent.probe}, not measured", absent.reason)


def _timed(work: Callable[[], object], device: str) -> tuple[float, int]:
    """Fastest of three after one; peak bytes beside what stood (0 on a CPU)."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    work()
    seconds, peak = float("inf"), 0
    for _ in range(3):
        wait()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        work()
        wait()
        seconds = min(seconds, time.perf_counter() - begun)
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
    return seconds, peak


def _fact(what: str, seen: str) -> Row:
    return {"what": what, "seen": seen}


PROBES: dict[str, Callable[[bool], Iterator[Row]]] = {
    probe.__name__: probe
    for probe in (machine, ledger, attention, copies, ipc, cpu_adam, deepspeed, fsdp2, dpo, rollout, measure)
}


def main(name: str, file: Path, *, small: bool) -> None:
    """Run a probe and keep every row as it comes."""
    for row in PROBES[name](small):
        append(file, {"check": name, "row": row})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), small=sys.argv[3] == "1")
