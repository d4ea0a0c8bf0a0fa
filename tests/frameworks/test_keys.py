"""One row a key: what is written of a plan's field reads back as it was, and no other module spells the key."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rlhfsim.interchange
from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.forms import of_text
from rlhfsim.interchange.configuration.keys import key_table
from rlhfsim.interchange.configuration.recognise import settings_of
from rlhfsim.interchange.configuration.settings import NAMED_MODEL, FrameworkSettings
from rlhfsim.interchange.export import export, exporters
from rlhfsim.interchange.fields import ROLES, PlanFields
from rlhfsim.interchange.table import Key, Table, bare, holds
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.backends import BACKENDS
from tests.frameworks.drawn import Kind, algorithms_of, drawn_plans

FOLDERS = Path(rlhfsim.interchange.__file__).parent


NOT_RUN = {
    "skyrl": (
        "trainer.critic.megatron_config.",  # no PPO with Megatron
        "generator.inference_engine.backend",  # no other engine than vLLM
    ),
    "verl": ("critic.forward_max_token_len_per_gpu",),  # its trainer of older releases
}
"""Beginnings of keys that are read, and that say nothing of a plan."""


def table_of(name: str, file: str = "keys") -> Table:
    found: Table = import_module(f"rlhfsim.interchange.{name.replace('-', '_')}.{file}").TABLE
    return found


def started(name: str, plan: Plan) -> dict[str, Any]:
    """What the command says that starts a run on given data: which trainer it is."""
    if plan.workload.generates:
        return {}
    launch = export(plan, name, frozenset()).files["launch.sh"]
    return dict(settings_of(configuration_named(name), of_text(launch), {}).values)


def changed(name: str, table: Table, plan: Plan) -> Iterator[str]:
    """Fields that a row can say of the plan and that read back as something else."""
    given = PlanFields(plan, table.planned)
    values = {bare(s.key): s.value for section in table.write(plan) for s in section.settings}
    said = started(name, plan) | values | {NAMED_MODEL: plan.workload.model}
    reading = table.read(FrameworkSettings(said, "written"))
    said = reading.all()
    for key in table.keys:
        if not sayable(key, given) or shared(table, key, given):
            continue
        if key.read or key.field in said:
            value, again = given[key.field], said.get(key.field)
            if value != again and (value, again) != (
                "dapo",
                "grpo",
            ):  # with a clip range, which prices nothing
                yield f"{key.key}: {key.field} {value} -> {again}"


def sayable(key: Key, given: PlanFields) -> bool:
    """Whether the row says the field of this plan."""
    value = given[key.field] if holds(key.when, given) else None
    return value is not None and (key.codec.values is None or value in key.codec.values)


@pytest.mark.parametrize(
    ("name", "key", "estimators"),
    [
        ("verl", "algorithm.adv_estimator", ("gpg", "opo", "gdpo", "grpo_passk")),
        ("skyrl", "trainer.algorithm.advantage_estimator", ("grpo", "maxrl")),
    ],
)
def test_estimators_over_groups_are_read_as_grpo_whose_cost_is_theirs(name, key, estimators) -> None:
    for word in estimators:
        said = table_of(name).read(FrameworkSettings({key: word, NAMED_MODEL: "qwen2.5-7b"}, "given")).all()
        assert said["workload.algorithm"] == "grpo", word


def shared(table: Table, key: Key, given: PlanFields) -> bool:
    """Whether the key says another field, with another value: the export names what it cannot say then."""
    first = next(row for row in table.keys if row.key == key.key and holds(row.when, given))
    return first.field != key.field and given[first.field] != given[key.field]


def kinds_of(name: str, file: str) -> list[Kind]:
    """What the plans of a table train on."""
    own = importlib.util.find_spec(f"rlhfsim.interchange.{name.replace('-', '_')}.given_keys")
    kinds: tuple[Kind, ...] = ("generates", "distils", "given") if own is None else ("generates", "distils")
    return [kind for kind in (kinds if file == "keys" else ("given",)) if algorithms_of(name, kind)]


TABLES = [(name, "keys") for name in exporters()] + [("verl", "given_keys"), ("openrlhf", "given_keys")]
"""Framework and table that is written."""


@pytest.mark.parametrize(("name", "file"), TABLES)
def test_every_field_that_a_row_names_reads_back_as_it_was_written(name: str, file: str) -> None:
    table = table_of(name, file)
    for kind in kinds_of(name, file):
        assert {
            line for plan in drawn_plans(name, 40, kind=kind) for line in changed(name, table, plan)
        } == set()


@pytest.mark.long
@pytest.mark.parametrize(("name", "file"), TABLES)
def test_every_row_says_its_field_in_a_thousand_plans(name: str, file: str) -> None:
    table, kinds = table_of(name, file), kinds_of(name, file)
    plans = [plan for kind in kinds for plan in drawn_plans(name, 1000, seed=1, kind=kind)]
    assert {line for plan in plans for line in changed(name, table, plan)} == set()
    fields = [PlanFields(plan, table.planned) for plan in plans]
    undrawn = [key.key for key in table.keys if not any(sayable(key, given) for given in fields)]
    assert [key for key in undrawn if not key.startswith(NOT_RUN.get(name, ()))] == []


# --- one home -----------------------------------------------------------------------------------------------


def literals(path: Path) -> Iterator[str]:
    """Strings of a module, those put together of its constants among them, but documentation."""
    tree = ast.parse(path.read_text())
    constants: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets[0]
            names = targets.elts if isinstance(targets, ast.Tuple) else [targets]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target, value in zip(names, values, strict=False):
                text = spelled(value, constants)
                if isinstance(target, ast.Name) and text is not None:
                    constants[target.id] = text
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and (text := spelled(node, constants)) is not None:
            yield text


def spelled(node: ast.expr, constants: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return None
    if isinstance(node, ast.JoinedStr):
        parts = [
            constants.get(part.value.id)
            if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
            else spelled(part, constants)
            for part in node.values
        ]
        return "".join(part for part in parts if part) if None not in parts else None
    return None


@pytest.mark.parametrize("name", exporters())
def test_a_key_is_spelled_in_one_module(name: str) -> None:
    table = table_of(name)
    known = set(key_table(name).keys) | {n for key in table.keys for n in table.names(key.field)}
    known -= ROLES.keys() | BACKENDS.keys() | {"bf16", "sft"}  # words that are values as well
    homes: dict[str, set[str]] = defaultdict(set)
    modules = set((FOLDERS / name.replace("-", "_")).glob("*.py"))
    for path in sorted(path for path in modules if path.stem != "releases"):  # which maps names to older ones
        for text in literals(path):
            if bare(text) in known:
                homes[bare(text)].add(path.stem)
    for path in (FOLDERS / name.replace("-", "_")).glob("*.yaml"):  # the rows of the module of that name
        for text in re.findall(r"\bkey: \"?([-+.\w]+)", path.read_text()):
            if bare(text) in known:
                homes[bare(text)].add(path.stem)
    assert {key: files for key, files in homes.items() if len(files) > 1} == {}
