"""What a log says against what was read of it: a wrong import is refused with both numbers and the remedy.

Held against each other are samples (tokens of a step over tokens of a sample), GPUs, the work of training and
the peak of the GPU, memory and the GPU, roles that are timed and roles of the plan, the longest response and
its limit, the timers of a step and the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from rlhfsim import units
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.described import RunDescription, RunSpecs
from rlhfsim.interchange.logs.framework import Framework
from rlhfsim.interchange.logs.records import total
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.workload.roles import ENDS, MODELS
from rlhfsim.units import GIB

OFF = 0.03
"""Share by which counts may differ: frameworks log rounded means."""
OVER = 0.1
"""Share by which the timers of a synchronous step may exceed it."""
ROLES = tuple(role for role in MODELS if role not in ENDS)
NOTHING_S = 0.001
"""A timer below this timed no work."""
_FORWARD_BACKWARD, _FROZEN = 6, 4
"""FLOP of a parameter and token at least: trained, and where only adapters are."""

Steps = Sequence[Mapping[str, float]]
"""Metrics of each step."""
Mapped = Mapping[str, tuple[str, ...]]
"""Metric -> phases that it covers."""
Found = tuple[str, str]
"""What contradicts what, and the remedy."""


def check_against_log(
    path: Path, framework: Framework, run: RunDescription, specs: RunSpecs, steps: Steps, mapped: Mapped
) -> None:
    """Refuse an import that the log contradicts.

    Raises:
        RlhfsimError: all contradictions, with both numbers and what to set.
    """
    found = [
        *_samples(framework, run, steps),
        *_gpus(framework, run, steps),
        *_training(framework, run, specs, steps, mapped),
        *_memory(framework, run, specs, steps),
        *_roles(framework, run, steps, mapped),
        *_longest(framework, run, steps),
        *_sum(framework, run, steps, mapped),
    ]
    if found:
        raise RlhfsimError(
            "log-contradicts-configuration",
            "; and ".join(what for what, _ in found),
            place=Place(file=str(path)),
            help=f"correct it: {'; '.join(dict.fromkeys(remedy for _, remedy in found))}",
        )


def _samples(framework: Framework, run: RunDescription, steps: Steps) -> Iterator[Found]:
    counts = [
        v[t] / each for v in steps for t in framework.tokens if t in v and (each := _length(framework, v))
    ]
    if not counts:
        return
    logged, read = median(counts), run.prompts * run.samples
    if abs(logged / read - 1) <= OFF:
        return
    samples, prompts = logged / run.prompts, logged / run.samples
    whole = abs(samples - round(samples)) <= OFF * samples and round(samples) > 0
    key, value = ("samples", samples) if whole else ("prompts", prompts)
    yield (
        f"the tokens of a step are those of {logged:,.0f} samples, the configuration says "
        f"{run.prompts:,} prompts x {run.samples} = {read:,}",
        _set(framework, key, f"{value:.0f}"),
    )


def _length(framework: Framework, values: Mapping[str, float]) -> float:
    """Tokens of a sample of this step; 0: not logged."""
    parts = [
        next((values[n] for n in names if n in values), 0.0)
        for names in (framework.prompt, framework.response)
    ]
    return math.fsum(parts) if all(parts) else 0.0


def _gpus(framework: Framework, run: RunDescription, steps: Steps) -> Iterator[Found]:
    counts = [count for values in steps if (count := framework.gpus_of(values)) is not None]
    whole = run.gpus + (run.rollout_gpus or 0)
    if counts and all(abs(median(counts) / read - 1) > OFF for read in (run.gpus, whole)):
        yield (
            f"the log's tokens a second and GPU are those of {median(counts):.0f} GPUs, the configuration "
            f"says {whole}",
            _set(framework, "gpus_per_node", "N"),
        )


def _training(
    framework: Framework, run: RunDescription, specs: RunSpecs, steps: Steps, mapped: Mapped
) -> Iterator[Found]:
    metric = next((m for m, covers in mapped.items() if _of_training(covers)), None)
    seconds = [v[metric] for v in steps if metric is not None and v.get(metric, 0.0) > 0]
    lengths = [length for v in steps if (length := _length(framework, v))]
    if not seconds or not lengths:
        return
    params = resolve_model(run.model).num_active_params
    tokens = run.prompts * run.samples * median(lengths) * max(1, run.epochs)
    flop = (_FROZEN if run.lora_rank else _FORWARD_BACKWARD) * params * tokens
    rate = flop / median(seconds) / run.gpus
    group = specs.cluster.node_groups[0]
    peak = group.profile.peak.get(run.train_precision) or group.profile.peak.get("bf16")
    if peak is not None and rate > peak.value:
        yield (
            f"training {tokens:,.0f} tokens of {run.model} in {units.format(median(seconds), 's')} on "
            f"{run.gpus} GPUs is {units.format(rate, 'flop/s')} a GPU, {group.profile.title} has at most "
            f"{units.format(peak.value, 'flop/s')}",
            f"--gpu, {_set(framework, 'model', 'NAME')} or {_set(framework, 'gpus_per_node', 'N')}",
        )


def _of_training(covers: Sequence[str]) -> bool:
    """Whether a timer times training of the policy and nothing else that works."""
    works = {name for name in covers if not name.endswith((".load", ".unload"))}
    return works == {"actor.train"}


def _memory(framework: Framework, run: RunDescription, specs: RunSpecs, steps: Steps) -> Iterator[Found]:
    held = [v[n] * GIB for v in steps for n in framework.reserved_gib if n in v]
    profile = specs.cluster.node_groups[0].profile
    size = profile.memory.value
    pool = (run.rollout.memory_utilization or 0.0) * size if run.rollout_gpus is None else 0.0
    if held and max(held) - pool > size:
        yield (
            f"the log reserved {units.format(max(held), 'byte')} of a GPU"
            + (f", {units.format(pool, 'byte')} of it the sleeping engine's" if pool else "")
            + f"; {profile.title} has {units.format(size, 'byte')}",
            "--gpu",
        )


def _roles(framework: Framework, run: RunDescription, steps: Steps, mapped: Mapped) -> Iterator[Found]:
    for timer in framework.timers:
        role = timer.phase.split(".")[0]
        times = [v[timer.metric] for v in steps if timer.metric in v]
        if role in ROLES and timer.metric not in mapped and times and median(times) > NOTHING_S:
            yield (
                f"{timer.metric} takes {units.format(median(times), 's')}, the configuration has no {role}",
                _set(framework, role, "true" if role == "reference" else "VALUE"),
            )


def _longest(framework: Framework, run: RunDescription, steps: Steps) -> Iterator[Found]:
    longest = max((v[n] for v in steps for n in framework.longest if n in v), default=0.0)
    if run.max_response and longest > run.max_response:
        yield (
            f"a response has {longest:,.0f} tokens, the configuration cuts at {run.max_response:,}",
            _set(framework, "max_response", f"{longest:.0f}"),
        )


def _sum(framework: Framework, run: RunDescription, steps: Steps, mapped: Mapped) -> Iterator[Found]:
    whole = [(v[framework.step], total(v.get(m, 0.0) for m in mapped)) for v in steps if framework.step in v]
    if not whole or run.staleness:
        return
    step, timed = median(s for s, _ in whole), median(t for _, t in whole)
    if timed > step * (1 + OVER):
        yield (
            f"the timers of a step add up to {units.format(timed, 's')}, the step takes "
            f"{units.format(step, 's')}: something runs at the same time",
            "give the configuration of the asynchronous run with --config",
        )


def _set(framework: Framework, what: str, value: str) -> str:
    return f"--set {framework.keys.get(what, 'KEY')}={value}"
