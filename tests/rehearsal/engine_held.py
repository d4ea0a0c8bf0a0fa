"""Memory of vLLM's engine and of both ends of a weight sync on the rehearsal device, beside the plan's ledger.

`engine_held.py FOLDER CASE...` writes FOLDER/engine_held.json; the trainer is a process of its own. The engine
is built from the plan as a launch builds it, and comes and goes by the executor's `EngineMemory`. CUDA graphs,
contexts and what no tensor holds are constants of the profiles with their sources.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import held
import numpy as np
import runs
import torch
import vllm_rig

from executor.coordination.engine_memory import EngineMemory
from executor.engines import training, weights
from executor.engines.transformers import heads
from executor.engines.vllm.engine import VllmEngine
from executor.resolve import Job, rollout_spec
from executor.samples import GenerationRequest
from executor.weight_transfer.packing import ROW_BYTES, GatheredWeights, Named
from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.units import MIB

BUCKET = int(2 * MIB)
"""Of a weight transfer, scaled down in the plan and in the transfer."""
SHARE = 0.0181
"""Of the GPU's memory that is the engine's: what its graphs and libraries leave is a small KV cache."""
TENSORS = ("weights", "kv_cache", "sync_buffers")
BOUND = "profile_peak"
"""Kept back for activations of the largest batch, which a short generation does not reach."""
ASLEEP = "actor.generate.unload"
CHECKSUM = 2 * 2 * ROW_BYTES
"""Of a tensor smaller than a row: its bytes as words and the sums of no rows, then both in one (packing.py)."""
CASES = {
    "hybrid": ("hybrid", "ipc"),
    "colocated": ("smart", "disk"),
    "naive": ("naive", "host"),
    "disaggregated": ("disaggregated", "broadcast"),
    "hybrid of experts": ("hybrid", "ipc"),
    "disaggregated of experts": ("disaggregated", "broadcast"),
}
"""Case -> architecture, transport."""


def made(architecture: str, model: Path) -> tuple[Plan, Ledger]:
    """Its plan on H100s whose buckets are small, and the ledger of it."""
    profile = load_profile("h100")
    size = replace(
        profile.coefficients["sync_bucket_bytes"], value=float(BUCKET), low=float(BUCKET), high=float(BUCKET)
    )
    numbers = dict(profile.coefficients) | {"sync_bucket_bytes": size}
    apart = architecture == "disaggregated"
    group = node_group(replace(profile, coefficients=numbers), 1 + apart, gpus_per_node=1 + apart)
    rollout = {
        "pool": "rollout" if apart else "all",
        "layout": {"dp": 1, "memory_utilization": SHARE},
        "sleep": {"smart": 2, "hybrid": 1}.get(architecture, 0),
    }
    work = {
        "prompts": 8,
        "prompt_len": {"kind": "fixed", "value": held.PROMPT},
        "response_len": {"kind": "fixed", "value": held.RESPONSE},
    }
    cluster = Cluster(node_groups=(group,), framework=OWN)
    plan = runs.plan(
        architecture, "grpo", model, workload=work, placement={"rollout": rollout}, cluster=cluster
    )
    return plan, ledger(models_of(plan.workload), plan.placement, plan.workload, cluster)


# --- the trainer's process --------------------------------------------------------------------------


def trainer(model: Path, address: str) -> None:
    """Send its weights whenever a channel arrives; answer with the bytes that this takes at most."""
    loaded = heads.load(str(model), "causal", "bf16", device="cuda")

    def gather() -> Iterator[list[Named]]:
        return loaded.stored.of(weights.buckets(heads.named_tensors(loaded), BUCKET, here=True))

    with Client(address) as asked:
        while (spec := asked.recv()) is not None:
            gc.collect()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            end = training.sender({0: spec}, 0)
            assert end is not None
            asked.send("ready")
            end.send(GatheredWeights(gather, on_host=spec.native is None), 1)
            asked.send(torch.ops.rehearsal.pooled() - before)
            end.close()


# --- the engine's process ---------------------------------------------------------------------------


class Engine:
    """One case: an engine, and what it and the trainer were seen to hold."""

    def __init__(self, case: str, model: Path, folder: Path, asked: Any) -> None:
        architecture, self.transport = CASES[case]
        self.plan, self.planned = made(architecture, model)
        self.folder, self.asked, self.read = folder, asked, dict[str, float]()
        job = Job(
            plan=self.plan, settings=runs.settings(model), model=str(model), gpu=True, max_prompt=held.PROMPT
        )
        gc.collect()
        self.before = torch.accelerator.memory_allocated()
        self.engine = VllmEngine(rollout_spec(replace(job, settings=replace(job.settings, precision="bf16"))))
        self.memory = EngineMemory(job, self._move, lambda _: None)

    def _move(self, method: str, *arguments: Any, span: str = "", step: int = 0) -> dict[str, Any]:
        if method == "wake":
            self.engine.wake(kv_cache=arguments[0])
        else:
            getattr(self.engine, method)(*arguments)
        self._note(span)
        return {"rollout replica 0": self.engine.memory()}

    def _note(self, moment: str) -> None:
        self.read[moment] = torch.accelerator.memory_allocated() - self.before

    def run(self) -> None:
        """A step: generation, rest, sync, rest."""
        self.memory.built()
        self._note("start")
        draw = np.random.default_rng(0)
        self.memory.for_generation(0)
        torch.accelerator.reset_peak_memory_stats()
        asked = [
            GenerationRequest(
                id=i,
                prompt=draw.integers(4, 64, held.PROMPT),
                max_tokens=8,
                temperature=1.0,
                top_p=1.0,
                seed=i,
            )
            for i in range(8)
        ]
        self.engine.generate(asked)
        self._note("actor.generate")
        self.read["activations"] = torch.ops.rehearsal.pooled() - self.before - self.read["actor.generate"]
        self.memory.rest(0)
        self.memory.for_sync(0)
        self._receive()
        self.memory.for_generation(1)
        self._note("actor.generate.load")
        self.memory.rest(1)
        self.engine.close()

    def _receive(self) -> None:
        spec = vllm_rig.channel(
            self.engine, self.transport, self.folder, device="cuda", bucket_bytes=BUCKET, timeout_s=120.0
        )
        torch.accelerator.reset_peak_memory_stats()
        self.asked.send(spec)
        assert self.asked.recv() == "ready"
        before = torch.accelerator.memory_allocated()
        self.engine.receive(1)
        self.read["actor.sync"] = torch.accelerator.max_memory_allocated() - self.before
        self.read["actor.sync receiver"] = self.read["actor.sync"] + self.before - before
        self.read["actor.sync sender"] = self.asked.recv()
        gc.collect()
        self._note("actor.sync.unload")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each moment of the plan that was read, of the engine; and of the trainer what a transfer adds.

        What stays on the device asleep (inputs and block tables of vLLM's runner) is of the profile's constant
        `non_torch`, and in no other moment.
        """
        rollout = self.plan.placement.rollout
        assert rollout is not None
        kept = self.read.get(ASLEEP, 0.0)
        for phase in (phase for phase in self.planned.phases if phase.pool == rollout.pool):
            sizes = {e.component: e.bytes for e in phase.entries if e.role == "rollout"}
            if phase.name == ASLEEP and kept:
                yield _row("kept asleep", kept, {"non_torch": sizes["non_torch"]}) | {"bound": True}
            elif phase.name in self.read:
                parts = {name: sizes[name] for name in TENSORS if name in sizes}
                yield _row(phase.name, self.read[phase.name] - kept, parts)
            if phase.name == "actor.generate":
                yield _row("activations", self.read["activations"], {BOUND: sizes[BOUND]}) | {"bound": True}
        for role, end in (("rollout", "receiver"), ("actor", "sender")):
            phases = [phase for phase in self.planned.phases if phase.name == "actor.sync"]
            entries = [e for phase in phases for e in phase.entries if e.role == role]
            parts = {"sync_buffers": sum(e.bytes for e in entries if e.component == "sync_buffers")}
            if end == "sender" and parts["sync_buffers"]:
                parts["checksum"] = CHECKSUM
            yield _row(f"actor.sync {end}", self.read[f"actor.sync {end}"], parts)


def _row(phase: str, measured: float, parts: dict[str, float]) -> dict[str, Any]:
    return {"phase": phase, "measured": measured, "planned": sum(parts.values()), "parts": parts}


def main(folder: Path, names: list[str]) -> None:
    """All cases, one engine after the other."""
    dense, found = held.model_at(folder / "model"), {}
    models = {False: dense, True: held.with_experts(dense, folder / "experts")}
    for experts, model in models.items():
        mine = [name for name in names if name.endswith("experts") == experts]
        address = str(folder / f"trainer-{experts}")
        with Listener(address) as listener:
            process = subprocess.Popen([sys.executable, __file__, "trainer", str(model), address])
            asked = listener.accept()
            for name in mine:
                engine = Engine(name, model, folder, asked)
                engine.run()
                found[name] = list(engine.rows())
                (folder / "engine_held.json").write_text(json.dumps(found, indent=1))
            asked.send(None)
            process.wait(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "trainer":
        trainer(Path(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
