"""Which training backend is taken where a question names a framework and no backend: one rule everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim import Request, design
from rlhfsim.cli.main import cli
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.step.measured import model_error
from rlhfsim.what_if import engine
from rlhfsim.what_if.scenarios.document import RequestText
from rlhfsim.what_if.usual_trainer import assumed_trainer, trained

QUESTION = "--gpus 8 --gpu h100 --model qwen2.5-7b --algorithm grpo --rules workers=8"
AS_EXAMPLES = "trained by PyTorch FSDP2, as in most of verl's own examples of such a model (--backend)"


@pytest.mark.parametrize(
    ("name", "model", "backend"),
    [
        ("verl", "qwen2.5-7b", "fsdp2"),
        ("verl", "llama-3.1-70b", "fsdp2"),
        ("verl", "llama-3.1-405b", "megatron"),
        ("verl", "qwen3-30b-a3b", "megatron"),
        ("skyrl", "qwen3-30b-a3b", "megatron"),
        ("areal", "qwen3-8b", "fsdp2"),
        ("nemo-rl", "llama-3.1-8b", "fsdp2"),
        ("nemo-rl", "qwen3-32b", "megatron"),
        ("openrlhf", "llama-3.1-70b", "deepspeed"),
        ("slime", "qwen2.5-7b", "megatron"),
    ],
)
def test_the_usual_backend_is_that_of_the_frameworks_own_examples(
    name: str, model: str, backend: str
) -> None:
    assert framework(name).usual_trainer(resolve_model(model)) == backend


def request(**changes: Any) -> Request:
    work = Workload(model="qwen2.5-7b", algorithm="grpo", prompts=128, samples=8)
    work = replace(work, reward=Reward(model=None, rules=Rules(workers=8)))
    given: dict[str, Any] = {"cluster": parse_cluster(gpus=8, gpu="h100"), "workload": work}
    return Request(**{**given, "framework": "verl", **changes})


def answered(monkeypatch: pytest.MonkeyPatch, model: str = "qwen2.5-7b", **seconds: float | None) -> Request:
    """The question of verl where a good plan of each backend takes so long; None: nothing fits."""

    def good(question: Any, **_: Any) -> SimpleNamespace | None:
        took = seconds[question.request.backend]
        return None if took is None or took >= question.scope.below else SimpleNamespace(seconds=took)

    monkeypatch.setattr(engine, "good", good)
    return trained(request(workload=replace(request().workload, model=model)))


def test_another_backend_is_taken_only_beyond_the_models_error(monkeypatch: pytest.MonkeyPatch) -> None:
    within, beyond = 100 * (1 - 0.9 * model_error()), 100 * (1 - 1.1 * model_error())
    usual = answered(monkeypatch, fsdp2=100.0, megatron=within)
    faster = answered(monkeypatch, fsdp2=100.0, megatron=beyond)
    assert (usual.backend, usual.backend_by) == ("fsdp2", "examples")
    assert (faster.backend, faster.backend_by) == ("megatron", "seconds")
    assert assumed_trainer(faster)[0].startswith(
        f"trained by Megatron-Core: over {100 * model_error():.0f} % faster here than PyTorch"
    )


def test_another_backend_is_taken_where_nothing_fits_with_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, none = (
        answered(monkeypatch, fsdp2=None, megatron=9.0),
        answered(monkeypatch, fsdp2=None, megatron=None),
    )
    assert (other.backend, other.backend_by) == ("megatron", "fit")
    assert (none.backend, none.backend_by) == ("fsdp2", "examples")


def test_a_large_policy_stays_with_what_is_run_at_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast another backend may be; where nothing else fits, that one is taken."""
    fits = answered(monkeypatch, "llama-3.1-405b", megatron=100.0, fsdp2=50.0)
    other = answered(monkeypatch, "llama-3.1-405b", megatron=None, fsdp2=50.0)
    assert (fits.backend, fits.backend_by) == ("megatron", "examples")
    assert (other.backend, other.backend_by) == ("fsdp2", "fit")


def test_a_backend_that_is_named_is_taken_and_not_called_assumed() -> None:
    asked = request(backend="megatron")
    assert trained(asked) is asked
    assert assumed_trainer(asked) == ()


def test_a_layout_that_the_usual_backend_does_not_run_is_trained_by_the_other() -> None:
    taken = trained(request(fix={"actor": {"tp": 4}}))
    assert (taken.backend, taken.backend_by) == ("megatron", "fit")


def test_every_command_takes_the_same_backend_and_says_so(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "plan.json")]
    for command, more in (("design", out), ("estimate", []), ("memory", [])):
        words = [command, *QUESTION.split(), "--framework", "verl", *more, "--json"]
        shown = json.loads(CliRunner().invoke(cli, words, catch_exceptions=False).stdout)
        assert AS_EXAMPLES in json.dumps(shown), command
    written = json.loads((tmp_path / "plan.json").read_text())
    assert AS_EXAMPLES in written["assumed"]
    assert written["placement"]["backend"] == "fsdp2"
    assert written["choice"]["asked"]["backend"] == "fsdp2"


def test_the_python_api_takes_it_too() -> None:
    answer = design(request(), explain=False)
    assert answer.chosen is not None
    assert answer.chosen.placement.backend == "fsdp2"
    assert AS_EXAMPLES in answer.chosen.assumed


def test_a_scenario_leaves_it_open_where_it_names_none() -> None:
    assert RequestText().backend is None
