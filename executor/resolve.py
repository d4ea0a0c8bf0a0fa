"""A plan and its settings resolved: what every engine is built with. Pure; starts nothing."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from executor.engines.fake import Fakes
from executor.engines.protocols import EngineSpec, RolloutSpec
from executor.engines.training import library
from executor.limits import TimeLimits
from executor.settings import Precision, RewardRule, Settings, Size
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.outputs import is_file
from rlhfsim.plan import Plan
from rlhfsim.specs.loading import convert, parse_json, read_text
from rlhfsim.specs.placement.engine_numbers import CPU_SYNC_BUCKET_BYTES, SYNC_BUCKET_BYTES
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.roles import BY_NAME

MIN_KV_BYTES, MAX_CPU_KV_BYTES = 64 * 2**20, 4 * 2**30
BYTES = {"fp32": 4, "bf16": 2}
CONFIG = "config.json"
ROLLOUT = (
    "executor.engines.vllm.engine",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Modules of a rollout on CPUs."""


@frozen
class ModelKeys:
    """What is read here of a model's config.json, of the many keys that it may have."""

    model_type: str | None = None
    max_position_embeddings: Size | None = None
    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    hidden_size: Size | None = None
    head_dim: Size | None = None


@frozen
class Job:
    """Everything that fixes a run."""

    plan: Plan
    settings: Settings
    model: str
    """Folder of the policy's initial weights."""
    gpu: bool
    """Whether the slots are GPUs."""
    max_prompt: int
    """Tokens of the longest prompt."""
    fakes: Fakes | None = None
    """Dry run: what engines go by instead of working."""

    @property
    def limits(self) -> TimeLimits:
        """How long waits may take."""
        return TimeLimits(self.plan, self.settings.limits)

    @property
    def precision(self) -> Precision:
        """Precision of training and rollout."""
        return self.settings.precision or ("bf16" if self.gpu else "fp32")

    @property
    def rules(self) -> tuple[RewardRule, ...]:
        """Rules of the rewards."""
        given = self.settings.rewards
        usual = () if self.settings.environment else (RewardRule(kind="answer"),)
        return usual if given is None else given

    @property
    def bucket_bytes(self) -> int:
        """Bytes of one bucket of a weight transfer."""
        return self.settings.bucket_bytes or (SYNC_BUCKET_BYTES if self.gpu else CPU_SYNC_BUCKET_BYTES)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a response."""
        return self.settings.sampling.max_tokens or int(self.plan.workload.response_len.maximum)

    @property
    def turns(self) -> int:
        """Most turns of a response."""
        settings, planned = self.settings.environment, self.plan.workload.environment
        given = settings.turns if settings is not None else None
        return given or (int(planned.turns) if planned is not None else 1)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        workload = self.plan.workload
        return self.settings.iterations * workload.epochs * workload.mini_batches


def named_model(plan: Plan, settings: Settings) -> str:
    """The policy as it is named: settings before plan."""
    return settings.model or next(m.path for m in plan.models if m.role == "actor")


def model_folder(plan: Plan, settings: Settings) -> str:
    """Where the policy's weights are; a config.json means its folder."""
    path = named_model(plan, settings)
    folder = Path(path).parent if Path(path).name == CONFIG else Path(path)
    # workers of another cluster have another working directory
    return str(folder.absolute()) if folder.is_dir() else str(folder)


def located(plan: Plan, settings: Settings) -> Settings:
    """Settings with whole paths of what is on this machine: a run may go on from another directory."""
    model, evaluation = model_folder(plan, settings), settings.evaluation
    own = evaluation.data and replace(evaluation.data, path=_whole(evaluation.data.path))
    return replace(
        settings,
        model=model if Path(model).is_dir() else settings.model,
        critic_model=_whole(settings.critic_model),
        reward_model=_whole(settings.reward_model),
        reference_model=settings.reference_model and ",".join(map(str, map(_whole, settings.references))),
        data=replace(settings.data, path=_whole(settings.data.path)),
        evaluation=replace(evaluation, data=own),
    )


def _whole(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def served_by(plan: Plan) -> dict[str, str]:
    """Roles that run on another role's engine: the frozen base of a LoRA policy is its reference."""
    placement = plan.placement
    together = "reference" not in placement.roles or placement.together("actor", "reference")
    return {"reference": "actor"} if plan.workload.base_is_reference and together else {}


def engine_specs(job: Job) -> dict[str, EngineSpec]:
    """How the engine of every trained or scoring role is built."""
    return {
        role: _engine_spec(job, role, placed)
        for role, placed in job.plan.placement.trainers.items()
        if role not in served_by(job.plan)
    }


def preloaded(job: Job) -> tuple[str, ...]:
    """Modules that the processes of a run import before they are told what to build."""
    kind = model_config(job.model).get("model_type")
    specs = engine_specs(job).values()
    engines = {f"executor.engines.{library(spec).lower()}.engine" for spec in specs}
    trained = *sorted(engines), f"transformers.models.{kind}.modeling_{kind}"
    generates = job.plan.workload.generates
    return (*trained, *ROLLOUT, f"vllm.model_executor.models.{kind}") if generates else trained


def _engine_spec(job: Job, role: str, placed: RolePlacement) -> EngineSpec:
    settings, workload = job.settings, job.plan.workload
    critic = settings.critic_optimizer or settings.optimizer
    optimizer = {"actor": settings.optimizer, "critic": critic}.get(role)
    folder, *others = (
        settings.references if role == "reference" else [getattr(settings, f"{role}_model", None)]
    )
    return EngineSpec(
        role=role,
        model=folder or job.model,
        others=tuple(other for other in others if other is not None),
        head="score" if role == "actor" and workload.algorithm == "reward_model" else BY_NAME[role].head,
        backend=job.plan.placement.backend,
        layout=placed.layout,
        optimizer=optimizer,
        optimizer_kind=workload.optimizer,
        precision=job.precision,
        gradients=workload.gradients,
        micro_tokens=int(batch_lengths(workload).tokens(placed.layout)),
        score_tokens=int(batch_lengths(workload).tokens(placed.layout, scoring=True)),
        packing=workload.packing,
        lora_rank=workload.lora.rank if workload.lora and role == "actor" else None,
        temperature=settings.sampling.temperature,
        total_steps=job.total_steps,
        seed=settings.seed,
    )


def rollout_spec(job: Job) -> RolloutSpec:
    """How every replica is built."""
    role = job.plan.placement.rollout
    assert role is not None, "the plan has no rollout role"
    schedule = job.plan.placement.schedule
    length = job.max_prompt + job.max_tokens
    workload = job.plan.workload
    together = max(workload.num_sequences, workload.gen_prompts * workload.samples)
    running = min(role.layout.max_num_seqs, math.ceil(together / role.layout.dp))
    return RolloutSpec(
        model=job.model,
        layout=role.layout,
        max_model_len=length,
        max_num_seqs=running,
        kv_bytes=_kv_bytes(job, length * running),
        precision=job.precision,
        quantised=role.layout.precision == "fp8",
        interrupted=schedule.partial_rollout or schedule.overlapped_sync,
        seed=job.settings.seed,
        environment=job.settings.environment,
        turns=job.turns,
        chat=job.settings.data.chat_template,
        folder=os.getcwd() if job.settings.environment else "",
    )


def _kv_bytes(job: Job, tokens: int) -> int:
    """GPU: what the plan's ledger gives the KV cache; CPU: what all running sequences can need."""
    if job.fakes is not None:
        return MIN_KV_BYTES
    rollout = job.plan.placement.rollout
    pool = rollout.pool if rollout is not None else ""
    planned = [
        e.bytes
        for e in job.plan.prediction.ledger
        if (e.role, e.component, e.pool) == ("rollout", "kv_cache", pool)
    ]
    if job.gpu and planned:
        return int(max(planned))
    config = model_config(job.model)
    heads = config.get("num_key_value_heads", config.get("num_attention_heads", 1))
    size = config.get("head_dim") or config.get("hidden_size", 1) // config.get("num_attention_heads", 1)
    each = 2 * config.get("num_hidden_layers", 1) * heads * size * BYTES[job.precision]
    return int(min(MAX_CPU_KV_BYTES, max(MIN_KV_BYTES, 1.25 * each * tokens)))


def model_config(folder: str) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        RlhfsimError: no such folder, no config.json in it, not JSON, or a size that is none.
    """
    path = Path(folder) / CONFIG
    if not is_file(path):
        raise RlhfsimError(
            "no-model",
            f"{folder!r} is no model folder: it has no {CONFIG}",
            help="pass a folder with config.json, weights and tokenizer.json: rlhfsim launch --model FOLDER",
        ) from None
    source = parse_json(read_text(path), str(path))
    if not isinstance(source.data, dict):
        raise RlhfsimError("no-model", "config.json is not an object", place=Place(file=str(path)))
    names = {key.name for key in fields(ModelKeys)}
    said = {key: value for key, value in source.data.items() if key not in names or value is not None}
    convert(ModelKeys, source, {key: value for key, value in said.items() if key in names})
    return said


def has_weights(folder: str) -> bool:
    """Whether a model folder holds weights."""
    return any(Path(folder).glob("*.safetensors")) or any(Path(folder).glob("pytorch_model*.bin"))


def environment(job: Job) -> dict[str, str]:
    """Environment variables of every process of the run; settings win."""
    cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    common = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "DS_LOG_LEVEL": "error",
        "PYTHONUNBUFFERED": "1",
    }
    return common | ({} if job.gpu else cpu) | dict(job.settings.variables)
