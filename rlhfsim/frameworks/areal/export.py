"""A plan as AReaL's configuration (AReaL 1.0.4: `areal/api/cli_args.py`, `PPOConfig`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.areal.form import nested
from rlhfsim.frameworks.areal.unsaid import unsaid_of
from rlhfsim.frameworks.export import (
    Exporter,
    Section,
    Setting,
    Written,
    call,
    held,
    longest_prompt,
    longest_response,
    memory,
    nodes_of,
    predicted,
    the_rollout,
    title_of,
)
from rlhfsim.frameworks.launch_script import bash
from rlhfsim.outputs import comment
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement

NORMS = {
    "ppo": None,
    "reinforce++": None,
    "grpo": {"mean_level": "group", "std_level": "group"},
    "dr-grpo": {"mean_level": "group", "std_level": None},
    "rloo": {"mean_level": "group", "mean_leave1out": True, "std_level": None},
}
"""Algorithm -> how rewards are normalised (`actor.reward_norm`), as in AReaL's examples/math."""
NAMED = ("rollout", "saver", "recover", "evaluator", "stats_logger")
"""Sections that carry the names of the experiment."""
WORKER = "[{task_type: worker, port_count: 2, gpu: 1, mem: 32, cmd: python3 -m areal.infra.rpc.rpc_server}]"
NEEDS = {
    "SCRIPT": "training script with data and reward, such as examples/math/gsm8k_rl.py of AReaL",
    "MODEL": "folder or Hugging Face name of the policy",
    "DATASET": "folder or Hugging Face name of the prompts",
    "FILEROOT": "folder that all nodes share",
    "LR": "learning rate of the policy, 1e-6 in most recipes; the default of AReaL is 1e-3",
    "CRITIC_LR": "learning rate of the critic, 1e-5 in most recipes; the default of AReaL is 1e-3",
}


def write(plan: Plan) -> Written:
    """The plan in AReaL's keys.

    Raises:
        RlhfsimError: a sharing of GPUs, or half-filled nodes, that AReaL has no key for.
    """
    rollout = the_rollout(plan, "AReaL's PPOTrainer")
    sections = [
        Section(title="where it runs", settings=tuple(_where(plan, rollout))),
        Section(title="batch and lengths", settings=tuple(_batch(plan, rollout))),
        Section(title="algorithm", settings=tuple(_algorithm(plan))),
        Section(title="training of the policy", settings=tuple(_actor(plan))),
    ]
    for name, section in (("critic", "critic"), ("reference", "ref")):
        placed = getattr(plan.placement, name)
        if placed is not None:
            settings = tuple(_beside(plan, section, placed))
            sections.append(Section(title=name, settings=settings))
    sections.append(Section(title="rollout", settings=tuple(_rollout(plan, rollout))))
    return Written(sections=tuple(sections), unsaid=tuple(unsaid_of(plan, rollout)))


def _where(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    placement = plan.placement
    used = {role.pool for role in placement.roles.values() if role is not placement.reward}
    nodes, each = nodes_of(plan, sum(placement.pool(name).gpus for name in used))
    yield Setting(key="experiment_name", value=f"rlhfsim-{plan.workload.algorithm}")
    yield Setting(key="trial_name", value="planned")
    for name in NAMED:
        yield Setting(key=f"{name}.experiment_name", value="${experiment_name}")
        yield Setting(key=f"{name}.trial_name", value="${trial_name}")
        yield Setting(key=f"{name}.fileroot", value="${cluster.fileroot}")
    yield Setting(key="cluster.n_nodes", value=nodes, why=f"all pools. {predicted(plan)}")
    yield Setting(key="cluster.n_gpus_per_node", value=each)
    yield Setting(key="cluster.fileroot", value="???")
    yield Setting(key="cluster.name_resolve.type", value="nfs")
    yield Setting(key="cluster.name_resolve.nfs_record_root", value="${cluster.fileroot}/name_resolve")
    yield Setting(key="scheduler.type", value="local" if nodes == 1 else "ray")
    leaves = rollout.pool == placement.actor.pool or any(map(_leaves, (placement.actor, placement.reference)))
    yield Setting(key="enable_offload", value=leaves, why=memory(plan) if leaves else "")


def _leaves(placed: RolePlacement | None) -> bool:
    return placed is not None and (placed.offload_between or placed.residency == "offloaded")


def _batch(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    work = plan.workload
    lag = math.ceil(plan.placement.schedule.staleness)
    yield Setting(key="train_dataset.path", value="???")
    yield Setting(key="train_dataset.type", value="rl")
    yield Setting(key="train_dataset.batch_size", value=work.prompts, why="prompts")
    yield Setting(key="train_dataset.max_length", value=longest_prompt(plan))
    yield Setting(key="valid_dataset.path", value="${train_dataset.path}")
    yield Setting(key="valid_dataset.type", value="rl")
    yield Setting(key="valid_dataset.batch_size", value="${train_dataset.batch_size}")
    yield Setting(key="gconfig.n_samples", value=work.samples)
    yield Setting(key="gconfig.max_new_tokens", value=longest_response(plan))
    yield Setting(key="rollout.consumer_batch_size", value="${train_dataset.batch_size}")
    why = f"prompts under way: those of {lag + 1} steps" if lag else "prompts of a step"
    yield Setting(key="rollout.max_concurrent_rollouts", value=work.prompts * (lag + 1), why=why)
    apart = rollout.pool != plan.placement.actor.pool
    why = "policy versions between generation and training" if apart else "training and rollout take turns"
    yield Setting(key="rollout.max_head_offpolicyness", value=lag, why=why)
    yield Setting(key="actor.ppo_n_minibatches", value=work.mini_batches)


def _algorithm(plan: Plan) -> Iterator[Setting]:
    work = plan.workload
    norm = NORMS[work.algorithm]
    if norm is not None:
        for name, level in norm.items():
            yield Setting(key=f"actor.reward_norm.{name}", value=level)
        yield Setting(key="actor.reward_norm.group_size", value="${gconfig.n_samples}")
    yield Setting(key="actor.adv_norm.mean_level", value="batch")
    yield Setting(key="actor.adv_norm.std_level", value="batch")
    kl = plan.placement.reference is not None
    why = "above 0, so that the reference is read; how large is yours to choose" if kl else ""
    yield Setting(key="actor.kl_ctl", value=0.001 if kl else 0.0, why=why)
    recomputed = work.old_logprobs == "recompute"
    why = "" if recomputed else "old log-probs are those of the rollout: one forward pass less"
    yield Setting(key="actor.recompute_logprob", value=recomputed, why=why)


def _actor(plan: Plan) -> Iterator[Setting]:
    placed, work = plan.placement.actor, plan.workload
    yield from _engine(plan, "actor", placed, call(plan, "actor.train"))
    yield Setting(key="actor.path", value="???")
    yield Setting(key="tokenizer_path", value="${actor.path}")
    yield Setting(key="actor.optimizer.type", value="adam")
    yield Setting(key="actor.optimizer.lr", value="???")
    yield Setting(key="actor.max_new_tokens", value="${gconfig.max_new_tokens}")
    path = "disk" if plan.placement.weight_path == "disk" else "xccl"
    yield Setting(key="actor.weight_update_mode", value=path, why=call(plan, "actor.sync"))
    if work.gradients == "bf16" and plan.placement.backend == "megatron":
        yield Setting(key="actor.megatron.ddp.grad_reduce_in_fp32", value=False)
    elif work.gradients == "bf16":
        yield Setting(key="actor.grad_reduce_dtype", value="bfloat16")
    if work.lora is not None:
        yield Setting(key="actor.use_lora", value=True)
        yield Setting(key="actor.lora_rank", value=work.lora.rank)
        yield Setting(key="actor.lora_alpha", value=2 * work.lora.rank)
        yield Setting(key="actor.target_modules", value="[all-linear]")


def _engine(plan: Plan, section: str, placed: RolePlacement, why: str) -> Iterator[Setting]:
    """What every engine that trains or scores has."""
    megatron = plan.placement.backend == "megatron"
    yield Setting(key=f"{section}.backend", value=allocation(placed.layout, megatron=megatron), why=why)
    yield Setting(key=f"{section}.experiment_name", value="${experiment_name}")
    yield Setting(key=f"{section}.trial_name", value="${trial_name}")
    worker = WORKER if section == "actor" else "${actor.scheduling_spec}"
    yield Setting(key=f"{section}.scheduling_spec", value=worker)
    yield Setting(key=f"{section}.disable_dropout", value=True)
    trained = section != "ref"
    recompute = placed.layout.recompute if trained else "none"
    why = held(plan, f"{section}.train", placed.pool) if trained else ""
    yield Setting(key=f"{section}.gradient_checkpointing", value=recompute != "none", why=why)
    if megatron:
        if recompute == "selective":
            yield Setting(key=f"{section}.megatron.recompute_granularity", value="selective")
        yield Setting(key=f"{section}.megatron.ddp.use_distributed_optimizer", value=placed.layout.zero == 1)
        if placed.layout.vp > 1:
            yield Setting(key=f"{section}.megatron.virtual_pipeline_parallel_size", value=placed.layout.vp)
    elif placed.layout.offload_optimizer == "cpu":
        yield Setting(key=f"{section}.fsdp.offload_params", value=True, why=memory(plan))
    yield Setting(key=f"{section}.offload", value=_leaves(placed))
    yield from _micro_batch(plan, section, placed.layout, scores=not trained)


def _micro_batch(plan: Plan, section: str, layout: Layout, *, scores: bool) -> Iterator[Setting]:
    limit = layout.pack(scoring=scores)
    if limit is not None:
        yield Setting(key=f"{section}.mb_spec.max_tokens_per_mb", value=limit, why="of all CP ranks")
        return
    each = plan.workload.num_sequences // (1 if scores else plan.workload.mini_batches)
    number = math.ceil(each / (layout.dp * layout.micro_batch))
    why = f"micro-batches of {layout.micro_batch} samples"
    yield Setting(key=f"{section}.mb_spec.n_mbs", value=number, why=why)


def allocation(layout: Layout, *, megatron: bool) -> str:
    """AReaL's `fsdp:d8c2`, `megatron:d4p2t2e8`, or attention and experts apart where experts are cut too."""
    degrees = {"d": layout.dp, "p": layout.pp, "t": layout.tp, "c": layout.cp}
    if not megatron:
        return "fsdp:" + _spelled({name: size for name, size in degrees.items() if name != "p"})
    if layout.etp == 1:
        return "megatron:" + _spelled({**degrees, "e": layout.ep})
    copies = layout.gpus // (layout.pp * layout.etp * layout.ep)
    experts = {"d": copies, "p": layout.pp, "t": layout.etp, "e": layout.ep}
    return f"megatron:(attn:{_spelled(degrees)}|ffn:{_spelled(experts)})"


def _spelled(degrees: dict[str, int]) -> str:
    return "".join(f"{name}{size}" for name, size in degrees.items() if size > 1 or name == "d")


def _beside(plan: Plan, section: str, placed: RolePlacement) -> Iterator[Setting]:
    """A reference or a critic."""
    yield from _engine(plan, section, placed, "")
    yield Setting(key=f"{section}.path", value="${actor.path}")
    if section == "critic":
        yield Setting(key="critic.is_critic", value=True)
        yield Setting(key="critic.ppo_n_minibatches", value="${actor.ppo_n_minibatches}")
        yield Setting(key="critic.optimizer.type", value="adam")
        yield Setting(key="critic.optimizer.lr", value="???")
    placement = plan.placement
    with_critic = (
        placement.critic is not None and section != "critic" and placed.pool == placement.critic.pool
    )
    if placed.pool == placement.actor.pool or with_critic:
        target = "actor" if placed.pool == placement.actor.pool else "critic"
        yield Setting(key=f"{section}.scheduling_strategy.type", value="colocation")
        yield Setting(key=f"{section}.scheduling_strategy.target", value=target)
    elif placement.rollout is not None and placed.pool == placement.rollout.pool:
        raise RlhfsimError(
            "sharing-not-expressible",
            f"the {section} shares GPUs with the rollout and not with the actor",
            help="design again with --role-placement colocated",
        )


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout, shared = placed.layout, placed.pool == plan.placement.actor.pool
    degrees = _spelled({"d": layout.dp, "p": layout.pp, "t": layout.tp})
    why = call(plan, "actor.generate")
    yield Setting(key="rollout.backend", value=f"vllm:{degrees}", why=why)
    yield Setting(key="rollout.scheduling_spec", value="${actor.scheduling_spec}")
    yield Setting(key="rollout.tokenizer_path", value="${tokenizer_path}")
    if shared:
        why = "training and rollout share the GPUs"
        yield Setting(key="rollout.scheduling_strategy.type", value="colocation", why=why)
        yield Setting(key="rollout.scheduling_strategy.target", value="actor")
    yield Setting(key="vllm.model", value="${actor.path}")
    why = held(plan, "actor.generate", placed.pool)
    yield Setting(key="vllm.gpu_memory_utilization", value=layout.memory_utilization, why=why)
    yield Setting(key="vllm.max_num_seqs", value=layout.max_num_seqs)
    total = longest_prompt(plan) + longest_response(plan)
    yield Setting(key="vllm.max_model_len", value=total, why="prompt and response")
    yield Setting(key="vllm.enforce_eager", value=not layout.cuda_graphs)
    if shared:
        yield Setting(key="vllm.enable_sleep_mode", value=placed.sleep > 0)
    if plan.workload.lora is not None:
        yield Setting(key="rollout.use_lora", value=True)
        yield Setting(key="vllm.enable_lora", value=True)
        yield Setting(key="vllm.max_lora_rank", value=max(16, plan.workload.lora.rank))


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The configuration, and the script that names what it leaves open."""
    head = title_of(plan, "AReaL 1.0.4")
    critic = ' critic.optimizer.lr="${CRITIC_LR}"' if plan.placement.critic is not None else ""
    body = "\n".join(
        [
            'exec python3 "${SCRIPT}" --config config.yaml actor.path="${MODEL}" \\',
            '    train_dataset.path="${DATASET}" cluster.fileroot="${FILEROOT}" \\',
            f'    actor.optimizer.lr="${{LR}}"{critic} "$@"',
        ]
    )
    comments = "".join(f"{comment(line)}\n" for line in head.splitlines())
    return {"config.yaml": comments + nested(written), "launch.sh": bash(head, NEEDS, body)}


EXPORT = Exporter(
    version="1.0.4",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    install="pip install areal==1.0.4",
)
