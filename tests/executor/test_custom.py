"""Parts of the algorithm that the user brings: found, tried before the start, called, resumed, priced."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_agreement import CASES, check_loss
from test_dynamic_sampling import Machine, loop, workload

from executor.algorithms import custom, probe
from executor.algorithms.advantages import estimated
from executor.algorithms.custom import Parts
from executor.algorithms.iteration import Learned, Loop
from executor.coordination.tracking import open_trackers
from executor.launch import prepare
from executor.sample_files import read_samples, write_samples
from executor.samples import Conversation, Fault, Sample
from executor.settings import Algorithm, Custom, CustomPart, Data, RewardRule, Sampling, Settings, Tracking
from executor.tasks.files import FileSource
from executor.tasks.prompter import TaskPrompter
from executor.tasks.prompts import Generated
from executor.tasks.text import Text
from lab import learning
from rlhfsim.cli.run_settings import settings_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.workload import OwnParts, Rules

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are importable, as from the folder where a run is started."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of the user's, and says its name."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(text: str) -> str:
        name = f"own_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return name

    return write


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    import runs

    from executor.tasks import tiny

    return runs.plan("naive", "grpo", tiny.config(tmp_path_factory.mktemp("m"), layers=2))


@pytest.mark.parametrize("name", ["sapo", "vespo"])
def test_an_example_loss_and_its_gradient_equal_trls_to_1e_5(name: str) -> None:
    part = custom.for_workers(CustomPart(target=f"{name}:loss"))
    check_loss(CASES[f"own-trl-{name}"], "policy", "logprobs", policy_loss=part)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_at_most_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_a_part_is_a_target_alone_or_with_options() -> None:
    found = settings_of(None, ("custom.loss=sapo:loss", "custom.filter.target=replay:Replay"))
    assert found.custom.loss == CustomPart(target="sapo:loss")
    assert found.custom.filter == CustomPart(target="replay:Replay")
    with pytest.raises(RlhfsimError):
        settings_of(None, ("custom.loss=sapo",))


BROKEN = {
    "loss": (
        ("def f(batch): return batch.logprobs.sum()", "shape"),
        ("def f(batch): return batch.advantages", "no gradient"),
        ("def f(batch): return batch.logprobs / 0", "not finite"),
        ("def f(batch): raise KeyError('tau')", "KeyError"),
        ("def f(): return 0", "TypeError"),
        ("g = 1", "AttributeError"),
    ),
    "advantages": (
        ("def f(samples): return [0.0]", "1 advantages for 4"),
        ("def f(samples): return 0.0", "TypeError"),
        ("def f(samples): return ['a'] * 4", "not finite"),
        ("def f(samples): return [[0.0] * 9 for s in samples]", "shape"),
        ("def f(samples): return [float('nan') for s in samples]", "not finite"),
    ),
    "filter": (
        ("def f(samples): return samples + samples", "8 of 4"),
        ("def f(samples): return [1]", "something else"),
        ("def f(samples): return [samples[0]] * 4", "twice"),
    ),
    "sampler": (
        ("def f(batch, count, size): return [0]", "1 positions"),
        ("def f(batch, count, size): return ['a'] * count", "ValueError"),
        ("def f(batch, count, size): return [-1] * count", "positions"),
    ),
}


@pytest.mark.parametrize(
    ("part", "text", "word"), [(part, *case) for part, cases in BROKEN.items() for case in cases]
)
def test_a_broken_part_is_refused_before_the_start_by_name(
    part: str, text: str, word: str, module: Callable[[str], str], plan: Plan
) -> None:
    target = f"{module(text)}:f"
    own = Custom(**{part: CustomPart(target=target)})
    with pytest.raises(RlhfsimError, match=word) as refused:
        probe.check(Settings(custom=own), plan)
    assert part in refused.value.message or target in refused.value.message
    assert refused.value.help


def test_a_launch_tries_the_parts_and_prices_them(
    plan: Plan, module: Callable[[str], str], tmp_path: Path
) -> None:
    settings = Settings(
        model=str(tmp_path / "nowhere"), custom=Custom(filter=CustomPart(target="replay:Replay"))
    )
    job, _ = prepare(plan, settings, dry_step_s=1.0)
    assert "custom.filter" in {phase.name for phase in job.plan.prediction.phases}
    broken = CustomPart(target=f"{module('def f(samples): return 1')}:f")
    with pytest.raises(RlhfsimError, match=r"custom\.filter"):
        prepare(plan, replace(settings, custom=Custom(filter=broken)), dry_step_s=1.0)


def test_parts_that_work_pass_the_probe(plan: Plan) -> None:
    own = Custom(loss=CustomPart(target="sapo:loss"), filter=CustomPart(target="replay:Replay"))
    probe.check(Settings(custom=own), plan)


def test_options_that_a_part_does_not_take_are_refused(plan: Plan) -> None:
    own = Custom(filter=CustomPart(target="replay:Replay", options={"size": 3}))
    with pytest.raises(RlhfsimError, match="size"):
        probe.check(Settings(custom=own), plan)


def test_advantages_see_shaped_rewards_and_teach_nothing_at_other_tokens(
    module: Callable[[str], str],
) -> None:
    name = module("def f(samples, scale): return [scale * s.reward for s in samples]")
    part = CustomPart(target=f"{name}:f", options={"scale": 3.0})
    machine, work = Machine(hard=[]), replace(workload(), dynamic_sampling=None, kl=False)
    made = replace(
        loop(machine, work),
        settings=Settings(algorithm=Algorithm(reward_scale=2.0), custom=Custom(advantages=part)),
        parts=Parts(custom=Custom(advantages=part)),
    )
    [learned] = made.synchronous(range(1))
    for sample in learned.samples:
        assert sample.reward is not None
        assert sample.advantages is not None
        np.testing.assert_array_equal(sample.advantages, np.full(sample.num_tokens, 6.0 * sample.reward))


def test_a_filter_leaves_samples_out_and_their_groups_are_done(module: Callable[[str], str]) -> None:
    name = module("def f(samples): return [s for s in samples if s.reward]")
    machine, work = Machine(hard=[]), replace(workload(), dynamic_sampling=None, kl=False)
    own = Custom(filter=CustomPart(target=f"{name}:f"))
    [learned] = replace(loop(machine, work), parts=Parts(custom=own)).synchronous(range(1))
    assert len(learned.samples) == work.num_sequences
    assert [s.num_tokens > 0 for s in learned.samples] == [bool(s.reward) for s in learned.samples]
    assert learned.groups == set(range(work.prompts))


def test_a_sampler_says_which_problems_are_asked_and_follows_the_training(
    module: Callable[[str], str],
) -> None:
    name = module(
        "class S:\n"
        " seen = 0\n"
        " def __call__(self, batch, count, size): return [7 + self.seen] * count\n"
        " def update(self, samples): self.seen += len(samples)\n"
    )
    work = replace(workload(), dynamic_sampling=None, kl=False)
    parts = Parts(custom=Custom(sampler=CustomPart(target=f"{name}:S")))
    made = loop(Machine(hard=[]), work)
    assert isinstance(made.prompter, TaskPrompter)
    made.prompter.positions = parts.positions
    [learned] = replace(made, parts=parts).synchronous(range(1))
    source = made.prompter.source
    assert {s.answer for s in learned.samples} == {source.batch(7, 1)[0].answer}
    assert learned.groups == set(range(work.prompts)), "groups are numbered as ever"
    expected = source.batch(7 + len(learned.samples), 1)[0]
    assert made.prompter._problems(1)[0] == (work.gen_prompts, expected)


def test_rows_come_from_a_function_and_have_their_contents_as_identity(module: Callable[[str], str]) -> None:
    name = module("def rows():\n for i in range(20): yield {'prompt': f'{i}+1=', 'answer': str(i + 1)}\n")
    source = FileSource(Data(path=f"{name}:rows", shuffle=False))
    assert [p.answer for p in source.batch(0, 3)]
    assert source.size + len(source.held_out(99)) == 20
    before = source.identity()
    module("def rows(): return [{'prompt': 'x', 'answer': 'y'}]")
    assert FileSource(Data(path=f"{name}:rows")).identity() != before
    module("def rows(): yield 1")
    with pytest.raises(RlhfsimError, match="gave no rows: TypeError"):
        FileSource(Data(path=f"{name}:rows"))


def test_a_logger_gets_every_row_and_one_that_fails_is_left_out(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    name = module(
        "import json\n"
        "class L:\n"
        " def __init__(self, path): self.path = path\n"
        " def __call__(self, step, row):\n"
        "  if step == 2: raise OSError('gone')\n"
        "  open(self.path, 'a').write(json.dumps([step, row]) + '\\n')\n"
    )
    part = CustomPart(target=f"{name}:L", options={"path": str(tmp_path / "log")})
    parts = Parts(custom=Custom(logger=part))
    trackers = open_trackers(
        Tracking(tensorboard=False), tmp_path / "metrics.jsonl", tmp_path, custom=parts.made["logger"]
    )
    for step in range(3):
        trackers.log(step, {"reward/mean": 0.5})
    assert [json.loads(line) for line in (tmp_path / "log").open()] == [[1, {"reward/mean": 0.5}]]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_declared_seconds_reach_the_prediction_once(plan: Plan) -> None:
    own = Custom(filter=CustomPart(target="replay:Replay"), loss=CustomPart(target="sapo:loss"))
    priced = custom.priced(plan, own)
    more = 2e-6 * plan.workload.num_sequences
    assert math.isclose(priced.prediction.step_s - plan.prediction.step_s, more, rel_tol=1e-6)
    [phase] = [p for p in priced.prediction.phases if p.name == "custom.filter"]
    assert phase.seconds == more
    assert custom.priced(priced, own) == priced
    assert custom.priced(plan, Custom()) == plan
    assert priced.input_hash == plan.input_hash


def test_samples_in_a_file_are_the_same_bits(tmp_path: Path) -> None:
    talk = Conversation(sampled=np.array([True, False]), turns=1, fault=Fault("error", "x"))
    samples = [
        Sample(
            id=i,
            group=0,
            prompt=np.arange(3),
            response=np.arange(2),
            rollout_logprobs=np.array([-0.1, -1 / 3], np.float32),
            reward=1 / 3,
            rewards={"answer": 0.1},
            meta={"a": [1, "b"]},
            conversation=talk if i else None,
        )
        for i in range(2)
    ]
    write_samples(tmp_path / "s.npz", samples)
    for before, after in zip(samples, read_samples(tmp_path / "s.npz"), strict=True):
        for name in ("prompt", "response", "rollout_logprobs"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name), strict=True)
        assert (after.reward, after.rewards, after.meta) == (before.reward, before.rewards, before.meta)
        assert (after.conversation is None) == (before.conversation is None)
        assert after.num_sampled == before.num_sampled


# --- the examples together, on a model: stopped after an iteration, and never stopped -----------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from executor.tasks import tiny

    return tiny.build(tmp_path_factory.mktemp("own") / "model", layers=2)


class Small:
    """A run of the examples with all of its state: policy, optimizer, parts."""

    def __init__(self, folder: Path, loss: str) -> None:
        work = replace(learning.workload("grpo"), prompts=6, samples=2, mini_batches=1)
        own = Custom(
            loss=CustomPart(target=f"{loss}:loss"),
            filter=CustomPart(target="replay:Replay", options={"capacity": 4}),
        )
        settings = Settings(algorithm=Algorithm(kl_coefficient=0.0, correction="none"), custom=own)
        text = Text(str(folder))
        prompter = TaskPrompter(
            source=Generated(task="comparison"),
            text=text,
            workload=work,
            sampling=Sampling(),
            max_tokens=learning.MAX_TOKENS,
            seed=0,
        )
        self.machine = learning.InProcess(folder, work, settings, text)
        self.parts = Parts(custom=own)
        self.loop = Loop(
            backend=self.machine,
            prompter=prompter,
            workload=work,
            settings=settings,
            max_tokens=learning.MAX_TOKENS,
            parts=self.parts,
        )

    def state(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "model": machine._models["actor"].state_dict(),
            "optimizer": machine._optimizers["actor"].state_dict(),
            "steps": dict(machine._steps),
            "version": machine.version,
        }

    def restore(self, state: dict[str, Any], checkpoint: Path) -> None:
        self.machine._models["actor"].load_state_dict(state["model"])
        self.machine._optimizers["actor"].load_state_dict(state["optimizer"])
        self.machine._steps, self.machine.version = dict(state["steps"]), state["version"]
        self.parts.load(checkpoint)


def replayed(learned: Learned) -> int:
    return sum(s.group < learned.step * 6 for s in learned.samples)


def test_a_run_with_own_parts_resumes_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    whole = Small(folder, "vespo")
    steps = whole.loop.synchronous(range(3))
    next(steps)
    torch.save(whole.state(), tmp_path / "state.pt")
    whole.parts.save(tmp_path)
    undisturbed = list(steps)
    assert sum(map(replayed, undisturbed)) > 0, "old groups were learned from"
    second = Small(folder, "vespo")
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True), tmp_path)
    again = list(second.loop.synchronous(range(1, 3)))
    assert [replayed(s) for s in again] == [replayed(s) for s in undisturbed]
    for name, weight in whole.state()["model"].items():
        assert torch.equal(weight, second.state()["model"][name]), name


def test_a_critic_gets_the_returns_of_ones_own_advantages(module: Callable[[str], str]) -> None:
    name = module(
        "def f(samples): return [1.0 for s in samples], [[0.5] * s.num_tokens for s in samples]\n"
        "def g(samples): return [1.0 for s in samples]\n"
    )
    [sample] = [s for s in probe._samples(learning.workload("ppo")) if s.id == 0]
    for target, right in (("f", True), ("g", False)):
        parts = Parts(custom=Custom(advantages=CustomPart(target=f"{name}:{target}")))
        both = [sample, replace(sample, id=1), replace(sample, id=2)]

        def estimate(seen: list[Sample], parts: Parts = parts) -> Any:
            return parts.estimates(seen, 0, critic=True)

        if right:
            [first, *_] = estimated(estimate, "ppo", both, Algorithm(), 8)
            assert first.advantages is not None
            assert first.returns is not None
            assert (first.advantages.tolist(), first.returns.tolist()) == ([1.0] * 3, [0.5] * 3)
        else:
            with pytest.raises(RlhfsimError, match="with a critic"):
                estimated(estimate, "ppo", both, Algorithm(), 8)


def test_what_parts_and_rewards_declare_is_in_the_workload_and_launch_does_not_price_it_again(
    plan: Plan, module: Callable[[str], str]
) -> None:
    name = module(
        "def loss(batch): return 0\nloss.seconds_per_sample = 0.01\n"
        "def score(*of): return 1\nscore.seconds_per_sample = '20 ms'\n"
        "def plain(*of): return 1\n"
    )
    own = Custom(loss=CustomPart(target=f"{name}:loss"), filter=CustomPart(target=f"{name}:plain"))
    scores = [RewardRule(kind="function", target=f"{name}:{rule}") for rule in ("score", "plain")]
    reward = replace(plan.workload.reward, rules=Rules(seconds_per_sample=0.5, workers=2))
    stated = replace(plan.workload, reward=reward, custom=OwnParts(filter=0.3))
    declared = custom.with_declared(stated, Settings(custom=own, rewards=tuple(scores[:1])))
    assert declared.custom == OwnParts(loss=0.01, filter=0.3)
    assert declared.reward.rules == Rules(seconds_per_sample=0.02, workers=2)
    both = custom.with_declared(stated, Settings(rewards=tuple(scores)))
    assert both.reward.rules == Rules(seconds_per_sample=0.52, workers=2)
    assert custom.with_declared(stated, Settings(rewards=tuple(scores[1:]))) == stated
    designed = replace(plan, workload=declared)
    assert custom.priced(designed, own) is designed


@pytest.mark.parametrize("seconds", ["-1", "'soon'", "float('nan')", "[1]"])
def test_seconds_that_are_none_are_refused_with_the_name_of_the_part(
    seconds: str, module: Callable[[str], str]
) -> None:
    target = f"{module(f'def f(samples): return samples{chr(10)}f.seconds_per_sample = {seconds}')}:f"
    with pytest.raises(RlhfsimError, match=f"{target}.*seconds_per_sample") as refused:
        custom.declared(Custom(filter=CustomPart(target=target)))
    assert refused.value.help
