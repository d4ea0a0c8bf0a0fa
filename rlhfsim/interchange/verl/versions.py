"""Defaults of verl that changed from version to version: a run is read by those of its own.

From the generated trainer configurations (`verl/trainer/config`, that of FSDP and that of Megatron-Core) of
0.2.0.post2, 0.3.0.post1, 0.4.1, 0.5.0, 0.6.1, 0.7.1, 0.8.0 and 0.9.1. In which version between two of them a
default changed is not known: the later one is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from rlhfsim.interchange.configuration.settings import FrameworkSettings

ACTOR, ROLL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model.path"
EACH, NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
TRAIN_BATCH = "data.train_batch_size"
"""Prompts of a step, or samples of an update where data is given."""
EAGER = f"{ROLL}.enforce_eager"
UNPADDED = "actor_rollout_ref.model.use_remove_padding"
SEQUENCES = f"{ROLL}.max_num_seqs"
KL_IN_REWARD = "algorithm.use_kl_in_reward"
"""Until v0.3 there was no such key: without a KL loss the reward held it."""
ULYSSES = "ulysses_sequence_parallel_size"
"""Below the name of a role or of an engine; alone until 0.7 where data is given."""
VERSION = "verl_version"
"""Key by which a configuration, or `--set`, names the version that read it."""


ROLLOUT_TP = f"{ROLL}.tensor_model_parallel_size"
REWARD_TP = "reward.reward_model.rollout.tensor_model_parallel_size"
TRAIN_TP = "megatron.tensor_model_parallel_size"
"""Key of the policy and of the critic, below the name of the role."""
REFERENCE_FOLLOWS = f"{REF}.megatron.param_offload"
"""Whether the reference leaves for the host where the policy does, if nobody says so."""
ENTROPY = f"{ACTOR}.entropy_coeff"
TEMPERATURE = f"{ROLL}.temperature"

MICRO_BATCHES = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ROLL}.log_prob_micro_batch_size",
    f"{REF}.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.forward_micro_batch_size",
)
"""Samples of a micro-batch of all GPUs, divided by `fsdp_workers.py`; since v0.2 also `..._per_gpu`."""


Version = tuple[int, ...]
"""Numbers of a release, as many as are known or decide."""
SERVERS: Version = (0, 7)
"""Since then rollout engines run as servers, in processes of their own."""
ENGINES: Version = (0, 8)
"""Since then each role's engine sets up Megatron's groups, and the first one's stay."""
V1: Version = (0, 9)
"""Since then `trainer.use_v1` is on, which hands the critic's engine no key of the critic but one
(trainer/ppo/v1/trainer_base.py, `_setup`)."""
COPIES_LOGITS: Version = (0, 9)
"""Since then FSDP's engine divides logits by the temperature into a copy, not in place."""
LEAVES_LOGITS: Version = (0, 9, 1)
"""Since then it leaves them where the temperature is 1 (workers/engine/fsdp/transformer_impl.py)."""
CHANGED: Mapping[str, Mapping[Version, float]] = {
    EAGER: {(0, 0): True, (0, 6): False},
    UNPADDED: {(0, 0): False, (0, 7): True},
    KL_IN_REWARD: {(0, 0): True, (0, 4): False},
    SEQUENCES: {(0, 0): 1024, (0, 9): 256},
    ROLLOUT_TP: {(0, 0): 2},
    REWARD_TP: {(0, 0): 2},
    ENTROPY: {(0, 0): 0.001, (0, 4): 0},
}
"""Key -> first version -> its default from then on, where FSDP trains; truth values count as 0 and 1."""
CHANGED_IN_MEGATRON: Mapping[str, Mapping[Version, float]] = {
    UNPADDED: {(0, 0): True},  # packed whatever the key says until 0.8, which has it on
    ROLLOUT_TP: {(0, 0): 2, (0, 4): 1, (0, 6): 2},
    TRAIN_TP: {(0, 0): 4, (0, 4): 1},
    REFERENCE_FOLLOWS: {(0, 0): False, (0, 7): True},
}
"""The same where Megatron-Core trains, whose trainer has a configuration of its own."""


RENAMED: tuple[tuple[str, str | None, Version], ...] = (
    (f"critic.fsdp.{ULYSSES}", f"critic.{ULYSSES}", (0, 8)),
    ("critic.fsdp.", "critic.model.fsdp_config.", (0, 8)),
    (f"fsdp_config.{ULYSSES}", ULYSSES, (0, 6)),
    ("actor.optim.override_optimizer_config.", None, (0, 6)),
    ("fsdp_config.offload_policy", None, (0, 4)),
)
"""Part of a key, what was in its place before (None: nothing), and the first version with it."""


def of_each_gpu(s: FrameworkSettings) -> FrameworkSettings:
    """Settings with micro-batches of a GPU, where those of all GPUs are said."""
    whole = {key: s.count(key) for key in MICRO_BATCHES if s.find(f"{key}_per_gpu") is None}
    said = {f"{key}_per_gpu": max(1, value // _ranks(s, key)) for key, value in whole.items() if value}
    if not said:
        return s
    each = s.with_values(said)
    each.assumed, each.names = s.assumed, s.names
    return each


def _ranks(s: FrameworkSettings, key: str) -> int:
    """Data-parallel ranks of a role: GPUs by its sequence parallelism, or by its degrees in Megatron-Core."""
    gpus = (s.count(EACH) or 8) * (s.count(NODES) or 1)
    role = key.rpartition(".")[0].replace(".rollout", ".actor")
    degrees = ("tensor_model", "pipeline_model", "context")
    megatron = (f"megatron.{degree}_parallel_size" for degree in degrees)
    sizes = (ULYSSES, *(megatron if s.find(f"{role}.strategy") == "megatron" else ()))
    return max(1, gpus // math.prod(s.count(f"{role}.{size}") or 1 for size in sizes))


def default(key: str, version: str | None, *, megatron: bool = False) -> float:
    """The default of a key of `CHANGED` in a version such as `0.4` or `v0.6.1`; of the latest for None."""
    known = (CHANGED_IN_MEGATRON.get(key) if megatron else None) or CHANGED[key]
    release = _release(version)
    return known[max(since for since in known if release is None or since <= release)]


def before(version: str | None, release: Version) -> bool:
    """Whether a version that is known is older than a release."""
    known = _release(version)
    return known is not None and known < release[: len(known)]


def spelled(key: str, version: str | None) -> str | None:
    """A key of the latest release as a version has it; None: it has none."""
    release = _release(version)
    if release is None:
        return key
    for part, before, since in RENAMED:
        if part in key and release < since:
            if before is None:
                return None
            key = key.replace(part, before)
    return key


def _release(version: str | None) -> Version | None:
    numbers = re.findall(r"\d{1,6}", str(version or ""))[:3]
    return tuple(map(int, numbers)) if len(numbers) > 1 else (int(numbers[0]), 0) if numbers else None
