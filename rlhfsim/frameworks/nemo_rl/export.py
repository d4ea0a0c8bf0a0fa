"""A plan as overrides of NeMo-RL's example configurations (NVIDIA-NeMo/RL at 7ea279a: examples/configs)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.export import (
    Exporter,
    Section,
    Setting,
    Value,
    Written,
    call,
    held,
    longest_prompt,
    longest_response,
    nodes_of,
    predicted,
    script,
    speculation,
    the_rollout,
    title_of,
)
from rlhfsim.frameworks.nemo_rl.configuration import DISPATCHERS
from rlhfsim.frameworks.nemo_rl.unsaid import of_preferences, of_rollouts
from rlhfsim.frameworks.training_keys import TRAINING_NEEDS, written_for
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement

GEN, MEGATRON, DTENSOR = "policy.generation", "policy.megatron_cfg", "policy.dtensor_cfg"
NEEDS = {
    **TRAINING_NEEDS,
    "NEMO_RL": "folder of the NeMo-RL repository",
    "MODEL": "folder or Hugging Face name of the policy",
    "DATASET": "data set that NeMo-RL registers, such as OpenMathInstruct-2",
    "DRAFT_MODEL": "folder or Hugging Face name of what drafts tokens",
}
BASES = {"megatron": "math_1B_megatron.yaml", "fsdp2": "math_1B.yaml"}
"""Training backend -> the configuration under examples/configs that is overridden, behind its loop."""


def write(plan: Plan) -> Written:
    """The plan in NeMo-RL's keys.

    Raises:
        RlhfsimError: an algorithm without a rollout, or a rollout that is not whole nodes.
    """
    if plan.workload.algorithm == "dpo":
        return _preferences(plan)
    rollout = the_rollout(plan, "NeMo-RL's run_grpo.py, run_ppo.py and run_dpo.py")
    critic = plan.placement.critic
    value = (Section(title="value model", settings=tuple(_engine(plan, "value", critic))),) if critic else ()
    sections = (
        Section(title="where it runs", settings=tuple(_where(plan, rollout))),
        Section(title="batch and lengths", settings=tuple(_batch(plan))),
        Section(title="algorithm", settings=tuple(_algorithm(plan))),
        Section(title="training", settings=tuple(_training(plan))),
        *value,
        Section(title="rollout", settings=tuple(_rollout(plan, rollout))),
    )
    return written_for(plan, "nemo-rl", sections, of_rollouts(plan, rollout))


def _loop(plan: Plan) -> str:
    """Of its keys, its script and its base."""
    algorithm = plan.workload.algorithm
    return algorithm if algorithm in ("ppo", "dpo") else "grpo"


def _preferences(plan: Plan) -> Written:
    """DPO: batches count pairs, the pair of a prompt is in one micro-batch (nemo_rl/algorithms/dpo.py)."""
    work, placed = plan.workload, plan.placement.actor
    nodes, each = nodes_of(plan, plan.placement.pool(placed.pool).gpus)
    pairs = work.prompts // work.mini_batches
    total = longest_prompt(plan) + longest_response(plan)
    where = (
        Setting(key="cluster.num_nodes", value=nodes, why=predicted(plan)),
        Setting(key="cluster.gpus_per_node", value=each),
    )
    batch = (
        Setting(key="policy.train_global_batch_size", value=pairs, why="pairs of one optimizer step"),
        Setting(key="policy.max_total_sequence_length", value=total, why="prompt and response"),
    )
    sections = (
        Section(title="where it runs", settings=where),
        Section(title="batch and lengths", settings=batch),
        Section(title="training", settings=tuple(_training(plan))),
    )
    return written_for(plan, "nemo-rl", sections, of_preferences(plan))


def _where(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    trained = plan.placement.pool(plan.placement.actor.pool).gpus
    apart = rollout.pool != plan.placement.actor.pool
    own = plan.placement.pool(rollout.pool).gpus if apart else 0
    nodes, each = nodes_of(plan, trained + own)
    yield Setting(key="cluster.num_nodes", value=nodes, why=f"rollout included. {predicted(plan)}")
    yield Setting(key="cluster.gpus_per_node", value=each)
    yield Setting(key=f"{GEN}.colocated.enabled", value=not apart)
    if apart:
        alone, per_node = (None, own) if nodes == 1 else nodes_of(plan, own)
        if nodes > 1 and per_node != each:
            raise RlhfsimError(
                "pool-is-not-whole-nodes",
                f"NeMo-RL gives the rollout whole nodes: {own} GPUs are none of {each}",
                help="design with a rollout pool of whole nodes",
            )
        yield Setting(key=f"{GEN}.colocated.resources.num_nodes", value=alone)
        yield Setting(key=f"{GEN}.colocated.resources.gpus_per_node", value=per_node)
        if plan.placement.weight_path == "p2p":
            yield Setting(key=f"++{GEN}.refit_transport", value="nixl", why=call(plan, "actor.sync"))
    schedule = plan.placement.schedule
    if schedule.asynchronous:
        loop = f"{_loop(plan)}.async_{_loop(plan)}"
        yield Setting(key=f"{loop}.enabled", value=True, why="the rollout never waits for an update")
        lag = max(1, math.ceil(schedule.staleness))
        yield Setting(key=f"{loop}.max_trajectory_age_steps", value=lag)
        yield Setting(key=f"{loop}.in_flight_weight_updates", value=schedule.partial_rollout)
        yield Setting(key="loss_fn.use_importance_sampling_correction", value=True)
        yield Setting(key=f"{GEN}.vllm_cfg.async_engine", value=True)


def _batch(plan: Plan) -> Iterator[Setting]:
    work, loop = plan.workload, _loop(plan)
    yield Setting(key=f"{loop}.num_prompts_per_step", value=work.prompts)
    yield Setting(key=f"{loop}.num_generations_per_prompt", value=work.samples)
    if work.dynamic_sampling is not None:
        sampling = work.dynamic_sampling
        why = f"{sampling.kept:.0%} of the groups are expected to be kept"
        yield Setting(key=f"{loop}.use_dynamic_sampling", value=True, why=why)
        yield Setting(key=f"{loop}.batch_multiplier", value=sampling.prompts_of(work.prompts) / work.prompts)
        if sampling.max_gen_batches is not None:
            yield Setting(key=f"{loop}.dynamic_sampling_max_gen_batches", value=sampling.max_gen_batches)
    each = work.num_sequences // work.mini_batches
    yield Setting(key="policy.train_global_batch_size", value=each, why="samples of one optimizer step")
    total = longest_prompt(plan) + longest_response(plan)
    yield Setting(key="policy.max_total_sequence_length", value=total, why="prompt and response")
    yield Setting(key=f"{GEN}.max_new_tokens", value=longest_response(plan))


def _algorithm(plan: Plan) -> Iterator[Setting]:
    work, kl = plan.workload, plan.placement.reference is not None
    if _loop(plan) == "ppo":
        yield from _ppo(plan, kl)
    else:
        if work.algorithm == "reinforce++":
            yield Setting(key="grpo.adv_estimator.name", value="reinforce_plus_plus")
        yield Setting(key="grpo.use_leave_one_out_baseline", value=work.algorithm == "rloo")
        yield Setting(key="grpo.normalize_rewards", value=work.algorithm not in ("dr-grpo", "rloo"))
        if not kl:
            yield Setting(key="loss_fn.reference_policy_kl_penalty", value=0.0)
            yield Setting(key="grpo.skip_reference_policy_logprobs_calculation", value=True)
    if work.old_logprobs != "recompute" and work.one_update:
        yield Setting(key="loss_fn.force_on_policy_ratio", value=True, why="one forward pass less")


def _ppo(plan: Plan, kl: bool) -> Iterator[Setting]:
    yield Setting(key="ppo.ppo_epochs", value=plan.workload.epochs, why="passes over a batch")
    why = "above 0, so that the reference is read; how large is yours to choose" if kl else ""
    yield Setting(key="loss_fn.reference_policy_kl_penalty", value=0.001 if kl else 0.0, why=why)
    yield Setting(key="ppo.skip_reference_policy_logprobs_calculation", value=not kl)
    if plan.placement.schedule.asynchronous:
        why = "refused where the rollout never waits"
        yield Setting(key="ppo.reward_scaling.enabled", value=False, why=why)
        yield Setting(key="ppo.reward_shaping.enabled", value=False)
    else:
        yield Setting(key="ppo.reward_shaping.max_response_length", value=longest_response(plan))


def _training(plan: Plan) -> Iterator[Setting]:
    work, megatron = plan.workload, plan.placement.backend == "megatron"
    yield Setting(key="policy.model_name", value="${MODEL}")
    yield from _engine(plan, "policy", plan.placement.actor)
    if work.lora is not None:
        adapters = f"{MEGATRON}.peft" if megatron else f"{DTENSOR}.lora_cfg"
        for name, value in {"enabled": True, "dim": work.lora.rank, "alpha": 2 * work.lora.rank}.items():
            yield Setting(key=f"{'++' if megatron else ''}{adapters}.{name}", value=value)
    if work.train_precision == "fp8":
        yield Setting(key=f"{MEGATRON}.fp8_cfg.enabled", value=True)


def _engine(plan: Plan, model: str, placed: RolePlacement) -> Iterator[Setting]:
    """Of the policy or the value model: how it is cut, what it keeps, its micro-batches."""
    role = "actor.train" if model == "policy" else "critic.train"
    megatron = plan.placement.backend == "megatron"
    prefix = f"{model}.{'megatron' if megatron else 'dtensor'}_cfg"
    yield Setting(key=f"{model}.megatron_cfg.enabled", value=megatron)
    yield Setting(key=f"{model}.dtensor_cfg.enabled", value=not megatron)
    yield from (_megatron if megatron else _dtensor)(prefix, placed, call(plan, role))
    why = held(plan, role, placed.pool)
    recomputed = placed.layout.recompute != "none"
    yield Setting(key=f"{prefix}.activation_checkpointing", value=recomputed, why=why)
    if megatron:
        summed = plan.workload.gradients != "bf16"
        yield Setting(key=f"{prefix}.distributed_data_parallel_config.grad_reduce_in_fp32", value=summed)
    yield from _micro_batch(plan, model, placed.layout, why)


def _megatron(prefix: str, placed: RolePlacement, why: str) -> Iterator[Setting]:
    layout = placed.layout
    degrees: Mapping[str, Value] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
    }
    for i, (name, value) in enumerate(degrees.items()):
        yield Setting(key=f"{prefix}.{name}", value=value, why="" if i else why)
    if layout.dispatcher is not None and layout.dispatcher in DISPATCHERS:
        kind, backend = DISPATCHERS[layout.dispatcher]
        yield Setting(key=f"++{prefix}.moe_token_dispatcher_type", value=kind)
        yield Setting(key=f"++{prefix}.moe_flex_dispatcher_backend", value=backend or None)
    if layout.recompute == "selective":
        yield Setting(key=f"++{prefix}.recompute_granularity", value="selective")
    if layout.offload_optimizer == "cpu":
        yield Setting(key=f"{prefix}.optimizer.optimizer_cpu_offload", value=True)
        yield Setting(key=f"{prefix}.optimizer.optimizer_offload_fraction", value=layout.offload_fraction)


def _dtensor(prefix: str, placed: RolePlacement, why: str) -> Iterator[Setting]:
    layout = placed.layout
    yield Setting(key=f"{prefix}.tensor_parallel_size", value=layout.tp, why=why)
    yield Setting(key=f"{prefix}.context_parallel_size", value=layout.cp)
    yield Setting(key=f"{prefix}.sequence_parallel", value=layout.sequence_parallel and layout.tp > 1)
    if layout.ep > 1:
        yield Setting(key=f"++{prefix}.expert_parallel_size", value=layout.ep)
    yield Setting(key=f"{prefix}.cpu_offload", value=layout.offload_optimizer == "cpu")


def _micro_batch(plan: Plan, model: str, layout: Layout, why: str) -> Iterator[Setting]:
    packed = layout.pack_tokens is not None
    if not plan.workload.generates:
        yield Setting(key=f"{model}.sequence_packing.enabled", value=False)
        pairs = max(1, layout.micro_batch // 2)
        yield Setting(key=f"{model}.train_micro_batch_size", value=pairs, why=f"pairs. {why}")
        return
    yield Setting(key=f"{model}.sequence_packing.enabled", value=packed or plan.workload.packing)
    yield Setting(key=f"{model}.dynamic_batching.enabled", value=False)
    yield Setting(key=f"{model}.train_micro_batch_size", value=layout.micro_batch, why=why)
    if model == "policy":
        yield Setting(key="policy.logprob_batch_size", value=layout.micro_batch)
    if layout.pack_tokens is not None:
        train, score = layout.pack(scoring=False), layout.pack(scoring=True)
        yield Setting(key=f"{model}.sequence_packing.train_mb_tokens", value=train, why="of all CP ranks")
        yield Setting(key=f"{model}.sequence_packing.logprob_mb_tokens", value=score)


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout = placed.layout
    vllm = f"{GEN}.vllm_cfg"
    yield Setting(key=f"{vllm}.tensor_parallel_size", value=layout.tp, why=call(plan, "actor.generate"))
    yield Setting(key=f"{vllm}.pipeline_parallel_size", value=layout.pp)
    yield Setting(key=f"{vllm}.expert_parallel_size", value=layout.ep)
    why = held(plan, "actor.generate", placed.pool)
    yield Setting(key=f"{vllm}.gpu_memory_utilization", value=layout.memory_utilization, why=why)
    yield Setting(key=f"{vllm}.enforce_eager", value=not layout.cuda_graphs)
    if layout.precision == "fp8":
        yield Setting(key=f"{vllm}.precision", value="fp8")
    if layout.kv_precision == "fp8":
        yield Setting(key=f"{vllm}.kv_cache_dtype", value="fp8")
    if layout.bf16_layers:
        first = layout.bf16_layers // 2
        yield Setting(key=f"{vllm}.num_first_layers_in_bf16", value=first)
        yield Setting(key=f"{vllm}.num_last_layers_in_bf16", value=layout.bf16_layers - first)
    if layout.speculation is not None:
        yield from speculation(f"++{GEN}.vllm_kwargs.speculative_config", layout.speculation)
    yield Setting(key=f"++{GEN}.vllm_kwargs.max_num_seqs", value=layout.max_num_seqs)
    yield Setting(key=f"++{GEN}.vllm_kwargs.max_num_batched_tokens", value=layout.max_batched_tokens)


def override(setting: Setting) -> str:
    """`key=value` as bash and Hydra's grammar read it."""
    value = setting.value
    if isinstance(value, str):
        return f'{setting.key}="{value}"'
    return f"{setting.key}={json.dumps(value)}"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    head = title_of(plan, "NeMo-RL 7ea279a")
    loop = _loop(plan)
    base = "dpo.yaml" if loop == "dpo" else f"{loop}_{BASES[plan.placement.backend]}"
    command = f'cd "${{NEMO_RL}}" && exec uv run examples/run_{loop}.py --config examples/configs/{base}'
    return {"launch.sh": script(head, NEEDS, written, override, command)}


_POLICY = (MEGATRON, DTENSOR)
LEFT_OPEN = {
    "actor.recompute": tuple(f"{engine}.activation_checkpointing" for engine in _POLICY),
    "rollout.memory_utilization": (f"{GEN}.vllm_cfg.gpu_memory_utilization",),
    "actor.pack_tokens": ("policy.train_micro_batch_size", "policy.sequence_packing.train_mb_tokens"),
    "actor.score_pack_tokens": ("policy.logprob_batch_size", "policy.sequence_packing.logprob_mb_tokens"),
    "actor.offload_optimizer": (
        f"{MEGATRON}.optimizer.optimizer_cpu_offload",
        f"{MEGATRON}.optimizer.optimizer_offload_fraction",
        f"{DTENSOR}.cpu_offload",
    ),
    "rollout.ep": (f"{GEN}.vllm_cfg.expert_parallel_size",),
    "rollout.max_num_seqs": (f"{GEN}.vllm_kwargs.max_num_seqs", f"{GEN}.vllm_kwargs.max_num_batched_tokens"),
    "weight_path": (f"{GEN}.refit_transport",),
}
USUAL: Mapping[str, Value] = {"policy.train_micro_batch_size": 1, "policy.logprob_batch_size": 4}
"""Of the examples of 8B and more, and of the base (examples/configs, see `bases`)."""

EXPORT = Exporter(
    version="7ea279a",
    write=write,
    files=files,
    left_open=LEFT_OPEN,
    usual=USUAL,
    start="bash launch.sh",
    needs=NEEDS,
    install="pip install uv",
    ray='uv run --directory "${NEMO_RL}" ray',
)
