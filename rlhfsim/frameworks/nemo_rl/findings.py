"""What NeMo-RL refuses at start, in its first step, or ignores.

nemo_rl/algorithms/grpo.py, nemo_rl/data/packing/algorithms.py and nemo_rl/models/policy (7ea279abf).
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

PROMPTS, SAMPLES = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
UPDATE = "policy.train_global_batch_size"
BUDGETS = (
    "policy.sequence_packing.train_mb_tokens",
    "policy.sequence_packing.logprob_mb_tokens",
    "policy.dynamic_batching.train_mb_tokens",
    "policy.dynamic_batching.logprob_mb_tokens",
)
ASYNC = "grpo.async_grpo.enabled"
ENGINE = "policy.generation.vllm_cfg.async_engine"
CORRECTION = "loss_fn.use_importance_sampling_correction"
COLOCATED = "policy.generation.colocated.enabled"


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in the configuration; of DPO nothing is known."""
    if run.algorithm == "dpo":
        return
    yield from group_of_one(s, run, SAMPLES)
    yield from short_budget(s, run, *BUDGETS, then="no pack has room for it", stops=True)
    yield from uneven_batch(run, PROMPTS, SAMPLES, then="NeMo-RL refuses it")
    update = s.find(UPDATE)
    if isinstance(update, int):
        yield from uneven_updates(
            run.prompts * run.samples, update, UPDATE, then="the batch is no whole number of them"
        )
    if s.flag(ASYNC):
        yield from _asynchronous(s)


def _asynchronous(s: FrameworkSettings) -> Iterator[Finding]:
    """What asynchronous GRPO asserts."""
    wanted = ((ENGINE, True), (CORRECTION, True), (COLOCATED, False))
    for key, value in wanted:
        said = s.find(key)
        if isinstance(said, bool) and said is not value:
            yield Finding(
                what=f"asynchronous GRPO with {key}={str(said).lower()}: NeMo-RL refuses it",
                keys=(ASYNC, key),
                remedy=f"{key}={str(value).lower()}",
                stops=True,
            )
