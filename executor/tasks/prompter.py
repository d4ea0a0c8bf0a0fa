"""From problems to requests, and from completions to samples: the data side of an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from executor.samples import Completion, Conversation, GenerationRequest, Sample, Task, Tokens
from executor.settings import EnvironmentSettings, Sampling
from executor.tasks.prompts import Problem, ProblemSource
from executor.tasks.text import ByteText, Text
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload.workload import Workload

SCAN = 4096
"""Generated prompts that are looked at before a run to know how long they get."""
SEED_MODULUS = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class TaskPrompter:
    """Ids count through the run: group = position of the prompt in the data, id = group x samples + k."""

    source: ProblemSource
    text: Text | ByteText
    workload: Workload
    sampling: Sampling
    max_tokens: int
    seed: int
    environment: EnvironmentSettings | None = None
    """Who answers between the turns of a response."""
    max_prompt: int | None = None
    """Tokens that are kept of a prompt, its last ones; None: all."""
    positions: Callable[[int, int, int | None], list[int]] | None = None
    """The user's sampler: positions of a batch's problems; None: one after the other."""
    _open: dict[int, tuple[Problem, Tokens]] = field(default_factory=dict)

    def longest_prompt(self, steps: int) -> int:
        """Tokens of the longest of the first generated prompts; files are counted whole (lengths.py)."""
        batches = math.ceil(steps * self.workload.gen_batches)
        count = min(SCAN, batches * self.workload.gen_prompts)
        return max(self.text.lengths([p.prompt for p in self.source.batch(0, count)]))

    def requests(self, batch: int) -> list[GenerationRequest]:
        """The requests of one generation batch, samples of a prompt side by side."""
        requests = []
        for group, problem in self._problems(batch):
            prompt = self._encoded(problem)
            for number in range(group * self.workload.samples, (group + 1) * self.workload.samples):
                request = self._request(number, problem, prompt, self.sampling.temperature)
                requests.append(replace(request, top_p=self.sampling.top_p))
        return requests

    def evaluation(
        self, problems: list[Problem], first_id: int, samples: int, temperature: float
    ) -> list[GenerationRequest]:
        """Requests of an evaluation, samples of a problem side by side; temperature 0 is greedy."""
        numbered = ((problem, self._encoded(problem)) for problem in problems for _ in range(samples))
        return [
            self._request(number, problem, prompt, temperature)
            for number, (problem, prompt) in enumerate(numbered, first_id)
        ]

    def _encoded(self, problem: Problem) -> Tokens:
        tokens = self.text.encode(problem.prompt)
        return tokens if self.max_prompt is None else tokens[-self.max_prompt :]

    def _problems(self, batch: int) -> list[tuple[int, Problem]]:
        count = self.workload.gen_prompts
        start = batch * count
        if self.positions is None:
            return list(enumerate(self.source.batch(start, count), start))
        chosen = self.positions(batch, count, self.source.size)
        return list(enumerate((self.source.batch(at, 1)[0] for at in chosen), start))

    def _request(
        self, number: int, problem: Problem, prompt: Tokens, temperature: float
    ) -> GenerationRequest:
        self._open[number] = (problem, prompt)
        stream, task = np.random.SeedSequence([self.seed, number]), None  # of its own for every request
        seed = int(stream.generate_state(1)[0]) % SEED_MODULUS
        if self.environment is not None:
            task = Task(prompt=problem.prompt, answer=problem.answer, meta=problem.meta, seed=seed)
        return GenerationRequest(
            id=number,
            prompt=prompt,
            max_tokens=self.max_tokens,
            temperature=temperature,
            seed=seed,
            task=task,
        )

    def sample(self, completion: Completion) -> Sample:
        """The sample of a completed request; a request completes once.

        Raises:
            RlhfsimError: its environment failed, and `on_error` is stop.
        """
        sample = self.preview(completion)
        del self._open[completion.id]
        return sample

    def preview(self, completion: Completion) -> Sample:
        """What `sample` will give.

        Raises:
            RlhfsimError: as `sample`.
            KeyError: the request has been completed, or was never made.
        """
        problem, prompt = self._open[completion.id]
        conversation = self._judged(completion)
        reward = None if conversation is None else conversation.reward
        return Sample(
            id=completion.id,
            group=completion.id // self.workload.samples,
            prompt=prompt if completion.prompt is None else completion.prompt,
            conversation=conversation,
            reward=reward,
            rewards=None if reward is None else {"environment": reward},
            response=completion.tokens,
            finish=completion.finish,
            versions=completion.versions,
            rollout_logprobs=completion.logprobs,
            answer=problem.answer,
            meta=dict(problem.meta),
        )

    def _judged(self, completion: Completion) -> Conversation | None:
        """The conversation of a completion; what `on_error` says where its environment failed."""
        conversation, settings = completion.conversation, self.environment
        if conversation is None or conversation.fault is None or settings is None:
            return conversation
        kind, what = conversation.fault
        if settings.on_error == "stop":
            raise RlhfsimError(
                f"environment-{kind}",
                f"environment {settings.kind} failed in turn {conversation.turns} of sample {completion.id}: "
                f"{what}",
                help="on_error: drop or zero lets the run go on; timeout_s limits one answer",
            )
        return replace(conversation, reward=0.0 if settings.on_error == "zero" else None)

    def given(self, step: int) -> list[Sample]:
        """Samples of an iteration that generates nothing."""
        return self.answered(self._problems(step))

    def answered(self, problems: Iterable[tuple[int, Problem]]) -> list[Sample]:
        """Numbered problems with their given responses: both sides of a pair (chosen first), or the one."""
        samples = []
        for group, problem in problems:
            sides = [("response", float(problem.meta.get("label", 1.0)))]
            if self.workload.paired:
                sides = [("chosen", 1.0), ("rejected", -1.0)]
            for number, (name, label) in enumerate(sides, len(sides) * group):
                if name not in problem.meta:
                    raise RlhfsimError(
                        "no-preferences",
                        f"{self.workload.algorithm} needs {name!r} of every example, the data has none",
                        help="name the columns in data: answer_column, chosen_column, rejected_column, "
                        "label_column",
                    )
                samples.append(
                    Sample(
                        id=number,
                        group=group,
                        prompt=self._encoded(problem),
                        response=self.text.encode_response(str(problem.meta[name]))[: self.max_tokens],
                        label=label,
                        answer=problem.answer,
                        meta=dict(problem.meta),
                    )
                )
        return samples
