"""The GitHub action and the pre-commit hook, run as those two run them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION: Any = yaml.safe_load((ROOT / "action.yml").read_text())
[HOOK] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
DOCTOR = """#!/usr/bin/env bash
# as rlhfsim doctor ends: 0 it fits, 1 it does not, 2 not enough said
[ "$1" = doctor ] || exit 9
printf '%s\\n' "$*"
case "$(cat "$2")" in fits) exit 0 ;; large) exit 1 ;; *) echo "error[not-enough-said]" >&2; exit 2 ;; esac
"""


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a pull request that changed two scripts and removed one, with stand-ins for the commands."""
    origin, here = tmp_path / "origin", tmp_path / "here"
    origin.mkdir()
    git(origin, "init", "-q")
    for name in ("old.sh", "gone.sh", "sub/a b.sh", "notes.txt"):
        (origin / name).parent.mkdir(exist_ok=True)
        (origin / name).write_text("fits")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "base")
    git(tmp_path, "clone", "-q", str(origin), str(here))
    (here / "sub/a b.sh").write_text("large")
    (here / "new.sh").write_text("fits")
    (here / "gone.sh").unlink()
    git(here, "add", "-A")
    git(here, "commit", "-qm", "change")
    commands = tmp_path / "bin"
    commands.mkdir()
    gh = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$GH_CALLED"; cat "${@: -1}" >> "$GH_CALLED"\n'
    for name, text in (("rlhfsim", DOCTOR), ("gh", gh)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return here


def run(checkout: Path, script: str, *words: str, **inputs: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")},
        "PATH": f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(checkout.parent / "summary.md"),
        "GH_CALLED": str(checkout.parent / "gh.txt"),
        **inputs,
    }
    command = ["bash", "-c", script, *words]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def judged(checkout: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    [step] = [step for step in ACTION["runs"]["steps"] if step.get("id") == "judge"]
    names = {"FILES": "files", "GPU": "gpu", "OPTIONS": "options", "COMMENT": "comment", "FAIL_ON": "fail-on"}
    assert {name: f"${{{{ inputs.{key} }}}}" for name, key in names.items()}.items() <= step["env"].items()
    defaults = {name: ACTION["inputs"][key].get("default", "") for name, key in names.items()}
    given = {"FILES": "*.sh", "GPU": "h100", "PULL_REQUEST": "", **inputs}
    return run(checkout, step["run"], **{**defaults, **given})


def test_scripts_that_a_pull_request_changes_are_judged_and_commented(checkout: Path) -> None:
    done = judged(
        checkout, GITHUB_BASE_REF="main", OPTIONS="--framework verl", COMMENT="true", PULL_REQUEST="7"
    )
    assert done.returncode == 1, done.stderr
    assert "### new.sh: fits" in done.stdout
    assert "### sub/a b.sh: does not run" in done.stdout
    assert "doctor ./sub/a b.sh --gpu h100 --framework verl" in done.stdout
    assert "old.sh" not in done.stdout
    assert "gone.sh" not in done.stdout
    assert (checkout.parent / "summary.md").read_text() == done.stdout
    called = (checkout.parent / "gh.txt").read_text()
    assert called.startswith("pr\ncomment\n7\n--edit-last\n--create-if-none\n--body-file\n")
    assert called.endswith(done.stdout)


@pytest.mark.parametrize(
    ("fail_on", "files", "code"),
    [
        ("does-not-fit", "new.sh", 0),
        ("does-not-fit", "notes.txt", 0),
        ("unsure", "odd.sh", 1),
        ("does-not-fit", "odd.sh", 0),
        ("never", "*.sh", 0),
        ("sometimes", "*.sh", 2),
    ],
)
def test_it_fails_where_it_was_asked_to(fail_on: str, files: str, code: int, checkout: Path) -> None:
    (checkout / "odd.sh").write_text("odd")
    git(checkout, "add", ".")
    done = judged(checkout, FAIL_ON=fail_on, FILES=files)
    assert done.returncode == code, done.stdout + done.stderr
    assert not (checkout.parent / "gh.txt").exists()


def test_nothing_that_changed_is_said(checkout: Path) -> None:
    done = judged(checkout, GITHUB_BASE_REF="main", FILES="*.yaml\n\n*.json\n")
    assert (done.returncode, done.stdout) == (0, "rlhfsim doctor: no launch script was changed.\n")


def test_the_hook_judges_each_file_for_itself(checkout: Path) -> None:
    command = shlex.split(HOOK["entry"])
    assert command[:2] == ["bash", "-c"]
    words = [*command[3:], "--gpu", "h100", "--framework", "verl"]
    done = run(checkout, command[2], *words, "new.sh", "sub/a b.sh")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"doctor ./{file} --gpu h100 --framework verl" for file in ("new.sh", "sub/a b.sh")
    ]
    assert run(checkout, command[2], *words, "new.sh").returncode == 0


def test_the_doctor_ends_as_both_expect(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=1\n")
    command = [sys.executable, "-m", "rlhfsim", "doctor", "./run.sh", "--gpu", "h100", "--framework", "verl"]
    dynamic = ["--set", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    ends = [
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, check=False).returncode
        for more in (
            ["--model", "0.5b", *dynamic],
            ["--model", "70b", *dynamic],
            ["--set", "trainer.n_gpus_per_node=x"],
        )
    ]
    assert ends == [0, 1, 2]
