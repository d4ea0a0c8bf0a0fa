"""What a field takes, as its annotation says it, and options of the command line that take the same."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest

from rlhfsim.cli.design import design
from rlhfsim.cli.params import Number, OneOf, Whole
from rlhfsim.search.request import Request
from rlhfsim.specs.ranges import FieldValues, Tokens, taken, taken_by
from rlhfsim.specs.workload.workload import Workload


def test_a_field_says_its_range_its_unit_its_choices_and_its_default() -> None:
    assert taken_by(Workload, "epochs") == FieldValues(kind=int, low=1, high=100, default=1)
    assert taken_by(Workload, "kv_precision") == FieldValues(
        kind=str, choices=("bf16", "fp8"), default="bf16"
    )
    assert taken_by(Workload, "model") == FieldValues(kind=str, default="8b")
    assert taken_by(Request, "time_limit") == FieldValues(kind=float, low=0.1, high=86400, dimension="s")
    assert taken_by(Request, "max_oom").high == 0.3, "the narrower of two ends"
    assert taken(Tokens).dimension == "token"


OPTIONS = [
    (param, owner)
    for owner in (Workload, Request)
    for param in design.params
    if param.name in {field.name for field in fields(owner)} and isinstance(param.type, Whole | Number)
]


@pytest.mark.parametrize(("param", "owner"), OPTIONS, ids=[param.name for param, _ in OPTIONS])
def test_an_option_takes_what_its_field_takes(param: click.Parameter, owner: type) -> None:
    values = taken_by(owner, param.name or "")
    assert (param.type.low, param.type.high) == (values.low, values.high)
    assert values.default is None or param.default in (None, values.default)


def test_choices_and_defaults_of_an_option_are_those_of_its_field() -> None:
    algorithm = next(param for param in design.params if param.name == "algorithm")
    values = taken_by(Workload, "algorithm")
    assert isinstance(algorithm.type, OneOf)
    assert (algorithm.type.names, algorithm.default) == (values.choices, values.default)
    assert algorithm.help == f"{', '.join(values.choices)}."
