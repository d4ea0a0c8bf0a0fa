"""What OpenRLHF refuses at start, or does otherwise than its arguments suggest.

openrlhf/cli/train_ppo_ray.py and openrlhf/utils/deepspeed/deepspeed.py (0.11.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.findings import (
    Finding,
    group_of_one,
    said_as,
    short_budget,
    uneven_updates,
)
from rlhfsim.frameworks.configuration.settings import FrameworkSettings

SAMPLES = ("rollout.n_samples_per_prompt", "n_samples_per_prompt")
BATCH = ("train.batch_size", "train_batch_size")
MICRO = ("train.micro_batch_size", "micro_train_batch_size")
SLEEP = ("vllm.enable_sleep", "vllm_enable_sleep")
ENGINES = ("vllm.num_engines", "vllm_num_engines")
BUDGETS = ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu")


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in the arguments."""
    yield from group_of_one(s, run, *SAMPLES, stops=True)
    yield from short_budget(s, run, *BUDGETS, then="it becomes a micro-batch of its own, as large as it is")
    update = s.find(*BATCH)
    if isinstance(update, int):
        then = "the rest of the batch is not an update of its own"
        yield from uneven_updates(run.prompts * run.samples, update, said_as(s, BATCH), then=then)
        yield from _accumulation(s, run, update)
    yield from _placement(s, run)


def _accumulation(s: FrameworkSettings, run: RunDescription, update: int) -> Iterator[Finding]:
    """DeepSpeed wants micro-batch x accumulation x data-parallel ranks to be the batch."""
    micro, ranks = run.layout.micro_batch, run.layout.dp
    if run.layout.pack_tokens is None and update % (micro * ranks):
        key = said_as(s, BATCH)
        yield Finding(
            what=f"a batch of {update:,} is no multiple of micro-batches of {micro} on {ranks} data-parallel "
            "ranks: DeepSpeed refuses it",
            keys=(key, said_as(s, MICRO)),
            remedy=f"{key}={-(-update // (micro * ranks)) * micro * ranks}",
            stops=True,
        )


def _placement(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Engines on shared GPUs, and sleep where nothing is shared."""
    shared, engine = run.rollout_gpus is None, run.rollout
    if shared and engine.tp * engine.dp != run.gpus:
        yield Finding(
            what=f"{engine.dp} engines of {engine.tp} GPUs on {run.gpus} shared GPUs: OpenRLHF refuses it",
            keys=(said_as(s, ENGINES),),
            remedy=f"{said_as(s, ENGINES)}={run.gpus // engine.tp}",
            stops=True,
        )
    if not shared and s.flag(*SLEEP):
        yield Finding(
            what="the engines have GPUs of their own, so that they never sleep", keys=(said_as(s, SLEEP),)
        )
    if shared and not s.flag(*SLEEP) and (engine.memory_utilization or 0) > 0.5:
        yield Finding(
            what=f"engines that share their GPUs and never sleep hold {engine.memory_utilization:.0%} of "
            "each while the models train",
            keys=(said_as(s, SLEEP),),
            remedy=f"--{said_as(s, SLEEP)}",
        )
