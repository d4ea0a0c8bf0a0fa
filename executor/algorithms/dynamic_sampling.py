"""Dynamic sampling: groups whose rewards are all equal are dropped, and more generated until a step is full.

Source: DAPO, arXiv 2503.14476, section 3.2; as in verl's `filter_groups`, generation batches come one after
the other, and groups beyond those that the step trains on are thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from executor.samples import Sample
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.workload import Workload

BARREN = 10
"""Generation batches in a row without one group to learn from that end a run which sets no limit."""


def teaches(group: Sequence[Sample]) -> bool:
    """Whether the rewards of a group differ, those that failed aside."""
    return len({s.reward for s in group if s.reward is not None}) > 1


@dataclass(slots=True)
class StepGroups:
    """What happened to the groups that were generated for one step."""

    workload: Workload
    kept: list[list[Sample]] = field(default_factory=list)
    """In the order in which they were added."""
    equal: list[int] = field(default_factory=list)
    """Groups whose rewards are all equal."""
    barren: int = 0
    """Groups in a row that taught nothing."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of all samples, those thrown away included."""

    @property
    def generated(self) -> int:
        """Groups so far."""
        return len(self.kept) + len(self.equal)

    @property
    def full(self) -> bool:
        """Whether the step has its prompts."""
        return len(self.kept) >= self.workload.prompts

    def add(self, group: Sequence[Sample]) -> bool:
        """Whether it is kept."""
        self.rewards += [s.reward for s in group if s.reward is not None]
        if teaches(group):
            self.kept.append(list(group))
            self.barren = 0
            return True
        self.equal.append(group[0].group)
        self.barren += 1
        return False

    def check(self) -> None:
        """Called before more is generated; a step that has its groups passes.

        Raises:
            RlhfsimError: the plan allows no further generation batch, or none would help.
        """
        sampling, each = self.workload.dynamic_sampling, self.workload.gen_prompts
        assert sampling is not None
        if self.full:
            return
        most = sampling.max_gen_batches
        if most is not None and self.generated >= most * each:
            limit = f"max_gen_batches {most} of {each:,} prompts"
        elif self.barren >= BARREN * each:
            limit = f"{BARREN} generation batches in a row without one such group"
        else:
            return
        raise RlhfsimError(
            "dynamic-sampling-starved",
            f"{len(self.kept):,} of {self.generated:,} groups have rewards that differ, the step needs "
            f"{self.workload.prompts:,}: {limit}",
            help="take prompts of another difficulty, raise samples or sampling.temperature, or "
            "dynamic_sampling.max_gen_batches in the plan",
        )

    @property
    def samples(self) -> list[Sample]:
        """What the step trains on."""
        return [s for group in self.kept[: self.workload.prompts] for s in group]

    @property
    def unused(self) -> tuple[int, ...]:
        """Groups that were generated and are not trained on."""
        return (*self.equal, *(group[0].group for group in self.kept[self.workload.prompts :]))

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts of groups, the share that was kept, the mean reward of all."""
        counts = {
            "sampling/generated_groups": float(self.generated),
            "sampling/equal_groups": float(len(self.equal)),
            "sampling/kept_share": len(self.kept) / max(1, self.generated),
        }
        mean = {"sampling/reward_mean": float(np.mean(self.rewards))} if self.rewards else {}
        return counts | mean
