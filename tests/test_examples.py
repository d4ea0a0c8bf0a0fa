"""The Dockerfile and the examples of a launch say only what exists; none of them can be run without GPUs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from rlhfsim.cli.main import cli

ROOT = Path(__file__).parents[1]
LAUNCHES = sorted(p for p in (ROOT / "docs/examples").iterdir() if p.suffix != ".py")
EXAMPLES = {p.name: p for p in (ROOT / "Dockerfile", *LAUNCHES)}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands(text: str) -> list[list[str]]:
    """Every `rlhfsim COMMAND ...` (in the Dockerfile the image's name stands for it), joined over line
    ends."""
    joined = re.sub(r"\\\n#?\s*", "", text)
    found = re.findall(r"\brlhfsim ((?:design|launch)\b[^\n]*)", joined)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_are_understood(name: str) -> None:
    found = commands(EXAMPLES[name].read_text())
    assert any(words[0] == "launch" for words in found)
    for words in found:
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None
        arguments = [w for w in words[1:] if w != "${resume[@]}"]
        command.make_parser(click.Context(command)).parse_args(arguments)


@pytest.mark.parametrize("name", ["Dockerfile", "skypilot.yaml"])
def test_the_extras_exist(name: str) -> None:
    wanted = re.findall(r"\[([a-z-]+)\]\W", EXAMPLES[name].read_text())
    assert wanted
    assert set(wanted) <= set(EXTRAS)


def test_the_nodes_of_the_examples_hold_the_gpus_of_their_plan() -> None:
    sky = yaml.safe_load(EXAMPLES["skypilot.yaml"].read_text())
    kind, each = sky["resources"]["accelerators"].split(":")
    slurm = EXAMPLES["slurm.sbatch"].read_text()
    nodes = [int(re.findall(rf"--{key}=(\d+)", slurm)[0]) for key in ("nodes", "gpus-per-node")]
    assert (kind, sky["num_nodes"] * int(each)) == ("H100", 16)
    assert nodes[0] * nodes[1] == 16
    [workers] = kuberay()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert workers["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"] == 16
    for name in ("skypilot.yaml", "slurm.sbatch", "kuberay.yaml"):
        assert "--gpus 16 --gpu h100" in EXAMPLES[name].read_text()


def kuberay() -> Any:
    return yaml.safe_load(EXAMPLES["kuberay.yaml"].read_text())


@pytest.mark.parametrize("name", ["slurm.sbatch", "kuberay.yaml"])
def test_a_cluster_is_checked_and_a_dry_run_made_before_anything_is_on_a_gpu(name: str) -> None:
    lines = [line for line in EXAMPLES[name].read_text().splitlines() if not line.startswith("#")]
    called = re.findall(r"rlhfsim (check-machine|launch \S+ --dry-run|launch)", "\n".join(lines))
    assert [words.split()[-1] for words in called] == ["check-machine", "--dry-run", "launch"]


def test_pods_have_shared_memory_and_the_pinned_ray() -> None:
    cluster = kuberay()["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        assert any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["volumes"])
    assert f"ray=={cluster['rayVersion']}" in EXTRAS["real-gpu"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_scripts_parse() -> None:
    sky = yaml.safe_load(EXAMPLES["skypilot.yaml"].read_text())
    job = kuberay()["spec"]["entrypoint"]
    for script in (EXAMPLES["slurm.sbatch"].read_text(), sky["setup"], sky["run"], job):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_examples_hand_on_cpus_and_keep_runs_where_folders_can_be_renamed() -> None:
    step = next(
        line for line in EXAMPLES["slurm.sbatch"].read_text().splitlines() if "srun --overlap" in line
    )
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in step, "srun does not read the job's since Slurm 22.05"
    sky = yaml.safe_load(EXAMPLES["skypilot.yaml"].read_text())
    assert any(sky["envs"]["RUN"].startswith(mount) for mount in sky["volumes"])
    assert "file_mounts" not in sky, "a mounted bucket cannot rename"
