"""Which coefficients a set of runs can tell, and why not the others.

With B = Sigma^-1/2 J P^1/2 (effect of one prior standard deviation in units of the noise), chosen S, and
a candidate k, the data shrink the doubt about k, when all of S is fitted with it, to

    posterior / prior = 1 / sqrt(1 + g)        g = b_k^T (I + B_S B_S^T)^-1 b_k

S begins with the biases of the framework (`biases`). The candidate with the largest g joins S until no
ratio is below `NARROWER`. A coefficient that moves the same phases as one of S gains nothing more: only their
combination can be seen.

These effects are those at the priors. A coefficient that the fit puts far from its own may have an
`OtherCause` that was not chosen. The likelier of the two is fitted, that with the smaller F (`interval`), and
its interval reaches to its prior where F differs by less than `AS_LIKELY`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfsim.calibration.interval import carried_squares, objective
from rlhfsim.calibration.posterior import UNKNOWN_MISMATCH, Floats, Posterior, PriceModel, fit
from rlhfsim.calibration.priors import Prior
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90

NARROWER = 0.8
"""A posterior wider than this share of its prior says nothing new."""
WIDER = 1.0
"""Share of the prior's width beyond which what is not known of others hides a coefficient: its fitted value
would then be farther from the truth than the prior's, in the mean square."""
AS_LIKELY = 2 * math.log(0.9 / 0.1)
"""Difference of -2 ln posterior within which the less likely of two explanations lies inside P10 to P90."""
NO_EFFECT = 0.01
"""Change of ln seconds, for one prior standard deviation, below which a phase does not depend on it."""


HIDDEN = "what is not known of others that move the same phases hides it"


@frozen
class Unidentified:
    """A coefficient that keeps its prior."""

    name: str
    reason: str
    collinear_with: str | None = None
    """The fitted coefficient that represents it; None where the runs say nothing."""


def moved_by(model: PriceModel, known: Sequence[Prior]) -> list[bool]:
    """Whether any coefficient moves a datum; one that none moves says nothing, however far it is off."""
    return [max(map(abs, row), default=0.0) >= NO_EFFECT for row in _effects(model, known).tolist()]


def identify(model: PriceModel, known: Sequence[Prior]) -> tuple[list[Prior], list[Unidentified]]:
    """Coefficients that these data can tell, and the others with a reason.

    Those that no phase depends on are in neither list.
    """
    effect = _effects(model, known)
    matter = [k for k in range(len(known)) if np.abs(effect[:, k]).max(initial=0.0) >= NO_EFFECT]
    sigma = np.array([np.hypot(d.scatter, 0.0 if d.within else UNKNOWN_MISMATCH) for d in model.data])
    scaled = effect / sigma[:, None]
    chosen = _chosen(scaled, matter, [k for k in matter if known[k].is_bias])
    rest = [k for k in matter if k not in chosen]
    return [known[k] for k in chosen], [_reason(scaled, known, k, chosen) for k in rest]


def _effects(model: PriceModel, known: Sequence[Prior]) -> Floats:
    """Change of ln seconds of every datum for one prior standard deviation of every coefficient."""
    widths = np.array([p.width for p in known], dtype=np.float64)
    return np.asarray(model.slopes({}, [p.name for p in known]) * widths, dtype=np.float64)


def _chosen(scaled: Floats, matter: Sequence[int], start: Sequence[int]) -> list[int]:
    """`start`: what is fitted whatever it gains, as its prior says all that pulls it back."""
    chosen = list(start)
    while left := [k for k in matter if k not in chosen]:
        gains = {k: _gain(scaled, k, chosen) for k in left}
        best = max(left, key=lambda k: (gains[k], -k))
        if _ratio(gains[best]) > NARROWER:
            break
        chosen.append(best)
    return chosen


def _gain(scaled: Floats, k: int, chosen: Sequence[int]) -> float:
    """b^T (I + B B^T)^-1 b, by the inverse of the smaller matrix."""
    b, others = scaled[:, k], scaled[:, chosen]
    inner = np.eye(len(chosen)) + others.T @ others
    shared = others.T @ b
    return float(b @ b - shared @ np.linalg.solve(inner, shared)) if chosen else float(b @ b)


def _ratio(gain: float) -> float:
    """Posterior over prior standard deviation."""
    return float(1 / np.sqrt(1 + max(0.0, gain)))


def _reason(scaled: Floats, known: Sequence[Prior], k: int, chosen: Sequence[int]) -> Unidentified:
    name, alone = known[k].name, _ratio(_gain(scaled, k, ()))
    if alone > NARROWER or not chosen:
        return Unidentified(
            name=name, reason=f"these runs would leave {alone:.0%} of its doubt".replace("%", " %")
        )
    norms = np.linalg.norm(scaled, axis=0)
    like = {c: abs(scaled[:, k] @ scaled[:, c]) / (norms[k] * norms[c]) for c in chosen}
    return _twin(name, known[max(like, key=lambda c: like[c])].name)


def blurred(model: PriceModel, posterior: Posterior) -> Prior | None:
    """The fitted coefficient that the doubt of the others leaves widest, if too wide."""
    carried = np.maximum(*carried_squares(model, posterior, Z90))
    widths = np.sqrt(np.diag(posterior.own) + carried)
    ratios = [
        0.0 if p.is_bias else float(ratio)
        for p, ratio in zip(posterior.priors, widths / posterior.deviations, strict=True)
    ]
    worst = max(range(len(ratios)), key=ratios.__getitem__, default=None)
    return None if worst is None or ratios[worst] <= WIDER else posterior.priors[worst]


@frozen
class OtherCause:
    """Another explanation of times that a coefficient is fitted to far from its prior."""

    item: Prior
    """The coefficient that is fitted."""
    other: Prior
    """One that explains them in its place."""
    gain: float
    """By how much -2 ln posterior is smaller with the other."""


def other_causes(model: PriceModel, posterior: Posterior, left: Sequence[Unidentified]) -> list[OtherCause]:
    """Explanations of what lies outside its P10 to P90 that are about as likely, the likeliest first.

    Which of two coefficients moves the same phases more is decided at their priors. Far from there a latency
    of which less is known may be the likelier cause.
    """
    here = objective(posterior, posterior.residuals)
    twins = {u.name: u.collinear_with for u in left}
    found = []
    for item, theta in zip(posterior.priors, posterior.theta, strict=True):
        if not item.is_bias and abs(theta - item.mean) > Z90 * item.deviation(theta):
            for other in (p for p in posterior.others if twins.get(p.name) == item.name):
                instead = fit(model, _exchanged(posterior.priors, item, other))
                gain = here - objective(replace(instead, sigma=posterior.sigma), instead.residuals)
                found.append(OtherCause(item=item, other=other, gain=gain))
    likely = (cause for cause in found if cause.gain > -AS_LIKELY)
    return sorted(likely, key=lambda cause: -cause.gain)


def _exchanged(chosen: Sequence[Prior], item: Prior, other: Prior) -> list[Prior]:
    return [other if p is item else p for p in chosen]


def settled(posterior: Posterior) -> list[Prior]:
    """Fitted coefficients whose posterior, with the noise as it turned out, is narrower than the prior."""
    narrow = np.sqrt(np.diag(posterior.own)) <= NARROWER * posterior.deviations + 1e-12
    return [p for p, is_so in zip(posterior.priors, narrow, strict=True) if is_so or p.is_bias]


def fitted(model: PriceModel, known: Sequence[Prior]) -> tuple[Posterior, list[Unidentified]]:
    """The posterior of what can be identified, and what cannot.

    What has a likelier cause gives way to it, once. What turns out wider than it should, with the noise as
    estimated, is dropped and the rest fitted again.
    """
    chosen, left = identify(model, known)
    start: Posterior | None = None
    gave_way: list[OtherCause] = []
    while True:
        others = [p for p in known if p.name in {u.name for u in left}]
        posterior = fit(model, chosen, others, start)
        causes = other_causes(model, posterior, left)
        gone = {cause.item.name for cause in gave_way}
        likelier = next((x for x in causes if x.gain > 0 and x.other.name not in gone), None)
        if likelier is not None:
            item, other = likelier.item, likelier.other
            gave_way.append(likelier)
            chosen, start = _exchanged(chosen, item, other), None
            twins = {item.name, *(u.name for u in left if u.collinear_with == item.name)} - {other.name}
            left = [u for u in left if u.name not in (*twins, other.name)]
            left += [_twin(name, other.name) for name in sorted(twins)]
            continue
        kept, reason = settled(posterior), "the runs scatter too much to tell"
        if len(kept) == len(chosen):
            worst = blurred(model, posterior)
            kept, reason = [p for p in chosen if p is not worst], HIDDEN
        if len(kept) == len(chosen):
            as_likely = {cause.other.name for cause in gave_way if cause.gain < AS_LIKELY}
            return replace(posterior, doubted=as_likely | {cause.item.name for cause in causes}), left
        left += [Unidentified(name=p.name, reason=reason) for p in chosen if p not in kept]
        chosen, start = kept, posterior.of(kept)


def _twin(name: str, fitted: str) -> Unidentified:
    return Unidentified(name=name, reason=f"moves the same phases as {fitted}", collinear_with=fitted)
