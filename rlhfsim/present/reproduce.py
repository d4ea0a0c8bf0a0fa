"""How a page comes about again: commands, versions, hashes, seed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields

from rlhfsim.choice import AskedBound
from rlhfsim.plan import AskedRun, Plan
from rlhfsim.present.answers.tree import Code, TypedTable, pairs
from rlhfsim.search.requirements import CONFIDENCE
from rlhfsim.specs.hardware.prices import DEFAULT, market_of
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal, Truncated
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Environment, OwnParts, Workload


def commands(plan: Plan, file: str) -> Code:
    """What to type."""
    report = f"rlhfsim report {shlex.quote(file)}"
    if plan.choice is None:
        return Code("Commands (the plan was given, not searched)", report)
    design = shlex.join(["rlhfsim", "design", *design_arguments(plan)])
    return Code("Commands", f"{design} --out {shlex.quote(file)}\n{report}")


def design_arguments(plan: Plan) -> list[str]:
    """Options of `rlhfsim design` that ask what this plan answers; defaults are left out."""
    assert plan.choice is not None
    options = {
        **_cluster(plan, plan.choice.asked),
        **_workload(plan.workload),
        "teacher-top": _unless(plan.workload.teacher_top, 0),
        "router-replay": "" if plan.workload.router_replay else None,
        "no-kl": None if plan.workload.kl else "",
        "no-packing": None if plan.workload.packing else "",
        **_asked(plan.choice.asked),
        **(_run(plan.run) if plan.run else {}),
        "fastest": "" if plan.choice.fastest else None,
    }
    given = [[f"--{name}", str(value)] for name, value in options.items() if value is not None]
    fixed = [["--fix", text] for text in _fixed(plan.choice.asked)]
    targets = plan.run.targets if plan.run else ()
    required = [["--require", target.text] for target in targets if target.name not in PROMISED]
    return [word for words in (*given, *fixed, *required) for word in words if word]


PROMISED = {"deadline": "s", "budget": "USD"}
"""Target -> unit: those that have an option of their own name."""


def _run(run: AskedRun) -> dict[str, object]:
    promised = {t.name: f"{t.value:.12g}{PROMISED[t.name]}" for t in run.targets if t.name in PROMISED}
    sure = None if run.confidence is None else _unless(f"{run.confidence:g}", f"{CONFIDENCE:g}")
    return {"steps": run.steps, **promised, "confidence": sure}


def _cluster(plan: Plan, asked: AskedBound) -> dict[str, object]:
    first, *rest = plan.hardware
    second = rest[0] if rest else None
    market = first.market or market_of(first.profile, first.price)
    return {
        "gpus": first.gpus,
        "gpu": first.profile,
        "gpus-per-node": first.gpus_per_node,
        "rollout-gpus": second.gpus if second else None,
        "rollout-gpu": second.profile if second else None,
        "rollout-wan": as_option(second.wan, digits=12) if second else None,
        "oversubscription": _unless(f"{plan.oversubscription:g}", "1"),
        "price": _short(asked.price) or _unless(market, DEFAULT),
    }


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _unless(value: object, usual: object) -> object:
    """The value of an option; None: its default."""
    return None if value == usual else value


def _workload(work: Workload) -> dict[str, object]:
    rules = work.reward.rules
    return {
        "model": work.model,
        "algorithm": work.algorithm,
        "prompts": work.prompts,
        "samples": work.samples,
        "prompt-len": lengths(work.prompt_len),
        "response-len": lengths(work.response_len),
        "epochs": _unless(work.epochs, 1),
        "mini-batches": _unless(work.mini_batches, 1),
        "critic": _unless(work.critic, "same"),
        "reference": _unless(work.reference, "same"),
        "seed": _unless(work.seed, 0),
        "rules": f"seconds_per_sample={rules.seconds_per_sample:g},workers={rules.workers}"
        if rules
        else None,
        "environment": _pairs(work.environment),
        "custom": _pairs(work.custom),
        "speculation": as_option(work.speculation),
        "oversampling": _unless(f"{work.oversampling:.10g}", "0"),
        "dynamic-sampling": as_option(work.dynamic_sampling),
        "reward": _unless(work.reward.model or "none", "none" if rules else "same"),
    }


def _pairs(spec: Environment | OwnParts | None) -> str | None:
    """The fields of a spec that say something, as an option takes them."""
    if spec is None:
        return None
    given = ",".join(f"{name}={value}" for name, value in asdict(spec).items() if value)
    return given or None


def as_option(asked: Speculation | DynamicSampling | WanLink | None, *, digits: int = 10) -> str | None:
    """What a setting says other than its defaults, as options write it: `rtt=0.06,bandwidth=1250000000`."""
    if asked is None:
        return None
    said = {f.name: value for f in fields(asked) if (value := getattr(asked, f.name)) != f.default}
    texts = {n: f"{x:.{digits}g}" if isinstance(x, float) else str(x).lower() for n, x in said.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())


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


def _asked(asked: AskedBound) -> dict[str, object]:
    return {
        "framework": asked.framework,
        "backend": asked.backend,
        "objective": _unless(asked.objective, "time"),
        "architecture": asked.architecture,
        "weight-path": asked.weight_path,
        "max-gpus-per-role": asked.max_gpus_per_role,
        "max-oom": _unless(f"{asked.max_oom:g}", "0.1"),
        "max-staleness": _unless(f"{asked.max_staleness:g}", "1"),
        "time-limit": _short(asked.time_limit),
        "allow": ",".join(asked.allow) or None,
        "forbid": ",".join(asked.forbid) or None,
    }


def _fixed(asked: AskedBound) -> Iterator[str]:
    for role, values in asked.fix.items():
        yield from (f"{role}.{field}={value}" for field, value in values.items())
    for bound in asked.limits:
        if bound.field != "hardware":  # --rollout-gpus says that already
            value = {True: "yes", False: "no"}[bound.value] if isinstance(bound.value, bool) else bound.value
            yield f"{bound.role}.{bound.field}{bound.relation}{value}"


def hashes(plan: Plan) -> TypedTable:
    """Version, hashes and seed."""
    rows = [
        ("rlhfsim", plan.rlhfsim_version),
        ("plan (workload, placement, hardware)", plan.input_hash),
        *((f"profile {h.profile}", h.profile_hash[:16]) for h in plan.hardware),
        *((f"shape of {m.role}: {m.name}", m.shape_hash) for m in plan.models),
        ("seed of drawn lengths", str(plan.workload.seed)),
    ]
    return pairs("Versions and hashes: equal ones price the same thing", rows)
