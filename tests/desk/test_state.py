"""The question as fields, as an address and as a command: each gives the others."""

from __future__ import annotations

import shlex

import pytest

from rlhfsim.cli.choose import choose
from rlhfsim.cli.design import design
from rlhfsim.cli.desk import FIELDS, asked, parsed
from rlhfsim.desk.state import (
    DeskState,
    arguments,
    command,
    compared,
    comparison,
    of_search,
    query,
    to_search,
    wrong,
)
from rlhfsim.errors import RlhfsimError

QUESTION = {
    "gpus": "64",
    "model": "70b",
    "algorithm": "grpo",
    "response-len": "lognormal:mean=2000,sigma=0.8,max=8192",
    "steps": "1000",
    "deadline": "7d",
    "more": "--fix 'actor.tp<=4' --max-staleness 2",
}


def read(question: dict[str, str]) -> object:
    return asked(query(question), files=True)


def test_an_address_holds_question_and_base() -> None:
    state = DeskState(question=QUESTION, base={"gpus": "32", "model": "70b"})
    assert of_search(to_search(state), FIELDS) == state
    assert of_search("", FIELDS) == DeskState()


def test_the_command_asks_what_the_page_asks() -> None:
    typed = shlex.split(command(QUESTION))
    assert typed[:2] == ["rlhfsim", "design"]
    assert typed[-2:] == ["--out", "plan.json"]
    given = parsed(QUESTION, files=True)
    theirs = design.make_context("design", typed[2:-2]).params
    assert {k: v for k, v in given.items() if k != "out"} == {k: v for k, v in theirs.items() if k != "out"}
    assert given["deadline"] == 7 * 86400
    assert given["fix"] == ("actor.tp<=4",)


def test_the_other_command_compares_the_same_work() -> None:
    verb, *words = shlex.split(comparison(compared(QUESTION, {})))[1:]
    assert verb == "choose"
    given = choose.make_context(verb, words).params
    assert (given["model"], given["algorithm"], given["steps"]) == ("70b", "grpo", 1000)
    assert (given["gpu"], given["gpus"]) == ("h100,h200,b200,a100-80", "8..64")
    assert compared({"gpus": "4"}, {})["gpus"] == "4..4"
    assert compared({"gpus": "4"}, {"gpu": "l4"})["gpu"] == "l4"


def test_every_field_is_an_option_of_design() -> None:
    options = {p.opts[0] for p in design.params}
    for field in FIELDS.values():
        assert f"--{field.name}" in options or field.name == "more"


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"gpus": "4x8"}, "gpus", "not a whole number"),
        ({"model": "70bn"}, "model", "unknown model"),
        ({"deadline": "soon"}, "deadline", "soon"),
        ({"steps": ""}, "steps", "needs the length of the run"),
        ({"more": "--json"}, "more", "of no use on this page"),
        ({"more": "--fix 'actor"}, "more", "quotation"),
    ],
)
def test_the_field_that_is_wrong_is_named(change: dict[str, str], field: str, says: str) -> None:
    moved = {k: v for k, v in {**QUESTION, **change}.items() if v}
    found = wrong(read, moved, QUESTION, FIELDS)
    assert found is not None
    assert found[0] == field
    assert says in found[1].message
    assert wrong(read, QUESTION, {}, FIELDS) is None


def test_an_address_with_another_name_says_which() -> None:
    with pytest.raises(RlhfsimError, match="'gpuz'"):
        of_search("?gpuz=64", FIELDS)


def test_a_value_that_begins_with_a_dash_is_no_option() -> None:
    assert arguments({"model": "--json"}) == ["--model=--json"]


@pytest.mark.parametrize("named", ["model=./config.json", "gpu=mine.yaml", "response-len=empirical:file=x"])
def test_files_are_read_for_this_machine_alone(named: str) -> None:
    with pytest.raises(RlhfsimError, match="names a file"):
        asked(f"gpus=8&{named}" if named.startswith("model") else f"gpus=8&model=7b&{named}", files=False)
