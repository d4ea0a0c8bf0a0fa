"""A plan as verl's Hydra overrides (verl 0.9.1: `verl/trainer/config/ppo_trainer.yaml` and its groups)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.export import (
    Exporter,
    Section,
    Setting,
    Unsaid,
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
    speculation,
    the_rollout,
    title_of,
)
from rlhfsim.frameworks.nearest import like_actor, with_layouts, with_schedule
from rlhfsim.frameworks.training_keys import TRAINING_NEEDS, written_for
from rlhfsim.frameworks.verl.left_open import LEFT_OPEN
from rlhfsim.frameworks.verl.releases import RELEASES
from rlhfsim.frameworks.verl.reward_model import reward_settings, reward_unsaid
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import CLIP_RANGES

ACTOR, ROLL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ESTIMATORS = {
    "ppo": "gae",
    "grpo": "grpo",
    "dr-grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce_plus_plus",
}
GROUPS = ("tp", "pp", "cp", "ep", "etp")
NEEDS = {
    **TRAINING_NEEDS,
    "MODEL": "folder or Hugging Face name of the policy",
    "TRAIN_FILES": "Parquet file of training prompts",
    "VAL_FILES": "Parquet file of validation prompts",
    "REWARD_MODEL": "folder or Hugging Face name of the reward model",
    "DRAFT_MODEL": "folder or Hugging Face name of what drafts tokens",
}


def write(plan: Plan) -> Written:
    """The plan in verl's keys.

    Raises:
        RlhfsimError: an algorithm that verl's main_ppo does not train, or a batch that it cannot cut.
    """
    rollout = the_rollout(plan, "verl's main_ppo")
    sections = [
        Section(title="where it runs", settings=tuple(_where(plan, rollout))),
        Section(title="batch and lengths", settings=tuple(_batch(plan))),
        Section(title="algorithm", settings=tuple(_algorithm(plan))),
        Section(title="training of the policy", settings=tuple(_actor(plan))),
    ]
    if plan.placement.reference is not None:
        sections.append(Section(title="reference", settings=tuple(_reference(plan))))
    if plan.placement.critic is not None:
        sections.append(Section(title="critic", settings=tuple(_critic(plan, plan.placement.critic))))
    if plan.placement.reward is not None:
        sections.append(
            Section(title="reward model", settings=tuple(reward_settings(plan, plan.placement.reward)))
        )
    sections.append(Section(title="rollout", settings=tuple(_rollout(plan, rollout))))
    return written_for(plan, "verl", sections, _unsaid(plan))


def _where(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    placement = plan.placement
    nodes, each = nodes_of(plan, placement.pool(placement.actor.pool).gpus)
    apart = rollout.pool != placement.actor.pool
    yield Setting(key="model_engine", value="megatron" if placement.backend == "megatron" else "dp")
    yield Setting(key="trainer.nnodes", value=nodes, why=predicted(plan))
    yield Setting(key="trainer.n_gpus_per_node", value=each)
    yield Setting(
        key="trainer.v1.trainer_mode",
        value="separate_async" if apart else "sync",
        why="the rollout has GPUs of its own" if apart else "training and rollout share the GPUs",
    )
    if not apart:
        return
    nodes, each = nodes_of(plan, placement.pool(rollout.pool).gpus)
    yield Setting(key="actor_rollout_ref.hybrid_engine", value=False)
    yield Setting(key=f"{ROLL}.nnodes", value=nodes)
    yield Setting(key=f"{ROLL}.n_gpus_per_node", value=each)
    yield Setting(
        key="trainer.v1.separate_async.parameter_sync_step",
        value=plan.workload.mini_batches,
        why=f"new weights once a batch; {call(plan, 'actor.sync')}",
    )
    lag = max(1, math.ceil(placement.schedule.staleness))
    yield Setting(key="trainer.v1.sampler.max_off_policy_threshold", value=lag)


def _batch(plan: Plan) -> Iterator[Setting]:
    work = plan.workload
    if work.prompts % work.mini_batches:
        raise RlhfsimError(
            "batch-not-cut-by-prompts",
            f"verl counts a mini-batch in prompts: {work.prompts} prompts do not split into "
            f"{work.mini_batches} mini-batches",
            help="design with --mini-batches that divides --prompts",
        )
    yield Setting(key="data.train_files", value="${TRAIN_FILES}")
    yield Setting(key="data.val_files", value="${VAL_FILES}")
    yield Setting(key="data.train_batch_size", value=work.prompts, why="prompts, not samples")
    yield Setting(key="data.max_prompt_length", value=longest_prompt(plan))
    yield Setting(key="data.max_response_length", value=longest_response(plan))
    yield Setting(key="data.filter_overlong_prompts", value=True)
    if work.dynamic_sampling is not None:
        yield from _dynamic(plan, work.dynamic_sampling)
    yield Setting(key=f"{ROLL}.n", value=work.samples)
    yield Setting(key=f"{ACTOR}.ppo_mini_batch_size", value=work.prompts // work.mini_batches)
    if work.epochs > 1:
        yield Setting(key=f"{ACTOR}.ppo_epochs", value=work.epochs)


def _dynamic(plan: Plan, sampling: DynamicSampling) -> Iterator[Setting]:
    each = sampling.prompts_of(plan.workload.prompts)
    why = f"{sampling.kept:.0%} of the groups are expected to be kept"
    yield Setting(key="algorithm.filter_groups.enable", value=True, why=why)
    yield Setting(key="data.gen_batch_size", value=each)
    limit = sampling.max_gen_batches or 0
    yield Setting(key="algorithm.filter_groups.max_num_gen_batches", value=limit)


def _algorithm(plan: Plan) -> Iterator[Setting]:
    work = plan.workload
    yield Setting(key="algorithm.adv_estimator", value=ESTIMATORS[work.algorithm])
    if work.algorithm == "dr-grpo":
        yield Setting(key="algorithm.norm_adv_by_std_in_grpo", value=False)
        yield Setting(key=f"{ACTOR}.loss_agg_mode", value="seq-mean-token-sum-norm")
    if work.algorithm in ("gspo", "cispo"):
        yield Setting(key=f"{ACTOR}.policy_loss.loss_mode", value=work.algorithm)
    if work.algorithm == "gspo":
        yield Setting(key=f"{ACTOR}.loss_agg_mode", value="seq-mean-token-mean")
    if work.algorithm in CLIP_RANGES:
        low, high = CLIP_RANGES[work.algorithm]
        yield Setting(key=f"{ACTOR}.clip_ratio_low", value=low)
        yield Setting(key=f"{ACTOR}.clip_ratio_high", value=high)
    if work.algorithm in ("ppo", "reinforce++"):
        yield Setting(key="algorithm.use_kl_in_reward", value=plan.placement.reference is not None)
    else:
        yield Setting(key=f"{ACTOR}.use_kl_loss", value=plan.placement.reference is not None)
    if work.old_logprobs == "rollout":
        yield Setting(
            key="algorithm.rollout_correction.bypass_mode",
            value=True,
            why="old log-probs are those of the rollout: one forward pass less",
        )


def _actor(plan: Plan) -> Iterator[Setting]:
    placed, work = plan.placement.actor, plan.workload
    yield Setting(key="actor_rollout_ref.model.path", value="${MODEL}")
    yield Setting(key="actor_rollout_ref.model.use_remove_padding", value=work.packing)
    if work.lora is not None:
        yield Setting(key="actor_rollout_ref.model.lora_rank", value=work.lora.rank)
        yield Setting(key="actor_rollout_ref.model.lora_alpha", value=2 * work.lora.rank)
        if plan.placement.weight_path != "lora":
            yield Setting(key="actor_rollout_ref.model.lora.merge", value=True, why=call(plan, "actor.sync"))
    yield from _engine(plan, ACTOR, placed, trained=True)
    why = held(plan, "actor.train", placed.pool)
    yield from _gradients(plan)
    yield from _recompute(plan, ACTOR, placed.layout, why)
    yield from _micro_batch(plan, placed.layout, why)


def _engine(plan: Plan, role: str, placed: RolePlacement, *, trained: bool) -> Iterator[Setting]:
    """Parallel degrees and where states lie; `role` is the prefix of its keys."""
    offloaded = placed.residency == "offloaded"
    if plan.placement.backend == "megatron":
        virtual = placed.layout.vp if trained else plan.placement.actor.layout.vp  # set up once, for all
        layout = replace(placed.layout, vp=virtual if placed.layout.pp > 1 else 1)
        yield from _megatron(f"{role}.megatron", layout, call(plan, "actor.train") if trained else "")
        config = f"{role}.megatron"
    else:
        config = "critic.fsdp" if role == "critic" else f"{role}.fsdp_config"
        yield Setting(key=f"{role}.strategy", value="fsdp2")
        yield Setting(
            key=f"{config}.ulysses_sequence_parallel_size",
            value=placed.layout.cp,
            why=call(plan, "actor.train") if trained else "",
        )
        if placed.layout.shards is not None:
            yield Setting(
                key=f"{config}.fsdp_size", value=placed.layout.shards, why="a copy of the shards a node"
            )
        if placed.layout.zero == 2:
            yield Setting(key=f"{config}.reshard_after_forward", value=False)
        if placed.layout.offload_optimizer == "cpu":
            yield Setting(key=f"{config}.offload_policy", value=True, why=memory(plan))
    yield Setting(key=f"{config}.param_offload", value=offloaded, why=memory(plan) if offloaded else "")
    if trained:
        leaves = placed.offload_between or offloaded
        yield Setting(key=f"{config}.optimizer_offload", value=leaves)


def _megatron(prefix: str, layout: Layout, why: str) -> Iterator[Setting]:
    degrees: Mapping[str, Value] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if layout.ep > 1 else None,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
    }
    for i, (name, value) in enumerate(degrees.items()):
        if value is not None:
            yield Setting(key=f"{prefix}.{name}", value=value, why=why if i == 0 else "")
    yield Setting(key=f"{prefix}.sequence_parallel", value=layout.sequence_parallel and layout.tp > 1)


def _gradients(plan: Plan) -> Iterator[Setting]:
    if plan.workload.gradients == "bf16" and plan.placement.backend == "megatron":
        override = f"{ACTOR}.megatron.override_ddp_config"
        yield Setting(key=f"+{override}.grad_reduce_in_fp32", value=False)


def _recompute(plan: Plan, role: str, layout: Layout, why: str) -> Iterator[Setting]:
    """Activations that are computed again, and optimizer states on the host; `role` as in `_engine`."""
    if plan.placement.backend != "megatron":
        model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        yield Setting(key=f"{model}.enable_gradient_checkpointing", value=layout.recompute != "none", why=why)
        return
    if layout.offload_optimizer == "cpu":
        optimizer = f"{role}.optim.override_optimizer_config"
        yield Setting(key=f"+{optimizer}.optimizer_cpu_offload", value=True)
        yield Setting(key=f"+{optimizer}.optimizer_offload_fraction", value=layout.offload_fraction)
    override = f"{role}.megatron.override_transformer_config"
    if layout.recompute == "none":
        return
    yield Setting(key=f"{override}.recompute_granularity", value=layout.recompute, why=why)
    if layout.recompute == "full":
        yield Setting(key=f"{override}.recompute_method", value="uniform")
        yield Setting(key=f"{override}.recompute_num_layers", value=1)


def _micro_batch(plan: Plan, layout: Layout, why: str) -> Iterator[Setting]:
    packed = layout.pack_tokens is not None
    yield Setting(key=f"{ACTOR}.use_dynamic_bsz", value=packed)
    if packed:
        train, score = pack_limits(plan, layout)
        yield Setting(key=f"{ACTOR}.ppo_max_token_len_per_gpu", value=train, why=why)
        yield Setting(key=f"{ROLL}.log_prob_max_token_len_per_gpu", value=score)
        return
    yield Setting(key=f"{ACTOR}.ppo_micro_batch_size_per_gpu", value=layout.micro_batch, why=why)
    yield Setting(key=f"{ROLL}.log_prob_micro_batch_size_per_gpu", value=layout.micro_batch)


def pack_limits(plan: Plan, layout: Layout) -> tuple[int, int]:
    """Tokens of a micro-batch per GPU, (training, scoring): at least a GPU's share of the longest sample."""
    least = math.ceil((longest_prompt(plan) + longest_response(plan)) / layout.cp)
    train = max(layout.pack_tokens or 0, least)
    return train, max(layout.score_pack_tokens or train, least)


def _reference(plan: Plan) -> Iterator[Setting]:
    placed = plan.placement.reference
    assert placed is not None
    yield from _engine(plan, REF, placed, trained=False)
    if placed.layout.pack_tokens is None:
        yield Setting(key=f"{REF}.log_prob_micro_batch_size_per_gpu", value=placed.layout.micro_batch)
    else:
        limit = pack_limits(plan, placed.layout)[1]
        yield Setting(key=f"{REF}.log_prob_max_token_len_per_gpu", value=limit)


def _critic(plan: Plan, placed: RolePlacement) -> Iterator[Setting]:
    yield Setting(key="critic.model.path", value="${MODEL}")
    yield from _engine(plan, "critic", placed, trained=True)
    yield from _recompute(plan, "critic", placed.layout, held(plan, "critic.train", placed.pool))
    if placed.layout.pack_tokens is None:
        yield Setting(key="critic.ppo_micro_batch_size_per_gpu", value=placed.layout.micro_batch)
    else:
        train, score = pack_limits(plan, placed.layout)
        yield Setting(key="critic.ppo_max_token_len_per_gpu", value=train)
        yield Setting(key="critic.forward_max_token_len_per_gpu", value=score)


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout, apart = placed.layout, placed.pool != plan.placement.actor.pool
    yield Setting(key=f"{ROLL}.name", value="vllm")
    yield Setting(key=f"{ROLL}.tensor_model_parallel_size", value=layout.tp, why=call(plan, "actor.generate"))
    if layout.attention_dp > 1 or layout.ep > 1:
        yield Setting(key=f"{ROLL}.data_parallel_size", value=layout.attention_dp)
        yield Setting(key=f"{ROLL}.expert_parallel_size", value=layout.ep)
    yield Setting(
        key=f"{ROLL}.gpu_memory_utilization",
        value=layout.memory_utilization,
        why=held(plan, "actor.generate", placed.pool),
    )
    yield Setting(key=f"{ROLL}.max_num_seqs", value=layout.max_num_seqs)
    yield Setting(key=f"{ROLL}.max_num_batched_tokens", value=layout.max_batched_tokens)
    yield Setting(key=f"{ROLL}.enforce_eager", value=not layout.cuda_graphs)
    if not apart:
        yield Setting(key=f"{ROLL}.free_cache_engine", value=placed.sleep > 0)
    if layout.precision == "fp8":
        yield Setting(key=f"{ROLL}.quantization", value="fp8")
    if layout.speculation is not None:
        yield from speculation(f"+{ROLL}.engine_kwargs.vllm.speculative_config", layout.speculation)
    if plan.placement.weight_path == "lora":
        yield Setting(key=f"{ROLL}.load_format", value="safetensors")
    direct = plan.placement.weight_path == "p2p"
    backend = "nixl" if direct else "nccl" if apart else "naive"
    yield Setting(key=f"{ROLL}.checkpoint_engine.backend", value=backend, why=call(plan, "actor.sync"))


def _unsaid(plan: Plan) -> Iterator[Unsaid]:
    placement = plan.placement
    apart = placement.rollout is not None and placement.rollout.pool != placement.actor.pool
    if apart and not placement.schedule.asynchronous:
        yield Unsaid(
            what="a rollout on GPUs of its own that waits for every update",
            instead="samples may be one version old (separate_async with max_off_policy_threshold=1)",
            nearest=with_schedule(plan, staleness=1, partial_rollout=True, streaming=False),
            of=("schedule",),
        )
    elif apart and not placement.schedule.partial_rollout:
        yield Unsaid(
            what="batches that are generated with one version of the weights",
            instead="requests are interrupted at every update and go on with the new weights",
            nearest=with_schedule(plan, partial_rollout=True),
            of=("schedule",),
        )
    for role, placed in placement.roles.items():
        if not isinstance(placed, RolePlacement):
            continue
        if role == "reward":
            yield from reward_unsaid(plan, placed)
            continue
        if role != "actor" and plan.placement.backend == "megatron":
            yield from _other_groups(plan, role, placed)
        if placed.layout.pack_tokens is not None:
            train, _ = pack_limits(plan, placed.layout)
            if train > placed.layout.pack_tokens:
                yield Unsaid(
                    what=f"packs of {placed.layout.pack_tokens} tokens for the {role}",
                    instead=f"{train} are written: verl refuses packs shorter than the longest sample",
                    nearest=with_layouts(plan, role, pack_tokens=train),
                    of=(f"{role}.layout.pack_tokens", f"{role}.layout.score_pack_tokens"),
                )


def _other_groups(plan: Plan, role: str, placed: RolePlacement) -> Iterator[Unsaid]:
    """Megatron's groups are initialised once in a process, by whichever role comes first."""
    own, actors = ({n: getattr(x.layout, n) for n in GROUPS} for x in (placed, plan.placement.actor))
    if own != actors:
        said = ", ".join(f"{name} {value}" for name, value in own.items() if value != actors[name])
        yield Unsaid(
            what=f"{said} for the {role}, not the actor's",
            instead="both share a process, whose groups verl initialises once: for the first role",
            nearest=like_actor(plan, role),
            of=tuple(f"{role}.layout.{field.name}" for field in fields(Layout)),
        )


def hydra(setting: Setting) -> str:
    """`key=value` as bash and Hydra read it."""
    value = setting.value
    if value is None:
        return f"{setting.key}=null"
    if isinstance(value, str) and "$" in value:
        return f'{setting.key}="{value}"'
    return f"{setting.key}={value}"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    command = "exec python3 -m verl.trainer.main_ppo"
    return {"launch.sh": script(title_of(plan, "verl 0.9.1"), NEEDS, written, hydra, command)}


EXPORT = Exporter(
    version="0.9.1",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    releases=RELEASES,
    left_open=LEFT_OPEN,
    install='pip install "verl[vllm]==0.9.1"',
)
