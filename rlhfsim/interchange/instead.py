"""Fields of a plan that no key of a framework says, one row each: what the framework runs in their place.

Instead("rollout.sleep", 2, "sleep {}", "a colocated rollout drops weights and KV cache", "shared")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from rlhfsim.interchange.export import Unsaid
from rlhfsim.interchange.fields import ROLES, Fields, PlanFields
from rlhfsim.interchange.nearest import with_placement, with_schedule, with_workload, without_reward
from rlhfsim.interchange.rows import tagged
from rlhfsim.interchange.table import holds
from rlhfsim.plan import Plan


@dataclass(frozen=True, slots=True)
class Instead:
    """A field whose value the framework decides by itself."""

    field: str
    """As rows of keys name it."""
    runs: Any
    """The value that is run, or a function of the plan."""
    what: str
    """Words for a plan with another value; `{}` is that value."""
    instead: str
    """Words for what is run; `{}` is its value."""
    when: str = ""
    """See `rlhfsim.interchange.table.holds`; otherwise a key says the field, or nothing depends on it."""
    roles: tuple[str, ...] = ()
    """Other roles that get the same value."""
    also: tuple[str, ...] = ()
    """Other fields of the plan that read back differently for it."""
    priced: bool = True
    """Whether the planner can price what is run."""
    carried: bool = False
    """Whether a comment of the launch holds it, so that it reads back as it was."""

    def unsaid(self, plan: Plan, given: Fields) -> Iterator[Unsaid]:
        """The field, where the plan has another value than what is run."""
        if not holds(self.when, given):
            return
        asked, runs = given[self.field], self.runs(plan) if callable(self.runs) else self.runs
        if asked != runs:
            yield Unsaid(
                self.what.format(asked),
                self.instead.format(runs),
                nearest=self._nearest(plan, runs) if self.priced else None,
                of=(*(() if self.carried else (_path(self.field),)), *self.also),
            )

    def _nearest(self, plan: Plan, runs: Any) -> Plan:
        root, _, name = self.field.partition(".")
        others = [role for role in self.roles if role in plan.placement.roles]
        for one in (root, *others):
            plan = _with(plan, one, name, runs)
        return plan


def instead(plan: Plan, *rows: Instead) -> Iterator[Unsaid]:
    """What of a plan is not said, by the rows of its framework."""
    given = PlanFields(plan, {})
    for row in rows:
        yield from row.unsaid(plan, given)


def _path(field: str) -> str:
    """The field as it is compared after a plan is read back."""
    root, _, name = field.partition(".")
    if root == "schedule":
        return root
    if root in ROLES and not name:
        return "roles"
    return f"{root}.layout.{name}" if root in ROLES and name not in ROLES[root] else field


def _with(plan: Plan, root: str, name: str, value: Any) -> Plan:
    """The plan with another value of one field of `root`."""
    if root == "reward" and value is None:
        return without_reward(plan)
    if not name:
        return with_placement(plan, **{root: value})
    if root == "schedule":
        return with_schedule(plan, **{name: value})
    if root == "workload":
        outer, _, last = name.rpartition(".")
        inner = replace(getattr(plan.workload, outer), **{last: value}) if outer else value
        return with_workload(plan, **{outer or name: inner})
    role = plan.placement.roles[root]
    change = {name: value} if name in ROLES[root] else {"layout": replace(role.layout, **{name: value})}
    return with_placement(plan, **{root: replace(role, **change)})


def old_logprobs(when: str = "") -> Instead:
    """The row of a trainer that never takes the old log-probs of the rollout."""
    return Instead(
        "workload.old_logprobs",
        lambda plan: "reused" if plan.workload.one_update else "recompute",
        "old log-probs of the rollout",
        "of one update a batch those of the training pass, of several computed again",
        f"workload.old_logprobs=rollout {when}",
    )


ONE_PASS = Instead(
    "workload.epochs", 1, "{} passes over a batch of given samples", "one: epochs are those of the data set"
)
"""The row of a trainer of given data."""
OWN_ENVIRONMENT = Instead(
    "workload.environment", None, "an environment", "it is code of your own, with its turns", priced=False
)
"""The row of a framework without keys of turns."""


def layers_whole(*others: str) -> Instead:
    """The row of a trainer with one switch for recomputation where Megatron-Core does not train."""
    return Instead(
        "actor.recompute",
        "full",
        "recompute of attention alone",
        "whole layers are computed again",
        "actor.recompute=selective !backend=megatron",
        roles=others,
        also=tuple(f"{role}.layout.recompute" for role in others),
    )


def scored_as_trained(*others: str) -> Instead:
    """The row of a trainer whose passes without gradients have the micro-batches of training."""
    return Instead(
        "actor.score_micro_batch",
        lambda plan: plan.placement.actor.layout.micro_batch,
        "micro-batches of {} samples without gradients",
        "{}, as in training",
        "!packs",
        roles=others,
        also=tuple(f"{role}.layout.score_micro_batch" for role in others),
    )


def generated_as_batch(plan: Plan) -> Iterator[Unsaid]:
    """A generation batch of another size than the batch, where dynamic sampling has no key for it."""
    work, sampling = plan.workload, plan.workload.dynamic_sampling
    if sampling is not None and sampling.prompts_of(work.prompts) != work.prompts:
        yield Unsaid(
            f"{sampling.prompts_of(work.prompts)} prompts of a generation batch",
            f"{work.prompts}, as the batch's",
            nearest=with_workload(plan, dynamic_sampling=replace(sampling, gen_prompts=None)),
            of=("workload.dynamic_sampling",),
        )


def long_samples(longest: int, pack: int | None, shown: int | None = None) -> Iterator[Unsaid]:
    """Samples that are longer than the packs of a plan."""
    if pack is not None and pack < longest:
        yield Unsaid(
            f"samples of {longest} tokens in packs of {shown or pack}",
            "a longer sample is a micro-batch of its own",
        )


def served_reward(instead: str, when: str = "") -> Instead:
    """The row of a framework whose keys name no reward model (`configuration/served_reward.py`)."""
    return Instead("reward", None, "a reward model", instead, when, carried=True)


def instead_of(framework: str, own: Mapping[str, Any]) -> tuple[Instead, ...]:
    """The rows of `unsaid.yaml` of a framework (the form: `rows`); `own`: what it names by `!the`."""
    made = {
        "OWN_ENVIRONMENT": OWN_ENVIRONMENT,
        "layers_whole": layers_whole,
        "old_logprobs": old_logprobs,
        "scored_as_trained": scored_as_trained,
        "served_reward": served_reward,
    }
    return tuple(chain.from_iterable(map(_rows, tagged(framework, "unsaid", {**made, **own}))))


def _rows(given: Any) -> tuple[Instead, ...]:
    if not isinstance(given, dict):
        return given if isinstance(given, tuple) else (given,)
    return (Instead(**given | {name: tuple(given.get(name, ())) for name in ("roles", "also")}),)
