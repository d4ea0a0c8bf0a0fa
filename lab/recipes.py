"""Recipes that frameworks publish, priced beside the plan that `design` chooses for the same question.

    python -m lab.recipes                     # writes reports/recipes.md
    python -m lab.recipes verl-grpo-qwen3-8b  # only these, on the screen

`scenarios/recipes/*.yaml` say what each recipe runs and where that is written. The question is the recipe's
workload on its GPUs, its framework and training backend; what it allows itself (stale samples, FP8 rollouts,
log-probs of the rollout) the plan may use too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlhfsim import resources
from rlhfsim.api import design, estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.runs import ANY
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.scenario import Scenario, load_scenario
from rlhfsim.units import GB
from rlhfsim.what_if.differences import changes, chosen

FOLDER = resources.shipped("scenarios") / "recipes"
REPORT = Path("reports") / "recipes.md"
TIME_LIMIT = 60.0
"""Seconds of one search."""
MUCH = 1.5
"""A plan that is faster by more than this factor must say why."""
LEAST_SHARE = 0.1
"""A phase is named as a reason from this share of the seconds saved."""
SETTINGS = [
    "tp",
    "pp",
    "cp",
    "dp",
    "ep",
    "vp",
    "zero",
    "micro_batch",
    "pack_tokens",
    "recompute",
    "offload_optimizer",
    "offload_between",
    "residency",
    "sleep",
    "memory_utilization",
    "max_num_seqs",
    "cuda_graphs",
    "attention_dp",
    "weight_path",
    "staleness",
    "pool",
]
"""Fields of a placement that are named as differences, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A recipe with its prediction and that of the plan chosen in its place."""

    name: str
    title: str
    refused: str | None = None
    """Why it is not priced; None where it is."""
    recipe: Plan | None = None
    plan: Plan | None = None
    """None where nothing fits."""
    proven: bool = False
    """Whether no plan of the question is predicted faster than the plan."""

    @property
    def fits(self) -> bool:
        """Whether the recipe is not predicted to run out of memory."""
        return self.recipe is not None and self.recipe.prediction.probability_out_of_memory <= 0.5

    @property
    def factor(self) -> float | None:
        """Seconds of the recipe over those of the plan."""
        if self.recipe is None or self.plan is None:
            return None
        return self.recipe.prediction.step_s / self.plan.prediction.step_s


def names() -> tuple[str, ...]:
    """Shipped recipes."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def question(scenario: Scenario) -> Request:
    """What the planner is asked in place of the recipe."""
    workload, placement = scenario.workload, scenario.placement
    allowed = {
        "async": placement.schedule.staleness > 0,
        "fp8": workload.rollout_precision == "fp8",
        "rollout-logprobs": workload.old_logprobs == "rollout",
        "adam8bit": workload.optimizer == "adam8bit",
        "bf16-gradients": workload.gradients == "bf16",
    }
    return Request(
        cluster=scenario.cluster,
        workload=workload,
        backend=placement.backend,
        framework=scenario.cluster.framework or ANY,
        allow=frozenset(switch for switch, used in allowed.items() if used),
        max_staleness=max(1.0, placement.schedule.staleness),
    )


def price(name: str, *, search: bool = True, time_limit: float = TIME_LIMIT) -> Priced:
    """One recipe, and with `search` the plan of its question."""
    scenario = load_scenario(FOLDER / f"{name}.yaml")
    try:
        recipe = estimate(scenario.placement, scenario.workload, scenario.cluster)
    except RlhfsimError as error:
        return Priced(name=name, title=scenario.title, refused=error.message)
    if not search:
        return Priced(name=name, title=scenario.title, recipe=recipe)
    answer = design(replace(question(scenario), time_limit=time_limit))
    return Priced(
        name=name, title=scenario.title, recipe=recipe, plan=answer.best, proven=answer.certificate.proven
    )


# --- in words ---------------------------------------------------------------------------------------------


def saved(priced: Priced) -> Iterator[tuple[str, float, float]]:
    """Phases that account for the seconds between recipe and plan: name, seconds before and after."""
    assert priced.recipe is not None
    assert priced.plan is not None
    before, after = _phases(priced.recipe), _phases(priced.plan)
    gain = priced.recipe.prediction.step_s - priced.plan.prediction.step_s
    found = [(name, s, after.get(name, 0.0)) for name, s in before.items()]
    for name, one, other in sorted(found, key=lambda x: x[2] - x[1])[:3]:
        if one - other >= LEAST_SHARE * abs(gain):
            yield name, one, other


def _phases(plan: Plan) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase in plan.prediction.phases:
        name = phase.name.removesuffix(".load").removesuffix(".unload")
        seconds[name] = seconds.get(name, 0.0) + phase.seconds
    return seconds


def different(priced: Priced) -> Iterator[str]:
    """Settings of actor and rollout that the plan has otherwise."""
    assert priced.recipe is not None
    assert priced.plan is not None
    for change in changes(chosen(priced.recipe), chosen(priced.plan)):
        role, _, field = change.path.removeprefix("placement.").partition(".")
        field = field.rpartition(".")[2] or role
        if field in SETTINGS and role in ("actor", "rollout", "weight_path", "schedule"):
            label = field if role == field else f"{role}.{field}"
            yield f"{label} {_word(change.before)} -> {_word(change.after)}"


def _word(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def verdict(priced: Priced) -> str:
    """Whether the two predictions should be believed, and why."""
    if priced.refused:
        return f"refused: {priced.refused}"
    assert priced.recipe is not None
    chance = priced.recipe.prediction.probability_out_of_memory
    alarm = "" if priced.fits else f"does not fit ({chance:.0%} risk, {_peak(priced.recipe)}); "
    if priced.plan is None or priced.factor is None:
        return alarm + "no plan of the space fits"
    if priced.factor < 1 and priced.proven:
        return alarm + "faster than a plan called proven: the space lacks something the recipe has"
    phases = ", ".join(f"{name} {one:,.0f} -> {other:,.0f} s" for name, one, other in saved(priced))
    settings = ", ".join(list(different(priced))[:8])
    if priced.factor > MUCH:
        return f"{alarm}x{priced.factor:.1f}, from {phases}: {settings}"
    return f"{alarm}within {MUCH:g}: {settings or 'the same settings'}"


def _peak(plan: Plan) -> str:
    told = plan.prediction
    return f"{told.peak_memory_bytes / GB:.0f} of {told.capacity_bytes / GB:.0f} GB"


def report(priced: Sequence[Priced]) -> str:
    """The page."""
    fast = [p for p in priced if p.factor is not None and p.factor < 1 and p.proven]
    much = [p for p in priced if p.factor is not None and p.factor > MUCH]
    lines = [
        "# Published recipes\n",
        "What frameworks ship and people run (`scenarios/recipes`, each with source and commit), as predicted, beside the "
        "plan that `design` chooses for the same question with the recipe's framework. Written by `python -m "
        "lab.recipes`. Nobody measured these runs here.\n",
        f"{len(priced)} recipes: {sum(p.refused is not None for p in priced)} refused, "
        f"{sum(not p.fits and not p.refused for p in priced)} that do not fit, {len(fast)} predicted faster than a plan "
        f"called proven, {len(much)} whose plan claims more than {MUCH:g} times.\n",
        "| recipe | GPUs | recipe, s (P10 to P90) | plan, s | proven | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_line, priced),
    ]
    return "\n".join(lines) + "\n"


def _line(priced: Priced) -> str:
    gpus, seconds, best = "", "", ""
    if priced.recipe is not None:
        gpus = " + ".join(f"{h.gpus} {h.profile}" for h in priced.recipe.hardware)
        told = priced.recipe.prediction
        seconds = f"{told.step_s:,.0f} ({told.low_s:,.0f} to {told.high_s:,.0f})"
    if priced.plan is not None:
        best = f"{priced.plan.prediction.step_s:,.0f}"
    shown = f"[{priced.name}](../scenarios/recipes/{priced.name}.yaml): {priced.title}"
    return (
        f"| {shown} | {gpus} | {seconds} | {best} | {'yes' if priced.proven else 'no'} | {verdict(priced)} |"
    )


def main() -> None:
    """Price all recipes and write the page, or some of them on the screen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only these, on the screen")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds of one search")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    priced: list[Priced] = []
    with ProcessPoolExecutor(max_workers=given.workers) as pool:
        for one in pool.map(partial(price, time_limit=given.time_limit), given.names or names()):
            priced.append(one)
            if not given.names:
                REPORT.write_text(report(priced))
    if given.names:
        print(report(priced))


if __name__ == "__main__":
    main()
