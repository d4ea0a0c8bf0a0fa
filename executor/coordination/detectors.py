"""What goes wrong in a run, seen in its metrics: pure functions over the rows so far, newest last.

Each returns a `Finding` or None and says what was measured, against what, and what to change. Limits are
for a mean over thousands of tokens, they ask for several steps in a row or for a multiple of what was usual
before, so that noise raises no alarm (tests/executor/test_detectors.py: healthy runs over many seeds).
`Detectors` say a finding once, and again when it returns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.units import format as shown

logger = logging.getLogger(__name__)
Row = Mapping[str, float]
History = Sequence[Row]
"""Rows of metrics.jsonl in order."""
Severity = Literal["stop", "warn"]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong."""

    code: str
    """Stable name, as in `reward-collapsed`."""
    severity: Severity
    """stop: further steps destroy the model."""
    what: str
    """What was measured against what."""
    advice: str
    """What to change, the likeliest first."""

    def __str__(self) -> str:
        return f"{self.code}: {self.what}; {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLimits:
    """When a metric counts as wrong."""

    steps: int = 3
    """Steps in a row."""
    usual: int = 20
    """Steps before those that say what is usual."""
    explosion: float = 10.0
    """Times the usual size."""
    loss_floor: float = 0.1
    """Losses below this do not explode."""
    grad_norm_floor: float = 1.0
    mismatch: float = 0.1
    """Mean |log-prob of rollout - log-prob of training|; the alarm of slime's continuous integration."""
    kl: float = 0.5
    """Nats a token."""
    kl_floor: float = 0.1
    """A KL below this does not blow up, whatever was usual."""
    entropy_share: float = 0.1
    """Of the entropy at the start."""
    entropy: float = 0.1
    """Nats a token; above it no entropy counts as collapsed."""
    truncated: float = 0.3
    """Share of responses that were cut."""
    slow: float = 1.25
    """Times the upper end of the predicted interval."""
    reward_drop: float = 0.75
    """Standard deviations of rewards inside a batch."""
    clipped: float = 0.3
    """Share of clipped tokens at which stale rollouts hurt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the plan says."""

    generate: PredictedPhase | None = None
    """None: not predicted for this hardware."""
    staleness: float = 0.0
    """Bound of the schedule, versions."""


def expected(plan: Plan, *, priced_here: bool = True) -> Expected:
    """Of a plan; `priced_here` False: it was priced for other hardware than it runs on (a CPU run)."""
    phase = next((p for p in plan.prediction.phases if p.name == "actor.generate"), None)
    return Expected(generate=phase if priced_here else None, staleness=plan.placement.schedule.staleness)


# --- numbers that are none, or far too large --------------------------------------------------------


def non_finite(history: History) -> Finding | None:
    """A metric of the newest step is nan or infinite."""
    bad = [f"{name} is {value}" for name, value in history[-1].items() if not math.isfinite(value)]
    if not bad:
        return None
    return Finding(
        code="not-finite",
        severity="stop",
        what=f"{', '.join(bad[:4])} in step {_step(history)}",
        advice="go back to the last checkpoint with a lower learning rate or tighter gradient clipping (optimizer.max_grad_norm)",
    )


def exploding(history: History, limits: AlarmLimits) -> Finding | None:
    """Loss or gradient norm far above what was usual, two steps in a row."""
    watched = {
        "policy/loss": limits.loss_floor,
        "value/loss": limits.loss_floor,
        "policy/grad_norm": limits.grad_norm_floor,
        "value/grad_norm": limits.grad_norm_floor,
    }
    for name, floor in watched.items():
        now, before = _split(np.abs(_series(history, name)), 2, limits.usual)
        usual = float(np.median(before)) if len(before) >= 8 else math.inf
        if len(now) and now.min() > max(limits.explosion * usual, floor):
            return Finding(
                code="exploding",
                severity="warn",
                what=f"|{name}| is {now[-1]:.3g}, usual was {usual:.3g}",
                advice="lower the learning rate, clip gradients tighter (optimizer.max_grad_norm), look at the rewards of the last batches",
            )
    return None


def kl_blow_up(history: History, limits: AlarmLimits) -> Finding | None:
    """The policy leaves the reference."""
    now, before = _split(_series(history, "kl/mean"), 2, limits.usual)
    if not len(now):
        return None
    usual = float(np.median(before)) if len(before) >= 8 else math.inf
    if now.min() <= min(limits.kl, max(limits.kl_floor, limits.explosion * usual)):
        return None
    return Finding(
        code="kl-blow-up",
        severity="warn",
        what=f"kl/mean is {now[-1]:.3g} nats a token",
        advice="raise algorithm.kl_coefficient, lower the learning rate, or fewer epochs a batch",
    )


# --- rewards and policy -----------------------------------------------------------------------------


def equal_rewards(history: History, limits: AlarmLimits) -> Finding | None:
    """All samples of a batch have the same reward, several steps in a row: nothing can be learnt."""
    now = _last(history, "reward/std", limits.steps)
    if not len(now) or now.max() > 1e-8:
        return None
    reward = history[-1].get("reward/mean", math.nan)
    return Finding(
        code="rewards-equal",
        severity="warn",
        what=f"every sample of the last {limits.steps} steps has reward {reward:.3g}",
        advice="check the reward (does it recognise a right answer?), add diversity: temperature, more samples a prompt, prompts of other difficulty",
    )


def falling_reward(history: History, limits: AlarmLimits, window: int = 5) -> Finding | None:
    """The mean reward of the last steps is far below its best, in terms of both noises.

    Rewards inside a batch vary by `reward/std`, means of batches by the noise between steps (from the median
    of their absolute differences); the fall must exceed 0.75 of the first, 4 of the second, and a quarter of
    the range of all steps, in each of the last three windows.
    """
    rewards = _series(history, "reward/mean")
    if len(rewards) < 3 * window or not np.isfinite(rewards).all():
        return None
    smooth = np.convolve(rewards, np.full(window, 1 / window), mode="valid")
    span = float(np.ptp(rewards))
    between = 1.4826 * float(np.median(np.abs(np.diff(rewards)))) / math.sqrt(2)
    inside = float(np.median(_series(history, "reward/std"))) if "reward/std" in history[-1] else 0.0
    fall = float(smooth.max() - smooth[-limits.steps :].max())
    if fall <= max(limits.reward_drop * inside, 4 * between, 0.25 * span, 1e-6):
        return None
    return Finding(
        code="reward-falling",
        severity="warn",
        what=f"reward/mean fell from {smooth.max():.3g} (step {_step(history) - len(smooth) + 1 + int(smooth.argmax())}) to {smooth[-1]:.3g}",
        advice="go back to a checkpoint near the best and lower the learning rate or raise algorithm.kl_coefficient",
    )


def entropy_collapse(history: History, limits: AlarmLimits) -> Finding | None:
    """The policy has become deterministic: samples of one prompt no longer differ."""
    series = _series(history, "policy/entropy")
    if len(series) < 5 + limits.steps:
        return None
    start, now = float(np.median(series[:5])), series[-limits.steps :]
    if now.max() >= min(limits.entropy_share * start, limits.entropy):
        return None
    return Finding(
        code="entropy-collapsed",
        severity="warn",
        what=f"policy/entropy is {now[-1]:.3g} nats a token, {start:.3g} at the start",
        advice="raise algorithm.clip_high or algorithm.entropy_coefficient, lower the learning rate; harmless where the task is solved",
    )


def truncated_responses(history: History, limits: AlarmLimits) -> Finding | None:
    """Many responses end at the length limit: what they were about to say is not rewarded."""
    now = _last(history, "response/truncated", limits.steps)
    if not len(now) or now.min() <= limits.truncated:
        return None
    return Finding(
        code="responses-truncated",
        severity="warn",
        what=f"{now.mean():.0%} of the responses of the last {limits.steps} steps were cut",
        advice="raise sampling.max_tokens, or reward short answers",
    )


# --- rollout ----------------------------------------------------------------------------------------


def mismatch(history: History, limits: AlarmLimits) -> Finding | None:
    """Rollout and training engine disagree about the tokens that were sampled."""
    now = _last(history, "mismatch/mean_abs_dlogp", 1)
    if not len(now) or now[0] <= limits.mismatch:
        return None
    return Finding(
        code="logprob-mismatch",
        severity="warn",
        what=f"mean |log-prob of rollout - log-prob of training| is {now[0]:.3g}, limit {limits.mismatch:g}",
        advice="check that the weight sync is complete (tied embeddings), that temperature and precision agree on both sides, and keep algorithm.correction on",
    )


def stale_rollouts(history: History, limits: AlarmLimits, plan: Expected) -> Finding | None:
    """Samples older than the schedule allows, or old ones together with much clipping."""
    oldest = _last(history, "staleness/max", 1)
    if len(oldest) and oldest[0] > math.ceil(plan.staleness):
        return Finding(
            code="rollouts-stale",
            severity="warn",
            what=f"the oldest sample is {oldest[0]:.0f} versions old, the schedule allows {plan.staleness:g}",
            advice="sync weights more often (shorter sync interval), or raise schedule.staleness",
        )
    ages, clipped = (
        _last(history, name, limits.steps) for name in ("staleness/mean", "policy/clip_fraction")
    )
    if len(ages) and len(clipped) and ages.min() >= 1 and clipped.min() > limits.clipped:
        return Finding(
            code="rollouts-stale",
            severity="warn",
            what=f"samples are {ages[-1]:.1f} versions old on average and {clipped[-1]:.0%} of their tokens are clipped",
            advice="sync weights more often or lower schedule.staleness, or lower the learning rate",
        )
    return None


def slow_generation(history: History, limits: AlarmLimits, plan: Expected) -> Finding | None:
    """Generation takes longer than the plan's interval; the first step (warm-up) does not count."""
    if plan.generate is None:
        return None
    now = _last(history[1:], "time/actor.generate", limits.steps)
    if not len(now) or np.median(now) <= limits.slow * plan.generate.high_s:
        return None
    phase, share = plan.generate, _share(history)
    return Finding(
        code="generation-slow",
        severity="warn",
        what=f"actor.generate takes {shown(float(np.median(now)), 's')}{share}, predicted {shown(phase.seconds, 's')} ({shown(phase.low_s, 's')} to {shown(phase.high_s, 's')})",
        advice="look at the inference engine: preemptions (KV cache too small), max_num_seqs, few long responses at the end, CUDA graphs off; then calibrate the profile",
    )


def _share(history: History) -> str:
    row = history[-1]
    if "time/step" not in row or "time/actor.generate" not in row or row["time/step"] <= 0:
        return ""
    return f" ({row['time/actor.generate'] / row['time/step']:.0%} of the step)"


# --- all --------------------------------------------------------------------------------------------


def findings(history: History, plan: Expected, limits: AlarmLimits | None = None) -> tuple[Finding, ...]:
    """Everything that is wrong in the newest step."""
    if not history:
        return ()
    limits = limits or AlarmLimits()
    if stop := non_finite(history):  # nothing else means much then
        return (stop,)
    found = (
        exploding(history, limits),
        kl_blow_up(history, limits),
        equal_rewards(history, limits),
        falling_reward(history, limits),
        entropy_collapse(history, limits),
        truncated_responses(history, limits),
        mismatch(history, limits),
        stale_rollouts(history, limits, plan),
        slow_generation(history, limits, plan),
    )
    return tuple(finding for finding in found if finding)


class Detectors:
    """Say a finding when it appears, not while it lasts, and again when it returns."""

    def __init__(
        self, plan: Plan | Expected, limits: AlarmLimits | None = None, *, priced_here: bool = False
    ) -> None:
        """`plan` is what the run is measured against; `priced_here`: its seconds are those of this hardware."""
        self._plan = plan if isinstance(plan, Expected) else expected(plan, priced_here=priced_here)
        self._limits = limits or AlarmLimits()
        self._lasting: set[str] = set()

    def look(self, history: History) -> tuple[Finding, ...]:
        """New findings after a step; the caller ends the run where one says `stop`."""
        found = findings(history, self._plan, self._limits)
        new = tuple(finding for finding in found if finding.code not in self._lasting)
        self._lasting = {finding.code for finding in found}
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


def _split(series: Array, now: int, usual: int) -> tuple[Array, Array]:
    """The newest values and those before them; nothing where there are too few."""
    if len(series) < now:
        return series[:0], series[:0]
    return series[-now:], series[-now - usual : -now]
