"""The pinned sets: what is asked for is in them, and one release of everything."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().split()
    return {canonicalize_name(package): release for package, _, release in (x.partition("==") for x in lines)}


def test_the_cpu_set_has_what_it_is_made_from() -> None:
    pins = _pins("cpu.lock")
    for line in (ROOT / "requirements" / "cpu.in").read_text().splitlines():
        asked = Requirement(line)
        assert pins[canonicalize_name(asked.name)] in str(asked.specifier)


def test_the_frameworks_set_repeats_nothing_of_the_cpu_set() -> None:
    assert not _pins("cpu.lock").keys() & _pins("frameworks.lock").keys()


def test_the_cpu_set_can_run_the_reward_math_with_all_that_it_needs() -> None:
    pins = _pins("cpu.lock")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["math"]
    seen, todo = set[str](), [Requirement(text) for text in wanted]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        assert asked.specifier.contains(pins[name]), f"{asked} and {name}=={pins[name]}"
        if name not in seen:
            seen.add(name)
            needed = [Requirement(text) for text in requires(name) or ()]
            todo += [n for n in needed if n.marker is None or n.marker.evaluate({"extra": ""})]
    assert "antlr4-python3-runtime" in seen
