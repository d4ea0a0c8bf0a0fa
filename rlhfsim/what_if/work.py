"""What a step, or a run of steps, has to do, however a plan does it: only plans of equal work compete.

Not part of the work: where it runs, in which precision, with which optimizer state, how stale its samples
are, how fast rules and environments answer. Adapters train other weights than the whole model does, so they
are other work. Runs that end at one measured target do the same work by definition, whatever their steps are.
Different work is compared by the sample; by the token where its lengths differ:

    amount per sample = amount / (samples of the step x steps)      steps: 1 without a run
    amount per token  = amount per sample / mean tokens of a sample, prompt and response

Not known here: what a sample teaches. Half the samples a step is half the data, not half the price.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.lengths import AnyLengths, stats
from rlhfsim.specs.workload.sampling import DynamicSampling

By = Literal["work", "sample", "token"]
"""What two amounts are compared by: as they are, where the work is the same, else per sample or token."""


@frozen
class StepWork:
    """What is learnt from what in a step; with `steps` or `target` over a run. Equal work competes."""

    algorithm: str
    model: str
    """Name of the policy; its shapes are in `shapes`."""
    adapters: int | None
    """Rank; None: every weight is trained."""
    critic: str | None
    reference: str | None
    reward_model: str | None
    shapes: tuple[str, ...]
    """Hash of the shape of each model."""
    rules: bool
    turns: int
    """Turns of a response; 1 without an environment."""
    prompts: int
    samples: int
    prompt_len: AnyLengths
    response_len: AnyLengths
    epochs: int
    mini_batches: int
    oversampling: float
    dynamic_sampling: DynamicSampling | None
    sequences: int
    """Samples that a step learns from."""
    steps: float | None = None
    """Steps of the run, those that staleness adds left out; None: one step."""
    target: float | None = None
    """Value of the measured curve at which the run ends."""

    def same(self, other: StepWork) -> bool:
        """Whether both may compete."""
        return not self.unlike(other)

    def unlike(self, other: StepWork) -> tuple[str, ...]:
        """Fields in which the work differs; the shapes only where the names of the models do not tell."""
        if self.target is not None and self.target == other.target:
            return ()
        names = [f.name for f in fields(self) if f.name != "sequences"]
        different = [name for name in names if getattr(self, name) != getattr(other, name)]
        told = {"model", "critic", "reference", "reward_model"} & set(different)
        return tuple(name for name in different if name != "shapes" or not told)

    def by(self, other: StepWork) -> By:
        """What amounts of both are compared by."""
        different = self.unlike(other)
        if not different:
            return "work"
        return "token" if {"prompt_len", "response_len"} & set(different) else "sample"

    def amount(self, value: float, by: By) -> float:
        """Seconds, USD or energy of all the work, or of a sample or token of it."""
        if by == "work":
            return value
        each = value / (self.sequences * (self.steps or 1.0))
        return each if by == "sample" else each / self.tokens

    @property
    def tokens(self) -> float:
        """Mean tokens of a sample, prompt and response."""
        return stats(self.prompt_len).mean + stats(self.response_len).mean

    def change(self, value: float, other: StepWork, others: float) -> float:
        """Relative change from `others`, an amount of other work, to `value` of this one, alike compared."""
        by = self.by(other)
        return self.amount(value, by) / other.amount(others, by) - 1


def work_of(plan: Plan, *, steps: float | None = None, target: float | None = None) -> StepWork:
    """The work of a planned step, or of a run of such steps."""
    w = plan.workload
    names = {m.role: m.name for m in plan.models}
    return StepWork(
        algorithm=w.algorithm,
        model=names.get("actor", w.model),
        adapters=w.lora.rank if w.lora else None,
        critic=names.get("critic"),
        reference=names.get("reference"),
        reward_model=names.get("reward"),
        shapes=tuple(m.shape_hash for m in plan.models),
        rules=w.generates and w.reward.rules is not None,
        turns=w.environment.turns if w.environment else 1,
        prompts=w.prompts,
        samples=w.samples,
        prompt_len=w.prompt_len,
        response_len=w.response_len,
        epochs=w.epochs,
        mini_batches=w.mini_batches,
        oversampling=w.oversampling,
        dynamic_sampling=w.dynamic_sampling,
        sequences=w.num_sequences,
        steps=steps,
        target=target,
    )
