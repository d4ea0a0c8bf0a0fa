"""Histories exported from Weights & Biases, and the folder that an offline run leaves."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.imported import Imported
from tests.frameworks.test_importers import VERL_CONFIG, config, read, verl_console, verl_step

__all__ = ["config"]
STEPS = {i: verl_step(i) for i in range(1, 4)}


def of_panel() -> list[dict[str, Any]]:
    """Rows of a panel's CSV: a column a metric under the name of the run, and its bounds."""
    return [
        {"Step": i}
        | {f"my run - {name}{end}": v for name, v in row.items() for end in ("", "__MIN", "__MAX")}
        for i, row in STEPS.items()
    ]


def of_run() -> list[dict[str, Any]]:
    """Rows of `run.history()`, of which wandb's own logger wrote one without times."""
    rows = [{"_step": i, "_timestamp": 1e9 + i, **row} for i, row in STEPS.items()]
    return [dict.fromkeys(rows[0]) | {"_step": 0, "val/score": 0.5}, *rows]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("form", ["panel.csv", "run.csv", "records.json", "columns.json"])
def test_every_form_of_an_exported_history_gives_the_times_of_the_log(
    form: str, tmp_path: Path, config: Path
) -> None:
    path = tmp_path / f"out/{form}"
    path.parent.mkdir()
    if form.endswith(".csv"):
        write_csv(path, of_panel() if form == "panel.csv" else of_run())
    else:
        names = dict.fromkeys(name for row in of_run() for name in row)
        columns = {name: {str(i): row.get(name) for i, row in enumerate(of_run())} for name in names}
        path.write_text(json.dumps(of_run() if form == "records.json" else columns))
    assert times(read(path, "verl", config)) == [{"at": i} | timings(row) for i, row in STEPS.items()]


def timings(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("timing_s/")}


def times(run: Imported) -> list[dict[str, float]]:
    return [{"at": step.logged} | timings(step.values) for step in run.steps]


def test_the_folder_of_an_offline_run_is_read_by_its_console_and_its_configuration(tmp_path: Path) -> None:
    files = tmp_path / "offline-run-20260101_000000-abc/files"
    files.mkdir(parents=True)
    (files / "output.log").write_text(verl_console(3))
    (files / "config.yaml").write_text(VERL_CONFIG)
    (files / "wandb-summary.json").write_text("{}")
    (files.parent / "run-abc.wandb").write_bytes(b":W&B\x8f\x00\x00binary")
    assert len(read(files.parent, "verl").steps) == 3


def test_a_table_without_a_step_is_refused_and_passed_over_in_a_folder(tmp_path: Path, config: Path) -> None:
    table = tmp_path / "eval_history.csv"
    write_csv(table, [{"question": "a", "score": 1}])
    with pytest.raises(RlhfsimError, match="no row has a step"):
        read(table, "verl", config)
    (tmp_path / "c.log").write_text(verl_console(3))
    assert len(read(tmp_path, "verl", config).steps) == 3
