"""In which mode an engine runs a phase, and how much longer it then takes than priced (`biases`).

Not known here: modes that a plan does not say, such as the attention kernel.
"""

from __future__ import annotations

from rlhfsim.frameworks.costs import costs_of
from rlhfsim.specs.hardware.biases import bias_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.workload import Workload

KINDS = ("generate", "sync", "train", "logprob", "value", "score")
"""Calls that may have a bias; rule rewards and the controller are told in seconds."""


def biased(phase: str) -> bool:
    """Whether a phase is a call of an engine; moves between calls are not."""
    role, _, kind = phase.partition(".")
    return role != "rules" and kind in KINDS


def mode_of(phase: str, placement: Placement, workload: Workload) -> str:
    """`graphs` or `eager`, `packed` or `padded`, with `lora` where adapters are beside the weights.

    A weight sync is named by its path.
    """
    role, _, kind = phase.partition(".")
    if kind == "sync":
        return placement.weight_path
    if kind == "generate":
        layout = placement.rollout.layout if placement.rollout else None
        words = ["graphs" if layout is None or layout.cuda_graphs else "eager"]
        path = placement.weight_path
        apart = path != "none" and WEIGHT_PATHS[path].adapters_only
    else:
        words = ["packed" if workload.packing else "padded"]
        apart = role == "actor" and workload.lora is not None
    return " ".join([*words, "lora"] if apart else words)


def pool_of(phase: str, placement: Placement) -> str:
    """The pool that a phase runs in; of a weight sync the actor's."""
    role = phase.split(".")[0]
    if ".generate" in phase and placement.rollout is not None:
        return placement.rollout.pool
    placed = placement.roles.get(role)
    return placed.pool if placed is not None else placement.actor.pool


def bias(
    phase: str, placement: Placement, workload: Workload, cluster: Cluster, pool: str | None = None
) -> Coefficient | None:
    """Measured over priced seconds of a phase of a plan; None: as priced.

    A mode on whose runs the framework's costs were fitted takes nothing from runs of other modes.
    """
    if cluster.framework is None or not biased(phase):
        return None
    hardware = placement.pool(pool or pool_of(phase, placement)).hardware
    known = cluster.node_groups[hardware].profile.biases.get(cluster.framework)
    if known is None:
        return None
    mode = mode_of(phase, placement, workload)
    return bias_of(known, phase, mode, own_mode=mode in costs_of(cluster.framework).fitted_modes)
