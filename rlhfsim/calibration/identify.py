"""Which coefficients a set of runs can tell, and why not the others.

With B = Sigma^-1/2 J P^1/2 (effect of one prior standard deviation in units of the noise), chosen S, and
a candidate k, the data shrink the doubt about k, when all of S is fitted with it, to

    posterior / prior = 1 / sqrt(1 + g)        g = b_k^T (I + B_S B_S^T)^-1 b_k

S begins with the biases of the framework (`biases`). The candidate with the largest g joins S until no
ratio is below `NARROWER`. A coefficient that moves the same phases as one of S gains nothing more: only their
combination can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfsim.calibration.interval import carried_squares
from rlhfsim.calibration.posterior import UNKNOWN_MISMATCH, Floats, Posterior, PriceModel, fit
from rlhfsim.calibration.priors import Prior
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Z90

ROUNDS = 5
"""Most times that coefficients are dropped and the rest fitted again."""
NARROWER = 0.8
"""A posterior wider than this share of its prior says nothing new."""
WIDER = 1.0
"""Share of the prior's width beyond which what is not known of others hides a coefficient: its fitted value
would then be farther from the truth than the prior's, in the mean square."""
NO_EFFECT = 0.01
"""Change of ln seconds, for one prior standard deviation, below which a phase does not depend on it."""


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
    twin = known[max(like, key=lambda c: like[c])].name
    return Unidentified(name=name, reason=f"moves the same phases as {twin}", collinear_with=twin)


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


def settled(posterior: Posterior) -> list[Prior]:
    """Fitted coefficients whose posterior, with the noise as it turned out, is narrower than the prior."""
    narrow = np.sqrt(np.diag(posterior.own)) <= NARROWER * posterior.deviations + 1e-12
    return [p for p, is_so in zip(posterior.priors, narrow, strict=True) if is_so or p.is_bias]


def fitted(model: PriceModel, known: Sequence[Prior]) -> tuple[Posterior, list[Unidentified]]:
    """The posterior of what can be identified, and what cannot.

    What turns out wider than it should, with the noise as estimated, is dropped and the rest fitted again.
    """
    chosen, left = identify(model, known)
    start: Posterior | None = None
    for _ in range(ROUNDS):
        others = [p for p in known if p.name in {u.name for u in left}]
        posterior = fit(model, chosen, others, start)
        kept, reason = settled(posterior), "the runs scatter too much to tell"
        if len(kept) == len(chosen):
            worst, reason = (
                blurred(model, posterior),
                "what is not known of others that move the same phases hides it",
            )
            kept = [p for p in chosen if p is not worst]
        if len(kept) == len(chosen):
            break
        left += [Unidentified(name=p.name, reason=reason) for p in chosen if p not in kept]
        chosen, start = kept, posterior.of(kept)
    return posterior, left
