"""One table of the fields of a role: files, options and Python take the same ones, with the same words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.cli.constraints import constraints, limit_of
from rlhfsim.cli.estimate import estimate
from rlhfsim.cli.planned import OPTIONS, fixed_fields
from rlhfsim.errors import RlhfsimError
from rlhfsim.search import role_fields
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import FIXABLE_ROLES, ROLE_FIELDS, TABLE, RoleField, Use, named
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.dotted_paths import known
from rlhfsim.what_if.scenarios.document import Document, document_of, read_scenario
from rlhfsim.what_if.scenarios.points import Cases

H100 = parse_cluster(8, "h100")
WORK = Workload(algorithm="grpo", model="8b", prompts=64, samples=8)
USED = [(role, row.name) for role in FIXABLE_ROLES for row in TABLE if row.use(role)]
FIXED = [(role, name) for role, name in USED if ROLE_FIELDS[name].use(role) == "fixed"]


def example(row: RoleField) -> str:
    return row.choices[-1] if row.choices else f"{row.values.high:.0f}"


def of_file(role: str, name: str, value: object) -> Request:
    base = {
        "cluster": {"node_groups": [{"gpu": "h100", "gpus": 8}]},
        "workload": {"algorithm": "ppo", "model": "8b"},
        "request": {"fix": {role: {name: value}}},
    }
    source = read_scenario({"title": "one field", "base": base})
    return Cases(document_of(source), source, None).base.request


def said(request: Request, role: str, name: str) -> object:
    """The value of a field that a question fixes, or bounds by `=`."""
    bounds = {(x.role, x.field): x.value for x in request.limits if x.relation == "="}
    return request.fix.get(role, {}).get(name, bounds.get((role, name)))


@pytest.mark.parametrize(("role", "name"), USED)
def test_a_file_and_the_option_fix_take_every_field_alike(role: str, name: str) -> None:
    text = example(ROLE_FIELDS[name])
    fix, limits = constraints([f"{role}.{name}={text}"])
    typed = Request(cluster=H100, workload=WORK, fix=fix, limits=limits)
    assert said(typed, role, name) == said(of_file(role, name, text), role, name) is not None
    assert f"base.request.fix.{role}.{name}" in known(Document)


@pytest.mark.parametrize(("role", "name"), FIXED)
def test_options_of_a_role_take_what_python_takes(role: str, name: str) -> None:
    fields = fixed_fields(role, f"{name}={example(ROLE_FIELDS[name])}", OPTIONS[role])
    assert Request(cluster=H100, workload=WORK, fix={role: fields}).fix == {role: fields}


def test_the_help_lists_the_fields_of_the_table() -> None:
    helps = {param.opts[0]: getattr(param, "help", "") for param in estimate.params}
    assert ", ".join(named("actor", "fixed")) in helps["--actor"]
    assert ", ".join(named("rollout", "fixed")) in helps["--rollout"]


@pytest.mark.parametrize(
    ("role", "name", "value", "error"),
    [
        ("actor", "tpp", "2", "unknown layout field 'tpp'"),
        ("rollout", "zero", "2", "unknown layout field 'zero'"),
        ("actor", "zero", "4", "actor.zero: 4 is out of range"),
        ("actor", "shards", "1", "actor.shards: 1 is out of range"),
        ("actor", "tp", "two", "actor.tp: 'two' is not a whole number"),
        ("actor", "recompute", "some", "unknown recompute 'some'"),
        ("actor", "ep_overlap", "maybe", "unknown ep overlap 'maybe'"),
    ],
)
def test_a_bad_one_is_refused_in_the_same_words(role: str, name: str, value: str, error: str) -> None:
    ways = (
        lambda: Request(cluster=H100, workload=WORK, fix={role: {name: value}}),
        lambda: limit_of(f"{role}.{name}={value}", "--fix"),
        lambda: fixed_fields(role, f"{name}={value}", role),
        lambda: of_file(role, name, value),
    )
    for way in ways:
        with pytest.raises(RlhfsimError) as refused:
            way()
        words = refused.value.message.replace(f"{role} {name}:", f"{role}.{name}:").removeprefix("--fix ")
        assert words == error


@pytest.mark.parametrize("use", ["fixed", "bounded"])
def test_a_new_row_is_a_new_field_everywhere(monkeypatch: pytest.MonkeyPatch, use: Use) -> None:
    row = replace(ROLE_FIELDS["ep"], name="etp", roles=use, rollout=None)
    monkeypatch.setattr(role_fields, "TABLE", (*TABLE, row))
    monkeypatch.setattr(role_fields, "ROLE_FIELDS", {**ROLE_FIELDS, "etp": row})
    fix, limits = constraints(["actor.etp=2"])
    assert (fix, [x.field for x in limits]) == (
        ({"actor": {"etp": 2}}, []) if use == "fixed" else ({}, ["etp"])
    )
    assert said(Request(cluster=H100, workload=WORK, fix=fix, limits=limits), "actor", "etp") == 2
    if use == "fixed":
        assert fixed_fields("actor", "etp=2", "--actor") == {"etp": 2}
    with pytest.raises(RlhfsimError, match="etp"):
        limit_of("rollout.etp=2", "--fix")
