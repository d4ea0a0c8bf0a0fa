"""What verl refuses at start, or in its first step, whatever memory there is.

verl/utils/config.py (`validate_config`), verl/utils/seqlen_balancing.py (`rearrange_micro_batches`) and
verl/workers/rollout/vllm_rollout (verl-project/verl at 1dda039b9).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.findings import Finding, group_of_one, short_budget, uneven_batch
from rlhfsim.frameworks.configuration.settings import FrameworkSettings

ACTOR, ROLL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ALWAYS = (f"{ACTOR}.ppo_micro_batch_size", f"{ROLL}.log_prob_micro_batch_size")
BUDGETS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLL}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in a configuration of verl."""
    longest = (run.max_prompt or 0) + (run.max_response or 0)
    yield from short_budget(s, run, *BUDGETS, then="verl stops at its first batch", stops=True)
    yield from _priced_otherwise(s, run)
    yield from _unsaid_micro_batches(s, run)
    yield from _batches(s, run)
    if run.layout.cp > 1 and run.backend == "fsdp2" and not run.packing:
        yield Finding(
            what=f"sequence parallelism {run.layout.cp} with padded batches: verl refuses it",
            keys=(f"{ACTOR}.ulysses_sequence_parallel_size", "actor_rollout_ref.model.use_remove_padding"),
            remedy="actor_rollout_ref.model.use_remove_padding=True",
            stops=True,
        )
    batched, chunked = s.find(f"{ROLL}.max_num_batched_tokens"), s.find(f"{ROLL}.enable_chunked_prefill")
    if isinstance(batched, int) and batched < longest and chunked is False:
        yield Finding(
            what=f"the engine prefills {batched:,} tokens at once, a sample has up to {longest:,}, and "
            "chunked prefill is off: verl refuses it",
            keys=(f"{ROLL}.max_num_batched_tokens", f"{ROLL}.enable_chunked_prefill"),
            remedy=f"{ROLL}.max_num_batched_tokens={longest}",
            stops=True,
        )
    swap = s.find(f"{ROLL}.engine_kwargs.vllm.swap_space", f"{ROLL}.swap_space")
    if isinstance(swap, int | float) and swap > 0:
        yield Finding(
            what=f"vLLM pins {swap:g} GiB of host memory a GPU to swap, {swap * run.gpus_per_node:g} GiB "
            "a node, beside what is offloaded",
            keys=(f"{ROLL}.engine_kwargs.vllm.swap_space",),
            remedy="0 where nothing is swapped",
        )


def _priced_otherwise(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Trainers and schedules that are priced as the nearest that is known."""
    mode, apart = s.find("trainer.v1.trainer_mode"), run.rollout_gpus is not None
    if mode == "colocate_async":
        yield Finding(
            what="trainer_mode=colocate_async is priced as sync: what it generates ahead is not counted",
            keys=("trainer.v1.trainer_mode",),
        )
    if s.flag("actor_rollout_ref.hybrid_engine", default=not apart) and apart:
        yield Finding(
            what="with hybrid_engine=True the training GPUs generate as well, which is not counted",
            keys=("actor_rollout_ref.hybrid_engine",),
        )
    every = s.count("trainer.v1.separate_async.parameter_sync_step") or run.mini_batches
    if apart and every != run.mini_batches:
        yield Finding(
            what=f"new weights are sent after {every} updates, and priced once a batch of {run.mini_batches}",
            keys=("trainer.v1.separate_async.parameter_sync_step",),
        )
    trainer = s.find(f"{ACTOR}.strategy")
    for key in ("critic.strategy", f"{REF}.strategy"):
        other = s.find(key)
        if trainer is not None and other not in (None, trainer):
            yield Finding(what=f"{key}={other} is priced as the actor's {trainer}", keys=(key,))


def _unsaid_micro_batches(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Micro-batches without a default: verl has none where no token budget rules."""
    needed = [] if s.flag(f"{ACTOR}.use_dynamic_bsz") else [*ALWAYS]
    if needed and run.kl:
        needed.append(f"{REF}.log_prob_micro_batch_size")
    if run.algorithm == "ppo" and not s.flag("critic.use_dynamic_bsz", default=not needed):
        needed.append("critic.ppo_micro_batch_size")
    unsaid = [f"{key}_per_gpu" for key in needed if not s.says(key, f"{key}_per_gpu")]
    if unsaid:
        yield Finding(
            what="verl has no micro-batch of its own and nothing says one, so that it refuses to start: "
            + ", ".join(unsaid),
            keys=tuple(unsaid),
            remedy=f"{ACTOR}.use_dynamic_bsz=True, or the micro-batches",
            stops=True,
        )


def _batches(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Batches that verl cannot cut, and groups of one."""
    mini = s.find(f"{ACTOR}.ppo_mini_batch_size")
    if isinstance(mini, int) and mini > run.prompts:
        yield Finding(
            what=f"mini-batches of {mini:,} prompts out of {run.prompts:,}: releases with validate_config "
            "refuse it, older ones take the whole batch",
            keys=(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
            remedy=f"{ACTOR}.ppo_mini_batch_size={run.prompts}",
        )
    yield from uneven_batch(run, "data.train_batch_size", f"{ROLL}.n", then="verl refuses it", updates=False)
    yield from group_of_one(s, run, f"{ROLL}.n")
