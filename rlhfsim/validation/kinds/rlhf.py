"""RLHF step and phase times predicted from a row's configuration, against what was published.

Kinds: `rlhf.step`, and one a phase the row prints (`rlhf.generation`, `rlhf.update_actor`, ...).
`rlhf.calibrated`: every step predicted after calibration on another row (`transfer`). Every step is what
`rlhfsim estimate` says of the row's plan. What an RL framework adds to its calls is fitted on one table
(`lab.fits.rlhf`), whose rows have part `fit`. With stale samples the generation column is the trainer's wait,
not a time of generation, and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlhfsim.calibration.one_run import Timed
from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.configuration.described import RunSpecs
from rlhfsim.frameworks.logs.framework import around
from rlhfsim.kernels.cost import Cost, total
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.step.iteration import Iteration
from rlhfsim.step.measured import Conditions, dispatcher_of, kernels_of
from rlhfsim.units import HOUR
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.rlhf import specs_of, staleness_of
from rlhfsim.validation.left_out import cluster_without, publisher, refits
from rlhfsim.validation.outcome import ZERO, Outcome, Skip
from rlhfsim.validation.rows import Row
from rlhfsim.validation.transfer import Published, pairs
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
FIT_FILE = "rlhf_nemo_rl_v03.csv"
"""Its rows fitted `lab.fits.rlhf.NAMES` and are never scored."""
FIT_LOGS = "eric-haibin-lin/verl-data@math/"
"""Logs that fitted `lab.fits.verl.NAMES` and are never scored."""


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """The step of every row, each phase that a predicted row prints, and steps calibrated on one another."""
    published: list[Published] = []
    return steps(rows, published) + pairs(published)


def steps(rows: Iterable[Row], published: list[Published]) -> list[Outcome]:
    """The step of every row, and each phase that a predicted row prints; rows with a step are added."""
    return [outcome for row in rows for outcome in _outcomes(row, published)]


def _outcomes(row: Row, published: list[Published]) -> list[Outcome]:
    """Outcomes of one row; a row with a step is added to `published`."""
    filled, shown = assumptions.apply("rlhf", row)
    try:
        seconds = step_seconds(filled)
        asked = specs_of(filled)
        step = priced(asked)
    except RlhfsimError as error:
        return [_outcome(row, "step", label=_label(row), assumptions=shown, skipped=error.message)]
    label = f"{_label(row)} {asked.placement.actor.layout.label}, rollout {_rollout(asked)}"
    name = publisher(row.source)
    blind = priced(replace(asked, cluster=cluster_without(asked.cluster, name))) if refits(name) else None
    scored = _phase_outcomes(filled, (step, blind), shown, label)
    if seconds is not None:
        job, release = job_of(filled, asked)
        detail = {phase.name: round(phase.cost.seconds, 3) for phase in step.phases}
        known = {"measured": seconds, "detail": detail, "job": job, "release": release, "assumptions": shown}
        known |= {"conditions": conditions_of(filled, asked), "blind": blind.cost if blind else None}
        scored.insert(0, _outcome(row, "step", step.cost, label=label, **known))
        published.append(_published(filled, scored[0], asked, step))
    return scored


def _published(row: Row, outcome: Outcome, asked: RunSpecs, step: Iteration) -> Published:
    """A row's step with what of it can calibrate."""
    assert outcome.measured is not None
    return Published(
        outcome=outcome,
        framework=row.text("framework") or "",
        model=asked.workload.model,
        step=step.cost,
        times=tuple(_times(row, step, outcome.measured)),
    )


def _times(row: Row, step: Iteration, measured_s: float) -> Iterator[Timed]:
    """Phases that a row prints and what they leave of its step; the step alone without them.

    Rows with stale samples print waits, so only their step counts.
    """
    names: set[str] = set()
    printed = 0.0
    for kind, (column, phases) in PHASES.items() if staleness_of(row) == 0 else ():
        cost, cell = timed_cost(row, step, kind), row.text(column) or ""
        if cost.seconds > 0 and cell.replace(".", "", 1).isdigit() and float(cell) > 0:
            names |= set(_timed(row, kind, phases))
            printed += float(cell)
            yield Timed(cost=cost, measured_s=float(cell))
    chain = (step.phases[i] for i in step.critical)
    rest = total(phase.cost for phase in chain if phase.name not in names)
    if rest.seconds > 0 and measured_s > printed:
        yield Timed(cost=rest, measured_s=measured_s - printed)


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
        framework=(row.text("framework") or "").partition(" v")[0],
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


def _phase_outcomes(
    row: Row, steps: tuple[Iteration, Iteration | None], shown: tuple[str, ...], label: str
) -> list[Outcome]:
    """Outcomes of the phases of a prediction, and of the one that saw no row of the publisher."""
    step, unseen = steps
    scored = []
    for kind, (column, _) in PHASES.items():
        cell = row.text(column)
        waits = kind == "generation" and staleness_of(row) > 0
        cost = timed_cost(row, step, kind)
        if cell is None or not cost.parts or waits or not cell.replace(".", "", 1).isdigit():
            continue
        measured = row.number(column)
        if measured:
            blind = timed_cost(row, unseen, kind) if unseen else None
            scored.append(
                _outcome(row, kind, cost, label=label, measured=measured, assumptions=shown, blind=blind)
            )
    return scored


def timed_cost(row: Row, step: Iteration, kind: str) -> Cost:
    """What the framework's timer of a kind of `PHASES` covers."""
    names = _timed(row, kind, PHASES[kind][1])
    return total(phase.cost for phase in step.phases if phase.name in names)


def _timed(row: Row, kind: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The phases that the framework's timer of this name covers."""
    framework = row.text("framework") or ""
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
    fitted = row.file == FIT_FILE or row.source.startswith(FIT_LOGS)
    part = "fit" if fitted else "report"
    return Outcome.of(row, f"rlhf.{kind}", label, cost, part=part, **known)


def job_of(row: Row, asked: RunSpecs) -> tuple[str, str]:
    """What a plan is for, and the release of the framework that ran it.

    The workload is its settings, not the mean length that a run happened to have.
    """
    name, _, release = (row.text("framework") or "").partition(" v")
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


def _rollout(asked: RunSpecs) -> str:
    assert asked.placement.rollout is not None
    return asked.placement.rollout.layout.label
