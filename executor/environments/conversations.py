"""A rollout engine whose responses have turns: what it sampled stays as it is, answers are put behind it.

A conversation that waits for its environment is no request of the engine, so others decode meanwhile; its
next turn is a new request whose prompt is all that was said, which the engine's prefix cache knows. Nothing
that was sampled is ever tokenised again. A response without an environment is the case of one turn.

Legend: P tokens of a prompt, R of a response, all turns and answers together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from executor.engines.protocols import RolloutEngine
from executor.environments.process import Answered, EnvironmentProcess
from executor.environments.protocol import Observed
from executor.samples import Completion, Conversation, Fault, Finish, GenerationRequest, Tokens
from executor.tasks.text import ByteText, Text

WAIT_S = 0.02
"""Longest wait for an answer when the engine has nothing to do."""
SEED_STEP, SEED_MODULUS = 1_000_003, 2**31 - 1
"""Turns of a conversation draw from streams of their own."""


@dataclass(slots=True)
class _Conversation:
    """A conversation that goes on."""

    request: GenerationRequest
    prompt: Tokens
    tokens: list[Tokens] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    seconds: float = 0.0
    finish: Finish = "stop"

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return sum(map(len, self.tokens))

    def say(self, tokens: Tokens, logprobs: np.ndarray, versions: np.ndarray, *, sampled: bool) -> None:
        """Put tokens behind what was said."""
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.sampled.append(np.full(len(tokens), sampled))

    def resumed(self) -> GenerationRequest:
        """What the engine is asked for: what another replica has sampled becomes a part of the prompt."""
        begun = self.request.begun
        if begun is None:
            return self.request
        self.say(begun.tokens, begun.logprobs, begun.versions, sampled=True)
        return replace(
            self.request,
            prompt=np.concatenate([self.prompt, begun.tokens]),
            max_tokens=self.request.max_tokens - self.length,
            seed=(self.request.seed + self.length) % SEED_MODULUS,
            begun=None,
        )

    def going_on(self) -> GenerationRequest:
        """The request with what there is of its response."""
        so_far = self.completion(False, None)
        return replace(self.request, begun=so_far if self.length else None)

    def completion(self, conversation: bool, fault: Fault | None) -> Completion:
        """The whole response."""
        none = np.zeros(0)
        talk = Conversation(
            sampled=np.concatenate([none, *self.sampled]).astype(np.bool_),
            turns=self.turns,
            reward=self.reward,
            seconds=self.seconds,
            fault=fault,
        )
        return Completion(
            id=self.request.id,
            tokens=np.concatenate([none, *self.tokens]).astype(np.int64),
            logprobs=np.concatenate([none, *self.logprobs]).astype(np.float32),
            versions=np.concatenate([none, *self.versions]).astype(np.int32),
            finish=self.finish,
            prompt=None if self.prompt is self.request.prompt else self.prompt,
            conversation=talk if conversation else None,
        )


class Conversations:
    """Requests in, whole responses out, over an engine and the environments of its replica."""

    def __init__(
        self,
        engine: RolloutEngine,
        environments: EnvironmentProcess | None = None,
        text: Text | ByteText | None = None,
        *,
        turns: int = 1,
        max_length: int = 2**31,
    ) -> None:
        """`turns`: most of a response; `max_length`: most tokens of prompt and response."""
        self._engine, self._environments, self._text = engine, environments, text
        self._turns, self._max_length = turns, max_length
        self._open: dict[int, _Conversation] = {}
        self.sampled = 0
        """Tokens that the engine has sampled."""
        self._answering: float | None = None
        self._answered: list[tuple[float, float]] = []

    @property
    def unfinished(self) -> int:
        """Responses that are not whole yet."""
        return len(self._open)

    @property
    def decoding(self) -> int:
        """Those among them that the engine works on."""
        return self._engine.unfinished

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin."""
        alone = []
        for request in requests:
            talk = self._open[request.id] = _Conversation(request, request.prompt)
            if self._environments is None or request.task is None:
                alone.append(talk.resumed())
            else:
                self._environments.ask(request.id, "reset", request.task)
        if alone:
            self._engine.add(alone)
        self._note()

    def step(self) -> list[Completion]:
        """One step of the engine, or a short wait for environments; responses that are whole now."""
        done = []
        if self._environments is not None:
            answers = self._environments.answers(0.0 if self._engine.unfinished else WAIT_S)
            done += [whole for answer in answers if (whole := self._heard(answer)) is not None]
        if self._engine.unfinished:
            done += [w for turn in self._engine.step() if (w := self._spoke(turn)) is not None]
        self._note()
        return done

    def leave(self, most: int | None = None) -> list[GenerationRequest]:
        """Takes unfinished responses out, to go on in another replica: requests, with what there is of each.

        All of them; or `most` of those without an environment, the youngest. One with an environment, whose
        state stays in this process, begins again.
        """
        asking = {id for id, talk in self._open.items() if self._asks(talk.request)}
        ids = list(self._open) if most is None else [id for id in self._open if id not in asking]
        talks = {id: self._open.pop(id) for id in ids[-(most or len(ids)) :]}
        for partial in self._engine.abort(list(talks)):
            self.sampled += len(partial.tokens)
            talks[partial.id].say(partial.tokens, partial.logprobs, partial.versions, sampled=True)
        for id in asking & talks.keys():
            assert self._environments is not None
            self._environments.ask(id, "close")
        self._note()
        return [talk.request if id in asking else talk.going_on() for id, talk in talks.items()]

    def _asks(self, request: GenerationRequest) -> bool:
        """Whether an environment answers."""
        return self._environments is not None and request.task is not None

    def taken(self) -> list[tuple[float, float]]:
        """From when to when environments were at work since the last call, on the clock of `time.time`."""
        answered, self._answered = self._answered, []
        return answered

    def close(self) -> None:
        """End the environments."""
        if self._environments is not None:
            self._environments.close()

    def _spoke(self, turn: Completion) -> Completion | None:
        """A turn of the policy: its environment is asked, or the response is whole."""
        talk = self._open[turn.id]
        self.sampled += len(turn.tokens)
        talk.say(turn.tokens, turn.logprobs, turn.versions, sampled=True)
        talk.turns, talk.finish = talk.turns + 1, turn.finish
        if self._environments is None or talk.request.task is None:
            return self._whole(talk)
        if self._room(talk) > 0:
            talk.finish = "stop"  # the limit of a turn cuts no response
        assert self._text is not None, "answers are read and written as text"
        self._environments.ask(turn.id, "step", self._text.decode([turn.tokens])[0])
        return None

    def _heard(self, answer: Answered) -> Completion | None:
        """The environment's answer: the next turn begins, or the response is whole."""
        if (talk := self._open.get(answer.conversation)) is None:  # it has left
            return None
        talk.seconds += answer.seconds
        if answer.fault is not None:
            return self._whole(talk, answer.fault)
        if isinstance(answer.value, Observed):
            talk.reward += answer.value.reward
            if answer.value.done or talk.turns >= self._turns:
                return self._whole(talk)
            assert self._text is not None, "answers are written as text"
            said = self._text.encode_observation(answer.value.text, int(talk.tokens[-1][-1]))
        else:
            said = np.zeros(0, np.int64)
            if answer.value is not None:
                assert self._text is not None, "prompts are written as text"
                talk.prompt = self._text.encode(answer.value)
        room = self._room(talk) - len(said)
        if room <= 0:
            talk.finish = "length"
            return self._whole(talk)
        if len(said):
            version = talk.versions[-1][-1:]
            talk.say(said, np.zeros(len(said)), np.repeat(version, len(said)), sampled=False)
        assert self._environments is not None
        limit = self._environments.settings.turn_tokens
        turn = replace(
            talk.request,
            prompt=np.concatenate([talk.prompt, *talk.tokens]),
            max_tokens=min(room, limit or room),
            seed=(talk.request.seed + SEED_STEP * talk.turns) % SEED_MODULUS,
        )
        self._engine.add([turn])
        return None

    def _room(self, talk: _Conversation) -> int:
        """Tokens that are left of a response."""
        return min(talk.request.max_tokens, self._max_length - len(talk.prompt)) - talk.length

    def _whole(self, talk: _Conversation, fault: Fault | None = None) -> Completion:
        asked = self._asks(talk.request)
        if self._environments is not None and asked:
            self._environments.ask(talk.request.id, "close")
        del self._open[talk.request.id]
        return talk.completion(asked, fault)

    def _note(self) -> None:
        """When environments begin and end to be at work."""
        busy = self._environments is not None and self._environments.busy
        if busy and self._answering is None:
            self._answering = time.time()
        elif not busy and self._answering is not None:
            self._answered.append((self._answering, time.time()))
            self._answering = None
