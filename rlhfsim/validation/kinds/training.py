"""Training step time predicted from a row's configuration alone, against what was published."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from rlhfsim.kernels.cost import Cost
from rlhfsim.specs.model.presets import preset, preset_name
from rlhfsim.step.calls import train_cost
from rlhfsim.step.measured import Conditions, dispatcher_of, kernels_of
from rlhfsim.validation import assumptions
from rlhfsim.validation.cases.training import TrainingJob, job, measured
from rlhfsim.validation.left_out import publisher, refits, without
from rlhfsim.validation.outcome import Outcome, Skip
from rlhfsim.validation.rows import Row

FIT_SHARE = 4
"""One in so many (publication, model) pairs is used to fit constants and is never scored."""


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """One outcome per row of training.csv."""
    return [_outcome(row) for row in rows]


def price(training: TrainingJob) -> Cost:
    """The predicted optimizer step of a job: `actor.train` of its plan."""
    setting = training.setting
    return train_cost(setting, "actor", setting.placement.actor)


def conditions_of(row: Row, training: TrainingJob) -> Conditions:
    """What a row ran on what."""
    framework = (row.text("framework") or "").split(" (")[0]
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


def part_of(row: Row) -> str:
    """`fit` for the (publisher, model) pairs whose MD5 says so, `report` for the others.

    The pair decides, not the row: variants of one experiment stay together, over all pages of one
    repository. Models with layers whose kernels nobody timed (`Recurrent`) are in no fit: what is wrong with
    our estimate of a scan is not to be found in the speed of a matrix product.
    """
    known = preset_name(row.text("model_config_key") or row.text("model") or "")
    if known and preset(known).recurrent:
        return "report"
    key = f"{row.source.split('@')[0]}|{row.text('model_config_key') or row.text('model')}"
    return "fit" if int(hashlib.md5(key.encode()).hexdigest(), 16) % FIT_SHARE == 0 else "report"


def _outcome(row: Row) -> Outcome:
    filled, shown = assumptions.apply("training", row)
    words = (*map(row.text, ("model", "gpus", "gpu_type")), "seq", *map(row.text, ("seq_len", "precision")))
    label = " ".join(filter(None, words))
    try:
        training = job(filled)
        seconds, how = measured(filled, training)
    except Skip as reason:
        return Outcome.of(row, "training", label, skipped=reason.message)
    cost, name = price(training), publisher(row.source)
    return Outcome.of(
        row,
        "training",
        f"{label} {training.layout.label}",
        cost,
        price(job(filled, without(name))) if refits(name) else None,
        measured=seconds,
        assumptions=(*shown, *training.stated),
        part=part_of(row),
        conditions=conditions_of(row, training),
        detail={
            "measured_from": how,
            "bound_by": cost.bound_by,
            **{k: round(v, 6) for k, v in cost.by_resource().items()},
        },
    )
