"""What `rlhfsim frameworks` shows: one line for each thing a plan can ask, one column a framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.frameworks.runs import FEATURES, Known, Runs, frameworks
from rlhfsim.present.tables import REST, grid
from rlhfsim.present.terminal.console import drawn
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import EVERYWHERE, WEIGHT_PATHS

SCHEMA = "rlhfsim.frameworks/1"
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


def lines() -> Iterator[tuple[str, list[Known | None]]]:
    """Each thing that a plan can ask of a framework, and how it is known that each one runs it."""
    every = frameworks()
    for backend, trainer in BACKENDS.items():
        yield f"training by {trainer.title}", [x.known_trainers.get(backend) for x in every]
    for path, rules in WEIGHT_PATHS.items():
        for topology in EVERYWHERE if rules.copies else ():
            known = [x.weight_paths.get(path, {}).get(topology) for x in every]
            if any(known):
                yield f"weights by {rules.title}, {topology}", known
    for feature in FEATURES:
        yield feature, [x.features.get(feature) for x in every]


def rows() -> Iterator[tuple[str, ...]]:
    """The same in words; backends stand beside what not all of them run."""
    every = frameworks()
    for what, row in lines():
        beside = (", ".join(x.only_with.get(what, ())) for x in every)
        yield (
            what,
            *(
                f"{SHORT[known]} ({names})" if names else SHORT[known]
                for known, names in zip(row, beside, strict=True)
            ),
        )


def listing() -> Sequence[RenderableType]:
    """The table, what its cells mean, where each column is from."""
    every = frameworks()
    sources = [Text(f"{x.name}: {x.source}", style="dim") for x in every]
    return [
        drawn(grid((WHAT, *(x.name for x in every)), map(_starred, rows()), fit={WHAT: REST})),
        Text(NOTE, style="dim"),
        *(Text(f"* {line}", style="dim") for line in limited()),
        *sources,
    ]


def _starred(row: Sequence[str]) -> list[str]:
    """Cells as narrow as eight columns need."""
    return [row[0], *(f"{cell.partition(' ')[0]}*" if " " in cell else cell for cell in row[1:])]


def limited() -> Iterator[str]:
    """What a framework runs with some of its backends only."""
    for each in frameworks():
        for backends in dict.fromkeys(each.only_with.values()):
            what = [feature for feature, names in each.only_with.items() if names == backends]
            yield f"{each.name} with {', '.join(backends)}: {', '.join(what)}"


def as_data() -> dict[str, Any]:
    """The same for machines."""
    table = list(lines())
    return {"schema": SCHEMA, "frameworks": [_framework(x, i, table) for i, x in enumerate(frameworks())]}


def _framework(runs: Runs, column: int, table: Sequence[tuple[str, list[Known | None]]]) -> dict[str, Any]:
    found = {what: row[column] for what, row in table if row[column] is not None}
    only = {what: list(backends) for what, backends in runs.only_with.items()}
    return {"name": runs.name, "title": runs.title, "source": runs.source, "runs": found, "only_with": only}
