"""Every command of the pages for people is run as it stands there, page by page, in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fork_server import COMMANDS, serving, written_program

from lab.planted import planted_trace
from rlhfsim.interchange.export import Value, exporter
from rlhfsim.interchange.logs.framework import framework_names
from rlhfsim.plan import Plan, read_plan
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.workload.lengths import LogNormal
from tests.frameworks.log_forms import console_log

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("tutorial.md", "planners.md", "budget.md", "schedules.md", "engineers.md")
FRAMEWORKS = sorted(path.stem for path in (DOCS / "frameworks").glob("*.md"))
REAL = "<!-- real run -->\n"
LIMIT_S = 280.0
MODEL = "Qwen/Qwen2.5-7B-Instruct"


def blocks(page: str, *, real: bool) -> str:
    """The `sh` blocks of a page as one script; those of real runs, or all others."""
    text = (DOCS / page).read_text()
    found = re.findall(rf"({re.escape(REAL)})?```sh\n(.*?)```", text, flags=re.DOTALL)
    return "\n".join(code for mark, code in found if bool(mark) == real)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an `rlhfsim` that does not import again what it needs."""
    folder, found = tmp_path_factory.mktemp("programs"), Path(sys.executable).with_name("rlhfsim")
    with serving(str(folder / "socket"), *COMMANDS) as address:
        written_program(folder, found, address)
        yield folder


def run(script: str, folder: Path, programs: Path = Path(sys.executable).parent) -> None:
    """In bash, which stops at the first command that fails."""
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
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
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, programs: Path) -> None:
    script = blocks(page, real=False)
    assert "rlhfsim " in script
    run(script, tmp_path, programs)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_commands_of_a_frameworks_page_run(framework: str, tmp_path: Path, programs: Path) -> None:
    """The first block designs and exports; what a user of the framework has lies there for the others."""
    first, *others = re.findall(
        r"```sh\n(.*?)```", (DOCS / "frameworks" / f"{framework}.md").read_text(), re.DOTALL
    )
    run(first, tmp_path, programs)
    plan = read_plan(tmp_path / "plan.json")
    the_users_script(tmp_path)
    if framework in framework_names():
        the_users_logs(framework, plan, tmp_path)
    run("\n".join(others), tmp_path, programs)
    wanted = re.findall(r"--out (\S+)", "\n".join(others))
    assert wanted
    assert all((tmp_path / name).exists() for name in wanted)


def given(name: str) -> str:
    """What a user gives for a variable of a launch."""
    return {"MODEL": MODEL, "REWARD": "http://127.0.0.1:5000/reward"}.get(name, "data")


def the_users_script(folder: Path) -> None:
    """The launch of the plan that lies in the folder, its variables set."""
    script = (folder / "launch" / "launch.sh").read_text()
    named = re.findall(r'^: "\$\{(\w+):', script, re.MULTILINE)
    exports = "".join(f"export {name}={given(name)}\n" for name in named)
    (folder / "run.sh").write_text(script.replace("set -euo pipefail\n", f"set -euo pipefail\n{exports}"))


def the_users_logs(framework: str, plan: Plan, folder: Path) -> None:
    """Last night's log of the plan, and an earlier one."""
    settings = {
        key.lstrip("+-"): given(str(value)[2:-1]) if str(value) in ("${MODEL}", "${REWARD}") else value
        for key, value in exporter(framework).write(plan).values.items()
    }
    name = "history.jsonl" if framework == "trl" else "job.log"
    (folder / name).write_text(a_log(framework, settings, plan))
    shorter = replace(plan.workload, response_len=LogNormal(mean=300, max=4096))
    (folder / "early.jsonl").write_text(a_log(framework, settings, replace(plan, workload=shorter)))


def a_log(framework: str, settings: Mapping[str, Value], plan: Plan) -> str:
    """A night of the plan where host and engine are slower than believed."""
    costs = {"rl_layer_time": 3e-3, "rollout_step_overhead": 6e-3}
    trace = planted_trace(plan, load_profile("h100"), costs, np.random.default_rng(0), steps=6)
    return console_log(framework, settings, plan, trace)


@pytest.mark.slow
def test_the_real_runs_of_the_tutorial(tmp_path: Path) -> None:
    run(blocks("tutorial.md", real=True), tmp_path)
    assert (tmp_path / "run.html").stat().st_size > 0
    assert (tmp_path / "mine.yaml").is_file()


@pytest.mark.slow
def test_the_student_of_the_page_on_schedules_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    run(blocks("schedules.md", real=True), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/pair/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[-1]["kl/mean"] < 0.8 * rows[0]["kl/mean"]
