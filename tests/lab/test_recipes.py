"""The published recipes: each loads, says where it stands, and is priced."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from lab import recipes
from rlhfsim.specs.scenario import load_scenario

MOST_THAT_DO_NOT_FIT = 2
"""Recipes that run elsewhere and are predicted to run out of memory here; see reports/recipes.md."""


@cache
def priced() -> dict[str, recipes.Priced]:
    """Once, and not while tests are collected."""
    return {name: recipes.price(name, search=False) for name in recipes.names()}


def test_at_least_forty_recipes_of_eight_frameworks_are_shipped() -> None:
    assert len(priced()) >= 40
    frameworks = {re.match(r"nemo-rl|prime-rl|[a-z]+", name)[0] for name in priced()}  # type: ignore[index]
    assert len(frameworks) >= 8


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_where_it_stands_and_what_was_assumed(name: str) -> None:
    source = load_scenario(recipes.FOLDER / f"{name}.yaml").source
    assert re.match(r"[\w.-]+/[\w.-]+@\S+.*\(commit [0-9a-f]{7,}\)", source)
    assert "assumed" in source or "mean" in source


def test_no_recipe_is_refused() -> None:
    assert {p.name: p.refused for p in priced().values() if p.refused} == {}


def test_few_recipes_are_said_not_to_fit() -> None:
    wrong = [p.name for p in priced().values() if not p.fits]
    assert len(wrong) <= MOST_THAT_DO_NOT_FIT, wrong


def test_a_recipe_is_asked_with_what_it_allows_itself() -> None:
    asked = recipes.question(load_scenario(recipes.FOLDER / "nemo-rl-llama-8b-fp8-async.yaml"))
    assert asked.framework == "nemo-rl"
    assert {"async", "fp8"} <= asked.allow
    plain = recipes.question(load_scenario(recipes.FOLDER / "verl-grpo-qwen3-8b.yaml"))
    assert plain.allow == frozenset()


def test_a_large_claim_names_phases_terms_and_settings() -> None:
    slow, fast = priced()["skyrl-dapo-7b"], priced()["verl-grpo-qwen3-8b"]
    told = recipes.told(replace(slow, plan=fast.recipe, proven=True))
    assert re.search(r"x\d+\.\d\d: actor\.\w+ [\d,.]+ -> [\d,.]+ s, [\d,.]+ s of it ", told)
    assert "CUDA graphs" in told
    assert "rollout.cuda_graphs False -> True" in told
    assert "no plan of the space is predicted faster" in told


def test_a_recipe_faster_than_a_proven_plan_is_said() -> None:
    one, other = priced()["verl-grpo-qwen3-8b"], priced()["skyrl-dapo-7b"]
    proven = replace(one, plan=other.recipe, proven=True)
    assert recipes.verdict(proven) == "faster than a plan called proven"
    assert "The space lacks something" in recipes.told(proven)


def test_a_recipe_that_does_not_fit_says_what_fills_the_gpu() -> None:
    told = recipes.told(priced()["openrlhf-reinforce-qwen3-4b"])
    assert "actor.train holds 143 of 85 GB, rollout kv cache 54, actor logits 49" in told


def test_the_page_counts_and_shows_every_recipe_in_readable_lines() -> None:
    page = recipes.report(list(priced().values()))
    assert f"{len(priced())} recipes: 0 refused" in page
    assert all(f"../scenarios/recipes/{name}.yaml" in page for name in priced())
    assert all(len(line) <= 120 for line in page.splitlines())


def test_the_committed_page_has_every_recipe_and_none_beats_a_plan_called_proven() -> None:
    page = recipes.REPORT.read_text()
    assert f"{len(priced())} recipes: 0 refused" in page
    assert "0 predicted faster than" in " ".join(page.split())
    assert all(f"**{name}**" in page for name in priced())


def test_the_committed_page_has_the_seconds_of_today() -> None:
    old = recipes.stale(recipes.REPORT.read_text(), list(priced().values()))
    assert not old, "python -m lab.recipes writes the page anew, in five minutes"


def test_a_page_with_other_seconds_of_a_recipe_is_stale() -> None:
    every = list(priced().values())
    page = recipes.report(every)
    assert recipes.stale(page, every) == []
    name, first = every[0].name, every[0].recipe
    assert first is not None
    later = replace(first, prediction=replace(first.prediction, step_s=2 * first.prediction.step_s))
    assert recipes.stale(page, [replace(every[0], recipe=later), *every[1:]]) == [name]
    assert recipes.stale(page.replace(f"[{name}]", "[gone]"), every) == [name]
