"""A schedule: submissions with faults until the run is done, and what must hold after each and at the end."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from executor.coordination import checkpoints
from executor.coordination.tracking import read_metrics
from executor.settings import Checkpoints, Data, Limits, Optimizer, RewardRule, Settings, Tracking
from lab.schedules.submission import Ending, Question, submit
from lab.schedules.world import KINDS, Fault, World
from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.workload import Workload

ITERATIONS, ROWS = 6, 64
FAULTY, MOST = 5, 12
"""Submissions that faults may hit; all of a schedule."""
OF_TIME = (
    "time/",
    "throughput/",
    "utilization/",
    "overlap/",
    "latency/",
    "memory/",
    "reward/critical",
    "checkpoint/",
)
MODEL = {"model_type": "qwen2", "max_position_embeddings": 4096, "num_hidden_layers": 24, "hidden_size": 896}
MODEL |= {"num_attention_heads": 14, "num_key_value_heads": 2}
REWARD = "def score(prompt, response, answer, meta):\n    return float(len(response) % 3)\n"
DISK = {
    "checkpoint-not-written",
    "checkpoint-incomplete",
    "unwritable-file",
    "folder-cannot-rename",
    "system",
}
PARTS = {"run-failed"}
EXPLAINED: Mapping[str, set[str]] = {
    "full": DISK | PARTS,
    "slow": PARTS | DISK,
    "worker": PARTS,
    "node": PARTS,
    "hang": PARTS,
    "raise": PARTS,
    "reward": {"reward-timeout"},
    "data": {"run-changed"},
    "code": {"run-changed"},
    "settings": {"run-changed"},
    "plan": {"run-changed"},
}
"""What happened -> codes of the reasons that it explains; others explain none."""
Change = Callable[[Question], Question]


@dataclass(slots=True)
class Outcome:
    """What became of a schedule."""

    seed: int
    case: str
    endings: list[Ending] = field(default_factory=list)
    wrong: str = ""
    """What did not hold; empty: it ended exact, and every refusal had its reason."""


def case_of(name: str, home: Path) -> Question:
    """The line of a case, with its data and code in `home`."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "own_reward.py").write_text(REWARD)
    (home / "model").mkdir(exist_ok=True)
    (home / "model" / "config.json").write_text(json.dumps(MODEL))
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(ROWS)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(
        model=str(home / "absent"),  # prompts are bytes then, and need no tokenizer
        iterations=ITERATIONS,
        data=Data(path=str(home / "rows.jsonl")),
        rewards=(RewardRule(kind="function", target="own_reward:score"),),
        optimizer=Optimizer(learning_rate=1e-3),
        tracking=Tracking(tensorboard=False),
        checkpoints=Checkpoints(every=2, keep=2, background=name != "grpo"),
        limits=Limits(start_s=240, call_s=120, sync_s=60, retries=1),
    )
    return Question(case=name, plan=_plan(name), settings=settings, home=home)


@cache
def _plan(name: str, micro_batch: int = 2) -> Plan:
    """Two training ranks on one node and the rollout on another; PPO with a critic; DAPO with thrown groups."""
    source = parse_yaml("{}", "schedules")
    roles = ("actor", "critic", "reference") if name == "ppo" else ("actor", "reference")
    layout = {"dp": 2, "zero": 2, "micro_batch": micro_batch, "recompute": "none"}
    fields: dict[str, Any] = {role: {"pool": "train", "layout": layout} for role in roles}
    fields |= {"backend": "deepspeed", "weight_path": "broadcast"}
    fields["pools"] = [{"name": "train", "gpus": 2}, {"name": "rollout", "start": 2, "gpus": 2}]
    fields["rollout"] = {"pool": "rollout", "layout": {"dp": 2, "memory_utilization": 0.3}, "sleep": 0}
    fields |= {"schedule": ASYNCHRONOUS[name]} if name in ASYNCHRONOUS else {}
    work = {
        "algorithm": "grpo" if name in ASYNCHRONOUS else name,
        "model": "qwen2.5-0.5b",
        "prompts": 4,
        "samples": 1 if name == "ppo" else 2,
        "prompt_len": {"kind": "fixed", "value": 8},
        "response_len": {"kind": "fixed", "value": 8},
        "reward": {"rules": {"seconds_per_sample": "1 ms", "workers": 2}},
    }
    if name == "dapo":
        work["dynamic_sampling"] = {"kept": 0.7}
    placement, workload = convert(Placement, source, fields), convert(Workload, source, work)
    return estimate(placement, workload, Cluster(node_groups=(node_group("cpu-core", 4, gpus_per_node=2),)))


CASES = ("grpo", "ppo", "dapo")
ASYNCHRONOUS: Mapping[str, Mapping[str, Any]] = {
    "waits for running requests": {"staleness": 1},
    "partial rollouts": {"staleness": 2, "partial_rollout": True},
    "the trainer's slots lent": {"staleness": 1, "partial_rollout": True, "lend": True},
    "weights in flight": {"staleness": 1, "partial_rollout": True, "overlapped_sync": True},
}
"""Name of a case -> schedule of its plan."""


@cache
def undisturbed(name: str) -> tuple[dict[str, bytes], list[Any], int]:
    """States and metrics of a run that nothing happens to, and how many operations it takes."""
    with TemporaryDirectory() as folder:
        question = case_of(name, Path(folder))
        ending = submit(question, World(np.random.default_rng(0)))
        assert ending.how == "done", ending
        return *learnt(question), ending.operations


def learnt(question: Question) -> tuple[dict[str, bytes], list[Any]]:
    """Bytes of the last checkpoint's states, and the metrics without what depends on the clock."""
    last = question.files.checkpoints / f"step-{ITERATIONS:06d}"
    states = {
        path.relative_to(last).as_posix(): path.read_bytes()
        for path in sorted(last.rglob("*"))
        if path.is_file() and path.name not in ("state.json", "manifest.json")
    }
    rows = read_metrics(question.files.metrics)
    return states, [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in rows]


# --- what is changed between two submissions --------------------------------------------------------


def _data(question: Question) -> Question:
    path = question.home / "rows.jsonl"
    path.write_text(path.read_text().replace('"answer": "7"', '"answer": "8"'))
    return question


def _code(question: Question) -> Question:
    (question.home / "own_reward.py").write_text(REWARD.replace("3", "4"))
    return question


def _settings(question: Question) -> Question:
    return replace(question, settings=replace(question.settings, optimizer=Optimizer(learning_rate=2e-3)))


def _other_plan(question: Question) -> Question:
    return replace(question, plan=_plan(question.case, 1))


CHANGES: Mapping[str, Change] = {"data": _data, "code": _code, "settings": _settings, "plan": _other_plan}


def _rot(question: Question, rng: np.random.Generator) -> bool:
    """Flip a bit of the newest checkpoint; whether there was an older one to go on from."""
    folders = sorted(question.files.checkpoints.glob("step-*"))
    if not folders:
        return False
    paths = sorted(path for path in folders[-1].rglob("*") if path.is_file() and path.stat().st_size)
    path = paths[rng.integers(len(paths))]
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1
    path.write_bytes(content)
    return True


# --- a schedule -------------------------------------------------------------------------------------


def schedule(seed: int, cases: Sequence[str] = CASES) -> Outcome:
    """All submissions of a seed."""
    rng = np.random.default_rng(seed)
    name = cases[rng.integers(len(cases))]
    outcome = Outcome(seed, name)
    with TemporaryDirectory() as folder:
        question = case_of(name, Path(folder))
        try:
            _play(question, outcome, rng)
        except Exception as error:  # a traceback for the user, or an assertion
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f" ({Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})" if where else ""
            outcome.wrong = f"{type(error).__name__}: {error}{line}"
    return outcome


def _play(question: Question, outcome: Outcome, rng: np.random.Generator) -> None:
    states, rows, operations = undisturbed(outcome.case)
    durable, now_s = 0, 1e6
    for number in range(MOST):
        faulty = number < FAULTY
        asked, changed = question, ""
        if faulty and rng.random() < 0.15:
            changed = str(rng.choice(list(CHANGES)))
            asked = CHANGES[changed](question)
        elif faulty and rng.random() < 0.1 and _rot(question, rng):
            durable = 0
        count = int(rng.choice([0, 1, 1, 2])) if faulty else 0
        faults = [
            Fault(KINDS[rng.integers(len(KINDS))], int(rng.integers(1, operations))) for _ in range(count)
        ]
        begun = question.files.plan.is_file() and (question.files.root / "metrics.jsonl").is_file()
        world = World(rng, faults, now_s=now_s)
        ending = submit(asked, world)
        outcome.endings.append(ending)
        now_s = world.now_s
        if changed and not begun:  # nothing to compare with: another run began
            shutil.rmtree(question.files.root, ignore_errors=True)
            ending.saved = []
        _check(ending, changed, begun)
        durable = max([durable, *ending.saved])
        newest = checkpoints.newest(question.files.checkpoints)
        reached = newest.progress.iteration if newest else 0
        assert reached >= durable, f"checkpoint {durable} was whole, now the newest is {reached}"
        case_of(outcome.case, question.home)  # data and code as they were
        if ending.how == "done" and asked is question and not changed:
            if outcome.case in ASYNCHRONOUS:
                _all_once(question)
            else:
                assert learnt(question) == (states, rows), "other bits than an undisturbed run"
            return
    raise AssertionError(f"not done after {MOST} submissions, {MOST - FAULTY} of them undisturbed")


def _all_once(question: Question) -> None:
    """As many groups were trained on as steps took, none of them twice, and none was left behind.

    An asynchronous run's samples depend on the clock. What each step checks: every token is young enough, and
    was sampled by the weights that its version says.
    """
    newest = checkpoints.newest(question.files.checkpoints)
    assert newest is not None, "a run that is done has a checkpoint"
    position, batch = newest.progress.data_position, question.plan.workload.prompts
    trained = position["prompts"] + len(position["ahead"])
    assert trained == ITERATIONS * batch, f"{trained} groups were trained on in {ITERATIONS} steps of {batch}"
    under_way = math.ceil(question.plan.placement.schedule.staleness + 1) * batch
    last = max(position["ahead"], default=0)
    assert last < trained + under_way, f"group {last} was trained on before {position['prompts']}"
    _, rows = learnt(question)
    assert len(rows) == ITERATIONS, f"{len(rows)} rows of metrics"


def _check(ending: Ending, changed: str, begun: bool) -> None:
    """That a refusal has a reason that something explains, and that another run is refused."""
    if ending.how == "refused":
        causes = {*ending.happened, changed}
        known = set().union(*(EXPLAINED.get(cause, set()) for cause in causes))
        assert ending.code in known, f"refused with {ending.code}, which {sorted(causes)} do not explain"
    if changed and begun and not ending.happened:
        assert ending.code == "run-changed", f"{changed} was changed, and the run went on: {ending.how}"
