"""One question has one answer: every command gives the same exit code, for the same reason."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.questions.ask import sync_s, sync_words
from rlhfsim.api import estimate
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import write_plan
from rlhfsim.specs.scenario import load_scenario
from rlhfsim.specs.workload.lengths import Fixed

SMALL = "--model qwen2.5-7b --algorithm grpo --rules workers=8"
TIGHT = f"--gpus 1 --gpu a100-40 {SMALL}"
ROOMY = f"--gpus 4 --gpu h100 {SMALL}"


def run(line: str) -> tuple[int, str]:
    """Exit code and output of a command line; a refusal has 2 and its error."""
    try:
        done = CliRunner().invoke(cli, shlex.split(line), catch_exceptions=False, standalone_mode=False)
    except RlhfsimError as error:
        return 2, f"{error.code}: {error.message}"
    code = done.return_value if isinstance(done.return_value, int) else done.exit_code
    return code, done.stdout


def answer(line: str) -> tuple[int, str | None]:
    """Exit code, and the error or what does not fit."""
    code, out = run(f"{line} --json")
    return code, out if code == 2 else json.loads(out).get("rejected_by")


QUESTIONS = {
    "fits": (ROOMY, 0, ""),
    "fits elsewhere": (f"{ROOMY} --framework verl --backend megatron", 0, ""),
    "does not fit": (
        f"{TIGHT} --framework verl --backend megatron",
        1,
        r"\S+ needs \S+ GB of 42.4 GB per GPU in pool all",
    ),
    "does not fit slime": (f"{TIGHT} --framework slime", 1, r"actor.train needs .* per GPU in pool all"),
    "oversampling": (f"{ROOMY} --oversampling 0.25", 2, "our own executor does not run oversampling"),
    "sampling": (f"{TIGHT} --framework trl --dynamic-sampling 0.5", 2, "TRL does not run dynamic sampling"),
    "backend": (
        f"{TIGHT} --framework verl --backend deepspeed",
        2,
        "verl does not run training by DeepSpeed",
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_one_exit_code_and_one_reason_in_every_command(name: str, tmp_path: Path) -> None:
    question, code, reason = QUESTIONS[name]
    design = answer(f"design {question} --out {tmp_path / 'plan.json'}")
    assert design[0] == code
    assert re.search(reason, design[1] or "")
    for command in ("estimate", "memory"):
        assert answer(f"{command} {question}") == design


LONG = Fixed(value=900_000)
PLANS: dict[str, tuple[dict[str, Any], int, str]] = {
    "fits": ({}, 0, ""),
    "does not fit": ({"response_len": LONG}, 1, "(per GPU in pool all|KV cache)"),
    "refused": ({"oversampling": 0.5}, 2, "verl does not run oversampling"),
}


def plan_file(path: Path, **changes: Any) -> Path:
    """A plan for verl on two GPUs, whether it fits and verl runs it or not."""
    scenario = load_scenario("verl")
    placement, cluster = scenario.placement, scenario.cluster
    work = replace(scenario.workload, prompts=32, model="qwen2.5-0.5b", **changes)
    write_plan(path, estimate(placement, work, cluster))
    return path


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_one_exit_code_and_one_reason_in_every_command(name: str, tmp_path: Path) -> None:
    changes, code, reason = PLANS[name]
    plan = plan_file(tmp_path / "plan.json", **changes)
    first = answer(f"estimate {plan}")
    assert first[0] == code
    assert re.search(reason, first[1] or "")
    for command in (
        f"memory {plan}",
        f"simulate {plan} --iterations 1",
        f"report {plan} --no-sizes --out {tmp_path / 'plan.html'}",
        f"export {plan} --to verl --out {tmp_path / 'run'}",
    ):
        assert answer(command) == first, command
    if code == 0:
        data = json.loads(plan.read_text())
        words = sync_words(data)
        assert words is not None
        synced = run(f"sync {shlex.join(words)} --json")
        assert synced[0] == code
        paths = json.loads(synced[1])["paths"]
        own = next(p for p in paths if p["name"] == data["placement"]["weight_path"])
        assert own["seconds"] == pytest.approx(sync_s(data), rel=1e-6)
        script = tmp_path / "run" / "launch.sh"
        doctor = run(
            f"doctor {script} --gpu h100 --framework verl --set actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B --json"
        )
        assert doctor[0] == code, doctor[1]


def test_a_refused_question_names_who_runs_it_and_they_do() -> None:
    with pytest.raises(RlhfsimError) as caught:
        CliRunner().invoke(cli, shlex.split(f"memory {ROOMY} --oversampling 0.25"), catch_exceptions=False)
    listed = re.findall(r"--framework \S+?(?: --backend \w+)?(?=,|$)", caught.value.help or "")
    assert listed
    for options in listed:
        assert run(f"memory {ROOMY} --oversampling 0.25 {options}")[0] in (0, 1)


# --- remedies -------------------------------------------------------------------------------------------


def typed(question: str, change: str) -> str:
    """A command line with a remedy put in: `without --option value`, or options over those that it has."""
    words = shlex.split(question)
    if change.startswith("without "):
        for option, value in pairs(shlex.split(change.removeprefix("without "))):
            at = next(i for i, w in enumerate(words) if w == option and value in (None, words[i + 1]))
            del words[at : at + 2]
        return shlex.join(words)
    for option, value in pairs(shlex.split(change)):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
        words += [option, *([value] if value else [])]
    return shlex.join(words)


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values; several after one another are in pairs."""
    for i, word in enumerate(words):
        if word.startswith("--"):
            after = words[i + 1] if i + 1 < len(words) else None
            yield word, None if after is None or after.startswith("--") else after


OTHERS = [pytest.mark.slow, pytest.mark.parallel]
UNFIT = [
    pytest.param(f"--gpus {gpus} --gpu a100-40 --model {model} --algorithm {more}", marks=marks)
    for gpus, model, more, marks in (
        (1, "qwen2.5-7b", "grpo --rules workers=8 --framework verl --backend megatron", []),
        (1, "qwen2.5-7b", "grpo --rules workers=8 --framework openrlhf", []),
        (1, "qwen2.5-7b", "grpo --rules workers=8 --framework slime", OTHERS),
        (1, "qwen2.5-7b", "grpo --rules workers=8 --framework trl", OTHERS),
        (2, "32b", "grpo --framework skyrl", OTHERS),
        (2, "qwen2.5-7b", "ppo --framework nemo-rl", OTHERS),
        (2, "32b", "dpo --backend fsdp2 --forbid offload", OTHERS),
        (2, "14b", "grpo --framework verl --backend megatron --allow async", OTHERS),
        (2, "qwen2.5-7b", "grpo --forbid offload --fix actor.zero=2", OTHERS),
        (2, "14b", "grpo --architecture hybrid --backend megatron", OTHERS),
    )
]


@pytest.mark.parametrize("question", UNFIT)
def test_every_remedy_of_a_question_that_does_not_fit_ends_with_exit_0(question: str, tmp_path: Path) -> None:
    out = f"--out {tmp_path / 'plan.json'} --time-limit 60"
    code, shown = run(f"design {question} {out} --json")
    assert code == 1
    found = [remedy["change"] for remedy in json.loads(shown)["remedies"]]
    assert found
    for change in found:
        assert run(f"design {typed(question, change)} {out}")[0] == 0, change


@pytest.mark.parametrize(
    "layout",
    [
        "--actor tp=1,zero=1,recompute=none",
        "--actor zero=1 --framework slime",
        "--rollout tp=1 --framework verl --backend megatron",
    ],
)
def test_the_remedy_of_an_estimate_ends_with_exit_0(layout: str) -> None:
    question = f"--gpus 1 --gpu a100-40 {SMALL} {layout}"
    code, shown = run(f"estimate {question} --json")
    assert code == 1
    assert run(f"estimate {typed(question, json.loads(shown)['remedy'])}")[0] == 0
