"""Runs as MLflow keeps them in a folder, and as Weights & Biases gives them by their address."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli import watch as watch_command
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.forms import of_text
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.imported import Choices, Imported, import_run
from rlhfsim.interchange.logs.mlflow import MARK
from rlhfsim.specs.loading import parse_yaml
from rlhfsim.what_if.watch import JobWatch, Judgement
from tests.frameworks.test_importers import VERL_CONFIG, config, read, verl_console, verl_step

__all__ = ["config"]
ADDRESS = "https://wandb.ai/team/project/runs/abc123?nw=nwuser"


def flat(config: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def mlflow_run(store: Path, steps: range, name: str = "run") -> Path:
    """A run as MLflow's file store writes it: verl's names, `critic.model.path` as Python prints None."""
    run = store / "0" / name
    files = {f"params/{key}": str(value) for key, value in flat(parse_yaml(VERL_CONFIG, "config").data)}
    files["params/critic/model/path"] = "None"
    for path, text in {MARK: "run_id: x", "../meta.yaml": "name: Default", **files}.items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text(text)
    log_to(run, steps)
    return run


def log_to(run: Path, steps: range, end: str = "\n") -> None:
    for step in steps:
        for metric, value in {**verl_step(step), "system/gpu_0_memory_usage": 3.0}.items():
            path = run / "metrics" / metric
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"17322901{step:02d}000 {value} {step}{end}")


def times(run: Imported) -> list[tuple[int, float]]:
    return [(step.logged, step.values["timing_s/gen"]) for step in run.steps]


@pytest.mark.parametrize("inside", [".", "0", "0/run"])
def test_a_store_of_mlflow_is_read_as_the_log_and_the_configuration_of_its_run(
    inside: str, tmp_path: Path, config: Path
) -> None:
    mlflow_run(tmp_path / "mlruns", range(1, 4))
    (tmp_path / "c.log").write_text(verl_console(3))
    console = read(tmp_path / "c.log", "verl", config)
    run = import_run(tmp_path / "mlruns" / inside, None, Choices(gpu="h100"))
    assert times(run) == times(console)
    assert run.setup == console.setup


def test_of_several_runs_of_mlflow_one_must_be_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        mlflow_run(tmp_path, range(1, 4), name)
    with pytest.raises(RlhfsimError, match="2 runs of MLflow") as error:
        import_run(tmp_path, None, Choices(gpu="h100"))
    assert str(tmp_path / "0/one") in (error.value.help or "")
    assert len(import_run(tmp_path / "0/two", None, Choices(gpu="h100")).steps) == 3


def test_a_run_of_mlflow_is_watched_as_it_grows(tmp_path: Path) -> None:
    run = mlflow_run(tmp_path, range(1, 3))
    watch = JobWatch(tmp_path, choices=Choices(gpu="h100"))
    events = [*watch.look(0.0)]
    for step in range(3, 8):
        log_to(run, range(step, step + 1), end=" \n")
        events += watch.look(float(step))
    (judged,) = [event for event in events if isinstance(event, Judgement)]
    assert judged.found.steps == 5
    assert judged.baseline is not None


def test_none_as_python_prints_it_is_no_value() -> None:
    said = of_text("critic: {model: {path: None}}\nmodel: ???\n", "config.yaml")
    settings = FrameworkSettings(said.values, said.name)
    assert settings.find("critic.model.path", "model") is None


# --- Weights & Biases -----------------------------------------------------------------------------------


def server(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> None:
    """The library of Weights & Biases, with one run."""

    class File(SimpleNamespace):
        def download(self, root: str, replace: bool) -> None:
            (Path(root) / self.name).write_text(json.dumps({"gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 8}))

    def run(path: str) -> SimpleNamespace:
        if path != "team/project/abc123":
            raise ValueError(f"Could not find run {path}\nand more")
        return SimpleNamespace(
            config=parse_yaml(VERL_CONFIG, "config").data,
            files=lambda: [File(name="wandb-metadata.json"), File(name="other.bin")],
            scan_history=lambda min_step: [row for row in rows if row["_step"] >= min_step],
        )

    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Api = lambda: SimpleNamespace(run=run)  # type: ignore[attr-defined]  # a library made here
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_the_address_of_a_run_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server(monkeypatch, [{"_step": i, **verl_step(i)} for i in range(1, 4)])
    arguments = ["import-run", ADDRESS, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    imported = json.loads((tmp_path / "out/import.json").read_text())
    assert (imported["from"], imported["framework"], imported["steps"]) == ("abc123", "verl", 3)
    assert json.loads((tmp_path / "out/plan.json").read_text())["hardware"][0]["profile"] == "h100_sxm"


def test_the_address_of_a_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [{"_step": 0, **verl_step(0)}]
    server(monkeypatch, rows)

    def pause(seconds: float) -> None:
        rows.append({"_step": len(rows), **verl_step(len(rows))})

    monkeypatch.setattr(watch_command, "pause", pause)
    arguments = ["watch", ADDRESS, "--steps", "6", "--json"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert result.return_value == 0
    judged = [line for line in map(json.loads, result.stdout.splitlines()) if line["event"] == "judged"]
    assert judged[0]["steps"] == 5
    assert judged[0]["compared_with"] == "the doctor on its configuration"


def test_what_cannot_be_fetched_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server(monkeypatch, [])
    for address, said, remedy in (
        ("https://wandb.ai/team/project/runs/gone", "Could not find run team/project/gone", "WANDB_API_KEY"),
        ("https://wandb.ai/team/project", "not the address of a run", "/runs/ID"),
    ):
        result = CliRunner().invoke(cli, ["import-run", address, "--out", str(tmp_path / "out")])
        assert isinstance(result.exception, RlhfsimError)
        assert said in result.exception.message
        assert "and more" not in result.exception.message
        assert remedy in (result.exception.help or "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = CliRunner().invoke(cli, ["watch", ADDRESS, "--once"])
    assert "pip install 'rlhfsim[wandb]'" in str(result.exception)
    assert not (tmp_path / "out").exists()
