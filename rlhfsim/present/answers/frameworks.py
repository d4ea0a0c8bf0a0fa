"""What `rlhfsim frameworks` answers: one line for each thing a plan can ask, one column a framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from rlhfsim.present.answers.tree import Column, Page, answer, table_of
from rlhfsim.present.tables import REST, fields
from rlhfsim.present.words import count
from rlhfsim.specs.frameworks.runs import FEATURES, LARGE_TRAINER, Known, Runs, frameworks
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import EVERYWHERE, WEIGHT_PATHS
from rlhfsim.specs.workload.workload import Algorithm, Workload

WHAT = "a plan asks for"
SHORT: dict[Known | None, str] = {
    "run on GPUs": "GPU",
    "run on CPUs": "CPU",
    "written only": "written",
    None: "-",
}
NOTE = (
    "GPU: its users run it on GPUs; CPU: run in our tests on CPUs; written: code that nothing has run; "
    "-: not run, so design leaves it out; *: with some backends only"
)
APART = "distillation: verl (trainer/distillation) and TRL have it too; no plan is made for them"


def lines() -> Iterator[tuple[str, list[Known | None]]]:
    """Each thing that a plan can ask of a framework, and how it is known that each one runs it."""
    every = frameworks()
    for algorithm in get_args(Algorithm):
        trains = [next(iter(x.known_trainers.values())) if x.trains_by(algorithm) else None for x in every]
        yield Workload(algorithm=algorithm, model="").title, trains
    for backend, trainer in BACKENDS.items():
        yield f"training by {trainer.title}", [x.known_trainers.get(backend) for x in every]
    for path, rules in WEIGHT_PATHS.items():
        for topology in EVERYWHERE if rules.copies else ():
            known = [x.weight_paths.get(path, {}).get(topology) for x in every]
            if any(known):
                yield f"weights by {rules.title}, {topology}", known
    for feature in FEATURES:
        yield feature, [x.features.get(feature) for x in every]


def listing() -> Page:
    """The table, what its cells mean, where each column is from."""
    every, table = frameworks(), list(lines())
    columns = [
        Column(x.name, lambda row, i=i, x=x: f"{SHORT[row[1][i]]}{'*' * (row[0] in x.only_with)}")
        for i, x in enumerate(every)
    ]
    notes = (
        NOTE,
        APART,
        *(f"* {line}" for line in limited()),
        *usual(),
        *(f"{x.name}: {x.source}" for x in every),
    )
    return answer(
        "rlhfsim.frameworks/1",
        table_of("", table, Column(WHAT, 0, fit=REST), *columns, notes=notes),
        data={"frameworks": [_framework(x, i, table) for i, x in enumerate(every)]},
    )


def limited() -> Iterator[str]:
    """What a framework runs with some of its backends only."""
    for each in frameworks():
        for backends in dict.fromkeys(each.only_with.values()):
            what = [feature for feature, names in each.only_with.items() if names == backends]
            yield f"{each.name} with {', '.join(backends)}: {', '.join(what)}"


def usual() -> Iterator[str]:
    """By what each framework with a choice trains where the question names no backend, and whence."""
    for runs in frameworks():
        if (own := runs.examples) is not None:
            dense, large = BACKENDS[own.dense].title, BACKENDS[LARGE_TRAINER].title
            size = f"{count(round(own.largest))} parameters"
            yield (
                f"{runs.name} without --backend: dense policies up to {size} by {dense}, unless {large} is "
                f"faster by more than the model's error; others by {large} where it fits ({own.source})"
            )


def _framework(runs: Runs, column: int, table: Sequence[tuple[str, list[Known | None]]]) -> dict[str, Any]:
    found = {what: row[column] for what, row in table if row[column] is not None}
    only = {what: list(backends) for what, backends in runs.only_with.items()}
    usual = None if runs.examples is None else {**asdict(runs.examples), "others": LARGE_TRAINER}
    return {
        **fields(runs, "name", "title", "source"),
        "runs": found,
        "only_with": only,
        "usual_backend": usual,
    }
