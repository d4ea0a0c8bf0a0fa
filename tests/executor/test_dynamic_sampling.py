"""Groups whose rewards are all equal are thrown away until a step is full, in both kinds of schedule."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor.algorithms.iteration import Learned, Loop, Position, _Feeder
from executor.coordination.buffer import BufferSettings, Experience
from executor.samples import Completion, GenerationRequest, Sample, Scored, Transfer
from executor.settings import Algorithm, Settings
from executor.tasks.prompter import TaskPrompter
from executor.tasks.prompts import Generated
from executor.tasks.text import ByteText
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.placement import Late
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

SAMPLES, PROMPTS, EACH = 2, 4, 3


def workload(kept: float = 0.5, most: int | None = None, **changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "algorithm": "dapo",
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "kl": False,
        "reward": Reward(rules=Rules()),
        "response_len": Fixed(value=4),
        "dynamic_sampling": DynamicSampling(kept=kept, gen_prompts=EACH, max_gen_batches=most),
    }
    return Workload(**(fields | changes))


class Machine:
    """A backend whose samples of every group that `hard` names are all wrong; it remembers its calls."""

    def __init__(self, hard: Sequence[int] = ()) -> None:
        self.version, self.hard = 0, set(hard)
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.waiting: list[Completion] = []
        self._lock = threading.Lock()

    def _note(self, name: str, groups: Sequence[int]) -> None:
        self.calls.append((name, tuple(dict.fromkeys(groups))))

    def _completion(self, request: GenerationRequest) -> Completion:
        tokens = np.arange(2) + request.id
        versions = np.full(2, self.version, np.int32)
        logprobs = np.full(2, -1.0, np.float32)
        return Completion(id=request.id, tokens=tokens, logprobs=logprobs, versions=versions, finish="stop")

    def generate(self, requests: Sequence[GenerationRequest], step: int) -> list[Completion]:
        self._note("generate", [r.id // SAMPLES for r in requests])
        return [self._completion(r) for r in requests]

    def submit(self, requests: Sequence[GenerationRequest], step: int) -> None:
        with self._lock:
            self.waiting += [self._completion(r) for r in requests]

    def poll(self, limit_s: float) -> list[Completion]:
        with self._lock:
            done, self.waiting = self.waiting[:SAMPLES], self.waiting[SAMPLES:]
        time.sleep(0 if done else 0.001)
        return done

    def score(self, call: Call, samples: Sequence[Sample], step: int) -> list[Any]:
        self._note(call.name, [s.group for s in samples])
        if call.role == "rules":
            right = [s.group not in self.hard and s.id % SAMPLES == 0 for s in samples]
            return [Scored(total=float(r), by_rule={"answer": float(r)}) for r in right]
        return [np.full(s.num_tokens, -1.0, np.float32) for s in samples]

    def train(self, role: str, samples: Sequence[Sample], loss: Any, step: int) -> list[dict[str, float]]:
        self._note("train", [s.group for s in samples])
        return [{}]

    def sync(self, step: int) -> Transfer:
        self.version += 1
        return Transfer(version=self.version, bytes=0, buckets=0, seconds=0.0, checksum="")

    def stop(self) -> None:
        """Nothing runs elsewhere."""


def loop(machine: Machine, work: Workload, late: Late = "wait") -> Loop:
    prompter = TaskPrompter(
        source=Generated(task="comparison"),
        text=ByteText(),
        workload=work,
        sampling=Settings().sampling,
        max_tokens=4,
        seed=0,
    )
    settings = Settings(algorithm=Algorithm())
    return Loop(
        backend=machine,
        prompter=prompter,
        workload=work,
        settings=settings,
        max_tokens=4,
        wait_s=20.0,
        late=late,
    )


def trained(learned: Learned) -> list[int]:
    return list(dict.fromkeys(s.group for s in learned.samples))


def test_batches_are_generated_until_the_step_is_full_and_only_kept_groups_go_on() -> None:
    machine = Machine(hard=[0, 2, 4])
    [first, second] = loop(machine, workload()).filled(range(2), Position())
    assert machine.calls[: machine.calls.index(("train", (1, 3, 5, 6))) + 1] == [
        ("generate", (0, 1, 2)),
        ("rules.score", (0, 1, 2)),
        ("generate", (3, 4, 5)),
        ("rules.score", (3, 4, 5)),
        ("generate", (6, 7, 8)),
        ("rules.score", (6, 7, 8)),
        ("actor.logprob", (1, 3, 5, 6)),
        ("train", (1, 3, 5, 6)),
    ]
    assert (trained(first), first.unused) == ([1, 3, 5, 6], (0, 2, 4, 7, 8))
    assert all(s.reward is not None and s.rewards == {"answer": s.reward} for s in first.samples)
    assert first.sampling == {
        "sampling/generated_groups": 9,
        "sampling/equal_groups": 3,
        "sampling/surplus_groups": 2,
        "sampling/kept_share": pytest.approx(6 / 9),
        "sampling/reward_mean": pytest.approx(6 / 18),
    }
    assert (trained(second), second.unused) == ([9, 10, 11, 12], (13, 14))


def test_a_run_that_goes_on_from_its_position_trains_as_one_that_was_not_interrupted() -> None:
    def run(steps: range, position: Position) -> Iterator[tuple[list[int], list[list[int]]]]:
        for learned in loop(Machine(hard=range(0, 40, 3)), workload()).filled(steps, position):
            position.add(learned.groups)
            yield trained(learned), [s.response.tolist() for s in learned.samples]

    whole = list(run(range(4), Position()))
    position = Position()
    before = list(islice(run(range(4), position), 2))
    assert not position.ahead
    saved = Position(position.prompts)
    assert before + list(run(range(2, 4), saved)) == whole


@pytest.mark.parametrize(
    ("most", "what"), [(3, "max_gen_batches 3"), (None, "10 generation batches in a row")]
)
def test_a_step_that_cannot_be_filled_stops_the_run_with_what_was_seen(most: int | None, what: str) -> None:
    machine = Machine(hard=range(1000))
    with pytest.raises(RlhfsimError, match=f"0 of .* groups have rewards that differ.*{what}") as caught:
        list(loop(machine, workload(most=most)).filled(range(1), Position()))
    assert caught.value.code == "dynamic-sampling-starved"
    assert len([c for c in machine.calls if c[0] == "generate"]) == (most or 10)


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer keeps samples in this process, not in Ray's object store."""
    store = SimpleNamespace(put=lambda content: content, get=lambda contents, timeout: contents)
    monkeypatch.setattr("executor.coordination.buffer.ray", store)


@pytest.mark.usefixtures("_here")
def test_an_asynchronous_run_trains_on_kept_groups_alone_and_counts_the_others() -> None:
    machine, hard, position = Machine(hard=range(0, 400, 2)), range(0, 400, 2), Position()
    buffer = Experience(BufferSettings(batch=PROMPTS, staleness=1.0), 0)
    for learned in loop(machine, workload()).asynchronous(range(4), buffer, position):
        assert len(trained(learned)) == PROMPTS
        assert not set(trained(learned)) & set(hard)
        assert set(learned.unused) <= set(hard)
        assert learned.sampling["sampling/equal_groups"] == len(learned.unused)
        position.add(learned.groups)
    assert position.prompts >= 4 * PROMPTS  # groups that taught nothing leave no gap
    scored = [group for name, groups in machine.calls if name == "rules.score" for group in groups]
    assert len(scored) == len(set(scored))


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("late", ["drop", "requeue"])
def test_a_group_that_comes_too_late_is_counted_and_generated_again_where_asked(late: Late) -> None:
    machine, work = Machine(), workload(dynamic_sampling=None)
    asked = loop(machine, work, late)
    buffer = Experience(BufferSettings(batch=2, staleness=1.0, waits=False), 0)
    feeder = _Feeder(asked, buffer, Position())

    def come(*groups: int) -> None:
        for completion in [c for c in machine.waiting if c.id // SAMPLES in groups]:
            feeder._receive(asked.prompter.sample(completion))
        machine.waiting = [c for c in machine.waiting if c.id // SAMPLES not in groups]

    for version, groups in enumerate([(1, 2), (3, 4)]):
        feeder._submit()
        come(*groups)
        assert [s.group for s in buffer.take(1.0)[::SAMPLES]] == list(groups), "it waits for nobody"
        machine.version = version + 1
        buffer.published(machine.version)
    feeder._submit()
    come(0)  # of version 0, at version 2
    feeder._submit()
    found = feeder.late_since(())
    assert found is not None
    assert found.tokens == {0: 2 * SAMPLES}
    learned = found.added_to(Learned(step=2, samples=(), actor=()))
    assert learned.sampling == {"sampling/late_groups": 1.0, "sampling/late_tokens": 2.0 * SAMPLES}
    again = 0 in {c.id // SAMPLES for c in machine.waiting}
    assert (again, learned.unused) == ((True, ()) if late == "requeue" else (False, (0,)))


def test_an_asynchronous_run_that_is_never_filled_stops() -> None:
    buffer = Experience(BufferSettings(batch=PROMPTS, staleness=1.0), 0)
    with pytest.raises(RlhfsimError, match="max_gen_batches 3"):
        list(loop(Machine(hard=range(1000)), workload(most=3)).asynchronous(range(1), buffer, Position()))


def test_samples_whose_reward_failed_say_nothing_about_their_group() -> None:
    work = workload()
    machine = Machine()
    given = loop(machine, work)
    machine.score = lambda call, samples, step: [  # type: ignore[method-assign]
        Scored(total=None if s.id % SAMPLES else 1.0, by_rule={}) for s in samples
    ]
    with pytest.raises(RlhfsimError, match="in a row"):
        list(given.filled(range(1), Position()))
