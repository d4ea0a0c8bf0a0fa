"""What the keys of verl say of the software around a policy: how logits are held, what FSDP keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.verl.versions import (
    ACTOR,
    COPIES_LOGITS,
    ENTROPY,
    LEAVES_LOGITS,
    TEMPERATURE,
    V1,
    VERSION,
    before,
    default,
)
from rlhfsim.specs.frameworks.verl.heads import HEADS, head_of
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.software import Software, default_software

SUMS_WHOLE = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"


@dataclass(frozen=True, slots=True)
class FsdpKeys:
    """Keys of one trainer that say what FSDP keeps."""

    strategy: str
    """Its `fsdp` is FSDP1 in every release (verl/workers/engine/fsdp/transformer_impl.py; before,
    verl/workers/fsdp_workers.py)."""
    dtype: str
    """Type of the shards (`_build_module` of verl/workers/engine/fsdp/transformer_impl.py, line 258 of
    0.9.1; before, verl/workers/fsdp_workers.py). In BF16 gradients and both moments of torch.optim.AdamW have
    it too, and there is no master; the default is FP32. Under adapters it is the type of their base."""
    sums_whole: str | None = None
    """Whether gradients are reduced once an update; None: never."""
    usual: str = "fsdp"
    """Strategy where nothing is said."""


POLICY = FsdpKeys(
    strategy="actor_rollout_ref.actor.strategy",
    dtype=f"{ACTOR}.fsdp_config.model_dtype",
    sums_whole=SUMS_WHOLE,
)


def scaled_of(version: str | None, *, temperature: float = 1.0) -> Head:
    """How a release applies the temperature to the logits of packed samples."""
    if before(version, COPIES_LOGITS):
        return HEADS["scaled_in_place"]
    return HEADS["scaled" if before(version, LEAVES_LOGITS) or temperature != 1 else "unpadded"]


def sums_whole(s: FrameworkSettings, keys: FsdpKeys) -> bool:
    """Whether FSDP's gradients are reduced once an update: always in 0.9.0, which has no key for it.

    Source: verl 0.9.0 and 0.9.1, _gradient_sync_context of verl/workers/engine/fsdp/transformer_impl.py
    (lines 674 and 692); 0.9.1, verl/trainer/config/engine/fsdp.yaml, line 61. No release before puts it off.
    """
    version = s.find(VERSION)
    if keys.sums_whole is None or before(version, V1):
        return False
    return before(version, LEAVES_LOGITS) or s.flag(keys.sums_whole)


def software(
    s: FrameworkSettings, *, packing: bool, megatron: bool = False, adapters: bool = False
) -> Software | None:
    """What the keys of the policy say of the head, and of FSDP; None: as `runs` has it."""
    version = s.find(VERSION)
    entropy = s.share(ENTROPY, default=default(ENTROPY, version)) != 0
    fused = s.flag("actor_rollout_ref.model.use_fused_kernels")
    if megatron:
        name = "megatron_fused" if fused else "megatron_entropy" if entropy else ""
        return in_megatron(HEADS.get(name))
    temperature = s.share(TEMPERATURE, default=1.0)
    head = head_of(packing=packing, entropy=entropy, scaled=scaled_of(version, temperature=temperature))
    if packing and s.flag("actor_rollout_ref.actor.entropy_from_logits_with_chunking"):
        head = replace(head, score_bytes=min(head.score_bytes, HEADS["scaled"].score_bytes))
    return in_fsdp(s, POLICY, HEADS["fused"] if fused else head, adapters=adapters)


def in_megatron(head: Head | None) -> Software | None:
    """What differs with Megatron-Core; None: as `runs` has it."""
    return None if head is None else replace(default_software("megatron"), head=head)


def in_fsdp(s: FrameworkSettings, keys: FsdpKeys, head: Head, *, adapters: bool) -> Software | None:
    """What differs with FSDP, by its keys and the head; None: as `runs` has it."""
    usual = default_software("fsdp2")
    known = replace(
        usual,
        head=None if head in (HEADS["unpadded"], HEADS["padded"]) else head,
        flat_parameters=str(s.find(keys.strategy) or keys.usual) != "fsdp2",
        sums_whole=sums_whole(s, keys),
    )
    bf16 = str(s.find(keys.dtype)).rpartition(".")[2] in ("bf16", "bfloat16")
    if adapters:
        known = replace(known, base_bytes=2.0 if bf16 else 4.0)
    elif bf16:
        known = replace(known, weight_bytes=2.0, gradient_bytes=2.0, moment_bytes=4.0)
    return None if known == usual else known
