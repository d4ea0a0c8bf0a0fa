"""What is refused at the door of every file: form, depth, keys that are given twice, control characters, odd files."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.forms import of_files
from rlhfsim.specs.loading import (
    MAX_DEPTH,
    Source,
    checked,
    convert,
    parse_json,
    parse_yaml,
    read_bytes,
    read_text,
)
from rlhfsim.specs.scenario import load_scenario


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(RlhfsimError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_yaml, "[" * 100_000, "nested more than"),
        (parse_yaml, "{a: " * 3000, "nested more than"),
        (parse_yaml, "- " * 3000 + "x", "nested more than"),
        (parse_yaml, "\n".join(" " * i + "a:" for i in range(2 * MAX_DEPTH)), "--> x:65"),
        (parse_json, "[" * 500 + "]" * 500, "nested more than"),
        (parse_json, '{"a": 1,\n "b": {"c": 1, "c": 2}}', "key 'c' is given twice\n  --> x:2"),
        (parse_yaml, "a: 1\na: 2\n", "key 'a' is given twice"),
        (parse_json, '{"a": "\\u001b[31m"}', r"control character '\x1b'"),
        (parse_json, '{"a": ["\\ud800"]}', "control character"),
        (parse_json, '{"\\u009b": 1}', "control character"),
        (parse_yaml, 'a: "\\e]0;x"', "control character"),
        (parse_yaml, 'a: "\\u202e"', "control character"),
    ],
)
def test_a_document_that_would_harm_is_refused_with_its_place(
    parse: Callable[[str, str], Source], text: str, message: str
) -> None:
    assert message in refused(lambda: parse(text, "x"))


def test_brackets_and_backslashes_inside_texts_are_none() -> None:
    text = '{"a": "' + "[" * 200 + '", "b": "C:\\\\users\\\\x86 \\ud83d\\ude00 \\n\\t"}'
    assert parse_json(text, "x").data["b"] == "C:\\users\\x86 \U0001f600 \n\t"
    assert len(parse_yaml("a: '" + "[" * 200 + "'", "x").data["a"]) == 200


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    whole: int = 0
    rates: tuple[float, ...] = ()
    by_name: dict[str, float] | None = None
    switch: bool | int = False


@pytest.mark.parametrize(
    ("text", "where"),
    [("whole: true", "whole"), ("rates: [1, false]", "rates.1"), ("by_name: {a: yes}", "by_name.a")],
)
def test_a_truth_value_is_no_number(text: str, where: str) -> None:
    message = refused(lambda: convert(Numbers, parse_yaml(text, "x.yaml")))
    assert f"'{where}': a truth value is no number" in message
    assert "--> x.yaml:1" in message
    assert convert(Numbers, parse_yaml("switch: true", "x")).switch is True


def test_what_is_no_regular_file_is_one_error_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    for name, reason in (
        ("pipe", "not a regular file"),
        ("loop", "too many levels of symbolic links"),
        ("", "is a directory"),
        ("huge", "file is larger than 4 MiB"),
        ("n" * 300, "file name too long"),
        ("\0", "not a path"),
    ):
        assert reason in refused(lambda name=name: read_text(tmp_path / name))  # type: ignore[misc]
    assert "file name too long" in refused(lambda: of_files([Path("n" * 300)]))
    assert "unknown scenario" in refused(lambda: load_scenario("n" * 300))
    for device in ("/dev/zero", "/dev/full", "/dev/null"):
        assert "not a regular file" in refused(lambda device=device: read_text(Path(device)))  # type: ignore[misc]


def test_an_error_cannot_drive_a_terminal_and_stays_short() -> None:
    place = Place(file="\x1b[2Jx\udcff.yaml", line=1, text="\x9b31m")
    shown = str(RlhfsimError("bad", "name \x1b]0;x\x07 " + "y" * 10_000, place=place, help="\u202ehelp"))
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert len(shown) < 2000


def test_a_file_beyond_a_large_limit_is_refused_before_any_of_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    try:
        assert "larger than 2048 MiB" in refused(lambda: read_bytes(tmp_path / "huge", 2 * 2**30))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
