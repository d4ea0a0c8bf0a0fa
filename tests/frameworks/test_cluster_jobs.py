"""Jobs of Slurm and SkyPilot beside an export: nodes of the plan, scripts that parse, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from rlhfsim.api import estimate_file
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.cluster_jobs import ACCELERATORS, FILES, MANAGERS, job
from rlhfsim.interchange.export import Exported, export, exporter
from rlhfsim.interchange.nearest import with_placement
from rlhfsim.plan import Plan, write_plan
from rlhfsim.specs.hardware.profiles import profile_names
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import ResourcePool

RECIPES = Path(__file__).parents[2] / "scenarios/recipes"
PLANS = {
    "verl": "verl-rloo-qwen2-7b",
    "openrlhf": "openrlhf-dapo-llama3-8b",
    "nemo-rl": "nemo-rl-qwen3-235b-async",
    "skyrl": "skyrl-megatron-qwen3-235b",
    "slime": "slime-glm4-9b",
    "trl": "trl-grpo-qwen2.5-72b",
}
SKYPILOT = {"name", "num_nodes", "workdir", "resources", "envs", "secrets", "setup", "run"}
"""Keys of SkyPilot's task file that are written."""


@cache
def planned(stem: str) -> Plan:
    return estimate_file(RECIPES / f"{stem}.yaml")


def with_job(name: str, manager: str) -> Exported:
    return export(planned(PLANS[name]), name, frozenset(), manager=manager)


def parses(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


HOSTILE = "x\ntouch /owned\r\u2028touch /owned\n- <img src=x> [a](b) | `c`"


@pytest.mark.parametrize("manager", [None, *MANAGERS])
@pytest.mark.parametrize("name", PLANS)
def test_names_of_a_plan_begin_no_line_of_a_script_and_are_text_on_its_page(
    name: str, manager: str | None
) -> None:
    plan = planned(PLANS[name])
    prediction = replace(plan.prediction, peak_role=HOSTILE, peak_phase=HOSTILE)
    phases = tuple(replace(phase, bound_by=HOSTILE) for phase in plan.prediction.phases)
    models = tuple(replace(model, name=HOSTILE) for model in plan.models)
    hostile = replace(plan, models=models, prediction=replace(prediction, phases=phases))
    found = export(hostile, name, frozenset(), manager=manager)
    for file, text in found.files.items():
        assert not [line for line in text.splitlines() if line.lstrip().startswith("touch")], file
    page = found.files["README.md"]
    assert not any(raw in page for raw in ("<img", " [a](b)", "| `c`", "\n- <", "\n- &lt;"))


def directives(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script, re.M))


@pytest.mark.parametrize("name", PLANS)
def test_a_slurm_job_has_the_nodes_of_the_plan_and_parses(name: str) -> None:
    found, plan = with_job(name, "slurm"), planned(PLANS[name])
    script = found.files["job.sbatch"]
    assert parses(script)
    assert found.start == "sbatch job.sbatch"
    assert found.start in found.files["README.md"]
    asked = directives(script)
    assert asked["ntasks-per-node"] == "1"
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == sum(h.gpus for h in plan.hardware)
    assert all(f'"${{{key}:?' in script for key in re.findall(r"export (\w+)=", found.files["README.md"]))


@pytest.mark.parametrize("name", PLANS)
def test_a_skypilot_task_has_the_nodes_of_the_plan_and_its_scripts_parse(name: str) -> None:
    found, plan = with_job(name, "skypilot"), planned(PLANS[name])
    task = yaml.safe_load(found.files["sky.yaml"])
    assert set(task) <= SKYPILOT
    kind, each = task["resources"]["accelerators"].split(":")
    assert kind == "H100"
    assert task["num_nodes"] * int(each) == sum(h.gpus for h in plan.hardware)
    assert parses(task["setup"])
    assert parses(task["run"])
    given = re.findall(r"--env (\w+)", found.start)
    assert set(given) == {key for key, value in task["envs"].items() if value is None}
    assert ("--secret RAY_AUTH_TOKEN" in found.start) == ("secrets" in task)


def runs(script: str, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """What a job starts, on a machine whose commands only say how they were called."""
    bin_ = folder / "bin"
    bin_.mkdir()
    log = folder / "log"
    fakes = {
        "srun": 'while [[ "$1" == --* ]]; do [[ "$1" == --nodelist=* ]] && n=${1#*=}; shift; done; '
        'NODE="$n" "$@"',
        "scontrol": "printf 'n0\\nn1\\nn2\\nn3\\nn4\\n'",
        "getent": 'echo "10.0.0.${2#n} STREAM"',
        "openssl": "echo token",
        "curl": "exit 0",
        "ray": f'if [ "$1" = status ]; then printf " node_%s\\n" 1 2 3 4 5; '
        f'else echo "$NODE ray $*" >> {log}; fi',
    }
    for name, body in fakes.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    for name in ("launch.sh", "server.sh"):
        (folder / name).write_text(f'echo "$NODE {name} $*" >> {log}\n')
    (folder / "job").write_text(script + "wait\n")
    path = f"{bin_}:{os.environ['PATH']}"
    subprocess.run(["bash", "job"], cwd=folder, env={"PATH": path, **environment}, check=True, timeout=60)
    return sorted(log.read_text().splitlines())


GIVEN = {
    "SLURM_JOB_NODELIST": "n[0-4]",
    "SLURM_CPUS_ON_NODE": "8",
    "MODEL": "m",
    "DATASET": "d",
    "REWARD": "r",
    "LR": "1e-6",
}


def test_the_slurm_job_of_trl_starts_a_rank_on_each_node_that_trains_and_the_engine_on_the_last(
    tmp_path: Path,
) -> None:
    started = runs(with_job("trl", "slurm").files["job.sbatch"], tmp_path, GIVEN)
    ranks = "--main_process_ip 10.0.0.0 --main_process_port 29500 --vllm_server_host 10.0.0.4"
    trainers = [f"n{i} launch.sh --machine_rank {i} {ranks}" for i in range(4)]
    assert started == [*trainers, "n4 server.sh "]


def test_the_slurm_job_of_verl_starts_ray_everywhere_and_the_command_on_the_head(tmp_path: Path) -> None:
    plan = planned(PLANS["verl"])
    five = replace(plan, hardware=(replace(plan.hardware[0], gpus=40, gpus_per_node=8),))
    script, _ = job("slurm", five, "verl", {}, "", ray="ray")
    started = runs(script, tmp_path, GIVEN)
    head = "n0 ray start --head --node-ip-address=10.0.0.0 --port=6399 --block"
    workers = [f"n{i} ray start --address=10.0.0.0:6399 --block" for i in range(1, 5)]
    assert started == sorted(["n0 launch.sh ", head, *workers])


def test_training_and_engine_on_one_node_see_their_own_gpus() -> None:
    plan = planned(PLANS["trl"])
    assert plan.placement.rollout is not None
    pools = (
        ResourcePool(name=plan.placement.actor.pool, gpus=6),
        ResourcePool(name=plan.placement.rollout.pool, start=6, gpus=2),
    )
    actor = replace(plan.placement.actor, layout=Layout(dp=6, zero=3))
    rollout = replace(plan.placement.rollout, layout=RolloutLayout(dp=2))
    placement = with_placement(plan, pools=pools, actor=actor, rollout=rollout, reference=None)
    small = replace(placement, hardware=(replace(plan.hardware[0], gpus=8),))
    script, _ = job("slurm", small, "TRL", {}, "", ray="")
    assert "#SBATCH --nodes=1" in script
    assert '"${nodes[0]}" env CUDA_VISIBLE_DEVICES=6,7 bash server.sh' in script
    assert '"${nodes[0]}" env CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 bash launch.sh --machine_rank 0' in script


def test_what_one_job_cannot_hold_is_refused() -> None:
    plan = planned(PLANS["trl"])
    two = replace(plan, hardware=(*plan.hardware, *plan.hardware))
    with pytest.raises(RlhfsimError, match="nodes of one kind"):
        job("slurm", two, "", {}, "", ray="ray")
    pools = tuple(replace(pool, gpus=16) if pool.start else pool for pool in plan.placement.pools)
    with pytest.raises(RlhfsimError, match="a rollout of 16 GPUs"):
        job("slurm", with_placement(plan, pools=pools), "", {}, "", ray="")
    other = replace(plan, hardware=(replace(plan.hardware[0], profile="mi250x"),))
    with pytest.raises(RlhfsimError, match="SkyPilot's name of mi250x"):
        job("skypilot", other, "", {}, "", ray="ray")


def test_names_of_gpus_are_those_of_profiles_and_every_framework_says_how_it_starts() -> None:
    assert set(ACCELERATORS) <= set(profile_names())
    assert set(FILES) == set(MANAGERS)
    assert not exporter("trl").ray
    assert all(exporter(name).ray.endswith("ray") for name in PLANS if name != "trl")


def test_the_command_writes_the_job_beside_the_script(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", planned(PLANS["skyrl"]))
    asked = ["export", str(tmp_path / "plan.json"), "--to", "skyrl", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(cli, [*asked, "--with", "slurm"], catch_exceptions=False)
    assert "sbatch job.sbatch" in done.output
    assert (tmp_path / "run/job.sbatch").is_file()
    assert (tmp_path / "run/launch.sh").is_file()
