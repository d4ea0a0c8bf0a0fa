"""A line of a log or of a configuration is read in time that grows with its length, whatever stands in it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlhfsim.interchange
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.framework import framework_named, framework_names
from rlhfsim.interchange.logs.imported import Choices, import_run
from rlhfsim.specs import loading

REPEATED = (
    *" 1a_.-=:(){}[]<|'\"\\/`$+\n\t",
    *("a ", "a.", "1.", "1 ", "(a ", "a(", "{'", "'a': ", "'a': 1, ", "\\'", '\\"', "| a ", "a=", "--a "),
    *("${", "$((", "$(", "${a-", "\x1b[", "\x1b]", "[repeated 1", "(a pid=", "python ", "verl.", "Config("),
    *("step:1 - ", "Step 1: ", "== ", "- ", "a:\n", ". ", "\n\n "),
)
"""What a pattern may have to try again from each place."""
LENGTH = 8_000
"""Of each text; what grows with its square takes several times the limit."""
LIMIT_S = 0.1
MEGABYTE = 10**6


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Every pattern of the modules that read logs and configurations."""
    names = [m.name for m in pkgutil.walk_packages(rlhfsim.interchange.__path__, "rlhfsim.interchange.")]
    for module in (*map(importlib.import_module, names), loading):
        for name, value in vars(module).items():
            for found in _inside(value):
                yield f"{module.__name__}.{name}", found


def _inside(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inside(item)


PATTERNS = sorted(dict(patterns()).items())


@pytest.mark.parametrize(("name", "pattern"), PATTERNS, ids=[name for name, _ in PATTERNS])
def test_a_pattern_takes_time_that_grows_with_the_text(name: str, pattern: re.Pattern[str]) -> None:
    for unit in REPEATED:
        text = unit * (LENGTH // len(unit))
        started = time.process_time()
        for probe in (f"({text}", f"{text}!"):
            pattern.match(probe)
            sum(1 for _ in pattern.finditer(probe))
        assert time.process_time() - started < LIMIT_S, f"{name} on {unit!r}"


def test_patterns_of_all_frameworks_are_tried() -> None:
    assert {name.split(".")[2] for name, _ in PATTERNS} >= {
        "logs",
        "configuration",
        "verl",
        "nemo_rl",
        "areal",
    }


@pytest.mark.parametrize("framework", framework_names())
def test_a_log_with_lines_of_a_megabyte_is_read_or_refused_in_seconds(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    length = MEGABYTE if framework == "nemo-rl" else MEGABYTE // 10
    path.write_text("\n".join(unit * length for unit in " 1[:"))
    started = time.process_time()
    with pytest.raises(RlhfsimError):
        import_run(path, framework_named(framework), Choices(gpu="h100"))
    assert time.process_time() - started < 2
