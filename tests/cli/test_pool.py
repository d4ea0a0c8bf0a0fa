"""`rlhfsim pool`: what is printed and written; runs are priced by the test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli import pool as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.what_if.risk.step import DRAWS
from rlhfsim.what_if.shared_pool.pairs import JobStep
from rlhfsim.what_if.shared_pool.schedule import PoolOption

JOB = "workload: {model: 0.5b, algorithm: grpo, reward: {rules: {}}}\nsteps: 180\ndeadline: 12 h\n"
SHAPE = JobStep(
    step_s=100, pools=((0, 8),), busy_s=(40,), any_s=40, out_s=2, in_s=3, host_bytes=1e11, capacity_bytes=2e12
)


def option(job: str, gpus: int) -> PoolOption:
    """5 h on 8 GPUs, 10 h on 4."""
    hours = 40 / gpus
    drawn = np.full(DRAWS, hours * 3600)
    return PoolOption(job=job, gpus=gpus, step_s=100, fits=1.0, drawn_s=drawn, shape=SHAPE)


@pytest.fixture(autouse=True)
def _priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("chat", "code"):
        Path(f"{name}.yaml").write_text(JOB)
    options = tuple(option(job, gpus) for job in ("chat", "code") for gpus in (4, 8))
    monkeypatch.setattr(command, "priced_options", lambda *asked: options)


def ask(*words: str) -> Result:
    return CliRunner().invoke(command.pool, ["chat.yaml", "code.yaml", "--gpus", "8", *words])


def test_the_answer_is_printed_and_written_as_a_page() -> None:
    result = ask("--page", "pool.html")
    assert result.exit_code == 0, result.output
    assert "Every job is in time" in result.output
    assert "pair well" in result.output
    assert 'id="schedule-plot"' in Path("pool.html").read_text()


def test_the_same_is_there_for_machines() -> None:
    data = json.loads(ask("--json").output)
    assert {job["job"]: job["in_time"] for job in data["jobs"]} == {"chat": 1.0, "code": 1.0}
    [pair] = data["pairs"]
    assert pair["gain"] == pytest.approx(200 / 110)
    assert data["usd"] == pytest.approx(8 * 3.0 * data["makespan_s"] / 3600)  # 3 USD an hour on demand


@pytest.mark.parametrize(
    ("files", "code"), [(["chat.yaml"], "number-of-jobs"), (["chat.yaml", "chat.yaml"], "name-twice")]
)
def test_jobs_that_make_no_pool_are_refused(files: list[str], code: str) -> None:
    error = CliRunner().invoke(command.pool, [*files, "--gpus", "8"]).exception
    assert isinstance(error, RlhfsimError)
    assert error.code == code


def test_an_unknown_switch_of_a_job_is_refused_with_its_place() -> None:
    Path("chat.yaml").write_text(JOB + "allow: [asink]\n")
    with pytest.raises(RlhfsimError, match="unknown switch 'asink'") as caught:
        CliRunner().invoke(command.pool, ["chat.yaml", "code.yaml", "--gpus", "8"], catch_exceptions=False)
    assert caught.value.place is not None
    assert (caught.value.place.file, caught.value.place.line) == ("chat.yaml", 4)


def test_a_good_pair_that_stays_apart_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = {("code", 8): 0.9, ("code", 4): 0.99}
    priced = [option(job, gpus) for job in ("chat", "code") for gpus in (4, 8)]
    # in turn on 4 GPUs they do not fit into host memory
    crowded = replace(SHAPE, host_bytes=1.5e12)
    options = tuple(
        replace(o, fits=fits.get((o.job, o.gpus), 1.0), shape=SHAPE if o.gpus == 8 else crowded)
        for o in priced
    )
    monkeypatch.setattr(command, "priced_options", lambda *asked: options)
    said = " ".join(ask().output.split())
    assert "code fits with a probability of 90 % on 8 GPUs, of 99 % on 4" in said, said


def test_of_many_pairs_the_best_are_shown_and_the_rest_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["chat", "code", "tools", "maths", "law", "art"]
    for name in names:
        Path(f"{name}.yaml").write_text(JOB)
    options = tuple(option(job, 8) for job in names)
    monkeypatch.setattr(command, "priced_options", lambda *asked: options)
    given = [*(f"{name}.yaml" for name in names), "--gpus", "8", "--time-limit", "20s"]
    result = CliRunner().invoke(command.pool, given)
    assert result.output.count("pair well") == 12, result.output
    assert "and 3 more rows, which --json has" in result.output
