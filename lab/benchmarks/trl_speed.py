"""Time of an iteration of our GRPO loop beside TRL's GRPOTrainer: same machine, model, prompts, batch.

    python lab/benchmarks/trl_speed.py --trl-python INTERPRETER_WITH_TRL [--model FOLDER] [--pairs 5]
        [--block N] [--out reports]

Without --model: a random qwen2 of 0.6 M parameters, 16 prompts x 8 samples, up to 32 tokens. With the folder
that small_model.py writes (SmolLM2, 135 M): 8 questions x 4 samples, up to 64 tokens, with the long tail of
real answers. Both sides start and warm up (printed apart); then they take turns in blocks of some iterations,
the other one idle, and the order alternates from pair to pair. fp32, 2 cores, one optimizer step an
iteration, no KL term, old log-probs from the rollout (TRL computes none in this case). TRL generates with
transformers, as it does without vLLM, and has two threads. Ours is hybrid: two training ranks and two vLLM
replicas of one thread each on the same two slots. Ours scores rewards, syncs weights, compares log-probs and
writes metrics inside its iteration; TRL logs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from executor.settings import Data, Settings
    from rlhfsim.plan import Plan

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both sides run."""

    name: str
    model: str
    prompts: int
    samples: int
    tokens: int
    """Most of a response."""
    prompt_tokens: int
    """Most of a prompt."""
    block: int
    """Iterations between two turns."""
    iterations: int = 0
    """In all, the warm-up too."""
    warm_up: int = 2
    threads: int = 2
    learning_rate: float = 1e-6
    trl_micro_batches: int = 1


TINY = Case(name="random qwen2, 0.6 M", model="", prompts=16, samples=8, tokens=32, prompt_tokens=4, block=10)
SMALL = Case(
    name="SmolLM2-135M-Instruct", model="", prompts=8, samples=4, tokens=64, prompt_tokens=24, block=1
)
TOPICS = ["France", "Japan", "gold", "rain", "Moon", "chess", "tea", "Mars", "salt", "jazz", "Peru", "glass"]
ASKS = (
    "What is {} in one word?",
    "Where would I find {}?",
    "Say one thing about {}.",
    "Name two facts about {}.",
    "Why do people like {}?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some iterations of one side."""

    seconds: float
    """Median of an iteration."""
    tokens_per_s: float
    """Response tokens."""
    lengths: Sequence[float]
    """Response tokens: of every sample (TRL), of the mean of every iteration (ours)."""


Pair = tuple[Block, Block]
"""Ours, TRL's."""


def main() -> None:
    """Print every pair, then the comparison."""
    parser = argparse.ArgumentParser(description="Our GRPO iteration beside TRL's")
    parser.add_argument("--trl-python", required=True, help="interpreter of TRL's environment")
    parser.add_argument("--model", type=Path, help="folder that small_model.py wrote")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--block", type=int, help="iterations between two turns")
    parser.add_argument("--trl-micro-batches", type=int, default=1, help="of TRL's gradient accumulation")
    parser.add_argument("--out", type=Path, help="folder of trl_speed.json, which keeps one result a model")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    case = replace(SMALL, model=str(options.model.resolve())) if options.model else TINY
    block = options.block or case.block
    case = replace(
        case,
        block=block,
        iterations=case.warm_up + options.pairs * block,
        trl_micro_batches=options.trl_micro_batches,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = compare(prepare(Path(folder), case), Path(folder), options.trl_python, options.pairs)
    if options.out:
        keep(options.out / "trl_speed.json", result)


def prepare(work: Path, case: Case) -> Case:
    """The model, and the prompts in the order in which ours takes them."""
    from executor.tasks.sources import open_source

    if not case.model:
        from executor.tasks import tiny

        case = replace(case, model=str(tiny.build(work / "model")))
    questions = [ask.format(topic) for topic, ask in itertools.product(TOPICS, ASKS)]
    rows = [{"prompt": f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n"} for q in questions]
    (work / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(_data(work, case), "grpo", 0, answers="unused")
    problems = source.batch(0, (case.iterations + 1) * case.prompts)
    (work / "prompts.json").write_text(json.dumps([p.prompt for p in problems]))
    (work / "case.json").write_text(json.dumps(asdict(case)))
    return case


def compare(case: Case, work: Path, interpreter: str, pairs: int) -> dict[str, Any]:
    """Start both, alternate, print."""
    from process import bind, pace

    cores, machine = bind(case.threads), pace()
    print(f"{case.name}: {cores} cores; {machine}; load average before: {os.getloadavg()[0]:.2f}", flush=True)
    ours, theirs = Ours(work, case), Theirs(interpreter, work)
    try:
        start = ours.turn(case.warm_up, first=True), theirs.start()
        print(f"start-up with warm-up: ours {start[0]:.1f} s, TRL {start[1]:.1f} s")
        print("pair  first   ours s   TRL s   ours tokens/s   TRL tokens/s   load", flush=True)
        rows = [one_pair(i, ours, theirs) for i in range(pairs)]
    finally:
        theirs.close()
    ours.thread.join(120)
    result = {"cores": cores, "case": asdict(replace(case, model="")), "start_s": start} | summary(rows)
    return result | {"where_s": where(work / "run" / "metrics.jsonl", case.warm_up)}


def where(metrics: Path, warm_up: int) -> dict[str, float]:
    """Median seconds of every phase of our iterations after the warm-up; phases that overlap add to more."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][warm_up:]
    names = sorted({name for row in rows for name in row if name.startswith("time/")})
    found = {n.removeprefix("time/"): statistics.median(row.get(n, 0.0) for row in rows) for n in names}
    print("where ours go, s: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in found.items()))
    return found


def one_pair(number: int, ours: Ours, theirs: Theirs) -> Pair:
    """A block of each, ours first in even pairs."""
    if number % 2 == 0:
        mine, other = ours.block(), theirs.block()
    else:
        other, mine = theirs.block(), ours.block()
    first = "ours" if number % 2 == 0 else "TRL"
    print(
        f"{number:4}  {first:5} {mine.seconds:8.3f} {other.seconds:7.3f} {mine.tokens_per_s:15,.0f} "
        f"{other.tokens_per_s:14,.0f} {os.getloadavg()[0]:6.2f}",
        flush=True,
    )
    return mine, other


def summary(rows: Sequence[Pair]) -> dict[str, Any]:
    """Smallest, median and largest over the pairs; a ratio is taken within its pair."""
    figures = {
        "seconds an iteration, ours": [mine.seconds for mine, _ in rows],
        "seconds an iteration, TRL": [other.seconds for _, other in rows],
        "response tokens a second, ours": [mine.tokens_per_s for mine, _ in rows],
        "response tokens a second, TRL": [other.tokens_per_s for _, other in rows],
        "TRL's seconds / ours": [other.seconds / mine.seconds for mine, other in rows],
        "our tokens/s / TRL's": [mine.tokens_per_s / other.tokens_per_s for mine, other in rows],
    }
    spread = {title: (min(v), statistics.median(v), max(v)) for title, v in figures.items()}
    print(f"{'':34}{'min':>12}{'median':>12}{'max':>12}")
    for title, values in spread.items():
        print(f"{title:34}" + "".join(f"{v:12,.3f}" for v in values))
    lengths = np.concatenate([other.lengths for _, other in rows])
    mean = {
        "ours": float(np.mean(np.concatenate([mine.lengths for mine, _ in rows]))),
        "TRL": float(np.mean(lengths)),
    }
    quantiles = [float(q) for q in np.percentile(lengths, (10, 50, 90, 99))]
    print(
        f"response tokens: mean {mean['ours']:.1f} ours, {mean['TRL']:.1f} TRL; "
        f"TRL's P10, P50, P90, P99: {quantiles}"
    )
    return {"pairs": len(rows), "figures": spread, "mean_length": mean, "length_quantiles": quantiles}


def keep(path: Path, result: Mapping[str, Any]) -> None:
    """Add or replace the result of this model."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | {result["case"]["name"]: result}, indent=1) + "\n")


def _data(work: Path, case: Case) -> Data:
    from executor.settings import Data

    tiny = case.name == TINY.name
    return Data(task="arithmetic") if tiny else Data(task="file", path=str(work / "questions.jsonl"))


# --- ours -------------------------------------------------------------------------------------------


class Ours:
    """A real run in a thread, that stops after every iteration until it has a turn."""

    def __init__(self, work: Path, case: Case) -> None:
        self.work, self.case = work, case
        self.seconds: list[float] = []
        self.tokens: list[float] = []
        self._allowed = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._last = 0.0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def turn(self, iterations: int, *, first: bool = False) -> float:
        """Seconds of so many iterations; the first turn starts everything, its first needs no permit."""
        begin = time.perf_counter()
        if first:
            self.thread.start()
        for i in range(iterations):
            if not (first and i == 0):
                self._allowed.release()
            self._done.acquire()
            if self.failure is not None:
                raise self.failure
        return time.perf_counter() - begin

    def block(self) -> Block:
        """The next iterations."""
        self.turn(self.case.block)
        seconds, tokens = self.seconds[-self.case.block :], self.tokens[-self.case.block :]
        lengths = [t / (self.case.prompts * self.case.samples) for t in tokens]
        return Block(
            seconds=statistics.median(seconds), tokens_per_s=sum(tokens) / sum(seconds), lengths=lengths
        )

    def phase(self, text: str) -> None:
        """Not shown."""

    def finding(self, finding: Any) -> None:
        """To the error stream."""
        print(f"{finding.code}: {finding.what}", file=sys.stderr)

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """Take the time, then wait for the next turn."""
        self.seconds.append(time.perf_counter() - self._last)
        self.tokens.append(row["response/length_mean"] * self.case.prompts * self.case.samples)
        self._done.release()
        if row["step"] + 1 < total:
            self._allowed.acquire()
        self._last = time.perf_counter()

    def _run(self) -> None:
        from executor.launch import LaunchOptions, launch

        try:
            launch(
                self._plan(), self._settings(), LaunchOptions(out=self.work / "run", self_check=False), self
            )
        except BaseException as error:
            self.failure = error
            self._done.release()

    def _plan(self) -> Plan:
        from rlhfsim.api import estimate
        from rlhfsim.specs.hardware.hardware import Cluster
        from rlhfsim.specs.hardware.profiles import node_group
        from rlhfsim.specs.loading import convert, parse_yaml
        from rlhfsim.specs.placement.placement import Placement
        from rlhfsim.specs.workload.lengths import Fixed
        from rlhfsim.specs.workload.workload import Reward, Rules, Workload

        case = self.case
        work = Workload(
            algorithm="grpo",
            model=str(Path(case.model) / "config.json"),
            prompts=case.prompts,
            samples=case.samples,
            kl=False,
            packing=True,
            old_logprobs="rollout",
            reward=Reward(rules=Rules(seconds_per_sample=0.001, workers=1)),
            prompt_len=Fixed(value=case.prompt_tokens),
            response_len=Fixed(value=case.tokens),
        )
        sequences = case.prompts * case.samples
        layout = {
            "dp": case.threads,
            "zero": 1,
            "micro_batch": sequences // case.threads,
            "recompute": "none",
        }
        engine = {"dp": case.threads, "memory_utilization": 0.3, "max_num_seqs": sequences}
        fields = {
            "backend": "deepspeed",
            "pools": [{"name": "all", "gpus": case.threads}],
            "weight_path": "ipc",
            "actor": {"pool": "all", "layout": layout},
            "rollout": {"pool": "all", "layout": engine, "sleep": 1},
        }
        placed = convert(Placement, parse_yaml("{}", "speed"), fields)
        pool = node_group("cpu-core", case.threads, gpus_per_node=case.threads)
        return estimate(placed, work, Cluster(node_groups=(pool,)))

    def _settings(self) -> Settings:
        from executor.settings import Algorithm, Optimizer, RewardRule, Settings, Tracking

        return Settings(
            model=self.case.model,
            data=_data(self.work, self.case),
            rewards=(RewardRule(kind="digits"),),
            algorithm=Algorithm(kl_coefficient=0.0),
            optimizer=Optimizer(learning_rate=self.case.learning_rate),
            iterations=self.case.iterations,
            tracking=Tracking(tensorboard=False),
        )


# --- TRL --------------------------------------------------------------------------------------------


class Theirs:
    """A process of TRL's interpreter that runs a block for every line it is sent."""

    def __init__(self, interpreter: str, work: Path) -> None:
        self._command = [interpreter, "-W", "ignore", str(Path(__file__).with_name("trl_side.py")), str(work)]
        self._threads = json.loads((work / "case.json").read_text())["threads"]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Seconds until the warm-up is over."""
        begin = time.perf_counter()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self._threads),
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()
        return time.perf_counter() - begin

    def block(self) -> Block:
        """The next iterations."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return Block(**self._answer())

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                message: dict[str, Any] = json.loads(line)
                return message
        raise SystemExit("TRL's side ended early")


if __name__ == "__main__":
    main()
