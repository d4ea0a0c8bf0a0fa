"""What the closed loop runs: configurations, which of them calibrate, and how one is run for real.

The split is a rule, fixed before any run: configurations come in pairs of one architecture that differ in
batch, lengths, ranks or ZeRO stage; the first of a pair calibrates, the second is predicted. Every level of
every factor stands on both sides. A model of twice the width is predicted only.
"""

from __future__ import annotations

import contextlib
import json
import random
import string
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from neighbours import Neighbours

from executor.settings import Data, Limits, RewardRule, Settings, Tracking
from rlhfsim.api import estimate
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

Role = Literal["calibrate", "predict", "second model", "repeat"]
PROFILE = "cpu-core"
ITERATIONS = 6
"""Steps of a run; the first is not counted."""
REPEATS = 3
"""Runs of each configuration in `REPEATED`."""
PROMPTS_IN_FILE = 64
SURROUNDINGS = "surroundings.json"
"""File of a run folder: cores that other processes kept busy during its steps, and the seconds of the whole
run."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "naive": {},
    "smart": {"rollout": {"sleep": 2}, "role": {"residency": "offloaded", "offload_between": True}},
    "hybrid": {"rollout": {"sleep": 1}},
    "disaggregated": {"apart": True},
    "async": {"apart": True, "schedule": {"staleness": 1}},
}
MODELS: dict[str, dict[str, int]] = {
    "one": {"hidden": 256, "layers": 8, "heads": 4, "kv_heads": 2},
    "wide": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4},
}
"""The calibrated model, and one of twice its width (four times its parameters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One configuration."""

    name: str
    architecture: str
    path: str
    algorithm: str = "grpo"
    prompts: int
    samples: int = 4
    prompt_len: int
    response_len: int
    dp: int = 1
    zero: int = 0
    micro_batch: int = 8
    model: str = "one"

    @property
    def sequences(self) -> int:
        """Responses of a step."""
        return self.prompts * self.samples


PAIRS: tuple[tuple[Config, Config], ...] = (
    (
        Config(name="naive-a", architecture="naive", path="host", prompts=8, prompt_len=32, response_len=32),
        Config(
            name="naive-b",
            architecture="naive",
            path="host",
            prompts=12,
            prompt_len=48,
            response_len=24,
            dp=2,
            zero=2,
            micro_batch=4,
        ),
    ),
    (
        Config(
            name="smart-a",
            architecture="smart",
            path="disk",
            prompts=8,
            prompt_len=24,
            response_len=48,
            dp=2,
            zero=1,
        ),
        Config(name="smart-b", architecture="smart", path="disk", prompts=6, prompt_len=48, response_len=32),
    ),
    (
        Config(
            name="hybrid-a",
            architecture="hybrid",
            path="ipc",
            prompts=8,
            prompt_len=32,
            response_len=24,
            dp=2,
            zero=3,
        ),
        Config(
            name="hybrid-b", architecture="hybrid", path="ipc", prompts=12, prompt_len=24, response_len=40
        ),
    ),
    (
        Config(
            name="disaggregated-a",
            architecture="disaggregated",
            path="broadcast",
            prompts=12,
            prompt_len=48,
            response_len=48,
        ),
        Config(
            name="disaggregated-b",
            architecture="disaggregated",
            path="broadcast",
            prompts=8,
            prompt_len=24,
            response_len=32,
            dp=2,
            zero=3,
            micro_batch=4,
        ),
    ),
    (
        Config(
            name="ppo-a",
            architecture="disaggregated",
            path="broadcast",
            algorithm="ppo",
            prompts=24,
            samples=1,
            prompt_len=32,
            response_len=32,
        ),
        Config(
            name="ppo-b",
            architecture="hybrid",
            path="ipc",
            algorithm="ppo",
            prompts=32,
            samples=1,
            prompt_len=48,
            response_len=24,
            dp=2,
            zero=1,
        ),
    ),
    (
        Config(
            name="long-a",
            architecture="hybrid",
            path="ipc",
            prompts=12,
            prompt_len=64,
            response_len=16,
            dp=2,
            zero=2,
            micro_batch=4,
        ),
        Config(
            name="long-b",
            architecture="disaggregated",
            path="disk",
            prompts=8,
            prompt_len=16,
            response_len=64,
            dp=2,
            zero=1,
        ),
    ),
    (
        Config(
            name="async-a", architecture="async", path="broadcast", prompts=8, prompt_len=32, response_len=32
        ),
        Config(
            name="async-b", architecture="async", path="broadcast", prompts=12, prompt_len=24, response_len=40
        ),
    ),
)
SECOND: tuple[Config, ...] = (
    Config(
        name="wide-naive",
        architecture="naive",
        path="host",
        prompts=6,
        prompt_len=32,
        response_len=24,
        model="wide",
    ),
    Config(
        name="wide-smart",
        architecture="smart",
        path="disk",
        prompts=4,
        prompt_len=32,
        response_len=24,
        dp=2,
        zero=1,
        model="wide",
    ),
    Config(
        name="wide-hybrid",
        architecture="hybrid",
        path="ipc",
        prompts=6,
        prompt_len=24,
        response_len=32,
        dp=2,
        zero=2,
        micro_batch=4,
        model="wide",
    ),
    Config(
        name="wide-disaggregated",
        architecture="disaggregated",
        path="broadcast",
        prompts=4,
        prompt_len=48,
        response_len=32,
        model="wide",
    ),
)
REPEATED = ("hybrid-b", "disaggregated-b")
"""Configurations that are run `REPEATS` times: one rank, two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a configuration."""

    config: Config
    role: Role
    repeat: int = 0

    @property
    def name(self) -> str:
        """Folder of the run."""
        return self.config.name + (f"-{self.repeat + 1}" if self.repeat else "")


def schedule() -> tuple[Run, ...]:
    """Every run, those that calibrate first; repeats are predicted like the run that they repeat."""
    first = [Run(config=a, role="calibrate") for a, _ in PAIRS]
    second = [Run(config=b, role="predict") for _, b in PAIRS]
    wide = [Run(config=c, role="second model") for c in SECOND]
    again = [
        Run(config=b, role="repeat", repeat=k)
        for k in range(1, REPEATS)
        for _, b in PAIRS
        if b.name in REPEATED
    ]
    return (*first, *second, *wide, *again)


# --- a run ------------------------------------------------------------------------------------------


def model_folder(name: str, runs: Path) -> Path:
    """The model, made where it is not there yet: random weights that never end a response."""
    folder = runs / "models" / name
    if not (folder / "done").is_file():
        from executor.tasks import tiny

        tiny.build(folder, **MODELS[name])  # type: ignore[arg-type]
        never_end(folder / "model.safetensors")
        (folder / "done").touch()
    return folder


def never_end(path: Path) -> None:
    """Make end-of-sequence impossible, so that every response has its full length.

    The first hidden dimension is 10 in every embedding, far above the other ones, and no other logit reads
    it:
    through the norms it stays positive, and the end's logit is a large negative multiple of it.
    """
    from safetensors.torch import load_file, save_file

    from executor.tasks.tiny import EOS, PAD, VOCABULARY

    weights = load_file(path)
    weights["model.embed_tokens.weight"][:, 0] = 10.0
    weights["lm_head.weight"][:, 0] = 0.0
    for token in (EOS, PAD):
        weights["lm_head.weight"][VOCABULARY.index(token)] = 0.0
        weights["lm_head.weight"][VOCABULARY.index(token), 0] = -10.0
    save_file(weights, path, metadata={"format": "pt"})


def prompts_file(length: int, runs: Path) -> Path:
    """A JSONL file of different prompts with that many characters, one token each."""
    path = runs / f"prompts-{length}.jsonl"
    letters = random.Random(length)
    rows = [
        {"prompt": "".join(letters.choices(string.ascii_lowercase, k=length)), "answer": "1"}
        for _ in range(PROMPTS_IN_FILE)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def workload_of(config: Config, model: Path) -> Workload:
    """What a step has to do."""
    return Workload(
        algorithm=config.algorithm,
        model=str(model / "config.json"),
        prompts=config.prompts,
        samples=config.samples,  # type: ignore[arg-type]
        prompt_len=Fixed(value=config.prompt_len),
        response_len=Fixed(value=config.response_len),
        packing=False,
        reward=Reward(rules=Rules(seconds_per_sample=0.00004, workers=1)),
    )


def plan_of(config: Config, model: Path) -> Plan:
    """The plan, priced with the shipped profile."""
    work, made = workload_of(config, model), ARCHITECTURES[config.architecture]
    apart = made.get("apart", False)
    layout = {"dp": config.dp, "zero": config.zero, "micro_batch": config.micro_batch, "recompute": "none"}
    train = "train" if apart else "all"
    roles = ["actor", "reference", *(["critic"] if work.has_critic else [])]
    placed_roles = {role: {"pool": train, "layout": layout, **made.get("role", {})} for role in roles}
    rollout = {
        "pool": "rollout" if apart else "all",
        "sleep": 0,
        "layout": {"dp": 1, "memory_utilization": 0.3, "max_num_seqs": config.sequences},
    }
    pools = [
        {"name": train, "gpus": config.dp},
        *([{"name": "rollout", "start": config.dp, "gpus": 1}] if apart else []),
    ]
    fields = {
        "backend": "deepspeed",
        "pools": pools,
        "schedule": made.get("schedule", {}),
        "weight_path": config.path,
        "rollout": rollout | made.get("rollout", {}),
        **placed_roles,
    }
    placed = convert(Placement, parse_yaml("{}", config.name), fields)
    gpus = config.dp + apart
    return estimate(placed, work, Cluster(node_groups=(node_group(PROFILE, gpus, gpus_per_node=gpus),)))


def settings_of(config: Config, model: Path, runs: Path) -> Settings:
    """Settings of a run: prompts of one length, one reward rule."""
    return Settings(
        model=str(model),
        iterations=ITERATIONS,
        rewards=(RewardRule(kind="digits"),),
        tracking=Tracking(tensorboard=False),
        data=Data(task="file", path=str(prompts_file(config.prompt_len, runs))),
        limits=Limits(start_s=240, call_s=120, sync_s=60, retries=0),
    )


class Heard:
    """A listener that shows progress, and remembers when the first step began."""

    def __init__(self) -> None:
        self.steps_from = 0.0
        """Start of the steps on the monotonic clock."""

    def phase(self, text: str) -> None:
        """To the error stream; the last phase before the steps is when they begin."""
        self.steps_from = time.monotonic()
        print(f"    {text}", file=sys.stderr, flush=True)

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """A line a step."""
        print(
            f"    step {int(row['step']) + 1} of {total}: {row['time/step']:.2f} s",
            file=sys.stderr,
            flush=True,
        )

    def finding(self, finding: Any) -> None:
        """To the error stream."""
        print(f"    {finding.code}: {finding.what}", file=sys.stderr, flush=True)


def execute(run: Run, runs: Path, address: str) -> float:
    """Run it; cores that other processes kept busy during its steps.

    The folder appears under its name only when the run has ended.
    """
    import shutil

    from executor.launch import LaunchOptions, launch

    final, partial = runs / run.name, runs / f"{run.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model = model_folder(run.config.model, runs)
    heard, others = Heard(), Neighbours()
    with contextlib.closing(others):
        launch(
            plan_of(run.config, model),
            settings_of(run.config, model, runs),
            LaunchOptions(out=partial, address=address),
            heard,
        )
        busy = others.share(heard.steps_from)
    shutil.rmtree(partial / "checkpoints", ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return busy


def missing(runs: Path) -> Iterator[Run]:
    """Runs that have not been made yet."""
    return (run for run in schedule() if not (runs / run.name).is_dir())
