"""What `rlhfsim frameworks` shows: one line for each thing a plan can ask, one column a framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.frameworks.runs import FEATURES, Known, Runs, frameworks
from rlhfsim.present.tables import grid
from rlhfsim.present.terminal.console import drawn
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.weight_paths import EVERYWHERE, WEIGHT_PATHS

SCHEMA = "rlhfsim.frameworks/1"
SHORT: dict[Known | None, str] = {
    "run on GPUs": "GPU",
    "run on CPUs": "CPU",
    "written only": "written",
    None: "-",
}
NOTE = (
    "GPU: its users run it on GPUs; CPU: run in our tests on CPUs; written: code that nothing has run; "
    "-: not run, so design leaves it out"
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


def listing() -> Sequence[RenderableType]:
    """The table, what its cells mean, where each column is from."""
    every = frameworks()
    rows = [(what, *(SHORT[known] for known in row)) for what, row in lines()]
    sources = [Text(f"{x.name}: {x.source}", style="dim") for x in every]
    return [
        drawn(grid(("a plan asks for", *(x.name for x in every)), rows)),
        Text(NOTE, style="dim"),
        *sources,
    ]


def as_data() -> dict[str, Any]:
    """The same for machines."""
    table = list(lines())
    return {"schema": SCHEMA, "frameworks": [_framework(x, i, table) for i, x in enumerate(frameworks())]}


def _framework(runs: Runs, column: int, table: Sequence[tuple[str, list[Known | None]]]) -> dict[str, Any]:
    found = {what: row[column] for what, row in table if row[column] is not None}
    return {"name": runs.name, "title": runs.title, "source": runs.source, "runs": found}
