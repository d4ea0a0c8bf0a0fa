"""What slime refuses at start, or does otherwise than its flags suggest.

slime/utils/arguments.py (624b824); micro-batches: slime/utils/seqlen_balancing.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.findings import (
    Finding,
    group_of_one,
    short_budget,
    uneven_batch,
    uneven_updates,
)
from rlhfsim.frameworks.configuration.settings import FrameworkSettings

PROMPTS, SAMPLES, UPDATE, STEPS = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "num_steps_per_rollout",
)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in the flags."""
    yield from group_of_one(s, run, SAMPLES)
    yield from short_budget(
        s, run, "max_tokens_per_gpu", then="it becomes a micro-batch of its own, as large as it is"
    )
    yield from uneven_batch(run, PROMPTS, SAMPLES, updates=False, then="the ranks do not get as many samples")
    update, steps = s.find(UPDATE), s.find(STEPS)
    batch = run.prompts * run.samples
    if isinstance(update, int) and isinstance(steps, int) and update != batch // max(1, steps):
        yield Finding(
            what=f"updates of {update:,} samples, and {steps} of a rollout of {batch:,}: slime refuses both "
            "together",
            keys=(UPDATE, STEPS),
            remedy=f"{UPDATE}={batch // max(1, steps)}",
            stops=True,
        )
    elif isinstance(update, int):
        yield from uneven_updates(batch, update, UPDATE, then="slime refuses it, or drops what is left")
    per_engine = s.find("rollout_num_gpus_per_engine")
    if isinstance(per_engine, int) and per_engine > run.gpus_per_node and per_engine % run.gpus_per_node:
        yield Finding(
            what=f"an engine of {per_engine} GPUs is no whole number of nodes of {run.gpus_per_node}",
            keys=("rollout_num_gpus_per_engine",),
            stops=True,
        )
    if run.kl and s.find("ref_load") is None and s.find("rank") is None:
        yield Finding(
            what="a KL term needs a reference: slime stops where --ref-load is not a checkpoint",
            keys=("ref_load",),
            remedy="--ref-load FOLDER",
        )
