from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rlhfsim import choice, plan
from rlhfsim.cli.estimate import estimate
from rlhfsim.cli.gpus import gpus
from rlhfsim.cli.memory import memory
from rlhfsim.cli.models import models
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.scenario import system_names
from rlhfsim.specs.workload.workload import Workload

DOCS = Path(__file__).parents[2] / "docs"
PLAN_TYPES = [
    plan.Plan,
    plan.PlannedModel,
    plan.PlannedHardware,
    plan.RoleGpus,
    plan.PredictedPhase,
    plan.LedgerEntry,
    plan.Prediction,
    choice.Choice,
    choice.AskedBound,
    choice.AskedLimit,
    choice.BreakEven,
    choice.Searched,
    choice.RunnerUp,
    Placement.in_files(),
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
    Layout,
    RolloutLayout,
]


def words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]*)`", (DOCS / name).read_text()))))


@pytest.mark.parametrize("kind", PLAN_TYPES, ids=lambda k: str(k.__name__))
def test_every_field_of_the_plan_is_documented(kind: type) -> None:
    assert {f.name for f in fields(kind)} - words("plan.md") == set()


def test_every_field_of_the_workload_is_documented() -> None:
    assert {f.name for f in fields(Workload)} - words("workload.md") == set()


@pytest.mark.parametrize("command", [estimate, memory], ids=lambda c: str(c.name))
def test_every_option_is_documented(command: click.Command) -> None:
    text = (DOCS / "cli.md").read_text() + (DOCS / "workload.md").read_text()
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.opts[0] in text


def test_every_shipped_system_is_named() -> None:
    assert set(system_names()) <= set(re.findall(r"`([\w-]+)`", (DOCS / "cli.md").read_text()))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(estimate, ["verl"]), (memory, ["verl"]), (gpus, ["h100"]), (models, ["8b"])],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_top_level_key_of_the_json_is_documented(command: click.Command, arguments: list[str]) -> None:
    data = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).output)
    keys = set(data) | set((data.get("gpus") or data.get("models") or [{}])[0])
    assert keys - words("plan.md") - {"schema"} == set()
