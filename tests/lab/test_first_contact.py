"""The checks of a first GPU: processes that fail, hang or lack packages are rows of the report."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import asdict, replace
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lab.first_contact import pack as packing
from lab.first_contact.checks import CHECKS, Answer, Check, answers, append, one, run
from lab.first_contact.engines import _killed
from lab.first_contact.report import page, verdict
from lab.first_contact.settle import DATA, TABLE, settle
from lab.first_contact.steps import scored, training_step
from rlhfsim.specs.hardware.measured import Machine, summarise
from rlhfsim.specs.hardware.profiles import profile_from_text
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.validation.kinds.memory import outcomes
from rlhfsim.validation.rows import parse_csv

MODEL = resolve_model("qwen2.5-0.5b")
PLAIN = Check(name="machine", title="plain", value=1, usual_s=1.0, limit_s=30.0)


def _python(code: str, **changes: object) -> Check:
    return replace(PLAIN, command=("-c", code), **changes)  # type: ignore[arg-type]


def test_a_failure_never_stops_the_checks_after_it(tmp_path: Path) -> None:
    heard: list[Answer] = []
    run(
        [_python("raise SystemExit('broken')"), replace(_python("pass"), name="copies")],
        budget_s=60,
        small=True,
        stream=tmp_path / "s.jsonl",
        heard=heard.append,
    )
    assert [(answer.outcome, answer.reason) for answer in heard] == [("failed", "broken"), ("ran", "")]
    assert answers(tmp_path / "s.jsonl") == heard


def test_a_check_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    begun = time.monotonic()
    answer = one(_python(child), 6.0, small=True, stream=tmp_path / "s.jsonl")
    assert answer.outcome == "out of time"
    assert time.monotonic() - begun < 20


def test_what_was_seen_before_a_cut_off_is_kept_and_a_later_run_takes_its_place(tmp_path: Path) -> None:
    stream, row = tmp_path / "s.jsonl", {"what": "peak", "unit": "GiB", "seen": 1.5, "expected": 1.5}
    append(stream, {"check": "ledger", "small": False})
    append(stream, {"check": "ledger", "row": row})
    with stream.open("a") as file:
        file.write('{"check": "ledger", "row": {"what": "half a li')
    [cut] = answers(stream)
    assert (cut.outcome, cut.rows) == ("cut off", (row,))
    assert "| ledger | peak | 1.5 GiB | 1.5 GiB | 1.000 | agrees |" in page([cut])
    append(stream, {"check": "copies", "small": False})
    append(stream, {"check": "ledger", "small": False})
    assert [(answer.name, answer.rows) for answer in answers(stream)] == [("ledger", ()), ("copies", ())]


def test_the_checks_of_most_value_per_second_come_first() -> None:
    worth = [check.value / check.usual_s for check in CHECKS]
    assert CHECKS[0].name == "machine"
    assert worth == sorted(worth, reverse=True)
    assert all(check.usual_s <= check.limit_s for check in CHECKS)


@pytest.mark.parametrize(
    ("check", "limit", "reason"),
    [
        (_python("pass", needs=("json", "no_such_package")), 30.0, "not installed: no_such_package"),
        (_python("pass", gpu=True), 30.0, "needs a GPU"),
        (_python("pass"), 1.0, "no time left"),
    ],
)
def test_what_cannot_run_is_skipped_with_its_reason(
    check: Check, limit: float, reason: str, tmp_path: Path
) -> None:
    answer = one(check, limit, small=True, stream=tmp_path / "s.jsonl")
    assert (answer.outcome, answer.reason) == ("skipped", reason)


@pytest.mark.parametrize(("seen", "expected"), [(1.05, "agrees"), (1.2, "high"), (0.8, "low")])
def test_a_row_is_judged_by_its_ratio(seen: float, expected: str) -> None:
    assert verdict({"what": "x", "seen": seen, "expected": 1.0}) == expected
    assert verdict({"what": "x", "seen": seen}) == "seen"


def test_the_facts_of_this_machine_come_as_rows_and_as_a_page(tmp_path: Path) -> None:
    check = next(check for check in CHECKS if check.name == "machine")
    answer = one(check, 60.0, small=True, stream=tmp_path / "s.jsonl")
    assert answer.outcome == "ran", answer.reason
    assert any(row["what"] == "Python" for row in answer.rows)
    assert "| machine | Python |" in page([answer])


def test_a_stream_settles_into_a_profile_and_into_rows_that_the_scoreboard_predicts(tmp_path: Path) -> None:
    stream, expected = (
        tmp_path / "s.jsonl",
        training_step(MODEL, Layout(zero=1, recompute="full"), "deepspeed", 8192),
    )
    machine = Machine(
        kind="cuda",
        title="NVIDIA H100 80GB HBM3",
        date="2026-11-27",
        cores=16,
        memory=1e11,
        free=1e11,
        peak=0,
        peak_source="",
        gpus=1,
        gpu_memory=8e10,
    )
    copied = summarise("memory_copy", [2.9e12, 3.0e12, 3.1e12], "byte/s", "copy of 64 MiB, one GPU")
    append(stream, {"check": "measure", "small": False})
    append(stream, {"check": "measure", "row": {"what": "memory", "seen": 1, "machine": asdict(machine)}})
    append(stream, {"check": "measure", "row": {"what": "x", "seen": 1, "measured": asdict(copied)}})
    append(stream, {"check": "deepspeed", "small": False})
    row = scored("DeepSpeed", "qwen2.5-0.5b", "zero1", 8192, "full", expected)
    append(stream, {"check": "deepspeed", "row": {"what": "y", "seen": 1.0, "memory": row}})
    shutil.copy(DATA / "memory.csv", tmp_path)
    for _ in range(2):  # the same day again: the rows are replaced
        lines = list(settle(stream, tmp_path / str(_), tmp_path))
    assert "scoreboard: 1 rows" in lines[-1]
    profile = (tmp_path / "1" / "local_nvidia_h100_80gb_hbm3.yaml").read_text()
    assert "2026-11-27" in profile
    assert profile_from_text(profile).name == "local_nvidia_h100_80gb_hbm3"
    table = tmp_path / TABLE
    [peak] = outcomes(parse_csv(table.read_bytes(), table.name))
    assert peak.predicted == pytest.approx(expected / 1e9)


def test_an_archive_carries_code_and_wheels_and_leaves_out_what_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wheel(name: str, python: str, folder: Path) -> Path:
        path = folder / f"{name}-{python}.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{name}/__init__.py", "")
            file.writestr(f"{name}/large.bin", random.Random(0).randbytes(2**18 if name == "ray" else 10))
            file.writestr("ray/jars/java.jar", "")
        return path

    monkeypatch.setattr(packing, "wheel", wheel)
    monkeypatch.setattr(packing, "closure", lambda name: [name])
    monkeypatch.setattr(packing, "WANTED", ("simpy", "ray", "click"))
    monkeypatch.setattr(packing, "FOLDERS", ("lab/first_contact",))
    monkeypatch.setattr(packing, "FILES", ("pyproject.toml",))
    lines = packing.pack(tmp_path / "a.tar.xz", "3.12", limit_mib=0.2)
    assert lines[1] == "left out, 0.3 MiB: ray"
    with tarfile.open(tmp_path / "a.tar.xz") as archive:
        names = archive.getnames()
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(tmp_path, **safe)
    assert {"first-contact/site/simpy/__init__.py", "first-contact/site/click/__init__.py"} <= set(names)
    assert not [name for name in names if "/ray/" in name]
    command = [sys.executable, "-S", "-m", "lab.first_contact", "--help"]
    ran = subprocess.run(command, cwd=tmp_path / "first-contact", env={}, capture_output=True, text=True)
    assert "--settle" in ran.stdout, "it starts with Python alone"
    with pytest.raises(SystemExit, match="the code alone takes"):
        packing.pack(tmp_path / "b.tar.xz", "3.12", limit_mib=0.001)
    assert not (tmp_path / "b.tar.xz").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "copies",
        "fsdp2",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("ledger", "deepspeed", "dpo", "rollout", "measure")
        ),
    ],
)
def test_a_check_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    check = next(check for check in CHECKS if check.name == name)
    answer = one(check, 150.0, small=True, stream=tmp_path / "s.jsonl")
    assert answer.outcome == "ran", answer.reason
    assert answer.rows
    assert not {verdict(row) for row in answer.rows} & {"high", "low"}


CARRIED = """
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

PACKAGES, THERE = packages_distributions(), set(sys.argv[1].split(","))

class Bare(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        makers = {maker.lower().replace("_", "-") for maker in PACKAGES.get(name, ())}
        spec = PathFinder.find_spec(name, path)
        inside_ray = spec is not None and "/ray/thirdparty_files/" in (spec.origin or "")
        if makers and not makers & THERE and not inside_ray:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
import lab.first_contact.engines
import rlhfsim.cli.launch
import executor.launch, executor.coordination.worker, executor.engines.training
import executor.engines.deepspeed.engine
"""


def test_a_launch_imports_nothing_that_the_archive_lacks_beside_torch_and_transformers() -> None:
    """Found in the archive for Python 3.12: no scipy, which a launch's view of its phases reads."""
    lines = [Requirement(line) for name in ("torch", "transformers") for line in requires(name) or ()]
    asked = [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    there = set(packing.LIKELY).union(*map(packing.closure, [*asked, *packing.WANTED]))
    ran = subprocess.run(
        [sys.executable, "-c", CARRIED, ",".join(there)],
        cwd=packing.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-600:]


def test_a_run_that_ends_before_it_is_killed_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such module"):
        _killed([sys.executable, "-c", "raise SystemExit('no such module')"], tmp_path)
