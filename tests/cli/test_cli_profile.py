"""`rlhfsim profile measure` from a planted session: the file, the table, the JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli.profile import profile
from rlhfsim.specs.hardware.measured import Machine, MissingProbe, Session, summarise
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.units import GB, GIB

pytest.importorskip("torch")
MACHINE = Machine(
    kind="cpu",
    title="Test CPU with a long name, 3.00 GHz",
    date="2026-11-21",
    cores=2,
    memory=24 * GIB,
    free=22 * GIB,
    peak=100e9,
    peak_source="planted",
    versions=(("torch", "2.13.0"), ("vllm", "0.32.0")),
)
SESSION = Session(
    machine=MACHINE,
    measured=(
        summarise("gemm", [1e-3, 1.1e-3, 1.2e-3], "s", "planted", at=(256.0, 512.0, 256.0)),
        summarise("gemm", [1e-5, 1.1e-5, 1.2e-5], "s", "planted", at=(1.0, 512.0, 256.0)),
        summarise("memory_copy", [8 * GB, 9 * GB, 8.5 * GB], "byte/s", "planted"),
    ),
    missing=(MissingProbe(probe="sleep", reason="no GPU"),),
)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where measuring takes no time."""
    from executor.microbench import run

    def measure(probes: Sequence[Any], listener: Any, *, quick: bool = False) -> Session:
        for number, probe in enumerate(probes, start=1):
            listener.started(probe, number, len(probes))
            listener.ended(probe, (), None, 1.0)
        return SESSION

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_profile_is_written_where_gpu_local_finds_it_and_shown(planted: Path) -> None:
    shown = CliRunner().invoke(profile, ["measure", "--only", "gemm,memory,sleep"])
    assert shown.exit_code == 0, shown.output
    assert load_profile("local").coefficient("hbm_efficiency").source.startswith("measured ")
    assert max(map(len, shown.output.splitlines())) <= 100
    said = " ".join(shown.output.split())  # lines end where the terminal does
    for text in (
        "[1/3] gemm",
        "gemm_efficiency",
        "hbm_efficiency",
        "sleep: no GPU",
        "wrote hardware_profiles/local.yaml",
        "next: rlhfsim design --gpu local --gpus 2",
        "of the peak of 100 GFLOP/s",
    ):
        assert text in said, text


def test_the_json_holds_what_the_view_shows(planted: Path) -> None:
    shown = CliRunner().invoke(profile, ["measure", "--json", "--out", "mine.yaml"])
    told = json.loads(shown.stdout)
    assert told["schema"] == "rlhfsim.profile-measure/1"
    assert told["file"] == "mine.yaml"
    assert told["not_measured"] == [{"probe": "sleep", "reason": "no GPU"}]
    assert {m["name"] for m in told["measured"]} == {"gemm", "memory_copy"}
    by_key = {change["key"]: change for change in told["profile"]}
    assert by_key["peak.fp32"]["value"] == pytest.approx(100e9)
    assert by_key["coefficients.hbm_efficiency"]["n"] == 3
    assert load_profile("mine.yaml").curves is None  # two products are no grid
    assert load_profile(planted / "mine.yaml").name == "mine"
