"""How a page comes about again: commands, versions, hashes, seed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rlhfsim.plan import Asked, Plan
from rlhfsim.present.html.content import Cell, Code, Table
from rlhfsim.present.html.content import words as cell
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal, Truncated
from rlhfsim.specs.workload.workload import Workload

SWITCHED = {"lora", "fp8", "adam8bit", "rollout-logprobs"}
"""Switches that stand in the workload of a plan which uses them."""


def commands(plan: Plan, file: str) -> Code:
    """What to type."""
    if plan.choice is None:
        return Code(
            title="Commands (the plan was given, not searched)", text=f"rlhfsim report {shlex.quote(file)}"
        )
    return Code(
        title="Commands",
        text=f"{shlex.join(['rlhfsim', 'design', *design_arguments(plan)])} --out {shlex.quote(file)}\nrlhfsim report {shlex.quote(file)}",
    )


def design_arguments(plan: Plan) -> list[str]:
    """Options of `rlhfsim design` that ask what this plan answers; defaults are left out."""
    assert plan.choice is not None
    return [*_cluster(plan, plan.choice.asked), *_workload(plan.workload), *_asked(plan.choice.asked)]


def _cluster(plan: Plan, asked: Asked) -> Iterator[str]:
    first, *rest = plan.hardware
    yield from (
        "--gpus",
        str(first.gpus),
        "--gpu",
        first.profile,
        "--gpus-per-node",
        str(first.gpus_per_node),
    )
    for second in rest[:1]:
        yield from ("--rollout-gpus", str(second.gpus), "--rollout-gpu", second.profile)
    if plan.oversubscription != 1:
        yield from ("--oversubscription", f"{plan.oversubscription:g}")
    if asked.price is not None:
        yield from ("--price", f"{asked.price:g}")


def _workload(work: Workload) -> Iterator[str]:
    yield from (
        "--model",
        work.model,
        "--algorithm",
        work.algorithm,
        "--prompts",
        str(work.prompts),
        "--samples",
        str(work.samples),
    )
    yield from ("--prompt-len", lengths(work.prompt_len), "--response-len", lengths(work.response_len))
    for name, value, usual in (
        ("epochs", work.epochs, 1),
        ("mini-batches", work.mini_batches, 1),
        ("critic", work.critic, "same"),
        ("reference", work.reference, "same"),
        ("seed", work.seed, 0),
    ):
        if value != usual:
            yield from (f"--{name}", str(value))
    if work.reward.rules is not None:
        yield from (
            "--rules",
            f"seconds_per_sample={work.reward.rules.seconds_per_sample:g},workers={work.reward.rules.workers}",
        )
    model = work.reward.model or "none"
    if model != ("none" if work.reward.rules else "same"):
        yield from ("--reward", model)
    yield from ["--no-kl"] * (not work.kl) + ["--no-packing"] * (not work.packing)


def lengths(spec: AnyLengths) -> str:
    """A distribution as options write it."""
    match spec:
        case Fixed():
            return f"{spec.value:g}"
        case LogNormal():
            return f"lognormal:mean={spec.mean:g},sigma={spec.sigma:g},max={spec.max:g}"
        case Truncated():
            return f"truncated:mean={spec.mean:g},std={spec.std:g},max={spec.max:g}"
        case _:
            return f"empirical:file={spec.file}"


def _asked(asked: Asked) -> Iterator[str]:
    yield from ("--backend", asked.backend)
    for name, value, usual in (
        ("objective", asked.objective, "time"),
        ("architecture", asked.architecture, None),
        ("weight-path", asked.weight_path, None),
        ("max-gpus-per-role", asked.max_gpus_per_role, None),
        ("max-oom", f"{asked.max_oom:g}", "0.1"),
        ("max-staleness", f"{asked.max_staleness:g}", "1"),
        ("time-limit", None if asked.time_limit is None else f"{asked.time_limit:g}", None),
    ):
        if value is not None and value != usual:
            yield from (f"--{name}", str(value))
    for name, values in (("allow", asked.allow), ("forbid", asked.forbid)):
        if values:
            yield from (f"--{name}", ",".join(values))
    for role, fields in asked.fix.items():
        for field, value in fields.items():
            yield from ("--fix", f"{role}.{field}={value}")
    for bound in asked.limits:
        if bound.field != "hardware":  # --rollout-gpus says that already
            yield from (
                "--fix",
                f"{bound.role}.{bound.field}{bound.relation}{'yes' if bound.value is True else 'no' if bound.value is False else bound.value}",
            )


def hashes(plan: Plan) -> Table:
    """Version, hashes and seed."""
    rows: list[tuple[str, str]] = [
        ("rlhfsim", plan.rlhfsim_version),
        ("plan (workload, placement, hardware)", plan.input_hash),
    ]
    rows += [(f"profile {h.profile}", h.profile_hash[:16]) for h in plan.hardware]
    rows += [(f"shape of {m.role}: {m.name}", m.shape_hash) for m in plan.models]
    rows += [("seed of drawn lengths", str(plan.workload.seed))]
    return Table(
        caption="Versions and hashes: equal ones price the same thing",
        head=("what", "value"),
        rows=tuple(_pair(a, b) for a, b in rows),
    )


def _pair(name: str, value: str) -> tuple[Cell, ...]:
    return cell(name), cell(value)
