"""Metrics of an iteration under their usual names, from its samples, engines, spans and memory.

    reward/{mean,std,min,max}              over samples
    reward/<rule>, reward/model            means before their weights, where rewards are a sum
    reward/dropped                         samples whose reward failed: they teach nothing
    reward/critical_share                  share of the step in which rules are all that works
    rules/<rule>/{samples,tries,failed,...}, latency/<rule>/{p50,p99}_s   how a rule fared: operations.py
    sampling/{generated,equal,surplus}_groups   dynamic sampling: all, those that taught nothing, those beyond
                                           the step (in synchronous schedules)
    sampling/late_{groups,tokens}          thrown away because they were too old
    lend/{seconds,tokens,moved}            the trainer's GPUs generated: how long, how many tokens, and
                                           responses that went on elsewhere afterwards
    sampling/{kept_share,reward_mean}      groups whose rewards differ; mean over all that was generated
    kl/teacher_<n>                         the same mean over the samples of one of several teachers
    kl/{mean,max}                          k3 of policy against reference: over tokens; largest of a sample
    policy/{loss,entropy,clip_fraction,grad_norm,...}   value/{loss,explained_var,...}
    policy/not_finite_rank                 first rank whose own sums are not finite, where there is one
    throughput/{tokens_per_sec,samples_per_sec}   prompt and response over the wall time of the iteration
    memory/{peak_gb,allocated_gb,host_gb}  used at most on the fullest GPU by all of its processes; tensors of
                                           the process that holds most; at most on the fullest node
    memory/planned_gb                      peak of the plan's ledger, where its GPUs are counted
    time/<phase>                           seconds, by the names of the plan's phases
    staleness/{mean,max}                   trainer's version - oldest version among the tokens of a sample
    response/{length_mean,length_max,truncated}
    environment/{turns,seconds}_{mean,max}, environment/tokens_mean    of a sample
    environment/{timeouts,errors}          conversations that ended with one
    mismatch/{mean_abs_dlogp,max_abs_dlogp,kl}    rollout against training engine, on the tokens that the
                                           weights which learn have sampled
    staleness/mean_abs_dlogp               the same on the tokens of older weights: the policy moved as well

What was not measured has no entry; there is no placeholder for unknown. Legend: N samples, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from executor.algorithms.iteration import Learned
from executor.algorithms.kl import kl
from executor.coordination.tracing import ENGINE_KINDS
from executor.engines.teachers import teacher_of
from executor.samples import Floats, Sample
from rlhfsim.trace import Span, covered
from rlhfsim.units import GB

Row = dict[str, float]
Array = NDArray[np.float64]
RANK = "not_finite_rank"
PREFIXES = {"actor": "policy", "critic": "value"}
"""Role -> prefix of those of its metrics that carry none."""


def sample_metrics(samples: Sequence[Sample], version: int, teachers: int = 1) -> Row:
    """Rewards, lengths, KL, staleness and mismatch of the samples that `version` is about to learn from."""
    row = _rewards(samples) | _lengths(samples) | _environment(samples) | _staleness(samples, version)
    row |= _kl_by_teacher(samples, teachers) if teachers > 1 else {}
    return row | _kl(samples) | _mismatch(samples, version) | _explained(samples)


def _rewards(samples: Sequence[Sample]) -> Row:
    rewards = np.array([s.reward for s in samples if s.reward is not None], dtype=np.float64)
    if not len(rewards):
        return {}
    row = _named("reward", mean=rewards.mean(), std=rewards.std(), min=rewards.min(), max=rewards.max())
    names = dict.fromkeys(name for s in samples for name in s.rewards or {})
    if len(names) > 1:
        by_rule = {n: [s.rewards[n] for s in samples if s.rewards and n in s.rewards] for n in names}
        row |= _named("reward", **{name: np.mean(values) for name, values in by_rule.items()})
    dropped = sum(s.dropped for s in samples)
    return row | ({"reward/dropped": float(dropped)} if dropped else {})


def _lengths(samples: Sequence[Sample]) -> Row:
    if not samples:
        return {}
    lengths = np.array([s.num_tokens for s in samples])
    cut = np.mean([s.finish == "length" for s in samples])
    return _named("response", length_mean=lengths.mean(), length_max=lengths.max(), truncated=cut)


def _environment(samples: Sequence[Sample]) -> Row:
    talks = [s.conversation for s in samples if s.conversation is not None]
    if not talks:
        return {}
    turns, seconds = ([getattr(t, name) for t in talks] for name in ("turns", "seconds"))
    faults = [t.fault.kind for t in talks if t.fault is not None]
    return _named(
        "environment",
        turns_mean=np.mean(turns),
        turns_max=max(turns),
        seconds_mean=np.mean(seconds),
        seconds_max=max(seconds),
        tokens_mean=np.mean([np.sum(~t.sampled) for t in talks]),
        timeouts=faults.count("timeout"),
        errors=faults.count("error"),
    )


def _staleness(samples: Sequence[Sample], version: int) -> Row:
    ages = [version - int(s.versions.min()) for s in samples if s.versions is not None and len(s.versions)]
    return _named("staleness", mean=np.mean(ages), max=max(ages)) if ages else {}


def _kl(samples: Sequence[Sample]) -> Row:
    """Before the update; an engine that computes a KL inside the loss reports one during it."""
    pairs = _pairs(samples, lambda s: (_policy(s), s.reference_logprobs))
    if not pairs:
        return {}
    each = [_k3(policy - reference) for policy, reference in pairs]
    return _named("kl", mean=np.concatenate(each).mean(), max=max(values.mean() for values in each))


def _kl_by_teacher(samples: Sequence[Sample], teachers: int) -> Row:
    """KL of the policy and each teacher over that teacher's own samples."""
    shared: dict[int, list[Sample]] = {}
    for sample in samples:
        shared.setdefault(teacher_of(sample, teachers), []).append(sample)
    means = {f"teacher_{number}": _kl(mine).get("kl/mean") for number, mine in sorted(shared.items())}
    return _named("kl", **{name: mean for name, mean in means.items() if mean is not None})


def _policy(sample: Sample) -> Floats | None:
    return sample.rollout_logprobs if sample.old_logprobs is None else sample.old_logprobs


def _mismatch(samples: Sequence[Sample], version: int) -> Row:
    """k3(rollout || training): tokens were drawn from the rollout engine. Of unknown version: of this one."""
    compared = [s for s in samples if s.rollout_logprobs is not None and s.old_logprobs is not None]
    pairs = _pairs(compared, lambda s: (s.rollout_logprobs, s.old_logprobs))
    if not pairs:
        return {}
    gap = np.concatenate([rollout - old for rollout, old in pairs])
    now = np.concatenate([_sampled_by(version, s) for s in compared])
    row = _named("staleness", mean_abs_dlogp=np.abs(gap[~now]).mean()) if not now.all() else {}
    if not now.any():
        return row
    gap = gap[now]
    return row | _named(
        "mismatch", mean_abs_dlogp=np.abs(gap).mean(), max_abs_dlogp=np.abs(gap).max(), kl=_k3(gap).mean()
    )


def _sampled_by(version: int, sample: Sample) -> NDArray[np.bool_]:
    """Whether these weights sampled it, of each sampled token."""
    whole = np.full(sample.num_sampled, True)
    return whole if sample.versions is None else sample.versions[sample.sampled] == version


def _k3(log_ratio: Array) -> Array:
    """In float64: of log-ratios near 1e-4 float32 would leave nothing but rounding."""
    return cast(Array, kl(cast(Any, log_ratio), "k3", np.exp))


def _explained(samples: Sequence[Sample]) -> Row:
    """1 - Var(return - value) / Var(return) over tokens; nothing where returns do not vary."""
    pairs = _pairs(samples, lambda s: (s.returns, s.values))
    if not pairs:
        return {}
    returns, values = (np.concatenate(side) for side in zip(*pairs, strict=True))
    spread = returns.var()
    return {"value/explained_var": float(1 - (returns - values).var() / spread)} if spread > 1e-12 else {}


def _pairs(
    samples: Iterable[Sample], fields: Callable[[Sample], tuple[Floats | None, Floats | None]]
) -> list[tuple[Array, Array]]:
    """float64 pairs at the sampled tokens of the samples that have both, at least one token long."""
    return [
        (a[s.sampled].astype(np.float64), b[s.sampled].astype(np.float64))
        for s in samples
        for a, b in [fields(s)]
        if a is not None and b is not None and s.num_sampled
    ]


def _named(prefix: str, **values: float | np.floating | np.integer) -> Row:
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def engine_metrics(role: str, steps: Sequence[Mapping[str, float]]) -> Row:
    """Means over the optimizer steps of an iteration, of a rank the first; names without a prefix get that of
    the role."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    prefix = PREFIXES.get(role, role)
    return {
        name if "/" in name else f"{prefix}/{name}": each[0] if name == RANK else float(np.mean(each))
        for name, each in values.items()
    }


def throughput(samples: Sequence[Sample], seconds: float) -> Row:
    """Rates over the wall time of the iteration."""
    if seconds <= 0:
        return {}
    tokens = sum(sample.length for sample in samples)
    return _named("throughput", tokens_per_sec=tokens / seconds, samples_per_sec=len(samples) / seconds)


def memory(readings: Iterable[tuple[str, Mapping[str, float]]]) -> Row:
    """From (node, reading by the keys of `engines.memory`) of every process.

    Host peaks of the processes of one node are added: pages that they share count more than once.
    """
    peak, allocated, host = 0.0, 0.0, dict[str, float]()
    for node, reading in readings:
        peak = max(peak, reading.get("device_peak", 0.0))
        allocated = max(allocated, reading.get("peak", 0.0))
        host[node] = host.get(node, 0.0) + reading.get("host_peak", 0.0)
    if not host:
        return {}
    most = max(host.values())
    return _named("memory", peak_gb=peak / GB, allocated_gb=allocated / GB, host_gb=most / GB)


def times(spans: Iterable[Span], step: int) -> Row:
    """Seconds of every phase of an iteration: those of the GPU group that was busy longest with it.

    Durations only, so clocks need not agree.
    """
    totals: dict[tuple[str, str, str], float] = {}
    for span in spans:
        if span.step == step and span.kind != "wait":
            key = (span.name, span.pool, span.group)
            totals[key] = totals.get(key, 0.0) + span.seconds
    row: Row = {}
    for (name, _, _), seconds in totals.items():
        row[f"time/{name}"] = max(row.get(f"time/{name}", 0.0), seconds)
    return row


def critical_share(spans: Sequence[Span], step: int, seconds: float) -> Row:
    """Share of an iteration in which nothing but its rules works; empty without rules."""
    busy = [s for s in spans if s.kind in ENGINE_KINDS]
    ruled = [(s.start_s, s.end_s) for s in busy if s.role == "rules" and s.step == step]
    others = [(s.start_s, s.end_s) for s in busy if s.role != "rules"]
    both, without = (sum(end - start for start, end in covered(w)) for w in (ruled + others, others))
    return {"reward/critical_share": max(0.0, both - without) / seconds} if ruled and seconds > 0 else {}


def iteration_metrics(
    learned: Learned,
    seconds: float,
    spans: Iterable[Span],
    readings: Iterable[tuple[str, Mapping[str, float]]] = (),
    *,
    teachers: int = 1,
) -> Row:
    """The row of an iteration that took `seconds`; what its samples say comes before what engines say."""
    row = engine_metrics("actor", learned.actor) | engine_metrics("critic", learned.critic)
    row |= sample_metrics(learned.samples, learned.version, teachers) | throughput(learned.samples, seconds)
    row |= learned.sampling
    spans = tuple(spans)
    row |= critical_share(spans, learned.step, seconds)
    return row | memory(readings) | times(spans, learned.step) | {"time/step": seconds}
