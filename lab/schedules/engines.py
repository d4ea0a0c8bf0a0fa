"""Engines whose state is a hash of all that it came from: whatever is lost, doubled or mixed up changes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from executor.coordination.engine_memory import LOSES_WEIGHTS
from executor.coordination.replica import Returned
from executor.coordination.tracing import Reply
from executor.rewards.operations import RuleCounts
from executor.samples import Completion, Floats, GenerationRequest, Sample, Scored, Tokens, Transfer
from lab.schedules.cluster import Cluster
from lab.schedules.world import World
from rlhfsim.errors import RlhfsimError

VALUES = 97
"""Different log-probs of a token."""


def digest(*parts: object) -> str:
    """Digest of the text of all parts."""
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def initial(role: str) -> str:
    """What a role begins with; the reference is the policy at its beginning."""
    return digest("initial", "actor" if role == "reference" else role)


def logprobs(state: str, tokens: Tokens) -> Floats:
    """Log-probs of the tokens of a response under weights of this state."""
    mixed = tokens * 31 + np.arange(len(tokens)) * 7 + int(state[:8], 16)
    return -((mixed % VALUES) / VALUES).astype(np.float32)


def facts(sample: Sample) -> tuple[object, ...]:
    """Everything of a sample that is learnt from."""
    arrays = (sample.response, sample.old_logprobs, sample.rollout_logprobs, sample.reference_logprobs)
    more = (sample.values, sample.advantages, sample.returns, sample.mask)
    return sample.id, sample.reward, *(None if a is None else a.tobytes().hex() for a in arrays + more)


class Trainer:
    """One rank of a trained or scored role."""

    def __init__(self, cluster: Cluster, role: str, rank: int, ranks: int) -> None:
        self._cluster, self._role, self._rank, self._ranks = cluster, role, rank, ranks
        self._state, self._open = initial(role), list[int]()
        self._trained = 0

    @property
    def state(self) -> str:
        """With the optimizer steps whose parts all ranks have given."""
        for number in self._open:
            parts = self._cluster.sums[self._role, number]
            assert len(parts) == self._ranks, "a rank has not taken part in a collective"
            self._state = digest(self._state, *(parts[rank] for rank in range(self._ranks)))
        self._open = []
        return self._state

    def train(self, batch: Any, loss: Any) -> Mapping[str, float]:
        """One optimizer step: this rank's part of it."""
        for sample in batch.samples if self._role == "actor" else ():
            self._look(sample)
        given = digest(*map(facts, batch.samples), batch.global_tokens)
        self._cluster.sums.setdefault((self._role, self._trained), {})[self._rank] = given
        self._open.append(self._trained)
        self._trained += 1
        return {"loss": int(given[:4], 16) / 65536, "grad_norm": int(given[4:8], 16) / 65536}

    def parts_s(self) -> Mapping[str, float]:
        """No seconds of its parts."""
        return {}

    def _look(self, sample: Sample) -> None:
        """Each token is of weights that were young enough, and of those that its version says."""
        world, states = self._cluster.world, self._cluster.states
        oldest = max(states) - self._cluster.staleness
        if sample.versions is None or sample.rollout_logprobs is None or min(sample.versions) < oldest:
            world.wrong = (
                f"group {sample.group} of {sample.versions} trained where {oldest} is the oldest allowed"
            )
            return
        for version in {*sample.versions.tolist()}:
            mine = sample.versions == version
            if (sample.rollout_logprobs != logprobs(states[version], sample.response))[mine].any():
                world.wrong = f"group {sample.group}: tokens that weights {version} did not sample"

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Under its state."""
        return [logprobs(self.state, s.response) for s in samples]

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Values of a critic."""
        return self.logprobs(samples)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Scores of a reward model."""
        return [float(logprobs(self.state, s.response).sum()) for s in samples]

    def save(self, folder: Path, background: Any = None) -> None:
        """A file a rank, and the copy for users."""
        state = self.state

        def write() -> None:
            (folder / f"rank-{self._rank}.pt").write_text(state * 4)
            if self._rank == 0:
                (folder / "model.safetensors").write_bytes(bytes.fromhex(state) * 4)

        if background is None:
            write()
        else:
            background.submit(write)

    def load(self, folder: Path) -> None:
        """Undo `save`."""
        text = (folder / f"rank-{self._rank}.pt").read_text()
        assert text == text[:32] * 4, "a torn file was loaded"
        self._state, self._open = text[:32], []

    def buckets(self, bucket_bytes: int, senders: Any) -> Iterator[str]:
        """Its state in one."""
        return iter([self.state])

    def offload(self, *_: Any, **__: Any) -> None:
        """Nothing is here that could leave."""

    reload = close = offload


class Background:
    """Writes that a rank does while it is asked whether they are done."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._jobs = rng, list[Callable[[], None]]()

    def submit(self, job: Callable[[], None]) -> None:
        """Later."""
        self._jobs.append(job)

    def written(self) -> bool:
        """Whether all is; some questions come too early."""
        if self._rng.random() < 0.5:
            return False
        while self._jobs:
            self._jobs.pop(0)()
        return True


class Sender:
    """The sending end of the channels of a group."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def send(self, weights: Any, version: int) -> Transfer:
        """Into the channel."""
        self._cluster.states[version] = weights.state
        self._cluster.channels[self._name] = version, weights.state
        return _transfer(version, weights.state)

    def close(self) -> None:
        """Nothing is open."""


def _transfer(version: int, state: str) -> Transfer:
    return Transfer(version=version, bytes=len(state), buckets=1, seconds=0.1, checksum=state)


class Replica:
    """A rollout engine."""

    def __init__(self, cluster: Cluster, identity: Any) -> None:
        self._cluster, self._state, self._version = cluster, initial("actor"), 0
        self._waiting, self._channel = list[GenerationRequest](), ""
        self._begun: dict[int, list[tuple[Tokens, int]]] = {}
        """Tokens of requests that new weights met, and the version of each part."""
        self._finished = list[Completion]()

    def build(self, spec: Any) -> Reply:
        """With the weights of the model's folder."""
        return Reply(value=None)

    def connect(self, links: Sequence[Any]) -> Reply:
        """To a weight channel."""
        self._channel = links[0].channel.name
        return Reply(value=None)

    def receive(self, version: int, keep: bool, tags: Any) -> Reply:
        """What lies in the channel."""
        sent, state = self._cluster.channels.get(self._channel, (None, ""))
        if sent != version:
            raise RlhfsimError("weight-sync-timeout", f"weights {version} did not come")
        if keep:
            self._decode()
        else:  # requests that run end first
            self._finished += [self._completion(request) for request in self._waiting]
            self._waiting = []
        self._state, self._version = state, version
        return Reply(value=_transfer(version, state))

    def stage(self, version: int, tags: Any) -> Reply:
        """Beside the running generation."""
        return self.receive(version, True, tags)

    def _decode(self) -> None:
        """Requests that run have some of their tokens."""
        for request in self._waiting:
            parts = self._begun.setdefault(request.id, [])
            tokens = self._tokens(request, sum(len(part) for part, _ in parts))
            parts.append((tokens[: self._cluster.world.rng.integers(len(tokens))], self._version))

    def submit(self, requests: Sequence[GenerationRequest], step: int) -> None:
        """Queue, behind what another replica has sampled."""
        self._waiting += requests
        for request in requests:
            if (begun := request.begun) is not None:
                starts = [0, *np.flatnonzero(np.diff(begun.versions)) + 1]
                parts = zip(np.split(begun.tokens, starts[1:]), begun.versions[starts], strict=True)
                self._begun[request.id] = [(tokens, int(version)) for tokens, version in parts]

    def give_back(self, most: int | None = None) -> Reply:
        """What is unfinished, or so much of it, the youngest."""
        count = len(self._waiting) if most is None else min(most, len(self._waiting))
        kept, back = self._waiting[: len(self._waiting) - count], self._waiting[len(self._waiting) - count :]
        self._waiting = back
        self._decode()
        self._waiting = kept
        return Reply(value=Returned([self._going_on(request) for request in back], count))

    def _going_on(self, request: GenerationRequest) -> GenerationRequest:
        parts = [part for part in self._begun.pop(request.id) if len(part[0])]
        return replace(request, begun=self._response(request, parts) if parts else None)

    def poll(self, at_least: int, limit_s: float) -> Reply:
        """Some that are done, in any order."""
        rng = self._cluster.world.rng
        rng.shuffle(self._waiting)
        most = 1 if self._cluster.staleness else len(self._waiting)  # few, so that new weights meet many
        count = int(rng.integers(1, most + 1)) if self._waiting else 0
        done, self._waiting = self._waiting[:count], self._waiting[count:]
        ended, self._finished = self._finished, []
        return Reply(value=[*ended, *(self._completion(request) for request in done)])

    def _completion(self, request: GenerationRequest) -> Completion:
        parts = self._begun.pop(request.id, [])
        parts.append((self._tokens(request, sum(len(part) for part, _ in parts)), self._version))
        return self._response(request, parts)

    def _response(self, request: GenerationRequest, parts: Sequence[tuple[Tokens, int]]) -> Completion:
        tokens = np.concatenate([part for part, _ in parts])
        versions = np.concatenate([np.full(len(part), version, np.int32) for part, version in parts])
        of_weights = {v: logprobs(self._weights(v), tokens) for v in {*versions.tolist()}}
        chosen = [of_weights[v][i] for i, v in enumerate(versions.tolist())]
        return Completion(
            id=request.id,
            tokens=tokens,
            logprobs=np.asarray(chosen, np.float32),
            versions=versions,
            finish="stop",
        )

    def _weights(self, version: int) -> str:
        if version == self._version and not self._state:
            self._cluster.world.wrong = f"a replica that lost weights {version} in its sleep samples"
        return self._state if version == self._version and self._state else self._cluster.states[version]

    def _tokens(self, request: GenerationRequest, known: int) -> Tokens:
        """The rest of a response of which so many tokens are there."""
        more = (known,) if known else ()
        drawn = np.random.default_rng(int(digest(self._state, request.id, request.seed, *more)[:16], 16))
        return drawn.integers(0, 256, int(drawn.integers(1, max(1, request.max_tokens - known) + 1)))

    def sleep(self, level: int, tags: Any) -> Reply:
        """Its weights are lost; nothing runs here."""
        if self._waiting:
            self._cluster.world.wrong = f"put to sleep with {len(self._waiting)} requests"
        self._state = "" if level == LOSES_WEIGHTS else self._state
        return Reply(value=None)

    def wake(self, *_: Any) -> Reply:
        """Nothing comes back."""
        return Reply(value=None)

    release_kv_cache = wake

    def close(self) -> None:
        """Nothing is open."""


class Meter:
    """Memory that nobody measures."""

    def start(self) -> None:
        """Nothing begins."""

    def read(self) -> dict[str, float]:
        """No bytes."""
        return dict.fromkeys(("allocated", "peak", "device", "device_peak", "host", "host_peak"), 0.0)


class Rules:
    """Reward rules that fail when the world says so."""

    def __init__(self, world: World, code: str) -> None:
        self._world, self._code, self._fails = world, code, False
        world.act["reward"] = lambda: setattr(self, "_fails", True)

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        """By hash of response and code."""
        self._world.operation()
        if self._fails:
            self._fails = False
            raise RlhfsimError("reward-timeout", "the function ran past its limit", help="raise timeout_s")
        values = [int(digest(self._code, s.response.tolist(), s.answer)[:2], 16) % 3 / 2 for s in samples]
        return [Scored(total=value, by_rule={"function": value}) for value in values]

    def ahead(self, completions: Sequence[Completion]) -> None:
        """Nothing to begin."""

    def taken(self) -> Mapping[str, RuleCounts]:
        """Nobody counts."""
        return {}


def gathered(gather: Callable[[], Any], *, on_host: bool) -> Any:
    """What a trainer's sender gets: the state that lies in the engine's buckets."""
    return SimpleNamespace(state=next(gather()), exhaust=lambda: None)
