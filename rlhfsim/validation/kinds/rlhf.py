"""RLHF step and phase times predicted from a row's configuration, against what was published.

Kinds: `rlhf.step`, and one a phase the row prints (`rlhf.generation`, `rlhf.update_actor`, ...).
Every step is what `rlhfsim estimate` says of the row's plan. With stale samples the generation column is the
trainer's wait, not a time of generation, and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.described import RunSpecs
from rlhfsim.interchange.logs.framework import around
from rlhfsim.kernels.cost import Cost, total
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.step.iteration import Iteration
from rlhfsim.step.measured import Conditions, dispatcher_of, kernels_of
from rlhfsim.units import HOUR
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of, staleness_of
from rlhfsim.validation.outcome import ZERO, Change, Outcome, Skip, unchanged
from rlhfsim.validation.rows import Row
from rlhfsim.what_if.estimate import priced_placement, step_of

PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "generation": ("generation_s", ("actor.generate",)),
    "logprob": ("logprob_s", ("actor.logprob",)),
    "ref_logprob": ("ref_logprob_s", ("reference.logprob",)),
    "values": ("values_s", ("critic.value",)),
    "update_actor": ("update_actor_s", ("actor.train",)),
    "update_critic": ("update_critic_s", ("critic.train",)),
    "weight_sync": ("weight_sync_s", ("actor.sync",)),
}
"""Kind -> column and phases of the priced step."""
WITH_SYNC = ("actor.generate.load", "actor.generate", "actor.generate.unload", "actor.sync")
"""What verl's timer of a co-located rollout covers: the sharding manager moves weights on entry."""

NEMO = {
    "generation": ("actor.generate", "rules.score", "actor.generate.unload"),
    "logprob": ("actor.logprob", "reference.logprob", "reference.logprob.load", "actor.logprob.load"),
    "weight_sync": ("actor.train.unload", "actor.generate.load", "actor.sync"),
}
"""NeMo-RL's timer of the rollout covers rewards and putting the engine to sleep, of log-probs policy
and reference with the actor's way back after it (as long as `actor.logprob.load`), of refit the moves
around the transfer (nemo_rl/algorithms/grpo.py, tag v0.3.0)."""


def outcomes(rows: Iterable[Row], change: Change = unchanged) -> list[Outcome]:
    """The step of every row, and each phase that a predicted row prints."""
    return [outcome for row in rows for outcome in _outcomes(row, change)]


def _outcomes(row: Row, change: Change) -> list[Outcome]:
    filled, shown = assumptions.apply("rlhf", row)
    try:
        seconds = step_seconds(filled)
        asked = specs_of(filled)
        if change is not unchanged:  # on profiles with other coefficients
            groups = tuple(replace(g, profile=change(g.profile, None)) for g in asked.cluster.node_groups)
            asked = replace(asked, cluster=replace(asked.cluster, node_groups=groups))
        step = priced(asked)
    except RlhfsimError as error:
        return [_outcome(row, "step", label=_label(row), assumptions=shown, skipped=error.message)]
    assert asked.placement.rollout is not None
    layouts = f"{asked.placement.actor.layout.label}, rollout {asked.placement.rollout.layout.label}"
    label, scored = f"{_label(row)} {layouts}", list[Outcome]()
    for kind, (column, _) in PHASES.items():
        cell = filled.text(column)
        waits = kind == "generation" and staleness_of(filled) > 0
        cost = timed_cost(filled, step, kind)
        if cell is None or not cost.parts or waits or not cell.replace(".", "", 1).isdigit():
            continue
        if measured := filled.number(column):
            scored.append(_outcome(filled, kind, cost, label=label, measured=measured, assumptions=shown))
    if seconds is not None:
        job, release = job_of(filled, asked)
        detail = {phase.name: round(phase.cost.seconds, 3) for phase in step.phases}
        known = {"measured": seconds, "detail": detail, "job": job, "release": release, "assumptions": shown}
        known |= {"conditions": conditions_of(filled, asked)}
        scored.insert(0, _outcome(row, "step", step.cost, label=label, **known))
    return scored


def priced(asked: RunSpecs) -> Iteration:
    """The prediction of a row, the step of `estimate`: the one place where rows meet the model."""
    return step_of(priced_placement(asked.placement, asked.workload, asked.cluster))


def step_seconds(row: Row) -> float | None:
    """Published seconds of a step: printed, or the hours of a run over its steps; None if only phases are.

    Raises:
        Skip: neither is published, or 0 is.
        RlhfsimError: the cell is no number.
    """
    seconds = row.number("step_time_s")
    if seconds is not None:
        if seconds == 0:
            raise Skip(ZERO)
        return seconds
    hours, steps = row.number("total_hours"), row.number("steps")
    if hours and steps:
        return hours * HOUR / steps
    if any(row.text(column) for column, _ in PHASES.values()):
        return None
    raise Skip("step time not published")


def conditions_of(row: Row, asked: RunSpecs) -> Conditions:
    """What a row ran on what."""
    work = asked.workload
    actor = models_of(work).actor
    return Conditions(
        kind="rlhf.step",
        framework=row.framework.partition(" v")[0],
        backend=asked.placement.backend,
        gpu=asked.cluster.node_group.profile.name,
        model=actor.name,
        params=actor.num_params,
        moe=actor.moe is not None,
        length=stats(work.prompt_len).mean + stats(work.response_len).mean,
        gpus=asked.cluster.gpus,
        algorithm=work.algorithm,
        precision=work.train_precision,
        mixer=actor.mixer,
        dispatcher=dispatcher_of(asked.placement.actor.layout),
        kernels=kernels_of(asked.cluster.node_group.profile),
    )


def timed_cost(row: Row, step: Iteration, kind: str) -> Cost:
    """What the framework's timer of a kind of `PHASES` covers."""
    names = timed_names(row, kind)
    return total(phase.cost for phase in step.phases if phase.name in names)


def timed_names(row: Row, kind: str) -> tuple[str, ...]:
    """The phases that the framework's timer of a kind of `PHASES` covers."""
    names = PHASES[kind][1]
    framework = row.framework
    if framework.startswith("verl"):
        # its workers move parameters in and out inside the timed calls (fsdp_workers.py, tags v0.2 to v0.5)
        return WITH_SYNC if kind == "generation" and staleness_of(row) == 0 else around(*names)
    if framework.startswith("NeMo-RL"):
        return NEMO.get(kind, names)
    if kind == "update_actor" and framework == "DeepSpeed-Chat":
        return ("actor.train", "critic.train")  # its "Training time" is both
    return names


def _outcome(row: Row, kind: str, cost: Cost | None = None, *, label: str, **known: Any) -> Outcome:
    known["detail"] = known.get("detail", {}) | ({"bound_by": cost.bound_by} if cost else {})
    return Outcome.of(row, f"rlhf.{kind}", label, cost, **known)


def job_of(row: Row, asked: RunSpecs) -> tuple[str, str]:
    """What a plan is for, and the release of the framework that ran it.

    The workload is its settings, not the mean length that a run happened to have.
    """
    name, _, release = row.framework.partition(" v")
    work = asked.workload
    settings = (
        work.algorithm,
        work.model,
        work.critic if work.has_critic else "-",
        work.prompts,
        work.samples,
        row.text("max_response_len") or row.text("mean_response_len"),
        work.mini_batches,
    )
    return " ".join(str(x) for x in (*settings, name)), release


def _label(row: Row) -> str:
    shown = (row.text(c) for c in ("actor_model", "gpus", "gpu_type", "framework", "staleness"))
    return " ".join(text for text in shown if text)
