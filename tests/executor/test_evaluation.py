"""Evaluation: pass@k, given responses, data and rules of its own; samples as text."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from executor.coordination.sample_log import SampleLog
from executor.evaluation import FIRST_ID, Evaluator, pass_at
from executor.launch import evaluation_prompter
from executor.resolve import Job
from executor.samples import Completion, GenerationRequest, Sample, Scored
from executor.settings import Data, Evaluation, RewardRule, Settings
from executor.tasks import tiny
from executor.tasks.prompter import TaskPrompter
from executor.tasks.sources import open_source
from executor.tasks.text import ByteText
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.workload import Workload


def test_pass_at_k_is_the_mean_over_all_choices_of_k() -> None:
    for n, right, k in itertools.product((1, 4, 5), (0, 1, 3, 4), (1, 2, 4)):
        if right <= n and k <= n:
            chosen = list(itertools.combinations([True] * right + [False] * (n - right), k))
            assert pass_at(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


class Engines:
    """Answers that count up; log-probs and scores by label."""

    def generate(self, requests: Sequence[GenerationRequest], step: int) -> list[Completion]:
        self.requests = requests
        return [
            Completion(
                id=r.id,
                tokens=np.array([48 + i % 4, 0]),
                logprobs=np.zeros(2, np.float32),
                versions=np.zeros(2, np.int32),
                finish="stop",
            )
            for i, r in enumerate(requests)
        ]

    def score(self, call: Call, samples: Sequence[Sample], step: int) -> list[Any]:
        if call.kind == "score":
            return [s.label for s in samples]
        shift = 0.0 if call.role == "reference" else 0.5
        return [np.full(s.num_tokens, -1.0 + shift * (s.label or 0.0), np.float32) for s in samples]


def evaluator(algorithm: str, evaluation: Evaluation, **data: Any) -> Evaluator:
    work, settings = Workload(algorithm=algorithm, samples=2), Settings(evaluation=evaluation)  # type: ignore[arg-type]
    prompter = TaskPrompter(
        source=open_source(Data(**data), algorithm, 0),
        text=ByteText(),
        workload=work,
        sampling=settings.sampling,
        max_tokens=8,
        seed=0,
    )

    def rules(samples: Sequence[Sample]) -> list[Scored]:
        return [Scored(total=float(s.response[0] == 48), by_rule={"a": 1.0, "b": 0.0}) for s in samples]

    return Evaluator(prompter=prompter, rules=rules, workload=work, settings=settings)


def test_several_responses_of_each_problem_give_pass_at_k_and_one_is_greedy() -> None:
    engines = Engines()
    found = evaluator("grpo", Evaluation(problems=3, samples=4, temperature=0.7)).run(engines, 1)
    assert [r.id for r in engines.requests] == list(range(FIRST_ID, FIRST_ID + 12))
    assert {r.temperature for r in engines.requests} == {0.7}
    assert len({r.seed for r in engines.requests}) == 12
    row = found.row()
    assert (found.value, row["evaluation/accuracy"], row["evaluation/a"]) == (0.25, 0.25, 1.0)
    passed = {name: value for name, value in row.items() if "pass" in name}
    assert passed == pytest.approx(
        {"evaluation/pass@1": 0.25, "evaluation/pass@2": 0.5, "evaluation/pass@4": 1.0}
    )
    assert [s.group for s in found.samples] == [0] * 4 + [1] * 4 + [2] * 4
    evaluator("grpo", Evaluation(problems=3)).run(engines, 1)
    assert {r.temperature for r in engines.requests} == {0.0}


@pytest.mark.parametrize(
    ("algorithm", "headline", "value"),
    [
        ("dpo", "accuracy", 1.0),
        ("reward_model", "accuracy", 1.0),
        ("kto", "margin", None),
        ("sft", "loss", 0.5),
    ],
)
def test_given_responses_are_evaluated_without_a_rollout(
    algorithm: str, headline: str, value: float | None
) -> None:
    found = evaluator(algorithm, Evaluation(problems=6)).run(Engines(), 1)
    assert found.headline == headline
    if value is not None:
        assert found.value == pytest.approx(value)
    if algorithm == "reward_model":
        assert found.metrics["loss"] == pytest.approx(math.log(1 + math.exp(-2.0)))
    assert found.samples == ()


def test_an_evaluation_without_problems_is_refused_and_its_own_data_are_used_whole(tmp_path: Path) -> None:
    with pytest.raises(RlhfsimError) as caught:
        evaluator("grpo", Evaluation(problems=3), held_out=0.0).check()
    assert caught.value.code == "nothing-held-out"
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * i, "answer": "1"}) + "\n" for i in range(1, 13)))
    asked = Evaluation(problems=100, data=Data(path=str(path)), rewards=(RewardRule(kind="answer"),))
    mine = evaluator("grpo", asked, held_out=0.0)
    made = runs.plan("naive", "grpo", tiny.config(tmp_path / "m", layers=2))
    job = Job(plan=made, settings=mine.settings, model="", gpu=False, max_prompt=1)
    heard: list[str] = []
    job, own = evaluation_prompter(job, mine.prompter, heard.append)
    assert (job.max_prompt, len(own.source.held_out(100))) == (12, 12)
    assert "data: 0 rows to train on, 12 held out (data.held_out)" in heard


def test_some_samples_are_written_as_text_and_a_resumed_run_writes_them_again(tmp_path: Path) -> None:
    text = ByteText()
    log = SampleLog(tmp_path / "samples.jsonl", text.decode, number=2, every=10)
    assert [done for done in range(1, 31) if log.due(done)] == [1, 10, 20, 30]
    base = Sample(id=0, group=0, prompt=text.encode("1+1="), response=text.encode("2"), answer="2")
    samples = [replace(base, id=i, reward=float(i), rewards={"answer": float(i)}) for i in range(5)]
    log.add("training", 0, samples)
    [first, last] = log.add("training", 9, samples)
    assert (first["prompt"], first["response"], first["reward"], last["reward"]) == ("1+1=", "2", 0.0, 4.0)
    assert (first["prompt_tokens"], first["response_tokens"], first["rewards"]) == (4, 1, {"answer": 0.0})
    log.restart(9)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 0]
