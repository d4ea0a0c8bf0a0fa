"""What one measured run says about another: the cost model's doubts, settled by its times.

The idea of the fit (`posterior`) where nothing but priced costs is at hand. Every part of a cost rests on a
coefficient or curve k and carries P10 and P90 of true over predicted seconds. Parts on one k move together:

    t_i(z) = sum_p seconds_p e^(s_p z_k(p))      s_p = ln(P90) / z90 for z > 0, -ln(P10) / z90 for z < 0
    minimise  sum_i ((ln m_i - ln t_i(z)) / tau)^2 + sum_k z_k^2

m_i: measured seconds of a phase, or of the step where only that is known; tau: what the model gets wrong
from run to run, which a single run cannot tell (`posterior.UNKNOWN_MISMATCH`). Another run is then sum_p of
its own parts at the same z. A part without doubt stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from rlhfsim.calibration.posterior import UNKNOWN_MISMATCH, Floats
from rlhfsim.calibration.priors import MAX_DOUBT
from rlhfsim.kernels.cost import Z90, Cost, Part

MOST_Z = 6.0
"""Bound of every z: a surprise of one in a billion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One time of a run: what was predicted, and what was measured."""

    cost: Cost
    measured_s: float


def settled(times: Sequence[Timed], tau: float = UNKNOWN_MISMATCH) -> dict[str, float]:
    """z by coefficient, in standard deviations of its doubt."""
    names = list(dict.fromkeys(p.rests_on for t in times for p in t.cost.parts if doubtful(p)))
    if not names:
        return {}
    measured = np.log([t.measured_s for t in times])

    def residuals(z: Floats) -> Floats:
        at = dict(zip(names, z, strict=True))
        logs = np.array([math.log(seconds(t.cost, at)) for t in times])
        return np.concatenate([(measured - logs) / tau, z])

    solved = least_squares(residuals, np.zeros(len(names)), bounds=(-MOST_Z, MOST_Z))
    return dict(zip(names, map(float, solved.x), strict=True))


def seconds(cost: Cost, z: Mapping[str, float]) -> float:
    """A cost with its doubts settled at z; what z does not name stays as predicted."""
    return math.fsum(p.seconds * math.exp(_move(p, z.get(p.rests_on, 0.0))) for p in cost.parts)


def doubtful(part: Part) -> bool:
    """Whether a part takes time and carries an interval."""
    return part.seconds > 0 and part.spread[1] > part.spread[0]


def _move(part: Part, z: float) -> float:
    """ln of true over predicted seconds at z."""
    edge = part.spread[1] if z > 0 else part.spread[0]
    wide = min(MAX_DOUBT, abs(math.log(edge)) / Z90) if edge > 0 else MAX_DOUBT
    return z * wide
