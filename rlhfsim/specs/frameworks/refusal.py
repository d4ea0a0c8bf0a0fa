"""A framework does not run what is asked: one error that names the framework, the option and who runs it."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.frameworks.runs import Lacks, Runs, frameworks
from rlhfsim.specs.model.model import ModelSpec

CODE = "not-run-by-framework"


def not_run(runs: Runs, lacking: Sequence[Lacks], takers: Sequence[str]) -> RlhfsimError:
    """The error; `takers`: options with which the same is run."""
    others = f"run by: {', '.join(takers)}" if takers else "no other framework here runs it"
    return RlhfsimError(
        CODE,
        f"{runs.title} does not run {'; '.join(lacks.what for lacks in lacking)}",
        help=f"{lacking[0].remedy}; {others}",
    )


def check_kind(model: ModelSpec, runs: Runs, *, generates: bool) -> None:
    """Refuse a model that a framework does not run, whatever the plan; `generates`: as a policy that does.

    Raises:
        RlhfsimError: its kind, or a kind of its layers, is not run.
    """
    if (lacks := runs.lacks_kinds(model, generates=generates)) is not None:
        others = [x.name for x in frameworks() if x.lacks_kinds(model, generates=generates) is None]
        raise not_run(runs, [lacks], [f"--framework {name}" for name in others])
