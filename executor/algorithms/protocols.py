"""What the iteration loops need of others: a backend that runs calls, prompts and samples, a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from executor.samples import Completion, GenerationRequest, LossSpec, Sample, Transfer
from rlhfsim.specs.workload.dataflow import Call


class LoopBackend(Protocol):
    """Runs calls on a cluster; calls of one pool wait for each other."""

    version: int

    def generate(self, requests: Sequence[GenerationRequest], step: int) -> list[Completion]:
        """Responses, in order."""

    def submit(self, requests: Sequence[GenerationRequest], step: int) -> None:
        """Queue requests of a rollout that goes on by itself."""

    def poll(self, limit_s: float) -> list[Completion]:
        """Completions of submitted requests; waits up to `limit_s` for the first."""

    def lend(self, step: int) -> None:
        """The trainer waits for samples from now on: its GPUs may generate."""

    def reclaim(self, step: int) -> dict[str, float]:
        """The trainer goes on; what its GPUs generated, as metrics."""

    def score(self, call: Call, samples: Sequence[Sample], step: int) -> list[Any]:
        """Results of one scoring call, one a sample."""

    def train(
        self, role: str, samples: Sequence[Sample], loss: LossSpec, step: int
    ) -> list[dict[str, float]]:
        """Metrics of each optimizer step."""

    def sync(self, step: int) -> Transfer:
        """Bring the policy's weights to the rollout; version + 1."""

    def stop(self) -> None:
        """End everything at once: calls that run come back with an error."""


class Prompter(Protocol):
    """Prompts in, samples out; knows data and tokenizer."""

    def requests(self, batch: int) -> list[GenerationRequest]:
        """The requests of a generation batch (its number in the run), samples of a prompt side by side."""

    def sample(self, completion: Completion) -> Sample:
        """The sample of a completed request."""

    def given(self, step: int) -> list[Sample]:
        """Samples of an iteration that generates nothing (DPO, KTO, SFT, reward models)."""


class ExperienceBuffer(Protocol):
    """Experience between rollout and training, bounded in size and staleness."""

    def room(self) -> int:
        """Prompt groups that may be submitted now."""

    def submitted(self, groups: Sequence[int]) -> None:
        """Generation of these groups starts."""

    def put(self, group: Sequence[Sample]) -> None:
        """All samples of one prompt."""

    def skip(self, group: int) -> None:
        """A group that was generated is not trained on: another may start."""

    def whole(self) -> bool:
        """Whether `take` need not wait."""

    def take(self, limit_s: float) -> list[Sample]:
        """One batch of whole groups; waits for it."""

    def published(self, version: int) -> None:
        """The trainer has new weights."""

    def rejected(self) -> dict[int, int]:
        """Groups that became too old since the last call of this, with their response tokens."""

    def fail(self, error: BaseException) -> None:
        """The rollout cannot go on: whoever waits in `take` gets this error."""
