"""What SkyRL refuses at start.

skyrl/train/utils/utils.py (`validate_batch_sizes`, `validate_cfg`; 0.4.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.findings import Finding, group_of_one, uneven_batch, uneven_updates
from rlhfsim.frameworks.configuration.settings import FrameworkSettings

PROMPTS, SAMPLES = "trainer.train_batch_size", "generator.n_samples_per_prompt"
UPDATE = "trainer.policy_mini_batch_size"


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in the configuration."""
    yield from group_of_one(s, run, SAMPLES)
    update = s.whole(UPDATE, default=256)
    yield from uneven_updates(run.prompts, update, UPDATE, PROMPTS, then="SkyRL refuses it")
    yield from uneven_batch(run, PROMPTS, SAMPLES, then="SkyRL refuses it")
    each, micro = update * run.samples // run.layout.dp, run.layout.micro_batch
    if run.layout.pack_tokens is None and micro and each % micro:
        yield Finding(
            what=f"an update of {each:,} samples a rank is no multiple of micro-batches of {micro}: SkyRL "
            "refuses it",
            keys=("trainer.micro_train_batch_size_per_gpu", UPDATE),
            remedy=f"trainer.micro_train_batch_size_per_gpu={math.gcd(each, micro)}",
            stops=True,
        )
    engines = run.rollout.tp * run.rollout.pp * run.rollout.attention_dp * run.rollout.dp
    if run.rollout_gpus is None and engines != run.gpus:
        yield Finding(
            what=f"engines of {engines} GPUs altogether share {run.gpus} GPUs with training: SkyRL "
            "refuses it",
            keys=("generator.inference_engine.num_engines",),
            remedy=f"generator.inference_engine.num_engines={run.gpus * run.rollout.dp // engines}",
            stops=True,
        )
