"""The micro-benchmarks as processes: failures are named, time is limited, an interrupt leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from executor.microbench.machine import cpu_peak
from executor.microbench.probes import BY_NAME, PROBES, Probe
from executor.microbench.run import measure
from rlhfsim.cli.profile import free
from rlhfsim.cli.profile import measure as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.measured import Measured, MissingProbe
from rlhfsim.specs.hardware.profiles import load_profile

FAKES = {
    "good": "return [summarise('good', [1.0, 2.0, 3.0], 's', 'planted')]",
    "broken": "raise ValueError('the disk is on fire')",
    "absent": "raise unavailable('there is no such device')",
    "endless": "(setup.scratch.parents[2] / 'pid').write_text(str(os.getpid())); time.sleep(600)",
}
ROOT = Path(__file__).parents[2]


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, int, MissingProbe | None]] = []

    def started(self, probe: Probe, number: int, total: int) -> None:
        """Nothing."""

    def ended(
        self, probe: Probe, found: Sequence[Measured], missing: MissingProbe | None, seconds: float
    ) -> None:
        """Keep."""
        self.ends.append((probe.name, len(found), missing))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Probes of our own, in a working directory of our own."""
    package = tmp_path / "lib" / "planted"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    head = "import os, time\nfrom executor.microbench.setup import unavailable\nfrom rlhfsim.specs.hardware.measured import summarise\n"
    for name, body in FAKES.items():
        (package / f"{name}.py").write_text(f"{head}\n\ndef measure(setup):\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}:{ROOT}")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def fake(name: str, limit_s: float = 60.0) -> Probe:
    return Probe(name=name, title="a planted probe", package="planted", limit_s=limit_s)


def scratch_folders(work: Path) -> list[Path]:
    return list(work.glob(".rlhfsim-measure-*"))


def test_what_fails_is_named_with_its_reason_and_the_others_go_on(fakes: Path) -> None:
    probes = [fake("broken"), fake("absent"), fake("endless", limit_s=8), fake("good")]
    heard = Heard()
    session = measure(probes, heard)
    reasons = {m.probe: m.reason for m in session.missing}
    assert "the disk is on fire" in reasons["broken"]
    assert reasons["absent"] == "there is no such device"
    assert reasons["endless"] == "not done after 8 s"
    assert [(m.name, m.value, m.n) for m in session.measured] == [("good", 2.0, 3)]
    assert [name for name, _, _ in heard.ends] == ["broken", "absent", "endless", "good"]
    assert session.machine.cores == len(os.sched_getaffinity(0))
    assert scratch_folders(fakes) == []
    _gone(int((fakes / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_neither_file_nor_process(fakes: Path, number: signal.Signals) -> None:
    script = (
        "import signal, sys\nfrom rlhfsim.cli import profile, main\nfrom executor.microbench.probes import Probe\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in what a script starts with `&`
        "profile.chosen = lambda only: [Probe(name='good', title='', package='planted'), Probe(name='endless', title='', package='planted')]\n"
        "sys.argv = ['rlhfsim', 'profile', 'measure']\nmain.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=fakes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (fakes / "pid").exists():
        assert time.monotonic() < deadline, "the endless probe never began"
        time.sleep(0.1)
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "interrupted: nothing was written, and no process is left"
    assert scratch_folders(fakes) == []
    assert not (fakes / "hardware_profiles").exists()
    _gone(int((fakes / "pid").read_text()))


def _gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_existing_file_stops_it_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "hardware_profiles" / "local.yaml"
    out.parent.mkdir()
    out.write_text("mine")
    with pytest.raises(RlhfsimError, match="never overwritten") as caught:
        command.main([], standalone_mode=False)
    assert caught.value.help == "measure into another file: --out hardware_profiles/local2.yaml"
    assert out.read_text() == "mine"
    out.with_name("local2.yaml").write_text("mine too")
    assert free(Path("hardware_profiles/local.yaml")) == Path("hardware_profiles/local3.yaml")


def test_unknown_probes_and_an_unmeasured_machine_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RlhfsimError, match="unknown probe 'gemmm'"):
        command.main(["--only", "gemmm"], standalone_mode=False)
    with pytest.raises(RlhfsimError, match="was not measured") as caught:
        load_profile("local")
    assert caught.value.help == "run: rlhfsim profile measure"


def test_every_probe_has_a_module_and_stands_in_the_help() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    for probe in PROBES:
        assert (ROOT / "executor" / "microbench" / f"{probe.name}.py").is_file()
        assert probe.name in shown


def test_the_peak_of_a_core_is_vector_width_times_clock() -> None:
    info = "flags\t\t: fpu sse2 avx2 avx512f\ncpu MHz\t\t: 2500.000\ncpu MHz\t\t: 2700.000\n"
    assert cpu_peak(info)[0] == pytest.approx(64 * 2.7e9)
    assert cpu_peak(info.replace(" avx512f", ""))[0] == pytest.approx(32 * 2.7e9)
    assert cpu_peak("flags\t\t: avx2\n")[0] == 0


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_measurement_is_what_design_then_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor.tasks import tiny

    monkeypatch.chdir(tmp_path)
    config = tiny.config(tmp_path / "tiny") / "config.json"
    main = [sys.executable, "-m", "rlhfsim.cli.main"]
    ran = subprocess.run(
        [*main, "profile", "measure", "--quick", "--only", "gemm,memory,decode", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout)
    assert told["schema"] == "rlhfsim.profile-measure/1"
    assert told["not_measured"] == []
    profile = load_profile("local")
    assert profile.coefficient("decode_layer_overhead").source.startswith("measured ")
    assert profile["gemm_efficiency"] <= 1
    assert profile.curves is not None
    designed = subprocess.run(
        [
            *main,
            "design",
            "--gpu",
            "local",
            "--gpus",
            "2",
            "--model",
            str(config),
            "--prompts",
            "8",
            "--samples",
            "4",
            "--prompt-len",
            "8",
            "--response-len",
            "8",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert designed.returncode == 0, designed.stderr[-3000:]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {hardware["profile"] for hardware in plan["hardware"]} == {"local"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [p.name for p in PROBES])
def test_every_probe_measures_a_gpu_or_says_why_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = measure([BY_NAME[name]], Heard(), quick=True)
    assert session.machine.kind == "cuda"
    reasons = [m.reason for m in session.missing]
    assert session.measured or reasons == ["this machine has one GPU, so there is nobody to exchange with"]
    assert all(0 < m.low <= m.value <= m.high for m in session.measured)
