"""In which mode an engine runs a phase, and how much longer it then takes than priced (`biases`).

Not known here: modes that a plan does not say, such as the attention kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlhfsim.frozen import frozen
from rlhfsim.specs.frameworks.costs import costs_of
from rlhfsim.specs.hardware.calibrated import Point, beyond, bias_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload

KINDS = ("generate", "sync", "train", "logprob", "value", "score")
"""Calls that may have a bias; rule rewards and the controller are told in seconds."""


def biased(phase: str) -> bool:
    """Whether a phase is a call of an engine; moves between calls are not."""
    role, _, kind = phase.partition(".")
    return role != "rules" and kind in KINDS


def mode_of(phase: str, placement: Placement, workload: Workload) -> str:
    """`graphs` or `eager`, `packed` or `padded`, with `lora` where there are adapters next to the weights.

    A weight sync is named by its path.
    """
    role, _, kind = phase.partition(".")
    if kind == "sync":
        return placement.weight_path
    if kind == "generate":
        layout = placement.rollout.layout if placement.rollout else None
        words = ["graphs" if layout is None or layout.captured else "eager"]
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


@frozen
class Bias:
    """How much longer a phase takes than priced, where the plan lies."""

    factor: Coefficient
    common: float
    """Share of the variance of ln factor that all calls of a step have in common."""


def point_of(params: float, pool: str, placement: Placement, workload: Workload) -> Point:
    """Where a phase lies (`specs.hardware.calibrated.COORDINATES`); `params` of its role's model."""
    numbers = (
        params,
        workload.num_sequences,
        stats(workload.prompt_len).mean,
        stats(workload.response_len).mean,
        placement.pool(pool).gpus,
    )
    a, b, c, d, e = (math.log(max(1.0, float(x))) for x in numbers)
    return a, b, c, d, e


def bias(
    phase: str,
    params: float,
    placement: Placement,
    workload: Workload,
    cluster: Cluster,
    pool: str | None = None,
) -> Bias | None:
    """Measured over priced seconds of a phase of a plan; None: as priced.

    A mode on whose runs the framework's costs were fitted takes nothing from runs of other modes. `params`
    of the role's model say how near the plan lies to the runs.
    """
    if cluster.framework is None or not biased(phase):
        return None
    name = pool or pool_of(phase, placement)
    known = cluster.node_groups[placement.pool(name).hardware].profile.biases.get(cluster.framework)
    if known is None:
        return None
    mode = mode_of(phase, placement, workload)
    entry = bias_of(known, phase, mode, own_mode=mode in costs_of(cluster.framework).fitted_modes)
    if entry is None:
        return None
    if not entry.near:
        return Bias(factor=entry.factor, common=entry.common)
    more = math.exp(beyond(entry.near, point_of(params, name, placement, workload)))
    value, low, high = (x * more for x in (entry.factor.value, entry.factor.low, entry.factor.high))
    return Bias(factor=replace(entry.factor, value=value, low=low, high=high), common=entry.common)
