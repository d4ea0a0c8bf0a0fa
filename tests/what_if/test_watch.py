"""A job that runs, watched: every log is written here step by step, the clock and the waits are the test's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rlhfsim.api import estimate_file
from rlhfsim.calibration.watching.causes import Cause, condition
from rlhfsim.cli import watch as command
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.framework import framework_named, framework_names
from rlhfsim.interchange.logs.imported import Choices
from rlhfsim.plan import write_plan
from rlhfsim.run_folder import METRICS, PLAN
from rlhfsim.what_if.watch import Event, JobWatch, Judgement, Notice
from tests.frameworks.log_forms import FORMS
from tests.frameworks.test_importers import verl_step, write_tensorboard
from tests.frameworks.test_log_alone import log as verl_log

SECONDS = 10.0


def row(name: str, step: int) -> dict[str, float]:
    """Every timer of a framework, the time of its step, and lengths."""
    framework = framework_named(name)
    timers = [t.metric for t in framework.timers if not t.derived]
    lengths = {n[0]: v for n, v in ((framework.prompt, 100.0), (framework.response, 500.0)) if n}
    counted = {} if framework.prompt else {"num_tokens": 600.0 * step}
    return {**lengths, **counted, **dict.fromkeys(timers, SECONDS), framework.step: SECONDS * len(timers)}


def step_lines(name: str, step: int) -> str:
    return "\n".join(FORMS[name][1](step, 100, row(name, step))) + "\n"


def looks(watch: JobWatch, path: Path, parts: Iterator[str], *, last: bool = False) -> list[Event]:
    """What a watch says while the parts are appended to a log one after the other, and once more after them."""
    events = []
    for at, part in enumerate(parts):
        with path.open("a") as file:
            file.write(part)
        events += watch.look(float(at))
    return [*events, *watch.look(1e3, last=last)]


def verl_lines(steps: range, **more: Callable[[int], float]) -> Iterator[str]:
    for i in steps:
        items = verl_step(i, **{name: of(i) for name, of in more.items()})
        yield f"step:{i} - " + " - ".join(f"{k}:{v}" for k, v in items.items()) + "\n"


def judged(events: list[Event]) -> list[Judgement]:
    return [event for event in events if isinstance(event, Judgement)]


def warned(events: list[Event]) -> list[str]:
    return [event.code for event in events if isinstance(event, Cause)]


@pytest.mark.parametrize("name", framework_names())
def test_the_log_of_every_framework_is_followed_from_before_it_is_there(name: str, tmp_path: Path) -> None:
    path = tmp_path / ("run.jsonl" if name == "trl" else "run.log")
    watch = JobWatch(path)
    assert [event.text for event in watch.look(0.0) if isinstance(event, Notice)] == [
        f"{path}: there is no log yet"
    ]
    assert not [*watch.look(1.0)]  # said once
    events = looks(watch, path, (step_lines(name, step) for step in range(1, 7)))
    first = judged(events)[0]
    whole = sum(v for k, v in row(name, 1).items() if k == first.framework.step)
    assert first.framework.name == name
    assert first.found.steps == 5
    expected = (
        len([t for t in first.framework.timers if not t.derived]) * SECONDS if name == "areal" else whole
    )
    assert first.found.step.measured_s == pytest.approx(expected, rel=0.01)


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    text = "".join(verl_lines(range(1, 8)))
    cut = [text[i : i + 37] for i in range(0, len(text), 37)]
    halves, lines = (
        judged(looks(JobWatch(tmp_path / name), tmp_path / name, parts, last=True))[-1].found
        for name, parts in (("halves.log", iter(cut)), ("lines.log", verl_lines(range(1, 8))))
    )
    assert halves == lines
    assert not path.exists()


def test_a_rotated_log_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    watch = JobWatch(path)
    looks(watch, path, verl_lines(range(1, 4)))
    with path.open("a") as file:
        file.write("".join(verl_lines(range(4, 5))))  # not seen before it is renamed
    path.rename(tmp_path / "run.log.1")
    events = looks(watch, path, verl_lines(range(5, 9)))
    assert judged(events)[0].found.steps == 5
    assert watch.found is not None
    assert (watch.found.steps, watch.found.logged) == (8, 8)
    assert not [event for event in events if isinstance(event, Notice) and event.kind == "restart"]


@pytest.mark.parametrize("replacement", ["shorter", "longer"])
def test_a_log_that_was_cut_or_replaced_is_read_from_its_beginning(replacement: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    watch = JobWatch(path)
    looks(watch, path, verl_lines(range(1, 4)))
    before = path.stat()
    text = "".join(verl_lines(range(4, 6) if replacement == "shorter" else range(4, 10)))
    path.write_text(text)
    assert path.stat().st_ino == before.st_ino
    [*watch.look(1.0)], [*watch.look(2.0)]
    assert watch.found is not None
    assert watch.found.logged == (5 if replacement == "shorter" else 9)


def test_a_resumed_run_is_judged_anew_from_the_step_at_which_it_began_again(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    watch = JobWatch(path)
    looks(watch, path, verl_lines(range(1, 9)))
    events = looks(watch, path, verl_lines(range(6, 12), **{"timing_s/step": lambda i: 50.0}))
    assert [event.text.partition(":")[0] for event in events if isinstance(event, Notice)][:1] == [
        "the run began again at step 6"
    ]
    found = judged(events)[-1].found
    assert (found.steps, found.step.measured_s) == (5, 50.0)


def test_no_byte_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfsim.interchange.logs import tail

    read: list[int] = []
    rest = tail.Tail._rest

    def counted(self: tail.Tail, path: Path) -> Iterator[bytes]:
        for piece in rest(self, path):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(tail.Tail, "_rest", counted)
    path = tmp_path / "run.log"
    looks(JobWatch(path), path, verl_lines(range(1, 40)))
    assert sum(read) == path.stat().st_size


# --- judged against a prediction ----------------------------------------------------------------------


def test_a_job_is_held_against_what_the_doctor_says_of_the_configuration_that_it_prints(
    tmp_path: Path,
) -> None:
    path = verl_log(tmp_path, head="GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    found = judged([*JobWatch(path).look(0.0, last=True)])[-1]
    assert found.baseline is not None
    assert found.baseline.said_by == "the doctor on its configuration"
    assert {phase.name for phase in found.found.phases} >= {"actor.generate", "actor.train"}
    assert found.found.oom_risk == found.baseline.plan.prediction.probability_out_of_memory


def test_a_job_that_does_not_say_enough_is_watched_without_a_prediction(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    events = looks(JobWatch(path), path, verl_lines(range(1, 7)))
    (note,) = [e for e in events if isinstance(e, Notice) and e.kind == "note"]
    assert "not compared with a prediction" in note.text
    assert "--gpu NAME" in note.text
    assert judged(events)[0].found.step.predicted_s is None


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    folder.mkdir()
    write_plan(folder / PLAN, estimate_file("verl"))
    return folder


def test_a_run_of_ours_is_watched_by_its_metrics_and_its_plan(own_run: Path) -> None:
    plan = estimate_file("verl")
    times = {f"time/{p.name}": 2 * p.seconds for p in plan.prediction.phases}
    step = {"time/step": 2 * plan.prediction.step_s, "response/length_mean": 300.0, "response/truncated": 0.5}
    rows = (json.dumps({"step": i, **times, **step}) + "\n" for i in range(6))
    watch = JobWatch(own_run)
    events = looks(watch, own_run / METRICS, rows)
    assert judged(events)[0].found.step.ratio == pytest.approx(2.0)
    assert "responses-cut" in warned(events)
    assert watch.found is not None
    assert condition("step-ratio>1.9").value_in(watch.found) == pytest.approx(2.0)
    assert condition("step-ratio<1.9").value_in(watch.found) is None


def test_a_plan_that_is_given_comes_before_the_configuration(own_run: Path, tmp_path: Path) -> None:
    plan = estimate_file("verl")
    path = tmp_path / "run.log"
    events = looks(JobWatch(path, plan=plan), path, verl_lines(range(1, 7)))
    found = judged(events)[0].found
    assert found.step.predicted_s == plan.prediction.step_s
    assert "actor.generate" in {phase.name for phase in found.phases}


# --- what grows ---------------------------------------------------------------------------------------


def grown(tmp_path: Path, of: Callable[[int], float], steps: int, **choices: Any) -> list[Event]:
    """A verl log whose allocated memory is `of` the step, on GPUs of 80 GB."""
    path = tmp_path / "run.log"
    watch = JobWatch(path, choices=Choices(gpu="h100"), **choices)
    return looks(watch, path, verl_lines(range(1, steps + 1), **{"perf/max_memory_allocated_gb": of}))


def test_the_step_at_which_memory_runs_out_is_said_with_its_interval(tmp_path: Path) -> None:
    events = grown(tmp_path, lambda i: 50.0 + 0.5 * i + 0.1 * (-1) ** i, 20)
    (cause,) = [event for event in events if isinstance(event, Cause)]
    assert cause.code == "oom-risk"
    found = judged(events)[-1].found
    assert found.memory is not None
    assert found.memory.reached is not None
    low, middle, high = (found.logged + ahead for ahead in found.memory.reached)
    full = next(i for i in range(1, 200) if (50 + 0.5 * i) * 2**30 >= (found.memory.limit or 0))
    assert low <= full <= high
    assert middle == pytest.approx(full, abs=2)
    assert (found.oom_risk or 0) > 0.99


@pytest.mark.parametrize(
    "of", [lambda i: 60.0, lambda i: 60.0 + 3.0 * ((7 * i) % 5 > 2), lambda i: 68.0 - 20.0 / i]
)
def test_memory_that_does_not_grow_raises_no_alarm(of: Callable[[int], float], tmp_path: Path) -> None:
    events = grown(tmp_path, of, 25)
    assert not warned(events)
    assert (judged(events)[-1].found.oom_risk or 0.0) < 0.05


def test_responses_that_grow_into_their_limit_are_warned_of_once(own_run: Path, tmp_path: Path) -> None:
    path = verl_log(tmp_path, head="GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    head = path.read_text().partition("step:1 ")[0].rpartition("\n")[0] + "\n"
    path.write_text(head)
    lines = (
        line.replace(
            "prompt_length/mean:200.0", f"prompt_length/mean:200.0 - response_length/clip_ratio:{i / 1000}"
        )
        for i, line in enumerate(
            verl_lines(range(1, 22), **{"response_length/mean": lambda i: 1000.0 + 100.0 * i + (i % 3)})
        )
    )
    events = looks(JobWatch(path), path, lines)
    assert warned(events).count("lengths-grow") == 1
    found = judged(events)[-1].found
    assert found.response is not None
    assert found.response.limit == 4096
    assert found.clipped == pytest.approx(0.0, abs=0.02)


def test_a_metric_that_is_no_number_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    lines = verl_lines(range(1, 7), **{"actor/grad_norm": lambda i: float("nan") if i == 6 else 1.0})
    assert "not-finite" in warned(looks(JobWatch(path), path, lines, last=True))


def test_a_job_from_which_nothing_comes_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    watch = JobWatch(path)
    looks(watch, path, verl_lines(range(1, 7)))
    assert not warned([*watch.look(1e3 + 100.0)])
    assert warned([*watch.look(1e3 + 1000.0)]) == ["quiet"]
    assert not warned([*watch.look(1e3 + 2000.0)])


# --- other forms of logs ------------------------------------------------------------------------------


def test_an_event_file_and_the_state_of_a_trainer_are_followed(tmp_path: Path) -> None:
    events = write_tensorboard(tmp_path / "whole", {i: verl_step(i) for i in range(1, 8)})
    content = events.read_bytes()
    path = tmp_path / "tb" / events.name
    path.parent.mkdir()
    watch = JobWatch(path.parent)
    found = []
    for end in range(0, len(content) + 1, max(1, len(content) // 9)):
        path.write_bytes(content[:end])
        found += [*watch.look(0.0)]
    found += [*watch.look(1.0, last=True)]
    assert judged(found)[-1].found.steps == 7
    state = tmp_path / "trainer_state.json"
    watch = JobWatch(state)
    for last in (3, 7):
        history = [
            {"step": i, "step_time": 9.0, "completions/mean_length": 100.0} for i in range(1, last + 1)
        ]
        state.write_text(json.dumps({"log_history": history}))
        found = [*watch.look(0.0), *watch.look(0.0)]
    assert judged(found)[-1].framework.name == "trl"


# --- the command --------------------------------------------------------------------------------------


def invoked(arguments: list[str], then: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(command, "pause", then)
    monkeypatch.setattr(command, "now", lambda: 0.0)
    return CliRunner().invoke(cli, ["watch", *arguments], standalone_mode=False)


def test_the_command_follows_until_a_condition_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.log"
    lines = verl_lines(range(1, 99), **{"perf/max_memory_allocated_gb": lambda i: 40.0 + 2 * i})

    def write(seconds: float) -> None:
        assert seconds == 5.0
        with path.open("a") as file:
            file.write(next(lines))

    arguments = [str(path), "--gpu", "h100", "--json", "--fail-on", "oom-risk>0.5"]
    result = invoked(arguments, write, monkeypatch)
    assert result.return_value == 1
    said = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in said][:1] == ["waiting"]
    assert said[-1]["event"] == "failed"
    assert said[-1]["value"] > 0.5
    assert next(line for line in said if line["event"] == "judged")["steps"] == 5
    assert sum(line["event"] == "warning" and line["code"] == "oom-risk" for line in said) == 1


def test_ctrl_c_ends_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    result = invoked([str(tmp_path / "run.log")], interrupt, monkeypatch)
    assert isinstance(result.exception, click.Abort)  # which `main` says in one line, with exit code 130


def test_once_judges_what_is_there_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.log"
    path.write_text("".join(verl_lines(range(1, 4))))
    result = invoked([str(path), "--once"], lambda s: pytest.fail("it waits"), monkeypatch)
    assert result.return_value == 0
    assert "verl, step 3 (3 steps since it began)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    empty = tmp_path / "empty.log"
    empty.write_text("nothing yet\n")
    assert "no step has ended" in str(invoked([str(empty), "--once"], lambda s: None, monkeypatch).exception)


def test_a_watch_ends_with_the_last_step_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.log"
    lines = verl_lines(range(1, 9))

    def write(seconds: float) -> None:
        with path.open("a") as file:
            file.write(next(lines, ""))

    assert invoked([str(path), "--steps", "8"], write, monkeypatch).return_value == 0


@pytest.mark.parametrize("text", ["oom-risk", "speed>1", "oom-risk>x", "oom-risk=0.5", ""])
def test_a_condition_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(RlhfsimError, match="is no condition") as error:
        condition(text)
    assert "oom-risk" in (error.value.help or "")
