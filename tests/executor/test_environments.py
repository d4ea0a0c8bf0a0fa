"""Conversations in turns: exact tokens, masks, limits, faults, and nobody waits for anybody's environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor import refusals
from executor.algorithms.advantages import advantages
from executor.algorithms.batch import collate
from executor.algorithms.iteration import Loop
from executor.coordination.metrics import sample_metrics
from executor.coordination.sample_log import SampleLog
from executor.engines.balance import optimizer_steps
from executor.environments.conversations import Conversations
from executor.environments.process import EnvironmentProcess
from executor.environments.python import PythonTool
from executor.environments.registry import environment_class
from executor.environments.search import SearchTool
from executor.samples import Completion, Conversation, Fault, GenerationRequest, Sample, Scored, Task
from executor.settings import Algorithm, EnvironmentSettings, Sampling, Settings
from executor.tasks.prompter import TaskPrompter
from executor.tasks.prompts import Generated
from executor.tasks.text import ByteText
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.workload import Environment, Reward, Workload

ECHO = "echo_environment:Echo"
TEXT = ByteText()


class Script:
    """An engine that says what it is told: one request a step, the shortest waiting first come."""

    def __init__(self, said: dict[int, list[str]]) -> None:
        self.said = said
        self.asked: list[GenerationRequest] = []
        self.waiting: list[GenerationRequest] = []

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.asked += requests
        self.waiting += requests

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    def abort(self, ids: Sequence[int]) -> list[Completion]:
        """Each has two tokens."""
        leaving = [r for r in self.waiting if r.id in ids]
        self.waiting = [r for r in self.waiting if r.id not in ids]
        return [self._completion(replace(r, max_tokens=2)) for r in leaving]

    def step(self) -> list[Completion]:
        return [self._completion(self.waiting.pop(0))]

    def _completion(self, request: GenerationRequest) -> Completion:
        tokens = TEXT.encode(self.said[request.id].pop(0))[: request.max_tokens]
        count = len(tokens)
        return Completion(
            id=request.id,
            tokens=tokens,
            logprobs=np.full(count, -0.5, np.float32),
            versions=np.full(count, 7, np.int32),
            finish="length" if count == request.max_tokens else "stop",
        )


def request(number: int, prompt: str = "p", max_tokens: int = 100) -> GenerationRequest:
    task = Task(prompt=prompt, seed=number)
    return GenerationRequest(id=number, prompt=TEXT.encode(prompt), max_tokens=max_tokens, seed=1, task=task)


def talk(
    said: dict[int, list[str]], requests: list[GenerationRequest], *, turns: int = 3, **settings: Any
) -> tuple[dict[int, Completion], Script, list[int]]:
    """Completions, the engine, and the order in which they came."""
    engine = Script(said)
    environments = EnvironmentProcess(EnvironmentSettings(kind=ECHO, **settings))
    try:
        conversations = Conversations(engine, environments, TEXT, turns=turns, max_length=120)  # type: ignore[arg-type]
        conversations.add(requests)
        done: list[Completion] = []
        while conversations.unfinished:
            done += conversations.step()
        return {c.id: c for c in done}, engine, [c.id for c in done]
    finally:
        environments.close()


def test_conversations_are_exact_and_those_that_wait_hold_up_nobody() -> None:
    said = {0: ["sleep", "b", "end"], 1: ["x", "end now"], 2: ["one", "two", "three", "four"], 3: ["end"]}
    requests = [request(0), request(1, "other"), request(2), request(3, max_tokens=2)]
    done, engine, order = talk(said, requests)
    assert order[-1] == 0, "its tool slept, the others went on"
    whole = done[0].tokens.tolist()
    assert bytes(whole) == b"sleep[sleep]b[b]end"
    first = done[0].conversation
    assert first is not None
    assert "".join("x" if s else "." for s in first.sampled) == "xxxxx.......x...xxx"
    assert np.array_equal(done[0].logprobs != 0, first.sampled)
    assert (first.turns, first.reward, first.fault) == (3, 0.75, None)
    assert first.seconds > 0.3
    assert done[0].versions.tolist() == [7] * len(whole)
    mine = [r for r in engine.asked if r.id == 0]
    assert [bytes(r.prompt.tolist()) for r in mine] == [b"p", b"psleep[sleep]", b"psleep[sleep]b[b]"]
    assert [r.max_tokens for r in mine] == [100, 88, 84]
    assert len({r.seed for r in mine}) == 3, "turns draw from streams of their own"
    assert done[1].prompt is not None
    assert bytes(done[1].prompt.tolist()) == b"another prompt", "the environment's instead of the data's"
    assert done[2].conversation is not None
    assert done[2].conversation.turns == 3, "the limit; the last turn is judged too"
    assert bytes(done[2].tokens.tolist()) == b"one[one]two[two]three"
    assert (done[3].finish, bytes(done[3].tokens.tolist())) == ("length", b"en")


def test_a_turn_that_is_cut_goes_on_and_a_response_that_is_cut_does_not() -> None:
    requests = [request(0, max_tokens=40), request(1, max_tokens=9)]
    done, _, _ = talk({0: ["abcdef", "end"], 1: ["abcdef", "end"]}, requests, turn_tokens=4)
    assert (bytes(done[0].tokens.tolist()), done[0].finish) == (b"abcd[abcd]end", "stop")
    assert (bytes(done[1].tokens.tolist()), done[1].finish) == (b"abcd", "length"), "no room for the answer"


def test_a_response_without_an_environment_is_one_turn() -> None:
    engine = Script({0: ["abc"]})
    conversations = Conversations(engine)  # type: ignore[arg-type]
    conversations.add([request(0)])
    [done] = conversations.step()
    assert (bytes(done.tokens.tolist()), done.conversation, conversations.unfinished) == (b"abc", None, 0)


def test_a_response_that_leaves_goes_on_behind_what_there_is_of_it() -> None:
    first, second = Script({0: ["ab"], 1: ["xy"]}), Script({0: ["cd"], 1: ["z"]})
    here, there = Conversations(first), Conversations(second)  # type: ignore[arg-type]
    here.add([request(0), request(1, max_tokens=3)])
    moved = here.leave()
    assert (here.unfinished, first.unfinished, here.sampled) == (0, 0, 4)
    there.add(moved)
    assert [bytes(r.prompt.tolist()) for r in second.asked] == [b"pab", b"pxy"]
    assert [r.max_tokens for r in second.asked] == [98, 1]
    assert second.asked[0].seed != moved[0].seed, "the rest is drawn from a stream of its own"
    [cut] = there.leave(1)
    assert cut.id == 1, "the youngest"
    assert cut.begun is not None
    assert bytes(cut.begun.tokens.tolist()) == b"xyz"
    [done] = there.step()
    assert (bytes(done.tokens.tolist()), len(done.logprobs), done.finish) == (b"abcd", 4, "stop")
    assert (done.prompt, done.conversation, there.sampled) == (None, None, 3)


def test_a_conversation_that_leaves_begins_again_and_one_of_several_stays() -> None:
    environments = EnvironmentProcess(EnvironmentSettings(kind=ECHO))
    try:
        engine = Script({0: ["one"]})
        here = Conversations(engine, environments, TEXT, turns=3, max_length=120)  # type: ignore[arg-type]
        asked = request(0)
        here.add([asked])
        assert here.leave(1) == [], "its environment is here"
        assert here.leave() == [asked]
        while environments.busy:
            assert here.step() == [], "what its environment still says is nobody's"
        assert here.unfinished == 0
    finally:
        environments.close()


def test_faults_end_their_conversation_alone() -> None:
    said = {0: ["raise"], 1: ["nonsense"], 2: ["nan"], 3: ["hang"], 4: ["ok", "end"]}
    done, _, _ = talk(said, [request(i) for i in said], timeout_s=0.5)
    faults = {i: c.conversation.fault for i, c in done.items() if c.conversation}
    assert {i: f.kind for i, f in faults.items() if f} == {0: "error", 1: "error", 2: "error", 3: "timeout"}
    assert faults[0].what == "KeyError: 'no such tool'"  # type: ignore[union-attr]
    assert "dict, not Observed" in faults[1].what  # type: ignore[union-attr]
    died, _, _ = talk({0: ["exit"], 1: ["sleep", "end"]}, [request(0), request(1)], concurrency=1)
    kinds = [
        c.conversation.fault.what if c.conversation and c.conversation.fault else "" for c in died.values()
    ]
    assert "its process ended" in kinds


def answers(process: EnvironmentProcess, method: str, argument: Any, count: int) -> list[Fault | None]:
    """Of so many conversations that ask together."""
    for number in range(count):
        process.ask(number, method, argument)
    said: list[Fault | None] = []
    while len(said) < count:
        said += [answer.fault for answer in process.answers(0.1)]
    return said


def test_waiting_for_a_place_is_no_time_out() -> None:
    process = EnvironmentProcess(EnvironmentSettings(kind="echo_environment:Counter", timeout_s=1.2))
    try:
        answers(process, "reset", Task(prompt=""), 6)
        assert answers(process, "step", "x", 6) == [None] * 6, "1.8 s together, 0.3 s each"
    finally:
        process.close()


def test_conversations_share_one_sandbox_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = EnvironmentProcess(EnvironmentSettings(kind="python"))
    answers(process, "reset", Task(prompt=""), 8)
    assert len(list(tmp_path.iterdir())) == len(os.sched_getaffinity(0)), "one worker a CPU"
    process.close()
    assert not list(tmp_path.iterdir())


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(RlhfsimError, match="cannot be made: ModuleNotFoundError"):
        EnvironmentProcess(EnvironmentSettings(kind="nowhere:Nobody"))
    with pytest.raises(RlhfsimError, match="has no reset and no step"):
        EnvironmentProcess(EnvironmentSettings(kind="io:StringIO"))


def sample(number: int, reward: float, mask: str, **changes: Any) -> Sample:
    """Tokens of an environment are `.`."""
    sampled = np.array([m == "x" for m in mask])
    own = np.where(sampled, 0.1 * (1 + number), 1e6).astype(np.float32)  # what must never be read
    fields: dict[str, Any] = {
        "rollout_logprobs": own * -1,
        "old_logprobs": own * -1.01,
        "reference_logprobs": own * -1.1,
        "values": own,
        "versions": np.zeros(len(mask), np.int32),
    }
    talked = Conversation(sampled=sampled, turns=2, reward=reward, seconds=0.5)
    tokens = np.arange(len(mask))
    return Sample(
        id=number,
        group=0,
        prompt=tokens[:1],
        response=tokens,
        reward=reward,
        conversation=talked,
        **fields | changes,
    )


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce++", "rloo"])
def test_advantages_read_no_token_of_an_environment(algorithm: str) -> None:
    talked = [sample(0, 1.0, "xx...x"), sample(1, 0.0, "x..xx")]
    cut = [
        Sample(
            id=s.id,
            group=0,
            prompt=s.prompt,
            response=s.response[s.sampled],
            reward=s.reward,
            **{
                name: getattr(s, name)[s.sampled]
                for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "values")
            },
        )
        for s in talked
    ]
    alone = advantages(algorithm, cut, Algorithm())
    for one, other in zip(advantages(algorithm, talked, Algorithm()), alone, strict=True):
        assert one.advantages is not None
        assert other.advantages is not None
        assert one.advantages[one.sampled] == pytest.approx(other.advantages)
        if algorithm != "ppo":
            assert not one.advantages[~one.sampled].any()
        if other.returns is not None:
            assert one.returns is not None
            assert one.returns[one.sampled] == pytest.approx(other.returns)


def test_losses_and_metrics_count_sampled_tokens_alone() -> None:
    talked = [sample(0, 1.0, "xx...x"), sample(1, 0.0, "x..xx")]
    [[step]] = optimizer_steps(talked, ranks=1, mini_batches=1, epochs=1, seed=[0])
    assert step.global_tokens == 6
    batch = collate(step.samples, num_tokens=6, num_sequences=2)
    assert batch.mask.tolist() == [[1, 1, 0, 0, 0, 1], [1, 0, 0, 1, 1, 0]]
    row = sample_metrics(talked, 0)
    assert row["mismatch/max_abs_dlogp"] == pytest.approx(0.002, rel=1e-3)
    assert row["kl/max"] < 1.0
    assert (row["environment/turns_mean"], row["environment/errors"], row["environment/tokens_mean"]) == (
        2,
        0,
        2.5,
    )


def in_a_thread(step: Any) -> Any:
    """What a coroutine returns; a browser that other tests have opened keeps an event loop in this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, step).result()


def test_search_ranks_rare_words_first(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat\n\nthe dog and the cat ran\n\nthe zebra slept")
    tool = SearchTool(str(tmp_path), results=2)
    told = in_a_thread(tool.step("<search>the zebra</search>"))
    assert str(told.text).splitlines()[2:4] == ["1. the zebra slept", "2. the dog and the cat ran"]
    assert in_a_thread(tool.step("it slept")).done


def test_the_example_of_the_docs_is_an_environment(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (tmp_path / "countdown.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    settings = EnvironmentSettings(kind="countdown:Countdown", options={"start": 2})
    environments = EnvironmentProcess(settings, str(tmp_path))
    try:
        engine = Script({0: ["2", " 1"]})
        conversations = Conversations(engine, environments, TEXT, turns=9)  # type: ignore[arg-type]
        conversations.add([request(0)])
        while not (done := conversations.step()):
            pass
    finally:
        environments.close()
    assert bytes(done[0].tokens.tolist()) == b"2 next:  1"
    assert done[0].conversation is not None
    assert (done[0].conversation.reward, conversations.taken()[0][1] > 0) == (2.0, True)


def test_programs_run_in_the_sandbox_and_their_output_is_told() -> None:
    tool = PythonTool(wall_s=20)
    tool.reset(Task(prompt=""))
    told = tool.step("I compute:\n```python\nprint(6 * 7)\n1 / 0\n```")
    assert "42" in str(told.text)
    assert "ZeroDivisionError" in str(told.text)
    assert tool.step("It is 42.").done


@pytest.mark.parametrize(("on_error", "reward"), [("zero", 0.0), ("drop", None), ("stop", None)])
def test_a_fault_is_what_on_error_says(on_error: Any, reward: float | None) -> None:
    prompter = TaskPrompter(
        source=Generated(task="guess"),
        text=TEXT,
        workload=Workload(algorithm="grpo", prompts=2, samples=2, reward=Reward()),
        sampling=Sampling(),
        max_tokens=4,
        seed=3,
        environment=EnvironmentSettings(kind="guess", on_error=on_error),
    )
    first = prompter.requests(0)[0]
    assert first.task is not None
    assert (first.task.answer.isdigit(), first.task.seed) == (True, first.seed)
    talked = Conversation(sampled=np.ones(2, np.bool_), turns=1, reward=0.5, fault=Fault("error", "it broke"))
    none = np.zeros(2)
    completion = Completion(
        id=first.id,
        tokens=none.astype(np.int64),
        logprobs=none.astype(np.float32),
        versions=none.astype(np.int32),
        finish="stop",
        conversation=talked,
    )
    if on_error == "stop":
        with pytest.raises(RlhfsimError, match="failed in turn 1 of sample 0: it broke"):
            prompter.sample(completion)
        return
    made = prompter.sample(completion)
    assert (made.reward, made.rewards) == (reward, None if reward is None else {"environment": 0.0})
    loop = Loop(
        backend=None,  # type: ignore[arg-type]
        prompter=prompter,
        workload=prompter.workload,
        settings=Settings(),
        max_tokens=4,
    )
    merged = loop._merged(made, {"rules.score": Scored(total=1.0, by_rule={"digits": 1.0})})
    assert (merged.reward, merged.num_sampled) == ((1.0, 2) if reward == 0 else (None, 0))
    assert merged.dropped == (on_error == "drop")


def test_a_plan_and_its_settings_agree_on_the_environment() -> None:
    def job(planned: Any, said: Any, fakes: Any = None) -> Any:
        plan = SimpleNamespace(workload=SimpleNamespace(environment=planned))
        return SimpleNamespace(plan=plan, settings=SimpleNamespace(environment=said), fakes=fakes)

    turns, game = Environment(turns=2), EnvironmentSettings(kind="guess")
    refusals.check_environment(job(None, None))
    refusals.check_environment(job(turns, None, fakes=object()))
    refusals.check_environment(job(turns, game))
    for asked, words in (((turns, None), "do not say which"), ((None, game), "the plan's workload has none")):
        with pytest.raises(RlhfsimError, match=words):
            refusals.check_environment(job(*asked))


def test_logged_conversations_say_what_they_were_told(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", ByteText().decode, number=1, every=1)
    spoken = TEXT.encode("ask[told]so[again]end")
    mask = np.array([c not in "[]toldagain" for c in "ask[told]so[again]end"])
    mask[:3], mask[9:11], mask[-3:] = True, True, True
    talked = Conversation(sampled=mask, turns=3, seconds=0.5, fault=Fault("timeout", "slow"))
    [line] = log.add(
        "training", 0, [Sample(id=0, group=0, prompt=spoken, response=spoken, conversation=talked)]
    )
    assert line["environment"] == {
        "turns": 3,
        "seconds": 0.5,
        "observed": ["[told]", "[again]"],
        "fault": "timeout: slow",
    }


@pytest.mark.parametrize("value", ["x", True, -1, float("nan"), 1e30])
@pytest.mark.parametrize(("kind", "option"), [("python", "wall_s"), ("guess", "numbers")])
def test_an_option_of_a_shipped_environment_is_a_number_in_its_range(
    kind: str, option: str, value: Any
) -> None:
    with pytest.raises(RlhfsimError, match=f"option {option} is .*, not a number from"):
        environment_class(kind, {option: value})
