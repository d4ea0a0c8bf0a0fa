"""Several teachers: whose sample is whose, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from executor.coordination.metrics import sample_metrics
from executor.engines.teachers import Teachers, teacher_of
from executor.refusals import check_reference
from executor.resolve import Job, engine_specs, located
from executor.samples import Floats, Sample
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError


class _Teacher:
    """Says its number at every token."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[list[int]] = []
        self.moves: list[Any] = []

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        self.asked.append([s.id for s in samples])
        return [np.full(s.num_tokens, self.number, np.float32) for s in samples]

    def offload(self, folder: Path | None, *, weights: bool) -> None:
        self.moves.append(folder)

    def reload(self, *, states: bool) -> None:
        self.moves.append("back")


def _sample(number: int, group: int, **meta: Any) -> Sample:
    return Sample(
        id=number, group=group, prompt=np.ones(1, np.int64), response=np.ones(3, np.int64), meta=meta or None
    )


def test_prompts_take_turns_unless_their_row_names_a_teacher() -> None:
    engines: list[Any] = [_Teacher(0), _Teacher(1)]
    samples = [_sample(i, i // 2, **({"teacher": "1"} if i == 4 else {})) for i in range(6)]
    scored = Teachers(engines).logprobs(samples)
    assert [int(row[0]) for row in scored] == [0, 0, 1, 1, 1, 0]
    assert [engine.asked for engine in engines] == [[[0, 1, 5]], [[2, 3, 4]]]


def test_the_kl_of_each_teacher_is_that_of_its_own_samples() -> None:
    """k3 of a log-ratio of 1 is e^-1 + 1 - 1 = 0.37 nats; of 0 it is 0."""
    ratios = [1.0, 1.0, 0.0, 0.0, 1.0]
    samples = [
        replace(
            _sample(i, i // 2),
            rollout_logprobs=np.full(3, ratio, np.float32),
            reference_logprobs=np.zeros(3, np.float32),
        )
        for i, ratio in enumerate(ratios)
    ]
    row = sample_metrics(samples, 0, 2)
    assert row["kl/teacher_0"] == pytest.approx(np.exp(-1))
    assert row["kl/teacher_1"] == 0
    assert row["kl/mean"] == pytest.approx(0.6 * np.exp(-1))
    assert not [name for name in sample_metrics(samples, 0) if "teacher" in name]


def test_a_rank_without_samples_of_a_teacher_asks_it_all_the_same() -> None:
    engines: list[Any] = [_Teacher(0), _Teacher(1)]
    assert len(Teachers(engines).logprobs([_sample(0, 0)])) == 1
    assert engines[1].asked == [[]], "its weights may be sharded over the ranks"


@pytest.mark.parametrize("given", [2, -1, "math"])
def test_a_row_that_names_no_teacher_is_refused(given: object) -> None:
    with pytest.raises(RlhfsimError, match=f"says {given!r} at prompt 4, and there are 2 teachers"):
        teacher_of(_sample(0, 4, teacher=given), 2)


def test_teachers_move_together_to_places_of_their_own(tmp_path: Path) -> None:
    engines: list[Any] = [_Teacher(0), _Teacher(1)]
    both = Teachers(engines)
    both.offload(tmp_path)
    both.reload()
    assert [engine.moves for engine in engines] == [[tmp_path / "0", "back"], [tmp_path / "1", "back"]]


def test_each_planned_teacher_has_a_folder(tiny_model: Path, tmp_path: Path) -> None:
    one, two = (tiny.build(tmp_path / name, layers=1, hidden=64) for name in ("one", "two"))
    work = {"reference": f"{one}/config.json,{two}/config.json", "reward": {}}
    made = runs.plan("hybrid", "distillation", tiny_model, workload=work)
    told = located(made, runs.settings(tiny_model, rewards=None, reference_model=f"{one}, {two}"))
    job = Job(plan=made, settings=told, model=str(tiny_model), gpu=False, max_prompt=8)
    check_reference(job)
    spec = engine_specs(job)["reference"]
    assert [each.model for each in spec.each] == [str(one), str(two)]
    with pytest.raises(RlhfsimError, match=r"the plan has 2 references .* reference_model names 1"):
        check_reference(replace(job, settings=replace(told, reference_model=str(one))))
