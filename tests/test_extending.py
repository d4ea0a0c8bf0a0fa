"""docs/extending.md: every worked example applies to the code of today, in as few files as it says, and
works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"<!-- example: (?P<name>[a-z -]+), at most (?P<files>\d) files? -->\n(?P<text>.*?)<!-- end -->",
    re.DOTALL,
)
EXAMPLES = {m["name"]: (int(m["files"]), m["text"]) for m in EXAMPLE.finditer(PAGE)}
CODE = ("rlhfsim", "executor", "hardware_profiles", "scenarios")
HALF_WRITTEN = "*.pyc.*"
"""Compiled modules that another process is about to rename; whole ones hold for files that no example changes."""
LIMIT_S = 200.0


def blocks(text: str, kind: str) -> list[str]:
    """Fenced blocks of one kind."""
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


def run(script: str, folder: Path, code: Path) -> None:
    """In bash, which stops at the first command that fails, with `code` before the installed package."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(code)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_questions_that_the_house_must_answer_are_all_there() -> None:
    asked = {"gpu", "framework", "algorithm", "role", "tool model", "weight path", "schedule", "kv bytes"}
    assert set(EXAMPLES) == asked


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_worked_example_applies_and_works(name: str, tmp_path: Path) -> None:
    files, text = EXAMPLES[name]
    code, folder = tmp_path / "code", tmp_path / "folder"
    folder.mkdir()
    for part in CODE:
        shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns(HALF_WRITTEN))
    shutil.copytree(ROOT / "reports", code / "reports", ignore=shutil.ignore_patterns("*.html", "demo_run"))
    changed: set[str] = set()
    for diff in blocks(text, "diff"):
        changed |= set(re.findall(r"^\+\+\+ b/(.*)$", diff, flags=re.MULTILINE))
        subprocess.run(["git", "apply", "-C1", "-"], input=diff, text=True, cwd=code, check=True)
    assert len(changed) <= files
    scripts = blocks(text, "sh")
    assert scripts
    for script in scripts:
        run(script, folder, code)


def test_the_other_commands_of_the_page_run(tmp_path: Path) -> None:
    run("\n".join(blocks(EXAMPLE.sub("", PAGE), "sh")), tmp_path, ROOT)
