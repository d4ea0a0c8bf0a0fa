"""What makes something fit: the gentlest of the changes that are tried, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import inf
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.search.branch_and_bound import SearchResult
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import ANY, frameworks
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS, Backend, violation
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step.prediction import usd_per_step
from rlhfsim.units import format
from rlhfsim.what_if.engine import Question, good, variants
from rlhfsim.what_if.estimate import planned, priced_placement
from rlhfsim.what_if.points import Change, Point, asking, first_of_each, on_gpus, on_larger, points, setting
from rlhfsim.what_if.verdict import check_plan, check_question, contradictions, put_to

MORE_GPUS = (2, 3, 4, 6, 8, 16, 32, 64)
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of a GPU's memory that a rollout engine is left with."""
NARROWING = ("architecture", "weight_path", "max_gpus_per_role", "max_memory")
"""Fields of a question that leave fewer plans where they are set."""
MAX_PAIRS = 300
RISKIEST = 0.3
"""Largest risk of running out of memory that a request may carry."""


# --- a request that nothing fits --------------------------------------------------------------------


def shortage(result: SearchResult) -> str | None:
    """What the plan that misses memory by least lacks, in words; None where none was looked at."""
    if result.nearest is None:
        return None
    skeleton, pool, lacking = result.nearest
    if not 0 < lacking < inf:
        return None
    kinds = " or ".join(sorted(skeleton.partition.labels))
    return f"the nearest plan ({kinds}) misses {format(lacking, 'byte')} per GPU in pool {pool}"


@frozen
class Remedy:
    """One change with which something fits, and a good plan under it (not proven)."""

    change: str
    step_s: float
    usd_per_step: float | None
    other_work: bool
    """Whether the step then trains or rewards otherwise."""


def remedies(request: Request, typed: Mapping[str, str] | None = None) -> tuple[Remedy, ...]:
    """The first change of every family with which something fits, the gentlest family first.

    A change is named as the user types it, and asked as the command would ask it. `typed`: the options that
    fix a layout, by role, of a command that knows no other restriction; None: `--fix` and all others. Where
    time is up, those that were found before.
    """
    question = Question(request=request)
    return first_of_each(_remedies(question, family) for family in _families(request, typed))


def _remedies(question: Question, family: Iterable[Change]) -> Iterator[Remedy]:
    """The changes of a family with which something fits."""
    asked = question.request.workload
    for point in points(question, family, fitting, skipped=(RlhfsimError,)):
        other, step_s = point.answer.question.request, point.answer.answer.seconds
        yield Remedy(
            change=point.name,
            step_s=step_s,
            usd_per_step=usd_per_step(other.cluster, step_s, other.price),
            other_work=(other.workload.lora, other.workload.reward) != (asked.lora, asked.reward),
        )


def fitting(question: Question) -> Point[Candidate] | None:
    """A good plan of a question, asked as a command asks it; None where it is refused or nothing fits."""
    try:
        check_question(question.request)
    except RlhfsimError:
        return None
    if any(contradictions(question.request)):
        return None
    axis = (asking(workload=work) for work in variants(question.request))
    return next(points(question, axis, good), None)


def _families(request: Request, typed: Mapping[str, str] | None) -> Iterator[Iterable[Change]]:
    yield _restrictions(request, typed)
    yield _others(request)
    for name in ("adam8bit", "lora", *(["fp8"] if request.workload.generates else [])):
        if name not in request.switches:
            names = request.allow | {name}
            yield [asking(f"--allow {','.join(sorted(names))}", allow=names)]
    if request.workload.has_reward_model:
        rules = Reward(rules=request.workload.reward.rules or Rules())
        text = (
            "--reward none"
            if request.workload.reward.rules
            else "--reward none --rules seconds_per_sample=5ms"
        )
        yield [asking(text, workload=replace(request.workload, reward=rules))]
    pool, *others = request.cluster.node_groups
    if pool.gpus <= pool.gpus_per_node or pool.gpus_per_node >= pool.profile.node.gpus:
        yield on_gpus(request, (pool.gpus * factor for factor in MORE_GPUS))
    if not others:
        yield on_larger(request, pool.profile.memory.value)
    if request.max_oom < RISKIEST and typed is None:
        yield [asking(f"--max-oom {RISKIEST:g}", max_oom=RISKIEST)]


def _restrictions(request: Request, typed: Mapping[str, str] | None) -> Iterator[Change]:
    """Each option that narrows the question left out, then all of them."""
    free: dict[str, dict[str, Any]] = {}
    for name in sorted(request.forbid):
        free[f"--forbid {name}"] = {"forbid": request.forbid - {name}}
    for role, fields in request.fix.items():
        option = typed[role] if typed else " ".join(f"--fix {role}.{k}={v}" for k, v in fields.items())
        free[option] = {"fix": {k: v for k, v in request.fix.items() if k != role}}
    for limit in (x for x in request.limits if x not in request.hardware_limits):
        free[f"--fix '{limit.text}'"] = {"limits": tuple(x for x in request.limits if x is not limit)}
    for name in NARROWING:
        if getattr(request, name) is not None:
            option = "--require memory" if name == "max_memory" else f"--{name.replace('_', '-')}"
            free[option] = {name: None}
    for option, values in free.items():
        yield asking(f"without {option}", **values)
    if len(free) > 1:
        opened = {**dict.fromkeys(NARROWING), "limits": request.hardware_limits}
        yield asking(f"without {' '.join(free)}", fix={}, forbid=frozenset(), **opened)


def _others(request: Request) -> Iterator[Change]:
    """Another backend, of the same framework where one is named, or another framework."""
    named = request.framework not in (None, ANY)
    for backend in request.runs.trainers if named and request.runs else BACKENDS:
        if backend != request.backend:
            yield _put(f"--backend {backend}", request.framework, backend)
    own = request.runs.name if request.runs else None
    for runs in frameworks():
        if runs.name != own:
            backend = runs.usual_trainer(models_of(request.workload).actor)
            yield _put(f"--framework {runs.name} --backend {backend}", runs.name, backend)


def _put(text: str, framework: str | None, backend: Backend) -> Change:
    return setting(text, {"request": partial(put_to, framework=framework, backend=backend)})


# --- a placement that does not fit ------------------------------------------------------------------


def remedy(placement: Placement, workload: Workload, cluster: Cluster) -> str | None:
    """The smallest change of the placement with which it fits, or pair of them; None when none does."""
    question = Question(request=Request(cluster=cluster, workload=workload), placement=placement)
    edits = list(_edits(placement))
    pairs = [_both(a, b) for a, b in list(combinations(edits, 2))[:MAX_PAIRS]]
    fit = next(points(question, [*edits, *pairs], _fits), None)
    return fit.name if fit else None


def _both(one: Change, other: Change) -> Change:
    return Change(name=f"{one.name} and {other.name}", apply=lambda q: other.apply(one.apply(q)))


def _fits(question: Question) -> bool | None:
    """True where the placement can exist, its framework runs it, and it fits."""
    assert question.placement is not None
    request = question.request
    try:
        priced = priced_placement(question.placement, request.workload, request.cluster)
        check_plan(planned(priced, priced.iteration, None), request.cluster)
    except RlhfsimError:
        return None
    return True if priced.memory.fits else None


def _edits(placement: Placement) -> Iterator[Change]:
    """Gentle first: memory share, micro-batch, recompute, moving states out, ZeRO, Adam on the host."""
    roles, rollout = placement.trainers, placement.rollout
    if rollout is not None:
        for share in SHARES:
            if share < rollout.layout.memory_utilization:
                words = f"memory_utilization {share} for the rollout"
                yield _edit(words, "rollout.layout.memory_utilization", share)
    for name, role in roles.items():
        if role.layout.micro_batch > 1:
            yield _edit(f"micro_batch 1 for {name}", f"{name}.layout.micro_batch", 1)
        if role.layout.pack_tokens:
            half = max(1, role.layout.pack_tokens // 2)
            yield _edit(f"pack_tokens {half} for {name}", f"{name}.layout.pack_tokens", half)
    for name, role in roles.items():
        trained = name in TRAINED
        if trained and role.layout.recompute != "full":
            yield _edit(f"recompute full for {name}", f"{name}.layout.recompute", "full")
        if not trained and role.residency == "resident":
            yield _edit(f"weights of {name} on the host between its calls", f"{name}.residency", "offloaded")
    if rollout is not None and rollout.sleep < 2 and rollout.pool == placement.actor.pool:
        yield _edit("sleep 2 for the rollout", "rollout.sleep", 2)
    for name, role in roles.items():
        yield from _heavier(placement, name, role)


def _heavier(placement: Placement, name: str, role: RolePlacement) -> Iterator[Change]:
    for zero in range(role.layout.zero + 1, 4):
        if violation(placement.backend, replace(role.layout, zero=zero)) is None:
            yield _edit(f"ZeRO-{zero} for {name}", f"{name}.layout.zero", zero)
    if name in TRAINED:
        if not role.offload_between:
            yield _edit(f"optimizer of {name} on the host between its calls", f"{name}.offload_between", True)
        if role.layout.offload_optimizer == "none":
            yield _edit(f"Adam of {name} on the CPU", f"{name}.layout.offload_optimizer", "cpu")


def _edit(name: str, path: str, value: Any) -> Change:
    return setting(name, {f"placement.{path}": value})
