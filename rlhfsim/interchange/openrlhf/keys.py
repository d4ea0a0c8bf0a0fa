"""OpenRLHF's arguments: one row each, written from a plan and read under the names of all releases.

Arguments and defaults: openrlhf/cli/train_ppo_ray.py (0.11.2; 0.8.11 and 0.9.10 for what they had otherwise).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.described import RoleDescription
from rlhfsim.interchange.configuration.engines import MODULES_SHARE, dynamic_sampling, own_modules
from rlhfsim.interchange.configuration.findings import said_as
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Setting
from rlhfsim.interchange.fields import Fields, cut
from rlhfsim.interchange.openrlhf.releases import RELEASES
from rlhfsim.interchange.predictions import memory
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Key, Table, flag, marked, of_call
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.files import heads_of
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Algorithm

READ: dict[str, Algorithm] = {
    "gae": "ppo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr-grpo",
}
"""--algo.advantage.estimator -> algorithm here."""
RUNS = framework("openrlhf")
HOSTED, SEQUENCES, PREFILL = RUNS.says.leaves_under, RUNS.says.sequences, RUNS.says.prefill[True]
"""ZeRO stages under which what only scores can be on the host; sequences and tokens of a vLLM engine."""
MODULES_SEQUENCES = 256
"""Sequences at a time where the actor's own modules generate."""
OLD = ("actor_num_nodes", "actor_num_gpus_per_node", "vllm_num_engines", "pretrain", "zero_stage")
"""Names until 0.9: dots came with 0.10."""
BATCH, MICRO_BATCH, LONGEST = "--train.batch_size", "--train.micro_batch_size", "--data.max_len"
PACKED, REFERENCE_AWAY, OVERLAPS = "--ds.packing_samples", "--ref.offload", "--ds.overlap_comm"
REWARD_AWAY = "--reward.offload"
"""Keys that trainers of given data have too."""
LIMITS = ("prompt_max_len", "generate_max_len")
"""Lengths of prompt and response until 0.8."""
MARKS = (
    "actor.num_nodes",
    "actor_num_nodes",
    "actor.num_gpus_per_node",
    "actor_num_gpus_per_node",
    "vllm.",
    "vllm_num_engines",
    "ds.",
    "train.colocate_",
    "colocate_all_models",
    "micro_train_batch_size",
)
"""Beginnings of keys that no other framework has."""
NOT_ON_RAY = "openrlhf.cli.train_ppo"
"""Entry point until 0.5 whose roles share all GPUs and whose policy generates by its own modules."""
FLAGS = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}
"""Role -> how its flags begin."""


def names(*keys: str) -> tuple[str, ...]:
    """Keys without a row, under the names of all releases."""
    return TABLE.named(*(f"--{key}" for key in keys))


# --- which roles share GPUs ---------------------------------------------------------------------------------


def trained(plan: Plan) -> list[tuple[str, RolePlacement]]:
    """Roles that train or score."""
    return list(plan.placement.trainers.items())


def _sharing(plan: Plan) -> Iterator[Setting]:
    """The flags that say which roles share GPUs."""
    pools, rollout = {name: role.pool for name, role in trained(plan)}, plan.placement.rollout
    assert rollout is not None
    together, apart = len(set(pools.values())) == 1, rollout.pool != plan.placement.actor.pool
    if together and (not apart or plan.placement.schedule.asynchronous):
        yield Setting("--train.colocate_all", True)
        return
    if not apart or rollout.pool in pools.values():
        raise _unshared("the rollout shares GPUs with some of the roles")
    pairs = {
        "--train.colocate_actor_ref": ("actor", "reference"),
        "--train.colocate_critic_reward": ("critic", "reward"),
    }
    found = {
        flag: {a, b} for flag, (a, b) in pairs.items() if a in pools and b in pools and pools[a] == pools[b]
    }
    for a in pools:
        for b in pools:
            if a < b and pools[a] == pools[b] and {a, b} not in found.values():
                raise _unshared(f"{a} and {b} share GPUs apart from the rollout")
    yield from (Setting(key, True) for key in found)


def _unshared(what: str) -> RlhfsimError:
    return RlhfsimError(
        "sharing-not-expressible",
        f"{what}: OpenRLHF shares all, actor with reference, or critic with reward",
        help="design again with --forbid split,standalone, or export to verl",
    )


def _roles(s: FrameworkSettings, read: Fields, *, ppo: bool, reward: bool) -> dict[str, RoleDescription]:
    """Critic, reference and reward model: on the actor's GPUs, on others that they share, or on their own."""
    whole = read["together"]
    beside = whole or s.flag(*names("train.colocate_actor_ref"))
    pools = {
        "reference": None if beside else "ref",
        "critic": None if whole else "critic",
        "reward": None if whole else "reward",
    }
    if s.flag(*names("train.colocate_critic_reward")) and ppo and not whole:
        pools["reward"] = "critic"
    present = {"reference": _kl(s), "critic": ppo, "reward": reward}
    asked = {role: s.flag(*names(f"{FLAGS[role]}.offload")) for role in ("reference", "reward")}
    offloaded = {role: read["actor.zero"] in HOSTED and flag for role, flag in asked.items()}
    scored = {"micro_batch": read["actor.score_micro_batch"], "score_micro_batch": None}
    roles = {}
    for name, pool in pools.items():
        nodes, each = (names(f"{pool or FLAGS[name]}.num_{unit}") for unit in ("nodes", "gpus_per_node"))
        own = s.whole(*nodes, default=1) * s.whole(*each, default=8) if pool else read["actor.gpus"]
        s.overruled(*names(*(f"{FLAGS[name]}.num_{unit}" for unit in ("nodes", "gpus_per_node"))))
        if present[name]:
            _check_placed(s, name, own, (nodes, each))
            critic = name == "critic"
            roles[name] = RoleDescription(
                layout=cut(read, own, **({} if critic else scored)),
                residency="offloaded" if offloaded.get(name) else "resident",
                optimizer_leaves=critic and read["leaves"],
                pool=pool,
                gpus=own if pool else 0,
            )
    return roles


def _check_placed(s: FrameworkSettings, role: str, gpus: int, keys: Iterable[tuple[str, ...]]) -> None:
    """Refuse a role that the estimator, the KL term or the reward needs and that is given no GPU."""
    if gpus:
        return
    needed_by = {
        "critic": ("estimator gae", "--advantage_estimator group_norm"),
        "reference": ("the KL term", "--init_kl_coef 0"),
        "reward": ("the reward", "--remote_rm_url URL"),
    }
    needs, remedy = needed_by[role]
    raise RlhfsimError(
        "role-without-gpus",
        f"{' x '.join(said_as(s, names) for names in keys)} is 0, and {needs} needs a {role} model",
        place=Place(file=s.name),
        help=f"give it GPUs, or do without it: {remedy}",
    )


def _kl(s: FrameworkSettings) -> bool:
    return s.share(*names("algo.kl.init_coef"), default=0.01) != 0


# --- what else no row can say -------------------------------------------------------------------------------


def _longest(s: FrameworkSettings) -> tuple[int | None, int | None]:
    """(prompt, response): limits of their own to 0.8, then one of both together and one of the response."""
    if s.find(*LIMITS) is not None:
        prompt, response = (s.whole(key, default=1024) for key in LIMITS)
        return prompt, response
    both = s.whole(*TABLE.named(LONGEST), default=2048)
    cut_at = s.count(*names("rollout.max_new_tokens"))
    return (max(1, both - cut_at), cut_at) if cut_at else (None, both)


def _dynamic_sampling(s: FrameworkSettings, prompts: int) -> DynamicSampling | None:
    if not s.flag(*names("algo.dynamic_filtering_enable")):
        return None
    each = s.whole(*names("rollout.vllm_generate_batch_size"), default=prompts)
    return dynamic_sampling(s, prompts, each, None)


def _algorithm(s: FrameworkSettings) -> Algorithm:
    name = s.text(*names("algo.advantage.estimator"), default="gae")
    if name not in READ:
        raise RlhfsimError(
            "algorithm-not-priced",
            f"advantage estimator {name!r} has no counterpart here",
            help=f"priced: {', '.join(READ)}",
        )
    by_response = s.text(*names("actor.policy_loss_type"), default="ppo") == "gspo"
    return "gspo" if READ[name] == "grpo" and by_response else READ[name]


def _reward(s: FrameworkSettings) -> str | None:
    """The reward model, without a name as the policy; None: a service or a function gives rewards."""
    if s.says(*names("reward.remote_url", "train.agent_func_path")):
        return None
    return str(s.find(*names("reward.model_name_or_path")) or "same").split(",")[0]


def _critic(s: FrameworkSettings, reward: str | None) -> str | None:
    """The critic; without a name it starts from the reward model, or from the policy."""
    keys = names("critic.model_name_or_path")
    named, policy = s.find(*keys), s.find(*names("actor.model_name_or_path"))
    if s.says(*keys) and named == policy:
        return None
    return str(named) if named else reward


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    algorithm, reward, (prompt, response) = _algorithm(s), _reward(s), _longest(s)
    samples = read["workload.prompts"] * read["workload.samples"]
    return {
        "workload.algorithm": algorithm,
        "workload.model": s.model(*names("actor.model_name_or_path")),
        "workload.critic": _critic(s, reward) if algorithm == "ppo" else None,
        "workload.reward.model": reward,
        "workload.mini_batches": max(1, round(samples / read["samples_of_update"])),
        "workload.packing": s.flag(*TABLE.named(PACKED)) or read["packs"] or read["actor.cp"] > 1,
        "workload.kl": _kl(s),
        "workload.dynamic_sampling": _dynamic_sampling(s, read["workload.prompts"]),
        "limit.prompt": prompt,
        "limit.response": response,
        "backend": "deepspeed",
        "software": software_of(s),
        "roles": _roles(s, read, ppo=algorithm == "ppo", reward=reward is not None),
        "actor.offload_between": read["leaves"],
        **_generation(read),
    }


def software_of(s: FrameworkSettings) -> Software | None:
    """Log-probs at another temperature than 1, reductions that overlap; None: as `runs` has both."""
    usual, scaled = RUNS.software["deepspeed"], s.share(*names("rollout.temperature"), default=1.0) != 1
    head = heads_of("openrlhf")["scaled"] if scaled else None
    known = replace(usual, head=head, overlaps_reduction=s.flag(*TABLE.named(OVERLAPS)))
    return None if known == usual else known


def _generation(read: Fields) -> dict[str, Any]:
    """Where the rollout runs and how weights reach it; without engines it is the actor's own modules."""
    shared, engines, gpus = read["shared"], read["rollout.dp"], read["actor.gpus"]
    if engines:
        own = gpus if shared else engines * read["rollout.tp"]
        return {
            "rollout.gpus": own,
            "rollout.max_num_seqs": SEQUENCES,
            "rollout.max_batched_tokens": PREFILL,
            "weight_path": "ipc" if shared else "broadcast",
        }
    return {
        "rollout.max_num_seqs": MODULES_SEQUENCES,
        "rollout.gpus": gpus,
        "rollout.tp": 1,
        "rollout.memory_utilization": MODULES_SHARE,
        **own_modules(read["actor.zero"]),
    }


# --- the rows -----------------------------------------------------------------------------------------------


def scored_together(plan: Plan) -> int:
    """Sequences of a micro-batch that is scored: as the reference's, the critic's or the actor's."""
    placed = plan.placement.role("reference") or plan.placement.role("critic") or plan.placement.actor
    return placed.layout.sequences(scoring=True)


ENGINE = (
    Key("actor.zero", "--ds.zero_stage", 2, why=of_call("actor.train")),
    Key("actor.tp", "--ds.tensor_parallel_size", 1, quiet=True),
    Key("actor.cp", "--ds.ring_attn_size", 1, quiet=True),
    Key("workload.packing", PACKED, codec=flag(), read=False),
    Key("workload.gradients", "--ds.grad_accum_dtype", codec=marked("fp32", "fp32", "backend")),
    Key("workload.lora.rank", "--ds.lora.rank", 0),
    Key("alpha", "--ds.lora.alpha", read=False),
    Key("workload.lora.base", "--ds.load_in_4bit", codec=flag("nf4", "bf16")),
)
"""What every trainer of OpenRLHF says of its engine."""
OFFLOAD = Key("actor.offload_optimizer", "--ds.adam_offload", codec=flag("cpu", "none"), why=memory)
TABLE = Table(
    lambda: rows_of(
        "openrlhf",
        {
            "BATCH": BATCH,
            "ENGINE": ENGINE,
            "LONGEST": LONGEST,
            "MICRO_BATCH": MICRO_BATCH,
            "OFFLOAD": OFFLOAD,
            "REFERENCE_AWAY": REFERENCE_AWAY,
            "REWARD_AWAY": REWARD_AWAY,
            "micro_batch": lambda read: 4 if read["old"] else 1,
            "scored": lambda read: 8 if read["old"] else 1,
            "sharing": _sharing,
        },
    ),
    _rest,
    {"actor.score_micro_batch": scored_together},
    follows={
        "old": lambda s, read: any(s.find(key) is not None for key in OLD),
        "together": lambda s, read: s.flag(*names("train.colocate_all")) or s.find(ENTRY_POINT) == NOT_ON_RAY,
        "shared": lambda s, read: (
            not read["rollout.dp"] or (read["together"] and not read["schedule.asynchronous"])
        ),
    },
    releases=RELEASES,
)
