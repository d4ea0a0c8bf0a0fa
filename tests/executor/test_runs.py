"""Every architecture really runs, with PPO and with GRPO; the phases are those of the simulation."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import ports
import pytest
import runs

from executor.tasks import tiny
from rlhfsim.trace import read_trace

pytestmark = pytest.mark.slow
LAYOUTS = {
    ("naive", "grpo"): {"dp": 2, "zero": 2},
    ("hybrid", "ppo"): {"dp": 2, "zero": 1},
    ("async", "grpo"): {"dp": 2, "zero": 3},
}
"""More than one training rank; one elsewhere, because every process takes its time to start."""


WITH_TIME = {("naive", "ppo"), ("smart", "ppo"), ("async", "ppo"), ("lend", "ppo"), ("lend", "grpo")}
"""What a critic adds is the same there as in the two that always run; `test_lending.py` lends."""


@pytest.mark.parametrize(
    ("architecture", "algorithm"),
    [
        pytest.param(*case, marks=pytest.mark.long if case in WITH_TIME else ())
        for case in product(runs.ARCHITECTURES, ("grpo", "ppo"))
    ],
)
def test_every_architecture_runs(
    architecture: str, algorithm: str, tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    made = runs.plan(architecture, algorithm, tiny_model, layout=LAYOUTS.get((architecture, algorithm)))
    assert made.architecture == architecture
    walked = (architecture, algorithm) == ("async", "grpo")  # pools, channels and a rollout engine at once
    with ports.sampled() if walked else nullcontext({}) as seen:
        outcome, heard = runs.run(made, runs.settings(tiny_model), tmp_path / "run", ray_address)
    assert ports.open_to_others(seen, ray_address.rpartition(":")[0]) == []
    assert bool(seen) == walked
    assert [row["step"] for row in heard.rows] == [0, 1]
    assert all(row["mismatch/max_abs_dlogp"] < 1e-4 for row in heard.rows if row["staleness/max"] == 0)
    assert all(row["policy/grad_norm"] > 0 for row in heard.rows)
    bound = made.placement.schedule.staleness
    assert all(row["staleness/max"] <= bound for row in heard.rows)
    trace = read_trace(outcome.files.trace)
    predicted = {p.name for p in made.prediction.phases} - {"controller"}
    measured = {s.name for s in trace.spans}
    assert predicted <= measured | {"actor.generate.wait"}


@pytest.mark.long  # 25 s of CPU
def test_a_student_comes_closer_to_its_teacher(tiny_model: Path, tmp_path: Path, ray_address: str) -> None:
    teacher = tiny.build(tmp_path / "teacher", layers=1, hidden=64, seed=7)
    work = {"reference": str(teacher / "config.json"), "reward": {}, "prompts": 32}
    _distilled(work, str(teacher), tiny_model, tmp_path, ray_address)


@pytest.mark.long  # 30 s of CPU
@pytest.mark.parametrize("zero", [0, 3])
def test_a_student_comes_closer_to_two_teachers(
    zero: int, tiny_model: Path, tmp_path: Path, ray_address: str
) -> None:
    one = tiny.build(tmp_path / "one", layers=1, hidden=64, seed=7)
    two = tiny.build(tmp_path / "two", layers=2, hidden=64, seed=8)
    work = {"reference": f"{one}/config.json,{two}/config.json", "reward": {}, "prompts": 32}
    layout = {"dp": 2, "zero": zero}
    _distilled(work, f"{one},{two}", tiny_model, tmp_path, ray_address, layout=layout)


def _distilled(
    work: dict[str, Any], teacher: str, tiny_model: Path, tmp_path: Path, ray_address: str, **plan: Any
) -> None:
    """A run in which the distance to the teachers falls."""
    made = runs.plan("hybrid", "distillation", tiny_model, workload=work, **plan)
    told = runs.settings(tiny_model, iterations=4, reference_model=teacher)
    outcome, heard = runs.run(made, told, tmp_path / "run", ray_address)
    assert {s.name for s in read_trace(outcome.files.trace).spans} >= {"reference.logprob", "actor.train"}
    first, *_, last = (row["kl/mean"] for row in heard.rows)
    assert last < 0.8 * first
    each = {name for name in heard.rows[-1] if name.startswith("kl/teacher_")}
    assert each == ({"kl/teacher_0", "kl/teacher_1"} if "," in teacher else set())
