"""The base install: what works without any extra, and the one line of pip where an extra is missing.

Libraries of extras are hidden from a process of its own; `.ci/base` walks every command in a real install.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import EXTRAS
from rlhfsim.plan import read_plan

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HIDDEN = sorted({module for modules in EXTRAS.values() for module in modules})
BASE = f"""
import sys
for name in {HIDDEN}:
    sys.modules[name] = None
from rlhfsim.__main__ import main
main()
"""


def base(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process that finds no library of an extra."""
    return subprocess.run([sys.executable, "-c", BASE, *words], cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("base")
    found = base("estimate", "verl", "--out", "plan.json", folder=made)
    assert found.returncode == 0, found.stderr
    return made


def test_a_dry_run_on_a_described_cluster_needs_no_extra(folder: Path) -> None:
    cluster = "2x8xh100_sxm"
    found = base("launch", "plan.json", "--dry-run", "--assume-cluster", cluster, folder=folder)
    assert (found.returncode, found.stderr) == (0, "")
    assert "not checked: not installed" in found.stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("desk", "desk"),
        ("demo", "real-gpu"),
        ("launch plan.json", "real-gpu"),
        ("launch plan.json --dry-run", "real-gpu"),
        ("launch verl --scale 2", "real-gpu"),
        ("sync --run", "real-gpu"),
        ("profile measure", "real-gpu"),
        ("whatif h100-to-b200 --ray", "ray"),
        ("whatif h100-to-b200 --parquet a.parquet", "parquet"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line_of_pip(words: str, extra: str, folder: Path) -> None:
    found = base(*words.split(), folder=folder)
    assert found.returncode == 2, found.stderr
    assert found.stderr.startswith("error[missing-library]: ")
    assert re.findall(r"pip install (\S+)", found.stderr) == [f"'rlhfsim[{extra}]'"]
    assert "Traceback" not in found.stderr


def test_a_library_that_no_command_asked_for_before_is_the_same_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlhfsim.cli import main

    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(main.cli, "main", lambda **_: __import__("psutil"))
    assert main._run(lambda: False) == 2
    assert "pip install 'rlhfsim[real-gpu]'" in capsys.readouterr().err


def test_every_extra_that_an_error_names_is_one_of_the_project() -> None:
    for extra, modules in EXTRAS.items():
        brought = " ".join(PROJECT["optional-dependencies"][extra])
        assert modules[0].replace("_", "-") in brought, f"extra {extra} does not bring {modules[0]}"


@pytest.mark.parametrize(("algorithm", "needed"), [("dpo", False), ("grpo", True)])
def test_a_launch_asks_for_vllm_only_where_it_generates(
    algorithm: str, needed: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from rlhfsim.cli import launch

    asked: set[str] = set()

    def settings_of(*_: object, **__: object) -> None:
        raise RlhfsimError("end", "as far as this test goes", help="none")

    plan = read_plan(folder / "plan.json")
    plan = replace(plan, workload=replace(plan.workload, algorithm=algorithm))
    monkeypatch.setattr(launch, "need", lambda *names, **_: asked.update(names))
    monkeypatch.setattr(launch, "plan_of", lambda *_: (plan, ()))
    monkeypatch.setattr(launch, "settings_of", settings_of)
    with pytest.raises(RlhfsimError, match="as far as"):
        CliRunner().invoke(
            launch.launch, ["plan.json", "--out", str(tmp_path / "run")], catch_exceptions=False
        )
    assert {"torch", "deepspeed"} <= asked
    assert ("vllm" in asked) is needed
