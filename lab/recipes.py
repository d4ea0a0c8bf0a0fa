"""Recipes that frameworks publish, priced beside the plan that `design` chooses for the same question.

    python -m lab.recipes                     # writes reports/recipes.md
    python -m lab.recipes verl-grpo-qwen3-8b  # only these, on the screen
    python -m lab.recipes --check             # whether the page has the seconds of today; no searches

`scenarios/recipes/*.yaml` say what each recipe runs and where that is written. The question is the recipe's
workload on its GPUs, its framework and training backend; what it allows itself (stale samples, FP8 rollouts,
log-probs of the rollout) the plan may use too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

from lab.claims import believed, reason
from rlhfsim import resources
from rlhfsim.api import design, estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.scenario import Scenario, load_scenario
from rlhfsim.units import GB
from rlhfsim.what_if.differences import changes, chosen

FOLDER = resources.shipped("scenarios") / "recipes"
REPORT = Path("reports") / "recipes.md"
TIME_LIMIT = 60.0
"""Seconds of one search."""
MUCH = 1.5
"""A plan that is faster by more than this factor must say why."""
MOST_RISK = 0.3
"""Risk of running out of memory that a plan may have where the recipe has as much: proofs hold up to it."""
LEEWAY = 1.01
"""Leeway of that risk, for two ways of adding up the same bytes."""
WIDTH = 100
"""Columns of the page's texts."""
MOST_SETTINGS = 8
"""Differences that are named of one recipe."""
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
        """Whether the recipe is predicted to start and not to run out of memory."""
        return self.recipe is not None and not self.recipe.prediction.rejected_by

    @property
    def beats_proof(self) -> bool:
        """Whether a plan is called proven although the recipe, at a risk that a plan may have, is faster."""
        risk = self.recipe.prediction.probability_out_of_memory if self.recipe else 1.0
        return self.proven and risk <= MOST_RISK and self.factor is not None and self.factor < 1

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
    asked = question(scenario)
    risk = min(MOST_RISK, max(asked.max_oom, LEEWAY * recipe.prediction.probability_out_of_memory))
    asked = replace(asked, time_limit=time_limit, max_oom=risk)
    answer = design(asked, explain=False, rivals=False, simplest_s=None)
    return Priced(
        name=name, title=scenario.title, recipe=recipe, plan=answer.best, proven=answer.certificate.proven
    )


# --- in words ---------------------------------------------------------------------------------------------


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
    """What becomes of a recipe, in a few words."""
    if priced.refused:
        return "refused"
    if priced.plan is None or priced.factor is None:
        return "no plan of the space fits"
    alarm = "" if priced.fits else "does not fit; "
    if priced.beats_proof:
        return alarm + "faster than a plan called proven"
    return alarm + ("proven" if priced.proven else "not proven")


def told(priced: Priced) -> str:
    """Why the plan is faster, what it has otherwise, and what its seconds should be held against."""
    if priced.refused:
        return f"refused: {priced.refused}."
    memory = "" if priced.fits else f"The recipe {_overflow(priced)}. "
    if priced.recipe is None or priced.plan is None or priced.factor is None:
        return memory + "No plan of the space fits."
    settings = ", ".join(list(different(priced))[:MOST_SETTINGS]) or "the same settings"
    why = f"{reason(priced.recipe, priced.plan)}. " if priced.factor > 1 else ""
    if priced.recipe.framework is None:
        settings += ". No table says what this framework runs, so the plan may use what it does not"
    lack = "The space lacks something that the recipe has. " if priced.beats_proof else ""
    support = believed(priced.plan, proven=priced.proven)
    return f"{memory}x{priced.factor:.2f}: {lack}{why}Differs: {settings}. Held against: {support}."


def _overflow(priced: Priced) -> str:
    """What fills the GPU of a recipe that is said not to fit."""
    assert priced.recipe is not None
    seen = priced.recipe.prediction
    if seen.peak_memory_bytes <= seen.capacity_bytes:
        return f"does not fit: {seen.rejected_by}"
    at_peak = sorted((e for e in seen.ledger if e.phase == seen.peak_phase), key=lambda e: -e.bytes)
    parts = ", ".join(f"{e.role} {e.component.replace('_', ' ')} {e.bytes / GB:.0f}" for e in at_peak[:4])
    return (
        f"does not fit ({seen.probability_out_of_memory:.0%} risk): {seen.peak_phase} holds "
        f"{seen.peak_memory_bytes / GB:.0f} of {seen.capacity_bytes / GB:.0f} GB, {parts}"
    ).replace("%", " %")


def report(priced: Sequence[Priced]) -> str:
    """The page."""
    fast = [p for p in priced if p.beats_proof]
    much = [p for p in priced if p.factor is not None and p.factor > MUCH]
    proven = sum(p.proven for p in priced)
    left_out = len(names()) - len(priced)
    counted = (
        f"{len(priced)} recipes{f' ({left_out} more are not priced here)' if left_out > 0 else ''}: "
        f"{sum(p.refused is not None for p in priced)} refused, "
        f"{sum(not p.fits and not p.refused for p in priced)} that do not fit, {len(fast)} predicted faster than "
        f"a plan called proven, {len(much)} whose plan claims more than {MUCH:g} times. {proven} plans are proven."
    )
    intro = (
        "What frameworks ship and people run (`scenarios/recipes`, each with source and commit), as predicted, "
        "beside the plan that `design` chooses for the same question with the recipe's framework, at a risk of "
        "running out of memory of at most 10 %, or the recipe's where that is up to 30 %. Written by "
        "`python -m lab.recipes`. Nobody measured these runs here."
    )
    rest = [p for p in priced if p not in much]
    lines = [
        "# Published recipes\n",
        fill(intro, WIDTH) + "\n",
        fill(counted, WIDTH) + "\n",
        "| recipe | GPUs | recipe, s | P10 to P90 | plan, s | times | plan is |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(_line, priced),
        f"\n## Plans that claim more than {MUCH:g} times\n",
        *map(_paragraph, much),
        "## The others\n",
        *map(_paragraph, rest),
        *(f"[{p.name}]: ../scenarios/recipes/{p.name}.yaml" for p in priced),
    ]
    return "\n".join(lines) + "\n"


def stale(page: str, priced: Sequence[Priced]) -> list[str]:
    """Recipes that the page has with other seconds than they have now, or has not; searches are not repeated."""
    rows = {line.split(" | ")[0]: line.split(" | ")[:4] for line in page.splitlines()}
    now = [_line(p).split(" | ")[:4] for p in priced]
    return [row[0].strip("| []") for row in now if rows.get(row[0]) != row]


def _line(priced: Priced) -> str:
    gpus, seconds, span, best, times = "", "", "", "", ""
    if priced.recipe is not None:
        gpus = " + ".join(f"{h.gpus} {h.profile}" for h in priced.recipe.hardware)
        seen = priced.recipe.prediction
        seconds, span = f"{seen.step_s:,.0f}", f"{seen.low_s:,.0f} to {seen.high_s:,.0f}"
    if priced.plan is not None:
        best, times = f"{priced.plan.prediction.step_s:,.0f}", f"{priced.factor:.2f}"
    return f"| [{priced.name}] | {gpus} | {seconds} | {span} | {best} | {times} | {verdict(priced)} |"


def _paragraph(priced: Priced) -> str:
    text = f"**{priced.name}** ({priced.title}). {told(priced)}"
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def main() -> None:
    """Price all recipes and write the page, or some of them on the screen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only these, on the screen")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds of one search")
    parser.add_argument("--check", action="store_true", help="fail where the page has other seconds")
    given = parser.parse_args()
    if given.check:
        old = stale(REPORT.read_text(), [price(name, search=False) for name in given.names or names()])
        sys.exit(f"{REPORT}: {len(old)} recipes are priced otherwise now: {', '.join(old)}" if old else 0)
    priced: list[Priced] = []
    for name in given.names or names():
        begun = time.monotonic()
        priced.append(price(name, time_limit=given.time_limit))
        factor = priced[-1].factor
        times = "" if factor is None else f"x{factor:.2f}, "
        print(f"{name}: {times}{verdict(priced[-1])} ({time.monotonic() - begun:.0f} s)", flush=True)
        if not given.names:
            REPORT.write_text(report(priced))
    if given.names:
        print(report(priced))


if __name__ == "__main__":
    main()
