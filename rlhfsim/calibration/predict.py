"""What the cost model says about an observed run, with coefficients of one's choice.

The run's plan is priced again on the profile as it is now: coefficients replaced, lengths those that were
measured, KV capacity held (calibration is about time). Only profiles of one name are changed, so a
cluster of two kinds of GPUs is calibrated one kind at a time.

    elasticity of phase f to coefficient k    e = d ln t_f / d ln theta_k    by a difference

Not known here: memory; and contention on shared links, which only the simulation of a step knows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace

from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.pieces import Pieces
from rlhfsim.calibration.priors import NODES
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.memory.ledger import ledger
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.costs import costs_of, with_software
from rlhfsim.specs.hardware.hardware import AT_LEAST_ONE, Cluster, NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal, Truncated, stats
from rlhfsim.specs.workload.measurable import as_measured
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.engine_mode import biased, mode_of
from rlhfsim.step.iteration import Iteration, Program, closed_form, program

STEP = "step"
"""Name under which the whole step is listed along with its phases."""
BY_LENGTH = " by length"
"""Behind the name of a phase: how much longer it takes on the run's longest samples (`evidence`)."""
REST = "rest"
"""The step without its timed phases: the controller, and gaps between calls."""
DIFFERENCE = 1e-3
"""Step of the difference in ln theta: far above rounding, far below curvature."""
FULL_SHARE = 0.985
"""A measured mean this close to the longest length: nearly all were cut there."""
HALVINGS = 50
"""Bisections for the parameter that gives a measured mean."""


@frozen
class RunPricer:
    """An observed run, ready to be priced again and again."""

    seen: Observation
    setting: CallSetting
    kv_tokens: float | None
    """KV capacity of one replica with the profile's own coefficients; held while others change."""
    profile: Profile
    """The profile whose coefficients may change."""
    clocks: frozenset[str] = frozenset()
    """Measured phases that time a part of the critical chain."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Phases that may have a bias, with the mode of their engine."""
    ends: tuple[RunPricer, RunPricer] | None = None
    """The same run on its shortest and on its longest samples; None: not told apart."""
    pieces: Pieces = field(compare=False)
    """Its priced pieces, at coefficients that were asked for."""

    @property
    def framework(self) -> str:
        """Whose run it is; empty: nobody's."""
        return self.setting.cluster.framework or ""

    def seconds(self, values: Mapping[str, float] | None = None) -> dict[str, float]:
        """Seconds of every phase, and of the step under `STEP`, with `values` for the profile's own.

        A phase counts its work alone, as measured spans do: what it waits for is only in the step.
        A clock that covers several phases has their sum; `REST` is the step without `clocks`.
        """
        priced, step = self._priced(values or {})
        by_phase: dict[str, float] = {}
        for call in priced.steps:
            by_phase[call.name] = by_phase.get(call.name, 0.0) + call.cost.seconds
        alone = dict(by_phase)
        for clock, under in self.seen.covers.items():
            by_phase[clock] = sum(alone.get(phase, 0.0) for phase in under)
        rest = step.seconds - math.fsum(by_phase[name] for name in self.clocks)
        return {**by_phase, STEP: step.seconds, REST: max(0.0, rest), **self._growths(values or {})}

    def _growths(self, values: Mapping[str, float]) -> dict[str, float]:
        """Ratios of the longest to the shortest samples, by phase and `BY_LENGTH`."""
        if self.ends is None:
            return {}
        short, long = (end.seconds(values) for end in self.ends)
        whole = (STEP, REST)
        return {f"{n}{BY_LENGTH}": long[n] / s for n, s in short.items() if s > 0 and n not in whole}

    def chain(self) -> frozenset[str]:
        """Phases that make up the step, with the profile's own coefficients."""
        _, step = self._priced({})
        return frozenset(step.phases[i].name for i in step.critical)

    def read(self) -> frozenset[str]:
        """Coefficients that pricing this run reads: no other can change a second of it."""
        self._priced({})
        return self.pieces.read

    def _priced(self, values: Mapping[str, float]) -> tuple[Program, Iteration]:
        pieces = self.pieces.at({n: v for n, v in values.items() if not n.startswith(NODES)})
        priced = program(self.setting, self.kv_tokens, piece=pieces).longer(self._factors(values))
        return priced, closed_form(priced, self.setting.placement.schedule)

    def _factors(self, values: Mapping[str, float]) -> dict[str, float]:
        """How much longer each phase takes with these biases."""
        return {
            phase: math.prod(values.get(name, 1.0) for name in nodes_of(self.framework, phase, mode))
            for phase, mode in self.modes.items()
        }


def pricer_of(
    observation: Observation, profile: Profile | None = None, off: Collection[str] = ()
) -> RunPricer:
    """An observation as a case; `profile` stands in for the plan's profile of its name. `off`: phases that
    may have a bias also where the framework's usually have none.

    Raises:
        RlhfsimError: a profile or a model of the plan is not found here.
    """
    plan = observation.plan
    given = profile or load_profile(plan.hardware[0].profile)
    priced = with_software(given, plan.framework, plan.placement.backend)
    workload = with_lengths(plan.workload, observation.prompt_tokens, observation.response_tokens)
    workload = as_measured(workload, observation.workload)
    cluster = cluster_with(plan, priced)
    models = models_of(workload)
    kv_tokens = ledger(models, plan.placement, plan.workload, cluster).kv_tokens
    setting = CallSetting(models=models, placement=plan.placement, workload=workload, cluster=cluster)
    case = RunPricer(
        seen=observation,
        setting=setting,
        kv_tokens=kv_tokens if kv_tokens and kv_tokens > 0 else None,
        profile=priced,
        pieces=Pieces(setting, priced),
    )
    chain = case.chain()
    timed = {f: observation.covers.get(f, (f,)) for f, times in observation.phases.items() if times}
    framework = plan.framework
    own = costs_of(framework).biased if framework else False
    may = off if framework else ()
    modes = {
        call.name: mode_of(call.name, plan.placement, plan.workload)
        for call in dataflow(workload)
        if (own or call.name in may) and biased(call.name) and workload.environment is None
    }
    return replace(case, clocks=frozenset(f for f, under in timed.items() if chain & {*under}), modes=modes)


def nodes_of(framework: str, phase: str, mode: str) -> tuple[str, ...]:
    """Names of the biases whose product is the factor of a phase: framework, phase, mode.

    The mode alone where runs of it fitted the framework's costs, or where the framework's phases have no bias
    in common: what others have in common is not its own.
    """
    whole, of_phase = f"{NODES}{framework}", f"{NODES}{framework} > {phase}"
    of_mode = f"{of_phase} > {mode}"
    costs = costs_of(framework)
    alone = mode in costs.fitted_modes or not costs.biased
    return (of_mode,) if alone else (whole, of_phase, of_mode)


def cluster_with(plan: Plan, profile: Profile) -> Cluster:
    """The plan's cluster, `profile` in place of its namesake (and of the only one)."""
    alone = len(plan.hardware) == 1
    pools = tuple(
        NodeGroup(
            profile=profile if alone or h.profile == profile.name else load_profile(h.profile),
            gpus=h.gpus,
            gpus_per_node=h.gpus_per_node,
        )
        for h in plan.hardware
    )
    return Cluster(node_groups=pools, oversubscription=plan.oversubscription, framework=plan.framework)


def with_coefficients(profile: Profile, values: Mapping[str, float]) -> Profile:
    """The profile with other values, taken as exact: only seconds are read off it."""
    if not values:
        return profile
    known = profile.coefficients
    moved = {k: replace(known[k], value=v, low=v, high=v) for k, v in values.items()}
    return replace(profile, coefficients={**known, **moved})


def sensitivities(
    case: RunPricer, values: Mapping[str, float], names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Elasticity d ln t / d ln theta of each phase, by coefficient.

    e = (ln t(theta (1 + d)) - ln t(theta)) / ln(1 + d)        d = -`DIFFERENCE`

    Downwards, because overlaps end at 1; upwards for what is at least 1. Phases of zero seconds have none.
    """
    base = case.seconds(values)
    slopes: dict[str, dict[str, float]] = {}
    for name in names:
        here = values.get(name) or (1.0 if name.startswith(NODES) else case.profile[name])
        d = DIFFERENCE if name in AT_LEAST_ONE else -DIFFERENCE
        moved = case.seconds({**values, name: here * (1 + d)})
        slopes[name] = {
            phase: math.log(moved[phase] / seconds) / math.log1p(d)
            for phase, seconds in base.items()
            if seconds > 0 and moved[phase] > 0
        }
    return slopes


# --- lengths as measured --------------------------------------------------------------------------


def with_lengths(workload: Workload, prompt: float | None, response: float | None) -> Workload:
    """The workload with the measured mean lengths, in distributions of the planned shape."""
    changes: dict[str, AnyLengths] = {}
    if prompt is not None:
        changes["prompt_len"] = with_mean(workload.prompt_len, prompt)
    if response is not None and workload.generates:
        changes["response_len"] = with_mean(workload.response_len, response)
    return replace(workload, **changes)  # type: ignore[arg-type]  # one field each


def with_mean(lengths: AnyLengths, mean: float) -> AnyLengths:
    """The distribution with another mean; its shape and cut are kept, an empirical one stays.

    Log-normal and truncated normal: bisection on the parameter until the mean after the cut is `mean`.
    """
    mean = max(1.0, mean)
    if isinstance(lengths, Fixed):
        return Fixed(value=mean)
    if not isinstance(lengths, LogNormal | Truncated):
        return lengths
    if mean >= FULL_SHARE * lengths.maximum:
        return Fixed(value=min(mean, lengths.maximum))
    low, high = 1.0, lengths.maximum * 50
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        reached = stats(replace(lengths, mean=middle)).mean
        low, high = (middle, high) if reached < mean else (low, middle)
    return replace(lengths, mean=low)


def check_profile(observations: Iterable[Observation], profile: Profile) -> None:
    """That every run has a pool of this profile.

    Raises:
        RlhfsimError: a run of other hardware.
    """
    for seen in observations:
        names = [h.profile for h in seen.plan.hardware]
        if len(names) > 1 and profile.name not in names:
            raise RlhfsimError(
                "another-profile",
                f"run {seen.name!r} used {', '.join(names)}, not {profile.name}",
                help="calibrate one kind of GPU at a time: --profile NAME",
            )
