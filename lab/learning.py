"""Do the algorithms learn? Reward on held-out prompts before and after each, several seeds, in one process.

    python -m lab.learning [--algorithms grpo dapo ...] [--seeds 0 1 2] [--out reports]

Everything of a run is the executor's (loops, prompts, advantages, losses, optimizer steps) but its engines: a
model of 0.6 M parameters samples and learns in plain torch, so that a run takes less than a minute on one core.
With all engines: lab/benchmarks/learning.py. Writes learning_algorithms.json and .md; runs that the JSON
already has stay in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from executor.algorithms import losses
from executor.algorithms.iteration import Learned, Loop, Position
from executor.algorithms.metrics import finish
from executor.engines.balance import optimizer_steps
from executor.engines.optimizers import learning_rate
from executor.engines.packing import micro_batch
from executor.engines.transformers import attention, heads
from executor.rewards.answers import digits_share
from executor.samples import Completion, GenerationRequest, LossSpec, Sample, Scored, Transfer
from executor.settings import Algorithm, Optimizer, Sampling, Settings
from executor.tasks import tiny
from executor.tasks.prompter import TaskPrompter
from executor.tasks.prompts import Generated
from executor.tasks.text import Text
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import GROUPED, Reward, Rules, Workload

ROOT = Path(__file__).parents[1]
ALGORITHMS = ("grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "ppo")
ITERATIONS, EVALUATIONS, HELD_OUT = 16, 4, 200
SEQUENCES, SAMPLES, MINI_BATCHES, MAX_TOKENS = 128, 8, 2, 4
RATE, CRITIC_RATE, WARM_UP_OF_RATE = 1e-3, 1e-3, 4
TASK, DIFFICULTY = "comparison", 2
CONFIDENCE = 0.95
OWN: Mapping[str, Mapping[str, Any]] = {"dapo": {"overlong_tokens": 1, "overlong_penalty": 0.5}}
"""Settings of an algorithm beside its own defaults."""


class InProcess:
    """A `LoopBackend` on one torch model a role."""

    def __init__(self, folder: Path, work: Workload, settings: Settings, text: Text) -> None:
        self.version, self._work, self._settings, self._text = 0, work, settings, text
        self._models = {"actor": heads.load(str(folder), "causal", "fp32")}
        if work.has_critic:
            self._models["critic"] = heads.load(str(folder), "value", "fp32", seed=settings.seed)
        self._end = int(text.encode_response("")[-1])
        self._optimizers = {role: self._adamw(role) for role in self._models}
        self._steps = dict.fromkeys(self._models, 0)

    def _constants(self, role: str) -> Optimizer:
        other = self._settings.critic_optimizer if role == "critic" else None
        return other or self._settings.optimizer

    def _adamw(self, role: str) -> torch.optim.Optimizer:
        constants = self._constants(role)
        return torch.optim.AdamW(
            self._models[role].parameters(),
            betas=constants.betas,
            eps=constants.eps,
            weight_decay=constants.weight_decay,
        )

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest], step: int) -> list[Completion]:
        """Responses to prompts, one forward pass of all rows a token."""
        model, draw = self._models["actor"], torch.Generator().manual_seed(requests[0].seed)
        starts = torch.tensor([len(r.prompt) for r in requests])
        rows = torch.arange(len(requests))
        ids = torch.zeros(len(requests), int(starts.max()) + MAX_TOKENS, dtype=torch.int64)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.prompt)] = torch.from_numpy(request.prompt)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        lengths = attention.sequences(model.config, positions)
        chosen = torch.zeros(len(requests), MAX_TOKENS)
        greedy = requests[0].temperature == 0
        for t in range(MAX_TOKENS):
            output = model.backbone(input_ids=ids, position_ids=positions, use_cache=False, **lengths)
            hidden = output.last_hidden_state[rows, starts + t - 1]
            logprobs = torch.log_softmax(hidden @ model.head.weight.T, dim=-1)
            token = (
                logprobs.argmax(-1) if greedy else torch.multinomial(logprobs.exp(), 1, generator=draw)[:, 0]
            )
            ids[rows, starts + t], chosen[:, t] = token, logprobs[rows, token]
        return [
            self._completion(request, ids[i, starts[i] : starts[i] + MAX_TOKENS], chosen[i])
            for i, request in enumerate(requests)
        ]

    def _completion(
        self, request: GenerationRequest, tokens: torch.Tensor, chosen: torch.Tensor
    ) -> Completion:
        ends = (tokens == self._end).nonzero().flatten()
        length = int(ends[0]) + 1 if len(ends) else MAX_TOKENS
        return Completion(
            id=request.id,
            tokens=tokens[:length].numpy().copy(),
            logprobs=chosen[:length].numpy().copy(),
            versions=np.full(length, self.version, np.int32),
            finish="stop" if len(ends) else "length",
        )

    def submit(self, requests: Sequence[GenerationRequest], step: int) -> None:
        """Belongs to schedules that are not run here."""
        raise NotImplementedError

    def poll(self, limit_s: float) -> list[Completion]:
        """Belongs to schedules that are not run here."""
        raise NotImplementedError

    def score(self, call: Call, samples: Sequence[Sample], step: int) -> list[Any]:
        """Rules, log-probs or values."""
        if call.role == "rules":
            texts = self._text.decode([s.response for s in samples])
            return [Scored(total=r, by_rule={"digits": r}) for r in map(digits_share, texts)]
        batch = micro_batch(samples, packed=False)
        with torch.no_grad():
            outputs, _ = self._models[call.role](batch.tokens, batch.positions, batch.index, batch.targets)
        return batch.split(outputs)

    def train(
        self, role: str, samples: Sequence[Sample], loss: LossSpec, step: int
    ) -> list[dict[str, float]]:
        """Optimizer steps of one iteration."""
        work, seed = self._work, (self._settings.seed, step + 1)
        [steps] = optimizer_steps(
            samples, ranks=1, mini_batches=work.mini_batches, epochs=work.epochs, seed=seed
        )
        return [self._step(role, mini, loss) for mini in steps]

    def _step(self, role: str, mini: Any, loss: LossSpec) -> dict[str, float]:
        model, optimizer, constants = self._models[role], self._optimizers[role], self._constants(role)
        total = ITERATIONS * self._work.mini_batches * self._work.epochs
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(constants, self._steps[role], total)
        batch = micro_batch(mini.samples, packed=False)
        outputs, _ = model(batch.tokens, batch.positions, batch.index, batch.targets)
        rows = {"values" if role == "critic" else "logprobs": batch.rows(outputs)}
        collated = losses.collate(
            batch.samples, num_tokens=mini.global_tokens, num_sequences=mini.global_sequences, **rows
        )
        value, metrics = losses.compute(loss, collated)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), constants.max_grad_norm)
        optimizer.step()
        self._steps[role] += 1
        return finish(metrics)

    def sync(self, step: int) -> Transfer:
        """The sampler's weights are the trainer's."""
        self.version += 1
        return Transfer(version=self.version, bytes=0, buckets=0, seconds=0.0, checksum="")

    def stop(self) -> None:
        """Nothing runs elsewhere."""


# --- a run ------------------------------------------------------------------------------------------


def workload(algorithm: str) -> Workload:
    """Equal numbers of trained sequences, in groups where the algorithm compares them."""
    samples = SAMPLES if algorithm in GROUPED else 1
    prompts = SEQUENCES // samples
    return Workload(
        algorithm=algorithm,  # type: ignore[arg-type]
        prompts=prompts,
        samples=samples,
        mini_batches=MINI_BATCHES,
        kl=False,
        reward=Reward(rules=Rules()),
        response_len=Fixed(value=MAX_TOKENS),
        dynamic_sampling=DynamicSampling(kept=0.5, gen_prompts=prompts) if algorithm == "dapo" else None,
    )


def measure(folder: Path, task: Generated, algorithm: str, seed: int) -> dict[str, Any]:
    """One run from the model of its seed."""
    began, work, text = time.perf_counter(), workload(algorithm), Text(str(folder))
    optimizer = Optimizer(
        learning_rate=RATE, betas=(0.9, 0.99), schedule="linear", warmup_steps=WARM_UP_OF_RATE
    )
    settings = Settings(
        algorithm=Algorithm(kl_coefficient=0.0, **OWN.get(algorithm, {})),
        optimizer=optimizer,
        critic_optimizer=replace(optimizer, learning_rate=CRITIC_RATE),
        seed=seed,
    )
    prompter = TaskPrompter(
        source=task, text=text, workload=work, sampling=Sampling(), max_tokens=MAX_TOKENS, seed=seed
    )
    machine = InProcess(folder, work, settings, text)
    loop = Loop(backend=machine, prompter=prompter, workload=work, settings=settings, max_tokens=MAX_TOKENS)
    reward = {0: _reward(machine, prompter, task)}
    kept = []
    for learned in _learned(loop):
        kept.append(learned.sampling.get("sampling/kept_share", 1.0))
        done = learned.step + 1
        if done % (ITERATIONS // EVALUATIONS) == 0:
            reward[done] = _reward(machine, prompter, task)
            print(f"  {algorithm} seed {seed} after {done}: {reward[done]:.3f}", flush=True)
    for step in range(0, ITERATIONS + 1, ITERATIONS // EVALUATIONS):
        if step not in reward:  # solved before
            reward[step] = _reward(machine, prompter, task)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "reward": {str(step): value for step, value in reward.items()},
        "kept_share": statistics.mean(kept),
        "seconds": time.perf_counter() - began,
    }


def _learned(loop: Loop) -> Iterator[Learned]:
    """Iterations; with dynamic sampling they end where all rewards of all groups have become equal."""
    steps = range(ITERATIONS)
    if loop.workload.dynamic_sampling is None:
        yield from loop.synchronous(steps)
        return
    try:
        yield from loop.filled(steps, Position())
    except RlhfsimError as error:
        if error.code != "dynamic-sampling-starved":
            raise


def _reward(machine: InProcess, prompter: TaskPrompter, task: Generated) -> float:
    """Mean reward of responses to held-out prompts, sampled as in training."""
    asked = prompter.greedy(task.held_out(HELD_OUT), 10**9)
    requests = [replace(request, temperature=1.0, seed=1) for request in asked]
    samples = [prompter.sample(c) for c in machine.generate(requests, 0)]
    scored = machine.score(Call(role="rules", kind="score"), samples, 0)
    return statistics.mean(s.total for s in scored)


def start_of(folder: Path, seed: int) -> tuple[Path, Generated]:
    """The random model that all runs of a seed start from, and their prompts."""
    task = Generated(task=TASK, difficulty=DIFFICULTY, seed=seed)  # type: ignore[arg-type]
    return tiny.build(folder / f"model-{seed}", seed=seed), task


# --- report -----------------------------------------------------------------------------------------


def rise_of(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """Mean rise over the seeds, and half of its interval (Student's t); None: one seed."""
    rises = [run["reward"][str(ITERATIONS)] - run["reward"]["0"] for run in runs]
    mean = statistics.mean(rises)
    if len(rises) < 2:
        return mean, None
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(rises) - 1))
    return mean, quantile * statistics.stdev(rises) / len(rises) ** 0.5


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """One row an algorithm."""
    rows = []
    for name in ALGORITHMS:
        mine = [run for run in runs if run["algorithm"] == name]
        if not mine:
            continue
        mean, half = rise_of(mine)
        curve = " ".join(
            f"{statistics.mean(run['reward'][step] for run in mine):.2f}" for step in mine[0]["reward"]
        )
        seeds = ", ".join(f"{run['reward'][str(ITERATIONS)] - run['reward']['0']:+.3f}" for run in mine)
        interval = "one seed" if half is None else f"{mean - half:+.3f} to {mean + half:+.3f}"
        seconds = statistics.mean(run["seconds"] for run in mine)
        rows.append(f"| {name} | {mean:+.3f} | {interval} | {seeds} | {curve} | {seconds:.0f} s |")
    return TEXT.format(rows="\n".join(rows), **globals())


TEXT = """# Learning, by algorithm

Output of `python -m lab.learning`: the executor's loops, advantages, losses and optimizer steps around one torch model of 0.6 M
parameters, on one core, without vLLM, DeepSpeed and Ray (with them: [learning.md](learning.md)).

Prompts are the generated `{TASK}` of difficulty {DIFFICULTY}; the reward is the share of digits in the response (rule `digits`), of {HELD_OUT} held-out prompts with
responses sampled as in training. A seed draws a random model, from which all algorithms start: {ITERATIONS} iterations of {SEQUENCES} sequences (groups of {SAMPLES} where
the algorithm compares them), {MINI_BATCHES} updates each, AdamW, learning rate {RATE:g} raised over {WARM_UP_OF_RATE} updates and decayed to 0, no KL term, everything else as
the algorithm has it; `dapo` with dynamic sampling and an overlong penalty of 0.5 at the last token. A smoke test: whether the gradient points where it should, not
how well an algorithm learns. The settings are the same for all algorithms, and were fixed on GRPO with a seed that is not in the table.

| algorithm | rise, mean of the seeds | {CONFIDENCE:.0%} interval (t) | each seed | reward on the way | a run |
| --- | --- | --- | --- | --- | --- |
{rows}
"""


def main() -> None:
    """Run what was asked, then write both files from all runs there are."""
    parser = argparse.ArgumentParser(description="Does each algorithm learn?")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.out / "learning_algorithms.json"
    known = {(r["algorithm"], r["seed"]): r for r in json.loads(path.read_text())} if path.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            model, task = start_of(Path(folder), seed)
            for algorithm in options.algorithms:
                run = known[algorithm, seed] = measure(model, task, algorithm, seed)
                print(
                    f"{algorithm} seed {seed}: {rise_of([run])[0]:+.3f} in {run['seconds']:.0f} s", flush=True
                )
                runs = [known[key] for key in sorted(known)]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(runs, indent=1) + "\n")
                path.with_suffix(".md").write_text(report(runs))


if __name__ == "__main__":
    main()
