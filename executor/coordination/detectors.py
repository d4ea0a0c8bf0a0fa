"""What goes wrong in a run, seen in its metrics: pure functions over the rows so far, newest last.

Each says what was measured against what, or None; `DETECTORS` adds what to change. Limits are for a mean over
thousands of tokens, they ask for several steps in a row or for a multiple of what was usual
before, so that noise raises no alarm (tests/executor/test_detectors.py: healthy runs over many seeds).
`Detectors` say a finding once, and again when it returns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.units import format as shown

logger = logging.getLogger(__name__)
Row = Mapping[str, float]
History = Sequence[Row]
"""Rows of metrics.jsonl in order."""
Severity = Literal["stop", "warn"]
Array = NDArray[np.float64]
STEPS, USUAL_STEPS, WINDOW = 3, 20, 5
"""Steps in a row that must be wrong, steps before them that say what is usual, steps of a mean reward."""
EXPLOSION, LOSS_FLOOR, GRAD_NORM_FLOOR = 10.0, 0.1, 1.0
"""Times the usual size; losses and norms below the floors do not explode."""
MISMATCH = 0.1
"""Mean |log-prob of rollout - log-prob of training|; the alarm of slime's continuous integration."""
LEAP = 3.0
"""Times the usual gap of tokens that older weights sampled."""
KL, KL_FLOOR = 0.5, 0.1
"""Nats a token; below the floor a KL does not blow up, whatever was usual."""
ENTROPY_SHARE, ENTROPY = 0.1, 0.1
"""Share of the entropy at the start; nats a token, above which no entropy counts as collapsed."""
TRUNCATED = 0.3
"""Share of responses that were cut."""
SLOW = 1.25
"""Times the upper end of the predicted interval."""
REWARD_DROP = 0.75
"""Standard deviations of rewards inside a batch."""
FAILING, FAILED = 0.1, 3
"""Share of a rule's tries, and how many at least, that fail in two steps."""
KEPT = 0.6
"""Times the share of groups that the plan counts on: two thirds more is generated than was priced."""
CLIPPED = 0.3
"""Share of clipped tokens at which old rollouts hurt."""


@frozen
class Detection:
    """Something that is wrong."""

    code: str
    """Stable name, as in `reward-collapsed`."""
    severity: Severity
    """stop: further steps destroy the model."""
    what: str
    """What was measured against what."""
    advice: str
    """What to change."""

    def __str__(self) -> str:
        return f"{self.code}: {self.what}; {self.advice}"


@frozen
class Expected:
    """What the plan says."""

    generate: PredictedPhase | None = None
    """None: not predicted for this hardware."""
    staleness: float = 0.0
    """Bound of the schedule, versions."""
    kept: float | None = None
    """Share of the groups that dynamic sampling keeps; None: it keeps all."""


def expected(plan: Plan, *, priced_here: bool = True) -> Expected:
    """What a plan leads to expect; `priced_here` False: it was priced for other hardware (a CPU run)."""
    phase = next((p for p in plan.prediction.phases if p.name == "actor.generate"), None)
    sampling = plan.workload.dynamic_sampling
    return Expected(
        generate=phase if priced_here else None,
        staleness=plan.placement.schedule.staleness,
        kept=None if sampling is None else sampling.kept,
    )


# --- numbers that are none, or far too large --------------------------------------------------------


def non_finite(history: History, plan: Expected) -> str | None:
    """A metric of the newest step is nan or infinite."""
    row = history[-1]
    bad = [f"{name} is {value}" for name, value in row.items() if not math.isfinite(value)]
    ranks = {name.partition("/")[0]: rank for name, rank in row.items() if name.endswith("/not_finite_rank")}
    first = [f"rank {rank:.0f} of the {role}" for role, rank in ranks.items()]
    where = f", first on {', '.join(first)}" if first else ""
    return f"{', '.join(bad[:4])} in iteration {_step(history) + 1}{where}" if bad else None


def exploding(history: History, plan: Expected) -> str | None:
    """Loss or gradient norm far above what was usual, two steps in a row."""
    watched = {
        "policy/loss": LOSS_FLOOR,
        "value/loss": LOSS_FLOOR,
        "policy/grad_norm": GRAD_NORM_FLOOR,
        "value/grad_norm": GRAD_NORM_FLOOR,
    }
    for name, floor in watched.items():
        now, usual = _newest(np.abs(_series(history, name)))
        if len(now) and now.min() > max(EXPLOSION * usual, floor):
            return f"|{name}| is {now[-1]:.3g}, usual was {usual:.3g}"
    return None


def kl_blow_up(history: History, plan: Expected) -> str | None:
    """The policy leaves the reference."""
    now, usual = _newest(_series(history, "kl/mean"))
    if not len(now) or now.min() <= min(KL, max(KL_FLOOR, EXPLOSION * usual)):
        return None
    return f"kl/mean is {now[-1]:.3g} nats a token"


# --- rewards and policy -----------------------------------------------------------------------------


def equal_rewards(history: History, plan: Expected) -> str | None:
    """All samples of a batch have the same reward, several steps in a row: nothing can be learnt."""
    now = _last(history, "reward/std", STEPS)
    if not len(now) or now.max() > 1e-8:
        return None
    reward = history[-1].get("reward/mean", math.nan)
    return f"every sample of the last {STEPS} steps has reward {reward:.3g}"


def falling_reward(history: History, plan: Expected) -> str | None:
    """The mean reward of the last steps is far below its best, in terms of both noises.

    Rewards inside a batch vary by `reward/std`, means of batches by the noise between steps (from the median
    of their absolute differences); the fall must exceed 0.75 of the first, 4 of the second, and a quarter of
    the range of all steps, in each of the last three windows.
    """
    rewards = _series(history, "reward/mean")
    if len(rewards) < 3 * WINDOW or not np.isfinite(rewards).all():
        return None
    smooth = np.convolve(rewards, np.full(WINDOW, 1 / WINDOW), mode="valid")
    span = float(np.ptp(rewards))
    between = 1.4826 * float(np.median(np.abs(np.diff(rewards)))) / math.sqrt(2)
    inside = float(np.median(_series(history, "reward/std"))) if "reward/std" in history[-1] else 0.0
    fall = float(smooth.max() - smooth[-STEPS:].max())
    if fall <= max(REWARD_DROP * inside, 4 * between, 0.25 * span, 1e-6):
        return None
    best = _step(history) - len(smooth) + 2 + int(smooth.argmax())
    return f"reward/mean fell from {smooth.max():.3g} (iteration {best}) to {smooth[-1]:.3g}"


def entropy_collapse(history: History, plan: Expected) -> str | None:
    """The policy has become deterministic: samples of one prompt no longer differ."""
    series = _series(history, "policy/entropy")
    if len(series) < 5 + STEPS:
        return None
    start, now = float(np.median(series[:5])), series[-STEPS:]
    if now.max() >= min(ENTROPY_SHARE * start, ENTROPY):
        return None
    return f"policy/entropy is {now[-1]:.3g} nats a token, {start:.3g} at the start"


def truncated_responses(history: History, plan: Expected) -> str | None:
    """Many responses end at the length limit: what they were about to say is not rewarded."""
    now = _last(history, "response/truncated", STEPS)
    if not len(now) or now.min() <= TRUNCATED:
        return None
    return f"{now.mean():.0%} of the responses of the last {STEPS} steps were cut"


def failing_rule(history: History, plan: Expected) -> str | None:
    """A reward rule fails often, whatever further tries make good, or is no longer asked."""
    names = [key.split("/")[1] for key in history[-1] if key.startswith("rules/") and key.endswith("/tries")]
    for name in names:
        failed, skipped, tries = (
            sum(row.get(f"rules/{name}/{count}", 0.0) for row in history[-2:])
            for count in ("failed_tries", "skipped", "tries")
        )
        if failed + skipped >= FAILED and failed + skipped > FAILING * (tries + skipped):
            gone = f", and {skipped:.0f} samples were not asked for" if skipped else ""
            return f"{failed:.0f} of the last {tries:.0f} tries of rule {name} failed{gone}"
    return None


# --- rollout ----------------------------------------------------------------------------------------


def mismatch(history: History, plan: Expected) -> str | None:
    """Rollout and training engine disagree about the tokens that were sampled.

    Where all of them are of older weights, the policy moved as well: then only a leap of two steps counts.
    """
    now = _last(history, "mismatch/mean_abs_dlogp", 1)
    if len(now) and now[0] > MISMATCH:
        return f"mean |log-prob of rollout - log-prob of training| is {now[0]:.3g}, limit {MISMATCH:g}"
    stale, usual = _newest(_series(history, "staleness/mean_abs_dlogp"))
    if len(now) or not len(stale) or stale.min() <= max(MISMATCH, LEAP * usual):
        return None
    gap = "mean |log-prob of rollout - log-prob of training|, the rollout's weights older,"
    return f"{gap} is {stale[-1]:.3g}, usual was {usual:.3g}"


def too_old(history: History, plan: Expected) -> str | None:
    """Samples older than the schedule allows."""
    oldest = _last(history, "staleness/max", 1)
    if not len(oldest) or oldest[0] <= math.ceil(plan.staleness):
        return None
    return f"the oldest sample is {oldest[0]:.0f} versions old, the schedule allows {plan.staleness:g}"


def old_and_clipped(history: History, plan: Expected) -> str | None:
    """Old samples together with much clipping."""
    ages, clipped = (_last(history, name, STEPS) for name in ("staleness/mean", "policy/clip_fraction"))
    if not (len(ages) and len(clipped) and ages.min() >= 1 and clipped.min() > CLIPPED):
        return None
    share = f"{clipped[-1]:.0%} of their tokens are clipped"
    return f"samples are {ages[-1]:.1f} versions old on average and {share}"


def few_kept(history: History, plan: Expected) -> str | None:
    """Dynamic sampling throws away more than the plan counts on."""
    now = _last(history, "sampling/kept_share", STEPS)
    if plan.kept is None or not len(now) or now.max() >= KEPT * plan.kept:
        return None
    return f"{now.mean():.0%} of the groups have rewards that differ, the plan counts on {plan.kept:.0%}"


def slow_generation(history: History, plan: Expected) -> str | None:
    """Generation takes longer than the plan's interval; the first step (warm-up) does not count."""
    now, phase = _last(history[1:], "time/actor.generate", STEPS), plan.generate
    if phase is None or not len(now) or np.median(now) <= SLOW * phase.high_s:
        return None
    row = history[-1]
    known = "time/actor.generate" in row and row.get("time/step", 0.0) > 0
    share = f" ({row['time/actor.generate'] / row['time/step']:.0%} of the step)" if known else ""
    interval = f"{shown(phase.low_s, 's')} to {shown(phase.high_s, 's')}"
    seconds = shown(float(np.median(now)), "s")
    return f"actor.generate takes {seconds}{share}, predicted {shown(phase.seconds, 's')} ({interval})"


# --- all --------------------------------------------------------------------------------------------

Detector = Callable[[History, Expected], str | None]
DETECTORS: tuple[tuple[Detector, str, str], ...] = (
    (
        exploding,
        "exploding",
        "lower the learning rate, clip gradients tighter (optimizer.max_grad_norm), "
        "look at the rewards of the last batches",
    ),
    (
        kl_blow_up,
        "kl-blow-up",
        "raise algorithm.kl_coefficient, lower the learning rate, or fewer epochs a batch",
    ),
    (
        equal_rewards,
        "rewards-equal",
        "check the reward (does it recognise a right answer?), add diversity: temperature, "
        "more samples a prompt, prompts of other difficulty",
    ),
    (
        falling_reward,
        "reward-falling",
        "go back to a checkpoint near the best and lower the learning rate or raise algorithm.kl_coefficient",
    ),
    (
        entropy_collapse,
        "entropy-collapsed",
        "raise algorithm.clip_high or algorithm.entropy_coefficient, lower the learning rate; "
        "harmless where the task is solved",
    ),
    (
        failing_rule,
        "reward-rule-failing",
        "look at what it calls (the run's log names samples and reasons): a judge that is overloaded "
        "(judge.concurrency, timeout_s), a function that raises",
    ),
    (truncated_responses, "responses-truncated", "raise sampling.max_tokens, or reward short answers"),
    (
        mismatch,
        "logprob-mismatch",
        "check that the weight sync is complete (tied embeddings), that temperature and precision agree on "
        "both sides, and keep algorithm.correction on",
    ),
    (
        too_old,
        "rollouts-stale",
        "sync weights more often (shorter sync interval), or raise schedule.staleness",
    ),
    (
        old_and_clipped,
        "rollouts-stale",
        "sync weights more often or lower schedule.staleness, or lower the learning rate",
    ),
    (
        few_kept,
        "groups-kept",
        "take prompts of another difficulty, or design again with the share that was seen "
        "(--dynamic-sampling)",
    ),
    (
        slow_generation,
        "generation-slow",
        "look at the inference engine: preemptions (KV cache too small), max_num_seqs, few long responses "
        "at the end, CUDA graphs off; then calibrate the profile",
    ),
)
"""What looks, the code of its finding, and what to change, the likeliest first."""


def findings(history: History, plan: Expected) -> tuple[Detection, ...]:
    """Everything that is wrong in the newest step, one finding a code."""
    if not history:
        return ()
    if bad := non_finite(history, plan):  # nothing else means much then
        advice = (
            "go back to the last checkpoint with a lower learning rate or tighter gradient clipping "
            "(optimizer.max_grad_norm)"
        )
        return (Detection(code="not-finite", severity="stop", what=bad, advice=advice),)
    by_code: dict[str, Detection] = {}
    for detect, code, advice in DETECTORS:
        if code not in by_code and (what := detect(history, plan)):
            by_code[code] = Detection(code=code, severity="warn", what=what, advice=advice)
    return tuple(by_code.values())


class Detectors:
    """Say a finding when it appears, not while it lasts, and again when it returns."""

    def __init__(self, plan: Plan | Expected, *, priced_here: bool = False) -> None:
        """`plan`: what the run is measured against; `priced_here`: its seconds are those of this hardware."""
        self._plan = plan if isinstance(plan, Expected) else expected(plan, priced_here=priced_here)
        self._lasting: set[str] = set()

    def look(self, history: History) -> tuple[Detection, ...]:
        """New findings after a step; the caller ends the run where one says `stop`."""
        lasting = findings(history, self._plan)
        new = tuple(finding for finding in lasting if finding.code not in self._lasting)
        self._lasting = {finding.code for finding in lasting}
        for finding in new:
            logger.log(logging.ERROR if finding.severity == "stop" else logging.WARNING, "%s", finding)
        return new


def _step(history: History) -> int:
    return int(history[-1].get("step", len(history) - 1))


def _series(history: History, name: str) -> Array:
    """Values of the steps that have it, in order."""
    return np.array([row[name] for row in history if name in row], dtype=np.float64)


def _last(history: History, name: str, steps: int) -> Array:
    """The newest values, one a step; empty where one of these steps lacks it."""
    rows = history[-steps:]
    complete = len(rows) == steps and all(name in row for row in rows)
    return _series(rows if complete else (), name)


def _newest(series: Array) -> tuple[Array, float]:
    """The two newest values, and the median of those before; infinite where these are too few to tell."""
    if len(series) < 2:
        return series[:0], math.inf
    before = series[-2 - USUAL_STEPS : -2]
    return series[-2:], float(np.median(before)) if len(before) >= 8 else math.inf
