"""What the configuration of a framework can say of a plan that the framework runs.

The search offers what can be said, so that what is exported is what was designed; `unsaid` of an export names
the rest. Each framework's reader (`configuration`) is the other side of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Literal

from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import AnyRolePlacement, RolePlacement, Schedule, model_cut
from rlhfsim.specs.workload.workload import Workload

Between = Literal["stays", "optimizer leaves", "leaves"]
"""What a trained or scoring role does between its calls."""
SleepLevel = Literal[0, 1, 2]
Aspect = Literal["cut", "groups", "virtual stages", "scoring", "training", "between", "leaves"]
"""What several roles may have to share: the cut of their weights, the groups of ranks alone, the number of
virtual stages, the size of scoring micro-batches (in samples or tokens), how they are trained, what they do
between their calls, or only whether all of them leaves."""

READS: Mapping[Aspect, tuple[str, ...]] = {
    "cut": ("tp", "pp", "cp", "ep", "etp", "shards", "zero", "offload_params"),
    "groups": ("tp", "pp", "cp", "ep", "etp"),
    "virtual stages": ("vp",),
    "scoring": ("cp", "pack_tokens", "score_pack_tokens", "micro_batch", "score_micro_batch"),
    "training": (
        *("zero", "vp", "recompute", "offload_optimizer", "offload_fraction"),
        *("cp", "pack_tokens", "micro_batch"),
    ),
    "between": (),
    "leaves": (),
}
"""Fields of a layout that `value_of` an aspect reads."""


@frozen
class Places:
    """Where states may be between the calls of a role."""

    between: Mapping[str, tuple[Between, ...]] = field(default_factory=dict)
    """Trained or scoring role -> what can be said; of a role that is missing, everything."""
    sleep: tuple[SleepLevel, ...] = (0, 1, 2)
    """Sleep levels of a rollout; one that receives adapters keeps its base weights, by level 1 for 2."""


@frozen
class Same:
    """An aspect that one key says for several roles, or that one process has once for all of them."""

    aspect: Aspect
    roles: tuple[str, ...]
    backends: tuple[Backend, ...] | None = None
    """Training backends for which that is so; None: all."""
    in_a_pool: bool = False
    """Whether it is so only for those that share their GPUs."""


FROZEN_BASE = Same(aspect="cut", roles=("actor", "reference"), in_a_pool=True)
"""With adapters alone in training, the actor's frozen weights give reference log-probs, as they lie there."""


@frozen
class Says:
    """What can be said in addition to the features that are run; the defaults: everything."""

    moves_with: Literal["rollout", "any"] | None = None
    """Whose presence on a role's GPUs decides between `sharing` and `alone`; None: nobody's. For a rollout
    it is always the actor's."""
    sharing: Places = field(default_factory=Places)
    alone: Places = field(default_factory=Places)
    same: tuple[Same, ...] = ()
    leaves_under: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages under which a role that only scores can leave for the host."""
    rollout_with: Literal["any", "actor", "all"] = "any"
    """Who shares GPUs with the rollout: anybody, only the actor and others with it, or all or nobody."""
    groups: tuple[frozenset[str], ...] | None = None
    """Sets of roles that may share GPUs without the rollout and without the others; None: any."""
    own_gpus: Collection[str] | None = None
    """Roles that may have GPUs of their own, each alone, other than those of actor and rollout; None: any."""
    own_gpus_apart: Collection[str] = ()
    """Those that must where the rollout has."""
    all_apart: Literal["always", "asynchronous"] = "always"
    """When all roles may share GPUs but the rollout."""
    waits_apart: bool = True
    """A rollout on GPUs of its own may wait for every update."""
    interrupts: Literal["may", "continuous", "always"] = "may"
    """Which asynchronous rollouts go on with the weights of an update in the middle of a sample, willing or
    not: none, those that never drain, or all."""
    each_update: bool = False
    """A rollout that never drains gets new weights with every update, and old log-probs are its own."""
    sequences: int | None = None
    """Sequences at a time of a rollout replica that no key changes."""
    sequences_of_batch: bool = False
    """On the actor's GPUs they are the samples of a batch on the ranks of a replica."""
    prefill: Mapping[bool, int] = field(default_factory=dict)
    """Tokens of a prefill of an engine that no key changes, where it shares the GPUs that train or not."""
    packs: bool = False
    """Packed micro-batches are counted in tokens even where all samples are equally long."""
    whole_updates: bool = False
    """The samples of an optimizer step on a rank are whole micro-batches."""
    packed_contexts: tuple[Backend, ...] = ()
    """Training backends that cut a sequence over ranks only where samples are packed."""
    adapters_alone: tuple[Backend, ...] = ()
    """Training backends that send adapters alone, never merged."""

    def alike(self, backend: Backend) -> tuple[Same, ...]:
        """What several roles share where this backend trains."""
        return tuple(each for each in self.same if each.backends is None or backend in each.backends)

    def places(self, *, shares: bool) -> Places:
        """What a role may do that shares its GPUs or not, see `moves_with`."""
        return self.sharing if shares else self.alone

    def shares(self, role: str, group: Collection[str]) -> bool:
        """Whether a role of a pool with `group` counts as sharing; False where that makes no difference."""
        if role == "rollout":
            decides = self.sharing.sleep != self.alone.sleep or self.sequences_of_batch
            return decides and "actor" in group
        if self.moves_with == "any":
            return len(group) > 1
        return self.moves_with == "rollout" and "rollout" in group

    def together(self, groups: Sequence[Collection[str]], schedule: Schedule) -> bool:
        """Whether it can be said that these sets of roles share GPUs each."""
        if not self._own_gpus(groups):
            return False
        beside_rollout = next((group for group in groups if "rollout" in group and len(group) > 1), None)
        if beside_rollout is not None and self.rollout_with != "any":
            return len(groups) == 1 or (self.rollout_with == "actor" and "actor" in beside_rollout)
        others = [set(group) for group in groups if "rollout" not in group]
        if self.groups is None or all(len(g) == 1 or frozenset(g) in self.groups for g in others):
            return True
        return len(others) == 1 and self.all_apart == "asynchronous" and schedule.asynchronous

    def _own_gpus(self, groups: Sequence[Collection[str]]) -> bool:
        """Whether the roles that have GPUs of their own may, and those that must do."""
        own = [set(group) for group in groups if not {"actor", "rollout"} & set(group)]
        if self.own_gpus is not None and not all(len(g) == 1 and g <= set(self.own_gpus) for g in own):
            return False
        rollout_alone = any(set(group) == {"rollout"} for group in groups)
        must = {role for group in groups for role in group} & set(self.own_gpus_apart)
        return not rollout_alone or all({role} in own for role in must)

    def when(self, schedule: Schedule, workload: Workload, *, apart: bool) -> bool:
        """Whether a schedule can be said."""
        single = workload.mini_batches == 1 and workload.old_logprobs == "rollout"
        if schedule.continuous and self.each_update and not single:
            return False
        if not schedule.asynchronous:
            return self.waits_apart or not apart
        whole = self.interrupts == "always" or (self.interrupts == "continuous" and schedule.continuous)
        return schedule.partial_rollout or not whole

    def engine(self, layout: RolloutLayout, samples: int, gpus: int, *, shares: bool) -> int:
        """Sequences at a time of a replica, for a batch of `samples` on `gpus` GPUs."""
        if self.sequences_of_batch and shares:
            return max(1, samples // gpus) * layout.tp
        return self.sequences or layout.max_num_seqs


def between(role: RolePlacement) -> Between:
    """What a trained or scoring role does between its calls; a swapped one has nothing that could leave."""
    if role.residency == "offloaded":
        return "leaves"
    return "optimizer leaves" if role.offload_between else "stays"


def value_of(aspect: Aspect, placed: AnyRolePlacement, backend: Backend) -> object:
    """What must be equal where one key says an aspect for several roles."""
    assert isinstance(placed, RolePlacement)
    layout = placed.layout
    match aspect:
        case "cut":
            return *model_cut(layout, backend), layout.zero == 3
        case "groups":
            return layout.tp, layout.pp, layout.cp, layout.ep, layout.etp
        case "virtual stages":
            return layout.vp
        case "scoring":
            return layout.pack(scoring=True), layout.sequences(scoring=True)
        case "between":
            return between(placed)
        case "leaves":
            return between(placed) == "leaves"
        case "training":
            size = layout.pack(scoring=False), layout.micro_batch
            hosted = layout.offload_optimizer, layout.offload_fraction
            return layout.zero, layout.vp, layout.recompute, *hosted, *size
