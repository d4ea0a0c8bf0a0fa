"""Runs in a few lines of Python: the plan and settings that they stand for, and the example of the page."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

import executor
from executor import trainers
from executor.launch import LaunchOptions
from executor.settings import Data, Optimizer, RewardRule, Sampling
from executor.tasks import tiny
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.workload import ONLINE

PAGE = Path(__file__).parents[2] / "docs" / "executor.md"
[EXAMPLE] = re.findall(r"```python\n(from executor import GRPO.*?)```", PAGE.read_text(), re.DOTALL)


def score(prompt: str, response: str, answer: str | None, meta: object) -> float:
    return float(len(response))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.config(tmp_path_factory.mktemp("m"), layers=2)


def test_the_example_has_eight_lines_of_code() -> None:
    statements = [line for line in EXAMPLE.splitlines() if line.strip()]
    assert len(statements) <= 8


@pytest.mark.parametrize("name", executor.__all__)
def test_every_algorithm_is_made_alike_and_planned_for_this_machine(name: str, model: Path) -> None:
    made = getattr(executor, name)(model, workload={"prompts": 4}, optimizer={"learning_rate": 1e-3})
    assert made.settings.optimizer == Optimizer(learning_rate=1e-3)
    plan = made.plan
    assert plan.workload.algorithm == made.algorithm
    assert plan.workload.prompts == 4
    assert (plan.workload.reward.rules is not None) == (made.algorithm in ONLINE)
    assert plan is made.plan


def test_rewards_are_rules_kinds_targets_or_functions(model: Path) -> None:
    rules = [RewardRule(kind="digits", weight=0.5), "answer", "m:f", score]
    made = executor.GRPO(model, Data(path="rows.jsonl"), rewards=rules, sampling=Sampling(max_tokens=9))
    assert made.settings.rewards == (
        rules[0],
        RewardRule(kind="answer"),
        RewardRule(kind="function", target="m:f"),
        RewardRule(kind="function", target=f"{__name__}:score"),
    )
    assert made.settings.data == Data(path="rows.jsonl")
    assert made.plan.workload.response_len.maximum == 9
    assert executor.GRPO(model, rewards="digits").settings.rewards == (RewardRule(kind="digits"),)


def test_a_reward_that_no_other_process_can_import_is_refused(model: Path) -> None:
    with pytest.raises(RlhfsimError, match="cannot import"):
        executor.GRPO(model, rewards=[lambda *_: 0.0])


@pytest.mark.parametrize("bad", [{"iteration": 3}, {"iterations": 0}, {"rewards": "poem"}])
def test_a_setting_that_is_none_is_refused(bad: dict[str, object], model: Path) -> None:
    with pytest.raises(RlhfsimError):
        executor.GRPO(model, **bad)


def test_importing_the_executor_imports_no_planner() -> None:
    import subprocess

    code = "import sys, executor, executor.settings; print('rlhfsim.search' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.slow
def test_the_example_of_the_page_runs_with_a_loss_of_ones_own(
    tiny_model: Path, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On real engines; the loss is found by workers in the folder where the run is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("model").symlink_to(tiny_model)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my_rewards.py").write_text(
        "def brevity(prompt, response, answer, meta):\n    return max(0.0, 1.0 - len(response) / 400)\n"
    )
    Path("own_loss.py").write_text(
        "def loss(batch, *, scale=1.0):\n"
        "    ratio = (batch.logprobs - batch.old_logprobs).exp()\n"
        "    return -scale * ratio * batch.advantages, {'own/ratio': ratio}\n"
    )
    monkeypatch.setattr(trainers, "LaunchOptions", partial(LaunchOptions, address=ray_address))
    own = EXAMPLE.replace("iterations=2", "iterations=2, custom={'loss': 'own_loss:loss'}")
    namespace: dict[str, object] = {}
    exec(compile(own, "example", "exec"), namespace)
    rows_run = namespace["finished"].ended.rows  # type: ignore[attr-defined]
    assert len(rows_run) == 2
    assert rows_run[0]["own/ratio"] == pytest.approx(1.0, abs=0.05)
    assert {"reward/answer", "reward/function"} <= set(rows_run[0])
