"""Releases of verl before 0.9.1 in its keys, as exports write them.

Source: composed configurations of 0.7.1, 0.8.0 and 0.9.1, read 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim.interchange.nearest import with_placement, with_workload
from rlhfsim.interchange.releases import Missing, Release

_FILTERED = Missing(
    what="groups whose rewards differ",
    instead="every group is trained on: its filter was a recipe of its own",
    nearest=lambda plan: with_workload(plan, dynamic_sampling=None),
)
_MERGED = Missing(
    what="adapters merged into the weights that are sent",
    instead="adapters alone are sent, and the rollout adds them to every product",
    nearest=lambda plan: with_placement(plan, weight_path="lora"),
)
_BEFORE_V1: Mapping[str, Missing] = {
    "trainer.v1.trainer_mode": Missing(),
    "trainer.v1.separate_async": Missing(
        what="a rollout on GPUs of its own, which another entry point runs",
        instead="design with training and rollout on the same GPUs",
        refused=True,
    ),
    "trainer.v1.sampler": Missing(),
    "algorithm.filter_groups": _FILTERED,
    "data.gen_batch_size": _FILTERED,
    "critic.ppo_infer_max_token_len_per_gpu": Missing(),
    **{
        f"critic.{engine}.{key}": Missing()
        for engine in ("fsdp", "megatron")
        for key in ("use_dynamic_bsz", "micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu")
    },
}
RELEASES: Mapping[str, Release] = {
    "0.8.0": Release(missing=_BEFORE_V1),
    "0.7.1": Release(
        missing={**_BEFORE_V1, "actor_rollout_ref.model.lora.merge": _MERGED},
        renamed={
            "critic.fsdp.": "critic.model.fsdp_config.",
            "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
        },
    ),
}
