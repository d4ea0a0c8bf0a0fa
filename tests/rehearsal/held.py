"""Memory of the calls of a step on the rehearsal device, beside what the plan's ledger says at the same moment.

`held.py RANK PORT FOLDER CASE...`: one of two ranks, both with a device of their own. The workers are the
executor's, their roles come and go by its own `Residency`, in the order of the plan's moments, which a dry run
holds a launch to (tests/executor/test_dry_run_memory.py). Rank 0 writes FOLDER/held.json. Read are tensors; under FSDP2,
whose ledger counts what CUDA's allocator keeps for the stream of the all-gathers, the pools of all streams.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed  # noqa: F401  # before a model is made, which hides the device from it
import numpy as np
import runs
import torch

from executor.algorithms.recipes import actor_loss, critic_loss
from executor.coordination.engine_memory import Residency
from executor.coordination.tracing import Tags
from executor.coordination.worker import Worker, WorkerIdentity
from executor.engines.deepspeed import config
from executor.engines.memory import Meter
from executor.engines.protocols import MiniBatch
from executor.engines.transformers import heads
from executor.resolve import Job, engine_specs, served_by
from executor.samples import Sample
from executor.tasks import tiny
from executor.weight_transfer.packing import GatheredWeights
from rlhfsim.memory import logits, states
from rlhfsim.memory.ledger import Ledger, LedgerPhase, ledger
from rlhfsim.memory.transfer import transfer_bytes
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.engine_numbers import DEEPSPEED
from rlhfsim.specs.workload.dataflow import Call, dataflow

WORLD, STEPS = 2, 2
WORDS, SHAPE = 2048, {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2}
PROMPT, RESPONSE, ROWS = 32, 96, 4
SOURCED = ("framework", "nccl", "fragmentation")
"""Components that no tensor of a process holds: constants of the profile with their sources."""
SEQUENCES = {"sft": 1, "ppo": 1, "dpo": 2, "grpo": 4}
"""Of a prompt; a rank has two full micro-batches of them."""
METHODS = {"logprob": "logprobs", "value": "values", "score": "scores"}
AWAY = {"residency": "offloaded"}
BETWEEN = {"offload_between": True}
CASES: dict[str, dict[str, Any]] = {
    "sft zero0": {"algorithm": "sft", "layout": {"zero": 0}},
    "sft zero1": {"algorithm": "sft", "layout": {"zero": 1}},
    "sft zero2 recompute": {"algorithm": "sft", "layout": {"zero": 2, "recompute": "full"}},
    "dpo zero1 recompute offloaded": {
        "algorithm": "dpo",
        "layout": {"zero": 1, "recompute": "full"},
        "actor": AWAY,
        "reference": AWAY,
    },
    "dpo zero3": {"algorithm": "dpo", "layout": {"zero": 3}},
    "sft fsdp2 zero2": {"algorithm": "sft", "backend": "fsdp2", "layout": {"zero": 2}},
    "sft fsdp2 zero3": {"algorithm": "sft", "backend": "fsdp2", "layout": {"zero": 3}},
    "dpo fsdp2 zero3 recompute offloaded": {
        "algorithm": "dpo",
        "backend": "fsdp2",
        "layout": {"zero": 3, "recompute": "full"},
        "actor": AWAY,
        "reference": AWAY,
    },
    "grpo zero2": {"algorithm": "grpo", "layout": {"zero": 2}, "actor": BETWEEN},
    "grpo zero3 recompute packed": {
        "algorithm": "grpo",
        "layout": {"zero": 3, "recompute": "full"},
        "workload": {"packing": True},
        "actor": BETWEEN,
        "reference": AWAY,
    },
    "ppo zero1": {
        "algorithm": "ppo",
        "layout": {"zero": 1},
        "actor": BETWEEN,
        "critic": BETWEEN,
        "reference": AWAY,
    },
    "grpo lora": {"algorithm": "grpo", "layout": {"zero": 1}, "workload": {"lora": {"rank": 16}}},
    "sft zero1 fp32 sums": {"algorithm": "sft", "layout": {"zero": 1}, "workload": {"gradients": "fp32"}},
    "sft zero2 fp32 sums": {"algorithm": "sft", "layout": {"zero": 2}, "workload": {"gradients": "fp32"}},
    "sft zero3 of experts": {"algorithm": "sft", "layout": {"zero": 3}},
    "sft fsdp2 of experts": {"algorithm": "sft", "backend": "fsdp2", "layout": {"zero": 3}},
    "sft zero3 recompute of experts": {"algorithm": "sft", "layout": {"zero": 3, "recompute": "full"}},
    "sft fsdp2 recompute of experts": {
        "algorithm": "sft",
        "backend": "fsdp2",
        "layout": {"zero": 3, "recompute": "full"},
    },
}
"""Case -> algorithm, layout, what roles do between their calls."""


EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
"""In place of the dense model's: a layer's experts are more than a bucket."""

BUCKET, LIVE, PREFETCH, CHUNK = 500_000, 1_000_000, 50_000, 2**20
"""Elements of DeepSpeed's buckets and of what ZeRO-3 gathers, bytes of logits at one time: scaled down as well."""


SENT = {"sft zero1", "dpo zero3", "sft fsdp2 zero3", "sft zero3 of experts"}
"""Cases whose actor sends its weights as well, to nobody: in buckets of `SYNC_BUCKET` bytes, by each way of vLLM."""
SYNC_BUCKET = 2 * 2**20


def scale_down() -> None:
    """Engines and ledger read the same small numbers."""
    numbers = replace(DEEPSPEED, reduce_bucket=BUCKET, live=LIVE, reuse=LIVE, prefetch=PREFETCH)
    config.DEEPSPEED = states.DEEPSPEED = numbers
    heads.LOGIT_CHUNK_BYTES = logits.LOGIT_CHUNK_BYTES = CHUNK


def model_at(folder: Path) -> Path:
    """A small model whose vocabulary is wide enough for logits to count."""
    tiny.VOCABULARY = (*tiny.VOCABULARY, *(f"<{i}>" for i in range(WORDS - len(tiny.VOCABULARY))))
    return tiny.build(folder, **SHAPE)  # type: ignore[arg-type]


def with_experts(dense: Path, folder: Path) -> Path:
    """The dense model's shape with experts, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((dense / "config.json").read_text()) | EXPERTS))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return folder


def made(case: Mapping[str, Any], model: Path) -> tuple[Plan, Ledger]:
    """Its plan on H100s, and the ledger of it."""
    work = {
        "prompts": 2 * ROWS * WORLD // SEQUENCES[case["algorithm"]],
        "prompt_len": {"kind": "fixed", "value": PROMPT},
        "response_len": {"kind": "fixed", "value": RESPONSE},
    } | case.get("workload", {})
    layout = {"dp": WORLD, "micro_batch": ROWS, "recompute": "none"} | case["layout"]
    cluster = Cluster(node_groups=(node_group("h100", WORLD, gpus_per_node=WORLD),), framework=OWN)
    roles = {
        role: {"pool": "all", "layout": layout, **case[role]}
        for role in ("actor", "critic", "reference")
        if role in case
    }
    placement = {"backend": case.get("backend", "deepspeed")} | roles
    plan = runs.plan(
        "naive", case["algorithm"], model, layout=layout, workload=work, placement=placement, cluster=cluster
    )
    return plan, ledger(models_of(plan.workload), plan.placement, plan.workload, cluster)


def samples(rank: int, algorithm: str) -> tuple[Sample, ...]:
    """Of one rank: two full micro-batches."""
    draw = np.random.default_rng(rank)

    def one(number: int) -> Sample:
        def floats() -> Any:
            return draw.normal(0.0, 0.3, RESPONSE).astype(np.float32)

        pair = algorithm == "dpo"
        return Sample(
            id=number,
            group=number // 2 if pair else number,
            prompt=draw.integers(4, 64, PROMPT),
            response=draw.integers(4, 64, RESPONSE),
            label=(1.0 if number % 2 == 0 else -1.0) if pair else None,
            old_logprobs=floats() - 4.0,
            reference_logprobs=floats() - 4.0,
            rollout_logprobs=floats() - 4.0,
            advantages=floats(),
            returns=floats(),
            values=floats(),
        )

    return tuple(one(number) for number in range(2 * ROWS))


class Step:
    """One case on this rank: its worker, and what was read in the last step."""

    def __init__(self, rank: int, case: Mapping[str, Any], model: Path, folder: Path) -> None:
        self.plan, self.planned = made(case, model)
        settings = runs.settings(model)
        self.job = Job(plan=self.plan, settings=settings, model=str(model), gpu=True, max_prompt=PROMPT)
        self.worker = Worker(WorkerIdentity(pool="all", gpu=True, rank=rank, ranks=WORLD))
        self.samples = samples(rank, self.plan.workload.algorithm)
        self.read: dict[str, float] = {}
        gc.collect()
        self.before = torch.accelerator.memory_allocated()
        self.residency = Residency(self.job, folder, self._moved)
        for role, spec in engine_specs(self.job).items():
            self.worker.build(spec)
            self.residency.rest(role, 0)

    def _note(self, name: str, reading: Mapping[str, float], key: str) -> None:
        self.read[name] = reading[key] - self.before

    def _moved(self, method: str, role: str, how: str, folder: str | None, span: str, step: int) -> None:
        tags = Tags(name=span, step=step)
        call = self.worker.load if method == "load" else self.worker.unload
        reply = call(role, how, tags) if method == "load" else self.worker.unload(role, how, folder, tags)
        assert reply.memory is not None
        self._note(span, reply.memory, "allocated")

    def run(self) -> None:
        """The calls of a step that run on the trainers."""
        reading = Meter()
        self._note("start", reading.read(), "allocated")
        for call in dataflow(self.plan.workload):
            if call.role != "rules" and call.kind in ("train", *METHODS):
                self._call(call)

    def _call(self, call: Call) -> None:
        tags, alias = Tags(name=call.name, step=0), served_by(self.plan)
        role = alias.get(call.role, call.role)
        with self.residency.present(role, call.name, 0, states=call.kind == "train"):
            if call.kind == "train":
                tokens = sum(sample.num_tokens for sample in self.samples)
                batch = MiniBatch(
                    samples=self.samples,
                    global_tokens=WORLD * tokens,
                    global_sequences=WORLD * len(self.samples),
                )
                reply = self.worker.train([batch], role, self._loss(role), tags)
            else:
                method = "reference_logprobs" if role != call.role else METHODS[call.kind]
                reply = self.worker.forward(self.samples, role, method, tags)
            assert reply.memory is not None
            reading = reply.memory | {"pooled": torch.ops.rehearsal.pooled()}
            self._note(call.name, reading, "pooled" if self.plan.placement.backend == "fsdp2" else "peak")

    def sent(self) -> Iterator[dict[str, Any]]:
        """What a sync adds at the trainer: vLLM's buffers, and full tensors that it gathers for them."""
        model = models_of(self.plan.workload).actor
        sharded = self.plan.placement.actor.layout.zero == 3
        for transport in ("ipc", "broadcast"):
            held = transfer_bytes(model, transport, float(SYNC_BUCKET))
            parts = {"sync_buffers": held.sent + held.group * sharded}
            row = {"phase": f"actor.sync by {transport}", "measured": self._sends(transport), "parts": parts}
            yield row | {"planned": sum(parts.values())}

    @torch.no_grad()
    def _sends(self, transport: str) -> float:
        from vllm.distributed.weight_transfer import packed_tensor

        from executor.engines.vllm.transfer import BucketSource

        engine, source = self.worker._engines["actor"], BucketSource()
        source.weights = GatheredWeights(lambda: engine.buckets(SYNC_BUCKET, range(WORLD)))
        size = source.buffer(SYNC_BUCKET)
        gc.collect()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        if transport == "ipc":
            for _ in packed_tensor.packed_ipc_producer(iter(source), "", itemgetter(1), size):
                pass
        else:
            nobody = SimpleNamespace(broadcast=lambda *_, **__: None)
            packed_tensor.packed_nccl_broadcast_producer(iter(source), nobody, 0, itemgetter(1), size)
        return float(torch.accelerator.max_memory_allocated() - before)

    def _loss(self, role: str) -> Any:
        algorithm = self.job.settings.algorithm
        if role == "critic":
            return critic_loss(algorithm)
        return actor_loss(self.plan.workload, algorithm, max_tokens=RESPONSE)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each moment of the plan that was read."""
        for phase in self.planned.phases:
            if phase.name in self.read:
                yield {"phase": phase.name, "measured": self.read[phase.name], **_planned(phase)}


def _planned(phase: LedgerPhase) -> dict[str, Any]:
    parts: dict[str, float] = {}
    for entry in phase.entries:
        if entry.role != "rollout" and entry.component not in SOURCED:
            name = f"{entry.role} {entry.component}"
            parts[name] = parts.get(name, 0.0) + entry.bytes
    return {"planned": sum(parts.values()), "parts": parts}


def main(rank: int, port: int, folder: Path, names: list[str]) -> None:
    """All cases, one after the other in one process group."""
    from executor.engines import training

    scale_down()
    training.start(rank, WORLD, 0, "127.0.0.1", port, 300.0, gpu=True)
    if rank == 0:
        with_experts(model_at(folder / "model"), folder / "experts")
    torch.distributed.barrier()
    found = {}
    for name in names:
        model = folder / ("experts" if name.endswith("experts") else "model")
        step = Step(rank, CASES[name], model, folder / f"away-{rank}")
        for _ in range(STEPS):
            step.run()
        found[name] = [*step.rows(), *(step.sent() if name in SENT else ())]
        step.worker.close()
        if rank == 0:
            (folder / "held.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or list(CASES))
