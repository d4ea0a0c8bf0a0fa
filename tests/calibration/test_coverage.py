"""Closed loop without hardware: planted coefficients are found again, inside their intervals as often as
stated.

Every seed is another world: true coefficients drawn from the priors, one run of each plan with 5 % noise from
step to step; of three seeds one has phases missing in two runs, and one a phase that takes three times as
long in
one whole run. Three plans in every test run; more seeds, and six plans, with -m long.

The statistic: identified coefficients whose P10 to P90 holds the truth, out of all identified ones. Stated
is 80 %; a rate passes whose Clopper-Pearson 99 % interval reaches 80 % or more. Coefficients of one seed
are not independent, so that interval is, if anything, too narrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest
from planted_plans import GPU, beliefs, planted_runs, six_plans, truth
from scipy.stats import beta

from lab.planted import Flaws
from rlhfsim.calibration.fit import calibrate
from rlhfsim.calibration.predict import RunPricer
from rlhfsim.calibration.priors import Prior
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile

STATED = 0.8
SEEDS = 24
LONG_SEEDS = 102
WAYS = ("noise", "missing phases", "outlier")
OFTEN = 20
"""Identifications from which a coefficient's own rate is looked at."""


@dataclass
class Tally:
    """What the seeds came to."""

    hits: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """By coefficient: did the interval hold the truth?"""
    by_way: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    narrower: list[float] = field(default_factory=list)
    """Width of ln interval after over before."""
    closer: list[bool] = field(default_factory=list)
    """Is the value nearer to the truth than the prior's?"""
    named: list[bool] = field(default_factory=list)
    """Outliers: was it named?"""

    @property
    def all(self) -> list[bool]:
        return [hit for hits in self.hits.values() for hit in hits]


def flaws_of(way: str, count: int, rng: np.random.Generator) -> Mapping[int, Flaws]:
    """What goes wrong in which of `count` runs."""
    phases = ("actor.train", "actor.logprob", "reference.logprob", "actor.sync")
    if way == "missing phases":
        return {
            i: Flaws(missing=frozenset(map(str, rng.choice(phases, size=1 + i % 2, replace=False))))
            for i in (0, count - 1)
        }
    if way == "outlier":
        return {int(rng.integers(count)): Flaws(slowed={str(rng.choice(phases[:3])): 3.0})}
    return {}


@contextmanager
def shared_prices() -> Iterator[None]:
    """Prices of the same run with the same coefficients, once for all seeds: most are taken at the priors."""
    price = RunPricer.seconds

    @lru_cache(maxsize=4096)
    def known(key: tuple[object, ...]) -> dict[str, float]:
        case, values = waiting.pop()
        return price(case, values)

    waiting: list[tuple[RunPricer, Mapping[str, float] | None]] = []

    def seconds(self: RunPricer, values: Mapping[str, float] | None = None) -> dict[str, float]:
        waiting[:] = [(self, values)]
        return known((self.seen.name, self.clocks, *sorted((values or {}).items())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunPricer, "seconds", seconds)
        yield


def tally(seeds: range, plans: tuple[Plan, ...]) -> Tally:
    """The closed loop for every seed."""
    profile = load_profile(GPU)
    known, found = beliefs(plans, profile), Tally()
    with shared_prices():
        for seed in seeds:
            one_world(seed, plans, profile, known, found)
    return found


def one_world(
    seed: int, plans: tuple[Plan, ...], profile: Profile, known: Mapping[str, Prior], found: Tally
) -> None:
    """The closed loop once."""
    rng, way = np.random.default_rng(seed), WAYS[seed % 3]
    world, flaws = truth(known, rng), flaws_of(way, len(plans), rng)
    fitted = calibrate(planted_runs(plans, profile, world, rng, flaws), profile, errors=False)
    for c in fitted.coefficients:
        hit = c.after.low <= world[c.name] <= c.after.high
        found.hits[c.name].append(hit)
        found.by_way[way].append(hit)
        if c.before.low > 0:
            found.narrower.append(np.log(c.after.high / c.after.low) / np.log(c.before.high / c.before.low))
        found.closer.append(
            abs(np.log(c.after.value / world[c.name])) < abs(np.log(c.before.value / world[c.name]))
        )
    if way == "outlier":
        [(run, flaw)] = flaws.items()
        found.named.append(any(o.startswith(f"r{run}, {next(iter(flaw.slowed))}") for o in fitted.outliers))


def interval(hits: list[bool]) -> tuple[float, float]:
    """Clopper-Pearson, 99 %."""
    k, n = sum(hits), len(hits)
    low = float(beta.ppf(0.005, k, n - k + 1)) if k else 0.0
    return low, float(beta.ppf(0.995, k + 1, n - k)) if k < n else 1.0


def figures(found: Tally) -> str:
    """The table of docs/calibration.md."""
    rows = [("all", found.all), *found.by_way.items(), *sorted(found.hits.items())]
    lines = [
        f"{name:32s} {len(h):5d} {np.mean(h):6.1%}  {interval(h)[0]:.1%} - {interval(h)[1]:.1%}"
        for name, h in rows
    ]
    lines.append(
        f"width after / before: median {np.median(found.narrower):.2f}; narrower than before: {np.mean(np.array(found.narrower) < 1):.1%}"
    )
    lines.append(
        f"nearer to the truth than before: {np.mean(found.closer):.1%}; outliers named: {np.mean(found.named):.1%} of {len(found.named)}"
    )
    return "\n".join(lines)


def check(found: Tally) -> None:
    """Coverage as stated: of all, of every way to go wrong, of every coefficient."""
    assert interval(found.all)[1] >= STATED, figures(found)
    for way in WAYS:
        assert interval(found.by_way[way])[1] >= STATED, f"{way}\n{figures(found)}"
    for name, hits in found.hits.items():
        assert len(hits) < OFTEN or interval(hits)[1] >= STATED, f"{name}\n{figures(found)}"
    assert np.mean(np.array(found.narrower) < 1) > 0.9
    assert np.mean(found.closer) > 0.7


def test_intervals_hold_the_truth_as_often_as_stated() -> None:
    check(tally(range(SEEDS), six_plans()[:3]))


@pytest.mark.long
@pytest.mark.parametrize(("first", "plans"), [(SEEDS, 3), (2000, 6)])
def test_the_same_over_more_seeds(first: int, plans: int) -> None:
    check(tally(range(first, first + LONG_SEEDS), six_plans()[:plans]))


if __name__ == "__main__":  # figures of docs/calibration.md: python THIS_FILE FIRST_SEED END_SEED PLANS
    import sys

    sys.stdout.write(
        figures(tally(range(int(sys.argv[1]), int(sys.argv[2])), six_plans()[: int(sys.argv[3])])) + "\n"
    )
