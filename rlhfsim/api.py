"""The verbs of the command line as typed functions: `estimate`, `design`, `simulate_file`, `whatif`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfsim.plan import read_plan
from rlhfsim.simulation.summary import Simulation, SimulationOptions
from rlhfsim.what_if.design import design
from rlhfsim.what_if.estimate import estimate, planned, priced_placement, simulated
from rlhfsim.what_if.plan_files import cluster_of as cluster_of
from rlhfsim.what_if.plan_files import estimate_file, placed, run_by_its_own

if TYPE_CHECKING:
    from rlhfsim.what_if.scenarios.result import WhatIf

__all__ = ["design", "estimate", "estimate_file", "simulate_file", "whatif"]


def simulate_file(
    path: str | Path,
    options: SimulationOptions | None = None,
    *,
    price: float | None = None,
    progress: Callable[[], object] | None = None,
) -> Simulation:
    """A scenario, a shipped system or a `plan.json`, run step by step; `progress` after every replication.

    Raises:
        RlhfsimError: as `estimate_file`.
    """
    priced = priced_placement(*placed(path))
    run_by_its_own(planned(priced, priced.iteration, price), priced.setting.cluster, path)
    answer = simulated(priced, options or SimulationOptions(), price=price, progress=progress)
    run = read_plan(Path(path)).run if Path(path).suffix == ".json" else None
    return replace(answer, plan=replace(answer.plan, run=run.question)) if run else answer


def whatif(  # noqa: PLR0913  the options of the command
    scenario: str | Path | Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    require: Sequence[str] = (),
    jobs: int | None = None,
    ray: str | None = None,
    cache: str | Path | None = None,
    progress: Callable[[int, int], object] | None = None,
    most_s: float | None = None,
    tables: Sequence[str | Path] = (),
) -> WhatIf:
    """A scenario (YAML file, shipped name or mapping; docs/whatif.md), every point designed anew.

    `settings` patches the base by dotted paths; `only` keeps points by name; `require` are targets
    ("step_time<90s"), whose probability every point then has; `jobs` searches run at the same time (default:
    one for each core), or on the Ray cluster at `ray` ("" starts one here); designs are kept in the folder
    `cache` (None: nowhere); `progress` hears how many are done, and of how many; `most_s`
    seconds may all searches together take (None: any time). More than 2,000 points are written to `tables`
    (.csv, .parquet) as they come; the answer has the best of them.

    Raises:
        RlhfsimError: the first thing wrong in the scenario, with its line, before anything is searched.
    """
    from rlhfsim.search.requirements import requirement
    from rlhfsim.what_if.scenarios.answer import whatif as answer
    from rlhfsim.what_if.scenarios.designs import Designs, Store
    from rlhfsim.what_if.scenarios.workers import local, on_ray

    with nullcontext(local(jobs)) if ray is None else on_ray(ray or None) as runner:
        return answer(
            scenario,
            Designs(runner, None if cache is None else Store(Path(cache)), progress, most_s),
            settings=settings,
            only=only,
            requirements=[requirement(text) for text in require],
            tables=tuple(map(Path, tables)),
        )
