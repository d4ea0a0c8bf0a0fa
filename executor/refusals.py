"""What a plan can ask that the executor does not run: refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from executor.algorithms import recipes
from executor.resolve import Job, has_weights, model_config
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.backends import BACKENDS, violation
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS

TOKENIZER = "tokenizer.json"


def check(job: Job) -> None:
    """Refuse what cannot run.

    Raises:
        RlhfsimError: the first reason, with what to change.
    """
    recipes.check(job.plan.workload, job.settings, staleness=job.plan.placement.schedule.staleness)
    for code, message, remedy in _reasons(job):
        raise RlhfsimError(code, message, help=remedy)


def check_model(folder: str) -> None:
    """A folder with config, weights and tokenizer.

    Raises:
        RlhfsimError: one is missing.
    """
    model_config(folder)
    if not has_weights(folder):
        raise RlhfsimError(
            "no-weights",
            f"{folder!r} has no weights (*.safetensors)",
            help="download or convert the model first; the executor loads nothing from a hub",
        )
    if not (Path(folder) / TOKENIZER).is_file():
        raise RlhfsimError(
            "no-tokenizer",
            f"{folder!r} has no {TOKENIZER}",
            help="save a fast tokenizer beside the weights: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
        )


def check_length(job: Job) -> None:
    """Prompt and response fit into the model's positions.

    Raises:
        RlhfsimError: they do not.
    """
    limit = model_config(job.model).get("max_position_embeddings")
    if limit is not None and job.max_prompt + job.max_tokens > limit:
        raise RlhfsimError(
            "too-long-for-model",
            f"prompts of up to {job.max_prompt} and responses of up to {job.max_tokens} tokens exceed "
            f"the model's {limit} positions",
            help="lower sampling.max_tokens or leave out long prompts",
        )


def _reasons(job: Job) -> Iterator[tuple[str, str, str]]:
    placement, workload = job.plan.placement, job.plan.workload
    rules = BACKENDS[placement.backend]
    if not rules.launchable:
        yield (
            "backend-not-launchable",
            f"the plan trains with {rules.title}, which the executor does not run",
            "simulate it (rlhfsim simulate), or design again with --backend deepspeed",
        )
    if workload.generates and placement.rollout is None:
        yield (
            "no-rollout-engine",
            "the plan generates with the policy's own training modules, which the executor does not run",
            "place the rollout: rollout: {pool: ..., layout: {...}}",
        )
    if workload.environment is not None:
        yield (
            "environment-not-run",
            "the plan's workload has an environment that answers between turns; "
            "the executor runs single-turn tasks",
            "leave out workload.environment; the simulator prices it",
        )
    yield from _path_reasons(job)
    yield from _rollout_reasons(job)
    for role, placed in placement.roles.items():
        if isinstance(placed, RolePlacement):
            yield from _role_reasons(job, role, placed)


def _path_reasons(job: Job) -> Iterator[tuple[str, str, str]]:
    placement, workload = job.plan.placement, job.plan.workload
    path = placement.weight_path
    if not workload.generates:
        return
    rules = WEIGHT_PATHS[path]
    if rules.transport is None:
        yield (
            "weight-path-not-run",
            f"weight path {path!r} is not run",
            "use broadcast, ipc, reshard, host, disk or lora",
        )
    if rules.adapters_only and workload.lora is None:
        yield (
            "lora-path-without-lora",
            "weight path lora moves adapters, but the policy trains all weights",
            "set workload.lora or another weight path",
        )
    nodes = {n for s in job.plan.gpu_map if s.role in ("actor", "rollout") for n in s.nodes}
    if rules.one_host and len(nodes) > 1:
        yield (
            "shared-memory-across-nodes",
            f"weight path {path!r} hands weights over in the memory of one host; "
            f"actor and rollout span {len(nodes)} nodes",
            "use weight_path broadcast or disk",
        )


def _rollout_reasons(job: Job) -> Iterator[tuple[str, str, str]]:
    role = job.plan.placement.rollout
    if role is None:
        return
    layout = role.layout
    if layout.attention_dp > 1 or layout.ep > 1:
        yield (
            "rollout-layout-not-run",
            "attention data parallelism and expert parallelism of the rollout are not run",
            "use tp and dp",
        )
    nodes = next(s.nodes for s in job.plan.gpu_map if s.role == "rollout")
    each = layout.replica_gpus
    if any(len(set(nodes[i : i + each])) > 1 for i in range(0, len(nodes), each)):
        yield (
            "replica-across-nodes",
            f"a rollout replica of {each} GPUs spans several nodes; one process runs it",
            "use a smaller rollout tp, or nodes with more GPUs",
        )
    if not job.gpu and layout.pp > 1:
        yield (
            "rollout-pp-on-cpu",
            "vLLM's CPU build has no pipeline parallelism here",
            "use rollout tp and dp",
        )
    if not job.gpu and layout.precision == "fp8":
        yield ("fp8-on-cpu", "FP8 rollout needs a GPU", "set rollout precision to bf16")
    if role.residency == "recreated" and job.plan.placement.weight_path != "disk":
        yield (
            "recreated-rollout-needs-disk",
            "a rollout that is destroyed between its calls reads its weights from disk "
            "when it is created again",
            "set weight_path: disk",
        )
    if job.plan.placement.schedule.double_buffered:
        yield (
            "double-buffering-not-run",
            "double buffering alternates with an environment, which the executor does not run",
            "set double_buffered: false",
        )


def _role_reasons(job: Job, role: str, placed: RolePlacement) -> Iterator[tuple[str, str, str]]:
    layout = placed.layout
    reason = violation(job.plan.placement.backend, layout)
    if reason is not None:
        yield (
            "layout-not-run",
            f"{role}: {reason}",
            "design again: rlhfsim design keeps to what the backend runs",
        )
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        yield ("nvme-not-run", f"{role}: offload to NVMe is not run", "use offload_optimizer: cpu")
    if job.plan.workload.lora and role == "actor" and (layout.pp > 1 or layout.tp > 1):
        yield (
            "lora-layout-not-run",
            "LoRA is run with data parallelism and ZeRO, not with tp or pp",
            "set tp: 1, pp: 1",
        )
    if job.plan.workload.optimizer == "adam8bit" and not job.gpu:
        yield ("adam8bit-on-cpu", "8-bit Adam needs a GPU", "set workload.optimizer: adam")
