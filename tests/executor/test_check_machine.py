"""What a machine lacks for a run: recorded answers of nvidia-smi, and every fact on its good and its bad side."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from click.testing import CliRunner

from executor import check_machine
from executor.machine import facts as machine_facts
from executor.machine.checks import Check, Needs, checks
from executor.machine.facts import ABSENT, SILENT, Facts, Gpu, fewest_links, parse_query, version
from executor.settings import Settings
from executor.tasks import tiny
from rlhfsim.cli.check_machine import check_machine as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.units import GIB, MIB

RECORDED = Path(__file__).parent / "recorded"
QUERY, TOPOLOGY = (RECORDED / "nvidia_smi.xml").read_text(), (RECORDED / "nvidia_smi_topo.txt").read_text()
DRIVER, GPUS = parse_query(QUERY)
GOOD = Facts(
    host="node-a",
    torch="2.13.0",
    torch_cuda="13.0",
    nccl="2.28.3",
    driver=DRIVER,
    gpus=GPUS,
    no_gpus="",
    links=18,
    shared_bytes=64 * GIB,
    open_files=65536,
    locked_bytes=None,
    processes=None,
    free_bytes=1000 * GIB,
    disk="/scratch",
    disk_bytes=4000 * GIB,
    compiler="g++",
    cuda_compiler="13.0",
    infiniband=("mlx5_0",),
    interfaces=("eth0", "lo"),
    named_interface=None,
    ports=28232,
)
NEEDS = Needs(
    gpus=2,
    gpu_kind="h100_sxm",
    processes_per_gpu=3,
    host_bytes=500 * GIB,
    disk_bytes=2000 * GIB,
    host_adam=True,
)


def outcomes(facts: Facts, needs: Needs = NEEDS) -> dict[str, Check]:
    return {check.name: check for check in checks(facts, needs)}


def test_gpus_are_read_from_what_nvidia_smi_prints() -> None:
    assert DRIVER == "580.65.06"
    assert [(gpu.index, gpu.name, gpu.mig, gpu.fabric) for gpu in GPUS] == [
        (i, "NVIDIA H100 80GB HBM3", False, "Completed") for i in (0, 1)
    ]
    assert (GPUS[1].memory_bytes, GPUS[1].used_bytes) == (81559 * MIB, 2049 * MIB)
    mig = QUERY.replace("<current_mig>Disabled", "<current_mig>Enabled", 1)
    assert [gpu.mig for gpu in parse_query(mig)[1]] == [True, False]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        (TOPOLOGY, 18),
        (TOPOLOGY.replace("NV18\tPIX", "SYS\tPIX", 1), 0),
        (re.sub("NV18", "PHB", TOPOLOGY), 0),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n", None),
        ("\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n", 4),
        ("", None),
    ],
)
def test_nvlinks_are_read_from_the_matrix_of_nvidia_smi(text: str, links: int | None) -> None:
    assert fewest_links(text) == links


def test_versions_compare_as_numbers() -> None:
    assert version("580.65.06") > version("575.100.00") > version("525.60.13")


def test_a_machine_that_has_everything_misses_nothing() -> None:
    assert {check.outcome for check in outcomes(GOOD).values()} == {"ok"}
    assert not [check for check in outcomes(GOOD).values() if check.remedy]


@pytest.mark.parametrize(
    ("name", "change", "remedy"),
    [
        ("driver", {"driver": "575.57.08"}, "install driver 580.65.06"),
        ("driver", {"torch_cuda": None}, "torch built for CUDA"),
        ("driver", {"torch": None}, "rlhfsim[real-gpu]"),
        ("driver", {"driver": None, "no_gpus": SILENT}, "nvidia-smi says why"),
        ("GPUs", {"gpus": ()}, "--gpus all"),
        ("GPUs", {"gpus": GPUS[:1]}, "design for fewer"),
        ("GPUs", {"gpus": tuple(replace(g, mig=True) for g in GPUS)}, "-mig 0"),
        ("GPUs", {"gpus": tuple(replace(g, name="NVIDIA A100-SXM4-80GB") for g in GPUS)}, "--gpu a100_sxm"),
        ("NVLink", {"links": 0}, "nvidia-fabricmanager"),
        ("NVLink", {"gpus": tuple(replace(g, fabric="In Progress") for g in GPUS)}, "restart nvidia-fabric"),
        ("NCCL", {"nccl": None}, "rlhfsim[real-gpu]"),
        ("NCCL", {"named_interface": "ib0"}, "NCCL_SOCKET_IFNAME=eth0"),
        ("shared memory", {"shared_bytes": 64 * MIB}, "--shm-size=1g"),
        ("shared memory", {"shared_bytes": None}, "tmpfs"),
        ("open files", {"open_files": 1024}, "ulimit -n"),
        ("locked memory", {"locked_bytes": 8 * 2**20}, "ulimit -l unlimited"),
        ("processes", {"processes": 1199}, "ulimit -u 1200"),
        ("compiler", {"compiler": None}, "apt install g++"),
        ("compiler", {"cuda_compiler": "12.4"}, "CUDA 13.0"),
        ("host memory", {"free_bytes": 499 * GIB}, "without offload"),
        ("disk", {"disk_bytes": 1999 * GIB}, "--out"),
        ("ports", {"ports": 999}, "ip_local_port_range"),
    ],
)
def test_what_is_missing_comes_alone_and_with_its_remedy(
    name: str, change: dict[str, Any], remedy: str
) -> None:
    found = outcomes(replace(GOOD, **change))
    assert found[name].outcome == "missing"
    assert remedy in found[name].remedy
    assert "\n" not in found[name].remedy
    others = {check.name for check in found.values() if check.outcome == "missing"} - {name}
    assert not others - ({"GPUs"} if "no_gpus" in change else set())


def test_pcie_cards_and_a_machine_without_infiniband_need_neither_links_nor_locked_memory() -> None:
    card: Gpu = replace(GPUS[0], name="NVIDIA L40S", fabric="N/A")
    facts = replace(GOOD, gpus=(card, card), links=0, infiniband=(), locked_bytes=8 * 2**20)
    found = outcomes(facts, Needs())
    assert (found["NVLink"].outcome, found["locked memory"].outcome) == ("ok", "ok")


def test_a_cpu_machine_says_what_it_could_not_check() -> None:
    facts = replace(GOOD, gpus=(), driver=None, no_gpus=ABSENT, torch_cuda=None, nccl=None, links=None)
    found = outcomes(facts, Needs())
    asked = ("driver", "GPUs", "NVLink", "NCCL", "compiler", "host memory")
    assert {found[name].outcome for name in asked} == {"not checked"}
    assert not [check for check in found.values() if check.outcome == "missing"]


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, [0, 1]), ("1", [1]), ("GPU-9c1a", [1]), ("", []), ("0,1", [0, 1])]
)
def test_only_gpus_that_this_process_may_use_count(visible: str | None, seen: list[int]) -> None:
    driver, gpus, why = machine_facts._gpus(QUERY, visible)
    assert (driver, [gpu.index for gpu in gpus]) == (DRIVER, seen)
    assert bool(why) is not bool(seen)


def test_a_command_that_hangs_or_fails_costs_its_time_limit_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(command: Any, *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(machine_facts.subprocess, "run", late)
    assert machine_facts._said(("nvidia-smi",)) is None
    monkeypatch.setattr(machine_facts.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=9))
    assert machine_facts._said(("nvidia-smi",)) is None
    assert machine_facts.COMMAND_S < 10


def test_this_machine_is_read_without_an_error(tmp_path: Path) -> None:
    facts = machine_facts.read(tmp_path / "runs" / "new", None)
    assert facts.disk == str(tmp_path)
    assert facts.free_bytes > 0
    assert facts.interfaces


def test_a_plan_asks_for_its_own_needs(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "model", layers=1)
    plan = runs.plan("hybrid", "grpo", model)
    asked = check_machine.question(plan, Settings(model=str(model)), tmp_path)
    assert (asked.needs.gpus, asked.needs.host_bytes) == (None, plan.prediction.host_peak_bytes)
    assert asked.needs.disk_bytes
    assert check_machine._model(asked.model).outcome == "ok"
    (model / "tokenizer.json").unlink()
    assert "AutoTokenizer" in check_machine._model(asked.model).remedy


def test_the_command_says_what_is_missing_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "read", lambda *_: replace(GOOD, open_files=1024))
    ran = CliRunner().invoke(command, ["--json"])
    data = json.loads(ran.stdout)
    assert (ran.exit_code, data["complete"], data["nodes"][0]["node"]) == (1, False, "node-a")
    shown = CliRunner().invoke(command, [])
    assert "missing[open files] on node-a: 1,024, needed 8,192\nhelp: ulimit -n 8192" in shown.stdout
    monkeypatch.setattr(check_machine, "read", lambda *_: GOOD)
    ran = CliRunner().invoke(command, [])
    assert ran.exit_code == 0
    assert "nothing that was checked is missing" in ran.stdout


# --- a cluster --------------------------------------------------------------------------------------


def test_an_address_where_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tries for more than ten minutes."""
    from executor.coordination import cluster
    from executor.sockets import listener

    monkeypatch.setattr(cluster, "keep_private", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RlhfsimError, match="no Ray cluster answers"):
        cluster.join(f"127.0.0.1:{port}", {})


def test_a_node_that_is_late_or_reaches_nobody_is_named_with_its_remedy() -> None:
    from ray.exceptions import GetTimeoutError

    from executor.check_machine import NodeChecks
    from executor.coordination.machines import NodeProbe, _node

    [late] = _node("10.0.0.2", GetTimeoutError("x"), []).checks
    assert (late.outcome, late.found) == ("missing", "no answer within 9 s")
    probe, closed = NodeProbe("127.0.0.1"), NodeProbe("127.0.0.1")
    here, gone = ("127.0.0.1", probe.port()), ("127.0.0.1", closed.port())
    closed._socket.close()
    missed = probe.unreachable([here, gone])
    assert missed == [gone]
    found = _node("10.0.0.2", NodeChecks(node="node-b", checks=()), missed)
    [network] = found.checks
    assert (found.node, network.outcome) == ("node-b (10.0.0.2)", "missing")
    assert f"127.0.0.1:{gone[1]}" in network.found
    assert "firewall" in network.remedy
