"""What makes a plan fit: single changes of its placement, the gentlest first, then pairs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import Models, models_of
from rlhfsim.specs.placement.backends import violation
from rlhfsim.specs.placement.placement import Placement, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Workload

Edit = tuple[str, Callable[[Placement], Placement]]
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
MAX_PAIRS = 300


def remedy(placement: Placement, workload: Workload, cluster: Cluster) -> str | None:
    """The smallest change of the placement with which it fits; None when none of those tried does."""
    models = models_of(workload)
    edits = list(_edits(placement))
    groups = [(e,) for e in edits] + list(combinations(edits, 2))[:MAX_PAIRS]
    for group in groups:
        changed = placement
        for _, edit in group:
            changed = edit(changed)
        if _fits(changed, workload, cluster, models):
            return " and ".join(words for words, _ in group)
    return None


def _fits(placement: Placement, workload: Workload, cluster: Cluster, models: Models) -> bool:
    found: Ledger = ledger(models, placement, workload, cluster)
    return found.fits and found.probability_out_of_memory < 0.5


def _edits(placement: Placement) -> Iterator[Edit]:
    """Gentle first: memory share, micro-batch, recompute, moving states out, ZeRO, Adam on the host."""
    roles = {n: s for n, s in placement.roles.items() if isinstance(s, RolePlacement)}
    rollout = placement.rollout
    if rollout is not None:
        for share in SHARES:
            if share < rollout.layout.memory_utilization:
                yield f"memory_utilization {share} for the rollout", _rollout(layout_share=share)
    for name, role in roles.items():
        if role.layout.micro_batch > 1:
            yield f"micro_batch 1 for {name}", _role(name, micro_batch=1)
    for name, role in roles.items():
        trained = name in ("actor", "critic")
        if trained and role.layout.recompute != "full":
            yield f"recompute full for {name}", _role(name, recompute="full")
        if not trained and role.residency == "resident":
            yield f"weights of {name} on the host between its calls", _placed(name, residency="offloaded")
    if rollout is not None and rollout.sleep < 2 and rollout.pool == placement.actor.pool:
        yield "sleep 2 for the rollout", _rollout(sleep=2)
    for name, role in roles.items():
        yield from _heavier(placement, name, role)


def _heavier(placement: Placement, name: str, role: RolePlacement) -> Iterator[Edit]:
    for zero in range(role.layout.zero + 1, 4):
        if violation(placement.backend, replace(role.layout, zero=zero)) is None:
            yield f"ZeRO-{zero} for {name}", _role(name, zero=zero)
    if name in ("actor", "critic"):
        if not role.offload_between:
            yield f"optimizer of {name} on the host between its calls", _placed(name, offload_between=True)
        if role.layout.offload_optimizer == "none":
            yield f"Adam of {name} on the CPU", _role(name, offload_optimizer="cpu")


def _placed(name: str, **changes: object) -> Callable[[Placement], Placement]:
    def edit(placement: Placement) -> Placement:
        role = replace(placement.roles[name], **changes)  # type: ignore[arg-type]
        return replace(placement, **{name: role})  # type: ignore[arg-type]

    return edit


def _role(name: str, **changes: object) -> Callable[[Placement], Placement]:
    def edit(placement: Placement) -> Placement:
        layout = replace(placement.roles[name].layout, **changes)  # type: ignore[arg-type]
        return _placed(name, layout=layout)(placement)

    return edit


def _rollout(layout_share: float | None = None, sleep: int | None = None) -> Callable[[Placement], Placement]:
    def edit(placement: Placement) -> Placement:
        role = placement.rollout
        assert isinstance(role, RolloutPlacement)
        if layout_share is not None:
            role = replace(role, layout=replace(role.layout, memory_utilization=layout_share))
        if sleep is not None:
            role = replace(role, sleep=sleep)
        return replace(placement, rollout=role)

    return edit
