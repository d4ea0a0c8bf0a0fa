"""A plan as the command line of SkyRL (0.4.0: `skyrl/train/config/config.py`)."""

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
    memory,
    nodes_of,
    predicted,
    script,
    the_rollout,
    title_of,
)
from rlhfsim.frameworks.skyrl.unsaid import scoring, unsaid
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement

PLACE, ENGINE, ALGORITHM = "trainer.placement", "generator.inference_engine", "trainer.algorithm"
ROLES = {"actor": "policy", "reference": "ref", "critic": "critic"}
"""Role -> its name in SkyRL; rewards come from the environment."""
ESTIMATORS = {"ppo": "gae", "grpo": "grpo", "dr-grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce++"}
STEP_BY_STEP = "examples.train.async.main_async"
CONTINUOUS = "examples.train.fully_async.main_fully_async"
NEEDS = {
    "SKYRL": "folder of the SkyRL repository",
    "MODEL": "folder or Hugging Face name of the policy",
    "TRAIN_DATA": "Parquet file of training prompts",
    "VAL_DATA": "Parquet file of validation prompts",
    "ADAPTERS": "folder for adapters that every node sees",
    "ENVIRONMENT": "environment that gives rewards, for example gsm8k",
}


def write(plan: Plan) -> Written:
    """The plan in SkyRL's keys.

    Raises:
        RlhfsimError: roles that share GPUs as SkyRL cannot say, or a batch that it cannot cut.
    """
    rollout = the_rollout(plan, "SkyRL's main_base")
    sections = [
        Section(title="where it runs", settings=tuple(_where(plan, rollout))),
        Section(title="batch and lengths", settings=tuple(_batch(plan))),
        Section(title="algorithm", settings=tuple(_algorithm(plan))),
    ]
    for role, name in ROLES.items():
        placed = getattr(plan.placement, role)
        if placed is not None:
            title = {"actor": "training of the policy"}.get(role, role)
            sections.append(Section(title=title, settings=tuple(_role(plan, placed, name))))
    sections.append(Section(title="rollout", settings=tuple(_rollout(plan, rollout))))
    return Written(sections=tuple(sections), unsaid=tuple(unsaid(plan, rollout)))


def _apart(plan: Plan) -> bool:
    rollout = plan.placement.rollout
    return rollout is not None and rollout.pool != plan.placement.actor.pool


def _where(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    placement, apart = plan.placement, _apart(plan)
    yield Setting(key="trainer.strategy", value={"fsdp2": "fsdp"}.get(placement.backend, placement.backend))
    shared = "the rollout has GPUs of its own" if apart else "training and rollout share the GPUs"
    yield Setting(key=f"{PLACE}.colocate_all", value=not apart, why=shared)
    _check_sharing(plan)
    reference = placement.reference
    if apart:
        together = reference is not None and reference.pool == placement.actor.pool
        yield Setting(key=f"{PLACE}.colocate_policy_ref", value=together)
    why = predicted(plan)
    for role, name in ROLES.items():
        placed = getattr(placement, role)
        if placed is None:
            continue
        nodes, each = nodes_of(plan, placement.pool(placed.pool).gpus)
        yield Setting(key=f"{PLACE}.{name}_num_nodes", value=nodes, why=why)
        yield Setting(key=f"{PLACE}.{name}_num_gpus_per_node", value=each)
        why = ""
    if placement.schedule.continuous:
        yield from _continuous(plan)
    yield Setting(key="trainer.logger", value="console", why="wandb, the default, wants a key")


def _check_sharing(plan: Plan) -> None:
    """Refuse pools that neither `colocate_all` nor `colocate_policy_ref` says.

    Raises:
        RlhfsimError: roles share GPUs in another way.
    """
    placement = plan.placement
    pools = {name: role.pool for name, role in placement.roles.items() if name != "reward"}
    if not _apart(plan):
        alone = [name for name, pool in pools.items() if pool != placement.actor.pool]
        if alone:
            raise _unshared(f"{' and '.join(alone)} on other GPUs than the rollout and the actor")
        return
    pairs = ((a, b) for a in pools for b in pools if a < b and pools[a] == pools[b])
    for a, b in pairs:
        if {a, b} != {"actor", "reference"}:
            raise _unshared(f"{a} and {b} share GPUs apart from the rollout's or the actor's")


def _unshared(what: str) -> RlhfsimError:
    return RlhfsimError(
        "sharing-not-expressible",
        f"{what}: SkyRL shares all, or actor with reference",
        help="design again with all roles on the same GPUs, or with the critic on its own",
    )


def _continuous(plan: Plan) -> Iterator[Setting]:
    lag, each = versions(plan), updates(plan)[1]
    yield Setting(key="trainer.fully_async.enabled", value=True, why="the rollout never waits for an update")
    yield Setting(
        key="trainer.fully_async.max_staleness_steps", value=lag, why="counted in updates, not batches"
    )
    yield Setting(
        key="trainer.fully_async.num_parallel_generation_workers",
        value=each * (lag + 1),
        why="prompts in flight: as many as the lag admits",
    )


def versions(plan: Plan) -> int:
    """Updates that a sample may lag behind; SkyRL sends weights after each."""
    return max(1, math.ceil(plan.placement.schedule.staleness * plan.workload.mini_batches))


def updates(plan: Plan) -> tuple[int, int]:
    """Prompts of (a batch, an update): with a rollout that never drains, a batch is one update.

    Raises:
        RlhfsimError: the prompts do not split into the updates.
    """
    work = plan.workload
    if work.prompts % work.mini_batches:
        raise RlhfsimError(
            "batch-not-cut-by-prompts",
            f"SkyRL counts a mini-batch in prompts: {work.prompts} prompts do not split into "
            f"{work.mini_batches} mini-batches",
            help="design with --mini-batches that divides --prompts",
        )
    each = work.prompts // work.mini_batches
    return (each if plan.placement.schedule.continuous else work.prompts), each


def _batch(plan: Plan) -> Iterator[Setting]:
    work, (batch, each) = plan.workload, updates(plan)
    yield Setting(key="data.train_data", value="['${TRAIN_DATA}']")
    yield Setting(key="data.val_data", value="['${VAL_DATA}']")
    yield Setting(key="trainer.train_batch_size", value=batch, why="prompts, not samples")
    yield Setting(key="trainer.policy_mini_batch_size", value=each, why="prompts of one optimizer step")
    if work.has_critic:
        yield Setting(key="trainer.critic_mini_batch_size", value=each)
    yield Setting(key="trainer.update_epochs_per_batch", value=work.epochs)
    yield Setting(key="generator.n_samples_per_prompt", value=work.samples)
    yield Setting(key="trainer.max_prompt_length", value=longest_prompt(plan))
    if work.environment is not None and work.environment.turns > 1:
        total = longest_prompt(plan) + longest_response(plan)
        yield Setting(key="generator.max_turns", value=work.environment.turns)
        yield Setting(key="generator.max_input_length", value=total, why="the conversation of all turns")
    yield Setting(key="generator.sampling_params.max_generate_length", value=longest_response(plan))
    yield from _micro_batch(plan)


def _micro_batch(plan: Plan) -> Iterator[Setting]:
    layout, scored = plan.placement.actor.layout, scoring(plan)
    why = held(plan, "actor.train", plan.placement.actor.pool)
    if (tokens := layout.pack(scoring=False)) is not None:
        yield Setting(key="trainer.max_tokens_per_microbatch", value=tokens, why=why)
        return
    each = plan.workload.num_sequences // plan.workload.mini_batches // layout.dp
    if not each or each % layout.micro_batch:
        raise RlhfsimError(
            "batch-not-cut-by-micro-batches",
            f"SkyRL accumulates whole micro-batches: {each} samples of an optimizer step on each of "
            f"{layout.dp} ranks do not split into micro-batches of {layout.micro_batch}",
            help="design with --prompts, --samples and --mini-batches that the GPUs divide",
        )
    yield Setting(key="trainer.micro_train_batch_size_per_gpu", value=layout.micro_batch, why=why)
    yield Setting(key="trainer.micro_forward_batch_size_per_gpu", value=scored.micro_batch)


def _algorithm(plan: Plan) -> Iterator[Setting]:
    work, kl = plan.workload, plan.placement.reference is not None
    yield Setting(key=f"{ALGORITHM}.advantage_estimator", value=ESTIMATORS[work.algorithm])
    in_reward = work.algorithm in ("ppo", "reinforce++")
    yield Setting(key=f"{ALGORITHM}.use_kl_in_reward", value=kl and in_reward)
    yield Setting(key=f"{ALGORITHM}.use_kl_loss", value=kl and not in_reward)
    if work.algorithm == "dr-grpo":
        total = longest_prompt(plan) + longest_response(plan)
        yield Setting(key=f"{ALGORITHM}.grpo_norm_by_std", value=False)
        yield Setting(key=f"{ALGORITHM}.loss_reduction", value="seq_mean_token_sum_norm")
        yield Setting(key=f"{ALGORITHM}.max_seq_len", value=total)
    if work.old_logprobs == "rollout" or plan.placement.schedule.continuous:
        why = "old log-probs are those of the rollout: one forward pass less"
        yield Setting(key=f"{ALGORITHM}.policy_loss_type", value="rollout_is", why=why)
    if work.dynamic_sampling is not None:
        why = f"{work.dynamic_sampling.kept:.0%} of the groups are expected to be kept"
        yield Setting(key=f"{ALGORITHM}.dynamic_sampling.type", value="filter", why=why)
        limit = work.dynamic_sampling.max_gen_batches or -1
        yield Setting(key=f"{ALGORITHM}.dynamic_sampling.max_sample_batches", value=limit)
    yield Setting(key="environment.env_class", value="${ENVIRONMENT}")


def _role(plan: Plan, placed: RolePlacement, name: str) -> Iterator[Setting]:
    """Model, degrees and memory of a role; `name` is SkyRL's."""
    work, prefix = plan.workload, f"trainer.{name}"
    policy, layout = name == "policy", placed.layout
    if name != "ref":
        yield Setting(key=f"{prefix}.model.path", value="${MODEL}")
    if policy:
        yield Setting(key="trainer.remove_microbatch_padding", value=work.packing)
        recompute = layout.recompute != "none"
        why = held(plan, "actor.train", placed.pool)
        yield Setting(key="trainer.gradient_checkpointing", value=recompute, why=why)
    if policy and work.lora is not None:
        yield Setting(key=f"{prefix}.model.lora.rank", value=work.lora.rank)
        yield Setting(key=f"{prefix}.model.lora.alpha", value=2 * work.lora.rank)
        if plan.placement.backend == "fsdp2" and plan.hardware[0].gpus > plan.hardware[0].gpus_per_node:
            yield Setting(key=f"{prefix}.model.lora.lora_sync_path", value="${ADAPTERS}")
    why = call(plan, "actor.train") if policy else ""
    if plan.placement.backend == "megatron":
        yield from _megatron(f"{prefix}.megatron_config", layout, why)
        if policy:
            yield from _policy_on_megatron(f"{prefix}.megatron_config", plan, layout)
    else:
        yield from _fsdp(prefix, layout, why)
    if name != "ref":
        leaves = placed.offload_between or placed.residency == "offloaded"
        yield Setting(key=f"{prefix}.optimizer_config.offload_after_step", value=leaves)


def _fsdp(prefix: str, layout: Layout, why: str) -> Iterator[Setting]:
    offloaded = (layout.offload_optimizer, layout.offload_params)
    yield Setting(key=f"{prefix}.sequence_parallel_size", value=layout.cp, why=why)
    yield Setting(key=f"{prefix}.fsdp_config.reshard_after_forward", value=layout.zero == 3)
    yield Setting(key=f"{prefix}.fsdp_config.fsdp_size", value=layout.shards or -1)
    yield Setting(key=f"{prefix}.fsdp_config.cpu_offload", value="cpu" in offloaded)


def _megatron(prefix: str, layout: Layout, why: str) -> Iterator[Setting]:
    degrees: Mapping[str, Value] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if layout.ep > 1 else None,
    }
    for i, (name, value) in enumerate(degrees.items()):
        yield Setting(key=f"{prefix}.{name}", value=value, why="" if i else why)


def _policy_on_megatron(prefix: str, plan: Plan, layout: Layout) -> Iterator[Setting]:
    work = plan.workload
    if layout.recompute == "selective":
        kwargs = f"{prefix}.transformer_config_kwargs"
        yield Setting(key=f"{kwargs}.recompute_granularity", value="selective")
        yield Setting(key=f"{kwargs}.recompute_method", value=None)
        yield Setting(key=f"{kwargs}.recompute_num_layers", value=None)
    if layout.offload_optimizer == "cpu":
        optimizer = f"{prefix}.optimizer_config_kwargs"
        yield Setting(key=f"{optimizer}.optimizer_cpu_offload", value=True, why=memory(plan))
        yield Setting(key=f"{optimizer}.optimizer_offload_fraction", value=layout.offload_fraction)
    yield Setting(key=f"{prefix}.ddp_config.grad_reduce_in_fp32", value=work.gradients != "bf16")
    if work.lora is not None:
        merged = plan.placement.weight_path != "lora"
        yield Setting(key=f"{prefix}.lora_config.merge_lora", value=merged)
        if not merged:
            yield Setting(key="trainer.policy.model.lora.sync_mode", value="memory")
    if work.train_precision == "fp8":
        yield Setting(key=f"{prefix}.fp8", value="e4m3")
        yield Setting(key=f"{prefix}.fp8_recipe", value="auto")


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout = placed.layout
    yield Setting(key=f"{ENGINE}.num_engines", value=layout.dp, why=call(plan, "actor.generate"))
    yield Setting(key=f"{ENGINE}.tensor_parallel_size", value=layout.tp)
    yield Setting(key=f"{ENGINE}.pipeline_parallel_size", value=layout.pp)
    yield Setting(key=f"{ENGINE}.data_parallel_size", value=layout.attention_dp)
    yield Setting(key=f"{ENGINE}.expert_parallel_size", value=layout.ep)
    yield Setting(
        key=f"{ENGINE}.gpu_memory_utilization",
        value=layout.memory_utilization,
        why=held(plan, "actor.generate", placed.pool),
    )
    yield Setting(key=f"{ENGINE}.max_num_seqs", value=layout.max_num_seqs)
    yield Setting(key=f"{ENGINE}.max_num_batched_tokens", value=layout.max_batched_tokens)
    yield Setting(key=f"{ENGINE}.enforce_eager", value=not layout.cuda_graphs)
    if layout.precision == "fp8":
        yield Setting(key=f"{ENGINE}.fp8_weight_sync_mode", value="blockwise")
    if layout.kv_precision == "fp8":
        yield Setting(key=f"{ENGINE}.engine_init_kwargs.kv_cache_dtype", value="fp8")
    yield from _speculation(layout)
    transport = "sharded_rdt" if plan.placement.weight_path == "p2p" else "nccl"
    yield Setting(key=f"{ENGINE}.weight_sync_backend", value=transport, why=call(plan, "actor.sync"))
    yield Setting(key="generator.batched", value=False)


def _speculation(layout: RolloutLayout) -> Iterator[Setting]:
    drafted = layout.speculation
    if drafted is None:
        return
    if drafted.method != "mtp":
        raise RlhfsimError(
            "speculation-not-exported",
            f"SkyRL drafts by the policy's own MTP layer, not by {drafted.method}",
            help="set method: mtp, or leave out speculation",
        )
    why = f"{drafted.tokens_per_step:.2f} tokens a step at an acceptance of {drafted.acceptance:g}"
    yield Setting(key="trainer.mtp.enabled", value=True, why=why)
    yield Setting(key="trainer.mtp.num_speculative_tokens", value=drafted.draft_tokens)


def argument(setting: Setting) -> str:
    """`key=value` as bash and OmegaConf read it."""
    value = setting.value
    if isinstance(value, str):
        return f'{setting.key}="{value}"'
    return f"{setting.key}={json.dumps(value)}"


def entry_point(plan: Plan) -> str:
    """The module that runs the schedule."""
    schedule = plan.placement.schedule
    if schedule.one_step_off:
        return STEP_BY_STEP
    return CONTINUOUS if schedule.continuous else "skyrl.train.entrypoints.main_base"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    head = title_of(plan, "SkyRL 0.4.0")
    extra = "megatron" if plan.placement.backend == "megatron" else "fsdp"
    run = f"uv run --isolated --extra {extra} -m {entry_point(plan)}"
    return {"launch.sh": script(head, NEEDS, written, argument, f'cd "${{SKYRL}}" && exec {run}')}


EXPORT = Exporter(
    version="0.4.0",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    install="pip install uv",
    ray='uv run --directory "${SKYRL}" --isolated --extra fsdp ray',
)
