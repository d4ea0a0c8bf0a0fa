"""Training step time predicted from a row's configuration alone, against what was published."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from rlhfsim.kernels.cost import Cost
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.step.calls import train_cost
from rlhfsim.step.measured import Conditions, dispatcher_of, kernels_of
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.training import Lookup, TrainingJob, job, measured
from rlhfsim.validation.outcome import Change, Outcome, Skip, unchanged
from rlhfsim.validation.rows import Row


def outcomes(rows: Iterable[Row], change: Change = unchanged) -> list[Outcome]:
    """One outcome per row of a table of training."""

    @cache
    def lookup(gpu: str) -> Profile:
        return change(load_profile(gpu), None)

    return [_outcome(row, lookup) for row in rows]


def price(training: TrainingJob) -> Cost:
    """The predicted optimizer step of a job: `actor.train` of its plan."""
    setting = training.setting
    return train_cost(setting, "actor", setting.placement.actor)


def conditions_of(row: Row, training: TrainingJob) -> Conditions:
    """What a row ran on what."""
    framework = row.framework.split(" (")[0]
    return Conditions(
        kind="training",
        framework=framework,
        backend=training.setting.placement.backend,
        gpu=training.device.profile.name,
        model=training.model.name,
        params=training.model.num_params,
        moe=training.model.moe is not None,
        length=training.sequences.tokens / training.sequences.count,
        gpus=training.layout.gpus,
        algorithm="pre-training",
        precision=training.setting.workload.train_precision,
        mixer=training.model.mixer,
        dispatcher=dispatcher_of(training.layout),
        kernels=kernels_of(training.device.profile),
    )


def _outcome(row: Row, lookup: Lookup) -> Outcome:
    filled, shown = assumptions.apply("training", row)
    words = (*map(row.text, ("model", "gpus", "gpu_type")), "seq", *map(row.text, ("seq_len", "precision")))
    label = " ".join(filter(None, words))
    try:
        training = job(filled, lookup)
        seconds, how = measured(filled, training)
    except Skip as reason:
        return Outcome.of(row, "training", label, skipped=reason.message)
    cost = price(training)
    return Outcome.of(
        row,
        "training",
        f"{label} {training.layout.label}",
        cost,
        measured=seconds,
        assumptions=(*shown, *training.stated),
        conditions=conditions_of(row, training),
        detail={
            "measured_from": how,
            "bound_by": cost.bound_by,
            **{k: round(v, 6) for k, v in cost.by_resource().items()},
        },
    )
