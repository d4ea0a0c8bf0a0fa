"""A plan as the command line of OpenRLHF (0.11.2: `openrlhf/cli/train_ppo_ray.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.export import (
    Exporter,
    Section,
    Setting,
    Unsaid,
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
from rlhfsim.frameworks.nearest import with_placement, with_rollout
from rlhfsim.frameworks.openrlhf.releases import RELEASES
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Workload

ESTIMATORS = {
    "ppo": "gae",
    "grpo": "group_norm",
    "dr-grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce",
}
NEEDS = {
    "MODEL": "folder or Hugging Face name of the policy",
    "PROMPTS": "data set of prompts",
    "REWARD": "address of the reward service, http://...",
}
SHARED = ("tp", "cp", "zero", "recompute", "offload_optimizer")
"""What one flag says for all trained and scoring roles (`--ds.*`)."""
ENGINE = RolloutLayout(max_num_seqs=256)
"""What vLLM runs with where OpenRLHF has no flag."""


def write(plan: Plan) -> Written:
    """The plan in OpenRLHF's flags.

    Raises:
        RlhfsimError: no rollout, or roles that share GPUs as OpenRLHF cannot say.
    """
    rollout = the_rollout(plan, "train_ppo_ray")
    sections = (
        Section(title="where it runs", settings=tuple(_where(plan, rollout))),
        Section(title="batch and lengths", settings=tuple(_batch(plan))),
        Section(title="algorithm", settings=tuple(_algorithm(plan))),
        Section(title="training", settings=tuple(_training(plan))),
        Section(title="rollout", settings=tuple(_rollout(plan, rollout))),
    )
    return Written(sections=sections, unsaid=tuple(_unsaid(plan, rollout)))


def _where(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    why = predicted(plan)
    for role in _trained(plan):
        nodes, each = nodes_of(plan, plan.placement.pool(role[1].pool).gpus)
        yield Setting(key=f"--{_flag(role[0])}.num_nodes", value=nodes, why=why)
        yield Setting(key=f"--{_flag(role[0])}.num_gpus_per_node", value=each)
        why = ""
    yield from (Setting(key=f"--train.{name}", value=True) for name in _sharing(plan, rollout))
    schedule = plan.placement.schedule
    if schedule.asynchronous:
        yield Setting(key="--train.async_enable", value=True)
        yield Setting(key="--train.async_queue_size", value=max(1, math.ceil(schedule.staleness)))
    if schedule.partial_rollout:
        yield Setting(key="--train.partial_rollout_enable", value=True)


def _trained(plan: Plan) -> list[tuple[str, RolePlacement]]:
    return [(name, role) for name, role in plan.placement.roles.items() if isinstance(role, RolePlacement)]


def _flag(role: str) -> str:
    return {"reference": "ref"}.get(role, role)


def _sharing(plan: Plan, rollout: RolloutPlacement) -> list[str]:
    """The flags that say which roles share GPUs."""
    pools = {name: role.pool for name, role in _trained(plan)}
    together, apart = len(set(pools.values())) == 1, rollout.pool != plan.placement.actor.pool
    if together and (not apart or plan.placement.schedule.asynchronous):
        return ["colocate_all"]
    if not apart or rollout.pool in pools.values():
        raise _unshared("the rollout shares GPUs with some of the roles")
    pairs = {"colocate_actor_ref": ("actor", "reference"), "colocate_critic_reward": ("critic", "reward")}
    found = [flag for flag, (a, b) in pairs.items() if a in pools and b in pools and pools[a] == pools[b]]
    groups = [{a, b} for flag, (a, b) in pairs.items() if flag in found]
    for a in pools:
        for b in pools:
            if a < b and pools[a] == pools[b] and {a, b} not in groups:
                raise _unshared(f"{a} and {b} share GPUs apart from the rollout")
    return found


def _unshared(what: str) -> RlhfsimError:
    return RlhfsimError(
        "sharing-not-expressible",
        f"{what}: OpenRLHF shares all, actor with reference, or critic with reward",
        help="design again with --forbid split,standalone, or export to verl",
    )


def _batch(plan: Plan) -> Iterator[Setting]:
    work = plan.workload
    yield Setting(key="--data.prompt_dataset", value="${PROMPTS}")
    yield Setting(key="--rollout.batch_size", value=work.prompts, why="prompts")
    yield Setting(key="--rollout.n_samples_per_prompt", value=work.samples)
    if work.dynamic_sampling is not None:
        why = f"{work.dynamic_sampling.kept:.0%} of the groups are expected to be kept"
        yield Setting(key="--algo.dynamic_filtering_enable", value=True, why=why)
        each = work.dynamic_sampling.prompts_of(work.prompts)
        yield Setting(key="--rollout.vllm_generate_batch_size", value=each)
    each = work.num_sequences // work.mini_batches
    yield Setting(key="--train.batch_size", value=each, why="samples of one optimizer step")
    yield Setting(key="--train.max_epochs", value=work.epochs)
    yield Setting(
        key="--data.max_len", value=longest_prompt(plan) + longest_response(plan), why="prompt and response"
    )
    yield Setting(key="--rollout.max_new_tokens", value=longest_response(plan))


def _algorithm(plan: Plan) -> Iterator[Setting]:
    work, reference = plan.workload, plan.placement.reference is not None
    yield Setting(key="--algo.advantage.estimator", value=ESTIMATORS[work.algorithm])
    if not reference:
        yield Setting(key="--algo.kl.init_coef", value=0)
    elif work.algorithm in ("grpo", "dr-grpo", "rloo"):
        yield Setting(key="--algo.kl.use_loss", value=True)
        yield Setting(key="--algo.kl.estimator", value="k3")
    if plan.placement.reward is None:
        yield Setting(key="--reward.remote_url", value="${REWARD}")
    else:
        yield Setting(key="--reward.model_name_or_path", value="${REWARD}")


def _training(plan: Plan) -> Iterator[Setting]:
    placed, work = plan.placement.actor, plan.workload
    layout = placed.layout
    yield Setting(key="--actor.model_name_or_path", value="${MODEL}")
    if plan.placement.critic is not None:
        why = "as the policy, which OpenRLHF would take from the reward model"
        yield Setting(key="--critic.model_name_or_path", value="${MODEL}", why=why)
    yield Setting(key="--ds.zero_stage", value=layout.zero, why=call(plan, "actor.train"))
    yield from _deepspeed(work, layout)
    why = held(plan, "actor.train", placed.pool)
    if layout.recompute != "none":
        yield Setting(key="--actor.gradient_checkpointing_enable", value=True, why=why)
    if layout.offload_optimizer == "cpu":
        yield Setting(key="--ds.adam_offload", value=True, why=memory(plan))
    if placed.offload_between or placed.residency == "offloaded":
        yield Setting(key="--ds.enable_sleep", value=True, why=memory(plan))
    for name in ("reference", "reward"):
        role = getattr(plan.placement, name)
        if role is not None and role.residency == "offloaded":
            yield Setting(key=f"--{_flag(name)}.offload", value=True)
    yield from _micro_batch(plan, layout, why)


def _deepspeed(work: Workload, layout: Layout) -> Iterator[Setting]:
    if layout.tp > 1:
        yield Setting(key="--ds.tensor_parallel_size", value=layout.tp)
    if layout.cp > 1:
        yield Setting(key="--ds.ring_attn_size", value=layout.cp)
    if work.packing:
        yield Setting(key="--ds.packing_samples", value=True)
    if work.gradients == "fp32":
        yield Setting(key="--ds.grad_accum_dtype", value="fp32")
    if work.lora is not None:
        yield Setting(key="--ds.lora.rank", value=work.lora.rank)
        yield Setting(key="--ds.lora.alpha", value=2 * work.lora.rank)
        if work.lora.base == "nf4":
            yield Setting(key="--ds.load_in_4bit", value=True)


def _micro_batch(plan: Plan, layout: Layout, why: str) -> Iterator[Setting]:
    if layout.pack_tokens is None:
        yield Setting(key="--train.micro_batch_size", value=layout.micro_batch, why=why)
        yield Setting(key="--rollout.micro_batch_size", value=_scored(plan))
        return
    yield Setting(key="--train.dynamic_batch_enable", value=True)
    yield Setting(key="--train.max_tokens_per_gpu", value=layout.pack_tokens, why=why)
    score = layout.score_pack_tokens or layout.pack_tokens
    yield Setting(key="--rollout.max_tokens_per_gpu", value=score)


def _scored(plan: Plan) -> int:
    """Sequences of a micro-batch that is scored: as the reference's, the critic's or the actor's."""
    placed = plan.placement.reference or plan.placement.critic or plan.placement.actor
    return placed.layout.micro_batch


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout, apart = placed.layout, placed.pool != plan.placement.actor.pool
    yield Setting(key="--vllm.num_engines", value=layout.dp, why=call(plan, "actor.generate"))
    yield Setting(key="--vllm.tensor_parallel_size", value=layout.tp)
    yield Setting(
        key="--vllm.gpu_memory_utilization",
        value=layout.memory_utilization,
        why=held(plan, "actor.generate", placed.pool),
    )
    if not layout.cuda_graphs:
        yield Setting(key="--vllm.enforce_eager", value=True)
    if placed.sleep and not apart:
        yield Setting(key="--vllm.enable_sleep", value=True)
    yield Setting(key="--vllm.sync_backend", value="nccl", why=call(plan, "actor.sync"))


def _unsaid(plan: Plan, rollout: RolloutPlacement) -> Iterator[Unsaid]:
    actor = plan.placement.actor.layout
    for name, role in _trained(plan)[1:]:
        for field in SHARED:
            value, ours = getattr(role.layout, field), getattr(actor, field)
            if field == "zero" and name != "critic" and (value == 3) == (ours == 3):
                continue  # what is only scored is sharded or not (get_ds_eval_config)
            if value != ours and not (field in ("recompute", "offload_optimizer") and name != "critic"):
                same = replace(
                    actor,
                    micro_batch=role.layout.micro_batch,
                    pack_tokens=role.layout.pack_tokens,
                    score_pack_tokens=role.layout.score_pack_tokens,
                )
                yield Unsaid(
                    what=f"{field} {value} of the {name}",
                    instead=f"{ours}, as the actor's",
                    nearest=with_placement(plan, **{name: replace(role, layout=same)}),
                    of=(f"{name}.layout.{field}",),
                )
    for field in ("max_num_seqs", "max_batched_tokens"):
        value, ours = getattr(rollout.layout, field), getattr(ENGINE, field)
        if value != ours:
            yield Unsaid(
                what=f"{field} {value} of the rollout",
                instead=f"vLLM's own, {ours}",
                nearest=with_rollout(plan, rollout, **{field: ours}),
                of=(f"rollout.layout.{field}",),
            )
    if rollout.sleep == 2:
        yield Unsaid(
            what="a rollout that drops its weights (sleep 2)",
            instead="they go to the host (sleep 1)",
            nearest=with_rollout(plan, rollout, sleep=1),
            of=("rollout.sleep",),
        )
    longest = longest_prompt(plan) + longest_response(plan)
    if actor.pack_tokens is not None and actor.pack_tokens * actor.cp < longest:
        yield Unsaid(
            what=f"samples of {longest} tokens in packs of {actor.pack_tokens}",
            instead="a longer sample is a micro-batch of its own",
        )


def argument(setting: Setting) -> str:
    """`--flag value` as bash reads it; a switch without value."""
    if setting.value is True:
        return setting.key
    value = f'"{setting.value}"' if "$" in str(setting.value) else setting.value
    return f"{setting.key} {value}"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    head = title_of(plan, "OpenRLHF 0.11.2")
    command = "exec python3 -m openrlhf.cli.train_ppo_ray"
    return {"launch.sh": script(head, NEEDS, written, argument, command)}


EXPORT = Exporter(
    version="0.11.2",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    releases=RELEASES,
    install='pip install "openrlhf[vllm]==0.11.2"',
)
