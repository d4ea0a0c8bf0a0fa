"""Every command of the pages for people is run as it stands there, page by page, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("tutorial.md", "planners.md", "engineers.md")
REAL = "<!-- real run -->\n"
LIMIT_S = 280.0


def blocks(page: str, *, real: bool) -> str:
    """The `sh` blocks of a page as one script; those of real runs, or all others."""
    text = (DOCS / page).read_text()
    found = re.findall(rf"({re.escape(REAL)})?```sh\n(.*?)```", text, flags=re.DOTALL)
    return "\n".join(code for mark, code in found if bool(mark) == real)


def run(script: str, folder: Path) -> None:
    """In bash, which stops at the first command that fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    script = blocks(page, real=False)
    assert "rlhfsim " in script
    run(script, tmp_path)


@pytest.mark.slow
def test_the_real_runs_of_the_tutorial(tmp_path: Path) -> None:
    run(blocks("tutorial.md", real=True), tmp_path)
    assert (tmp_path / "run.html").stat().st_size > 0
    assert (tmp_path / "mine.yaml").is_file()
