"""Whole engines on one machine: a DPO launch that is killed and resumed, and vLLM by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rlhfsim.api import design
from rlhfsim.kernels.devices import device_of
from rlhfsim.plan import write_plan
from rlhfsim.rollout.decode import decode_step
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Workload

Row = dict[str, Any]
ITERATIONS, KILLED_AFTER = 6, 2
PATIENCE_S = 150.0
"""Until the first iterations are done."""
GAP_NATS = {True: 1e-4, False: 0.05}
"""Largest gap between two log-probs of one token that is no fault: FP32 on a CPU, BF16 kernels on a GPU."""


def dpo_run(small: bool) -> Iterator[Row]:
    """SIGKILL in the middle of a DPO run, then `--resume`: every iteration is there once."""
    from executor.tasks import tiny

    with TemporaryDirectory(prefix="first-contact-") as name:
        folder = Path(name)
        model = tiny.build(folder / "model")
        write_plan(folder / "plan.json", _dpo_plan(model, small))
        settings = {
            "model": str(model),
            "iterations": ITERATIONS,
            "checkpoints": {"every": 1},
            "tracking": {"tensorboard": False},  # not carried
        }
        (folder / "run.yaml").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "rlhfsim.cli.main", "launch", "plan.json", "--settings", "run.yaml"]
        begun = time.monotonic()
        killed = _killed([*command, "--out", "run"], folder)
        yield {"what": "start to the kill", "unit": "s", "seen": time.monotonic() - begun}
        yield {"what": "iterations before the kill", "seen": killed}
        begun = time.monotonic()
        done = subprocess.run(
            [*command, "--out", "run", "--resume"], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout)[-300:])
        yield {"what": "resume to the end", "unit": "s", "seen": time.monotonic() - begun}
        steps = _steps(folder)
        once = len(steps) == len(set(steps)) == ITERATIONS
        yield {"what": "iterations, each once", "expected": ITERATIONS, "seen": len(steps) if once else 0}


def _dpo_plan(model: Path, small: bool) -> Any:
    workload = Workload(
        algorithm="dpo",
        model=str(model / "config.json"),
        prompts=8,
        samples=1,
        packing=False,
        prompt_len=Fixed(value=8),
        response_len=Fixed(value=8),
    )
    chosen = design(Request(workload=workload, cluster=_cluster(small)), explain=False).chosen
    assert chosen is not None
    return chosen


def _killed(command: Sequence[str], folder: Path) -> int:
    """Start, wait for `KILLED_AFTER` iterations, end the driver's processes; iterations that were done."""
    log = folder / "killed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        end = time.monotonic() + PATIENCE_S
        while len(_steps(folder)) < KILLED_AFTER and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        seen = len(_steps(folder))
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if seen < KILLED_AFTER:
        raise RuntimeError(log.read_text(errors="replace")[-300:])
    return seen


def _steps(folder: Path) -> list[int]:
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def rollout_engine(small: bool) -> Iterator[Row]:
    """vLLM by itself: start, log-probs beside Hugging Face's, seconds of a decode step, sleep and wake."""
    from executor.engines.protocols import RolloutSpec
    from executor.engines.vllm.engine import VllmEngine
    from executor.tasks import tiny

    with TemporaryDirectory(prefix="first-contact-") as name:
        shape: tiny.Shape = {} if small else {"hidden": 2048, "layers": 24, "heads": 16, "kv_heads": 8}
        model = tiny.build(Path(name) / "model", **shape)
        layout = RolloutLayout(max_batched_tokens=2048)
        begun = time.monotonic()
        engine = VllmEngine(
            RolloutSpec(
                model=str(model),
                layout=layout,
                max_model_len=256,
                max_num_seqs=64,
                kv_bytes=64 * 2**20 if small else 4 * 2**30,
                precision="fp32" if small else "bf16",
            )
        )
        yield {"what": "start", "unit": "s", "seen": time.monotonic() - begun}
        try:
            yield from _log_probs(engine, model, small)
            yield from _decode(engine, str(model / "config.json"), layout, small)
            yield from _sleep(engine)
        finally:
            engine.close()


def _requests(count: int, tokens: int) -> list[Any]:
    from executor.samples import GenerationRequest

    draw = np.random.default_rng(count)
    return [
        GenerationRequest(id=i, prompt=draw.integers(4, 60, 8), max_tokens=tokens, seed=i)
        for i in range(count)
    ]


def _log_probs(engine: Any, folder: Path, small: bool) -> Iterator[Row]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cpu" if small else "cuda"
    asked = _requests(8, 32)
    got = engine.generate(asked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if small else torch.bfloat16)
    model.to(device)
    gaps: list[float] = []
    for request, completion in zip(asked, got, strict=True):
        ids = torch.tensor(np.concatenate([request.prompt, completion.tokens]), device=device)[None]
        with torch.no_grad():
            logits = model(ids).logits[0].float()
        start = len(request.prompt)
        ours = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        gaps += (ours.cpu() - torch.tensor(completion.logprobs)).abs().tolist()
    limit = GAP_NATS[small]
    yield {"what": f"mean gap of log-probs (at most {limit:g})", "unit": "nats", "seen": float(np.mean(gaps))}
    yield {"what": "largest gap of log-probs", "unit": "nats", "seen": max(gaps)}


def _decode(engine: Any, config: str, layout: RolloutLayout, small: bool) -> Iterator[Row]:
    device, spec = device_of(_cluster(small).node_group), resolve_model(config)
    for count in (1, 8, 64):
        engine.add(_requests(count, 64))
        steps: list[tuple[int, float]] = []
        while (running := engine.unfinished) > count / 2:
            begun = time.perf_counter()
            engine.step()
            steps.append((running, time.perf_counter() - begun))
        engine.abort(range(count))
        decoding = steps[2:]  # the first reads the prompts
        running = round(median(number for number, _ in decoding))
        priced = float(decode_step(device, spec, layout, running, 40.0).seconds)
        yield {
            "what": f"decode step of {running} sequences (median of {len(decoding)})",
            "unit": "s",
            "expected": None if small else priced,  # a CPU that others use too says nothing
            "seen": median(seconds for _, seconds in decoding),
            "tolerance": 0.3,
        }


def _sleep(engine: Any) -> Iterator[Row]:
    for what, move in (("sleep, level 1", lambda: engine.sleep(1)), ("wake", engine.wake)):
        begun = time.perf_counter()
        move()
        yield {"what": what, "unit": "s", "seen": time.perf_counter() - begun}


def _cluster(small: bool) -> Cluster:
    """One slot of this machine, as the shipped profile of its kind."""
    if small:
        return Cluster(node_groups=(node_group("cpu-core", 1, gpus_per_node=1),))
    import torch

    kind = next(
        (x for x in ("h200", "h100", "b200", "a100") if x in torch.cuda.get_device_name().lower()), ""
    )
    return Cluster(node_groups=(node_group(kind or "h100", 1, gpus_per_node=1),))
