from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lab.scoreboard.rows import part_of, rows_of
from rlhfsim.cli.validate import validate
from rlhfsim.errors import RlhfsimError
from rlhfsim.validation import scoreboard
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import Row

HEADER = "model,gpus,gpu_type,seq_len,framework,step_time_s,source\n"
ROW = "m,8,H100,4096,f,10,s\n"


@pytest.fixture(autouse=True)
def _fixed_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training row is predicted at 11 s; the other sections have no module."""

    def run(section: str, rows: Sequence[Row]) -> list[Outcome]:
        if section != "training":
            return []
        return [
            Outcome(
                kind="training",
                file=r.file,
                line=r.line,
                source=r.source,
                label="m",
                measured=r.number("step_time_s"),
                predicted=11.0,
                low=9.0,
                high=12.0,
                assumptions=("tp=1 (x)",),
                detail={"bound_by": "compute"},
            )
            for r in rows
        ]

    monkeypatch.setattr(scoreboard, "run", run)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + ROW)
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(validate, [str(a) for a in arguments], standalone_mode=False)


def test_json_holds_errors_as_fractions_by_kind_and_source(table: Path) -> None:
    data = json.loads(call(table, "--json").stdout)
    assert data["schema"] == "rlhfsim.validate/1"
    training = data["kinds"]["training"]
    assert {"rows", "predicted", "skipped", "p90_abs_error", "bias"} <= training.keys()
    assert training["median_abs_error"] == pytest.approx(0.1)
    assert data["sources"]["s"]["median_abs_error"] == pytest.approx(0.1)


def test_no_table_line_is_wider_than_a_hundred_columns(table: Path) -> None:
    output = call(table).stdout
    assert "training" in output
    assert max(map(len, output.splitlines())) <= 100


def test_every_row_is_written_with_assumptions_interval_and_detail(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert call(table, "--out", out).exception is None
    (row,) = csv.DictReader(out.open())
    assert (row["assumptions"], row["low"], row["part"]) == ("tp=1 (x)", "9.0", "report")
    assert json.loads(row["detail"]) == {"bound_by": "compute"}
    assert float(row["error"]) == pytest.approx(0.1)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_rows_can_be_written_as_json(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    call(table, "--out", out)
    assert json.loads(out.read_text())[0]["predicted"] == 11


def test_without_a_file_the_figures_on_published_measurements_are_shown() -> None:
    shown = call()
    assert "rlhf.step" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    one = json.loads(call("--kind", "rlhf.step", "--json").stdout)
    assert set(one["kinds"]) == {t["kind"] for t in one["targets"]} == {"rlhf.step"}
    assert one["kinds"]["rlhf.step"]["left_out"]["scored"] >= 60


def test_rows_can_only_be_written_of_a_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert isinstance(call("--out", out).exception, RlhfsimError)
    assert not out.exists()


def test_a_folder_stands_for_its_tables(table: Path) -> None:
    data = json.loads(call(table.parent, "--json").stdout)
    assert data["kinds"]["training"]["rows"] == 1


def test_a_table_without_kind_is_named_and_alone_is_an_error(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "models.csv"
    other.write_text("model,family,layers,hidden\nm,f,1,2\n")
    assert "nothing is scored" in " ".join(call(table, other).stderr.split())
    with pytest.raises(RlhfsimError, match="no row to score"):
        raise call(other).exception or AssertionError


@pytest.mark.parametrize("arguments", [("--kind", "trainning"), ("none.csv",)])
def test_bad_input_is_one_error_for_people(arguments: tuple[str, ...]) -> None:
    assert isinstance(call(*arguments).exception, RlhfsimError)


def test_a_measured_zero_is_a_skipped_row_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    table = tmp_path / "runs.csv"
    table.write_text(
        "actor_model,model_config_key,gpus,gpu_type,framework,algorithm,gen_tp,train_backend,prompts_per_step,"
        "samples_per_prompt,mean_prompt_len,mean_response_len,step_time_s,source\n"
        + "Qwen3-8B,qwen3-8b,8,H100,verl v0.5,GRPO,1,FSDP,8,8,100,100,0,s\n"
    )
    data = json.loads(call(table, "--json").stdout)
    assert data["kinds"]["rlhf.step"]["skip_reasons"] == {"a measured 0 is no measurement": 1}
    sync = tmp_path / "sync.csv"
    sync.write_text(
        "model,model_config_key,gpu_type,mechanism,seconds,source\nQwen3-8B,qwen3-8b,H100,nccl broadcast,0,s\n"
    )
    assert call(sync).exception is None


def test_own_rows_are_scored_whatever_the_split_of_the_shipped_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    fitted = next(
        r for r in rows_of("training") if part_of("training", r) == "fit" and r.text("tokens_per_s_per_gpu")
    )
    table = tmp_path / "mine.csv"
    with table.open("w") as file:
        writer = csv.DictWriter(file, list(fitted.values))
        writer.writeheader()
        writer.writerow(fitted.values)
    training = json.loads(call(table, "--json").stdout)["kinds"]["training"]
    assert (training["fit"], training["scored"]) == (0, 1)


def test_one_bad_cell_skips_its_row_and_scores_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    table = tmp_path / "mine.csv"
    header = "model,model_config_key,gpus,gpu_type,seq_len,framework,micro_batch,global_batch_seqs,precision,"
    table.write_text(
        header
        + "recompute,tokens_per_s_per_gpu,source\n"
        + "Llama-3.1-8B,llama-3.1-8b,eight,H100,8192,torchtitan,1,8,bf16,none,6000,s\n"
        + "Llama-3.1-8B,llama-3.1-8b,8,H100,8192,torchtitan,1,8,bf16,none,6000,s\n"
    )
    training = json.loads(call(table, "--json").stdout)["kinds"]["training"]
    assert (training["rows"], training["scored"]) == (2, 1)
    assert list(training["skip_reasons"]) == ["gpus is not a number: 'eight'"]
