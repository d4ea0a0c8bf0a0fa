"""One replica of the rollout engine: a process whose thread steps the engine while calls come and go.

The thread owns the engine between two scheduler steps; commands (receive weights, sleep, commit) run there
too, so that no weight changes in the middle of a step. With `keep` (partial rollout) running requests go on
with the new weights; else a command waits until the engine is empty and later requests are held back.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue
from typing import Any, NamedTuple

from executor.coordination.tracing import Reply, Tags
from executor.coordination.worker import ProcessIdentity, TracedProcess, uncollected
from executor.engines.fake import FakeRollout
from executor.engines.memory import Reading
from executor.engines.protocols import Link, RolloutEngine, RolloutSpec
from executor.engines.training import check_device
from executor.environments.conversations import Conversations
from executor.environments.process import EnvironmentProcess
from executor.samples import Completion, GenerationRequest
from executor.tasks.text import ByteText, Text
from rlhfsim.frozen import frozen
from rlhfsim.trace import CPU_POOL, MEASURED, Span

IDLE_S = 0.02
"""Longest sleep of the thread when nothing runs."""


@frozen
class ReplicaIdentity(ProcessIdentity):
    """Which replica this is."""

    name: str
    """In spans and counters."""


class Returned(NamedTuple):
    """What a replica gives back."""

    requests: Sequence[GenerationRequest]
    """With what there is of their responses."""
    sampled: int
    """Tokens that it has sampled since it was asked last."""


@dataclass(slots=True)
class _Command:
    act: Callable[[], Any]
    keep: bool
    """Running requests stay while it acts."""
    done: threading.Event
    result: Any = None
    error: BaseException | None = None


class ReplicaFollower(TracedProcess):
    """The workers of a replica on a node that does not lead it; runs as a Ray actor."""

    def __init__(self, identity: ReplicaIdentity) -> None:
        super().__init__(identity, identity.name)
        self._workers: Any = None

    def build(self, spec: RolloutSpec) -> None:
        """Start the workers, which wait for those of the leader."""
        if self._fakes is not None:
            return
        from executor.engines.vllm import start

        check_device(gpu=self._on_gpu)
        self._workers = start.follow(
            spec, start.ready(spec), lambda: None if self._workers is None else os._exit(1)
        )

    def close(self) -> None:
        """End the workers, after the leader."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown()


class Replica(TracedProcess):
    """Runs as a threaded Ray actor."""

    def __init__(self, identity: ReplicaIdentity) -> None:
        super().__init__(identity, identity.name)
        self._engine: RolloutEngine | None = None
        self._conversations: Conversations | None = None
        """What the engine and its environments work on."""
        self._incoming: list[GenerationRequest] = []
        self._finished: list[Completion] = []
        self._changed = threading.Condition()
        self._commands: Queue[_Command] = Queue()
        self._failure: BaseException | None = None
        self._closed = False
        self._step = 0
        self._busy_since: float | None = None
        self._reading: Reading | None = None
        """Memory of what was done last."""
        self._thread = threading.Thread(target=self._work, name="rollout", daemon=True)
        self._thread.start()

    # --- calls ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Import vLLM while other processes start; `build` says what fails."""
        if self._fakes is None:
            with suppress(Exception):
                self._command(self._import)

    def _import(self) -> None:
        from executor.engines.vllm import start

        with uncollected():
            start.prepare()

    def build(self, spec: RolloutSpec) -> Reply:
        """Create the engine in the thread that will step it."""
        return self._command(lambda: self._build(spec))

    def _build(self, spec: RolloutSpec) -> None:
        if self._fakes is not None:
            self._engine = FakeRollout(self._fakes, self._device, self._pool)
            self._converse(spec, ByteText())
            return
        from executor.engines.vllm.engine import VllmEngine

        check_device(gpu=self._on_gpu)

        with uncollected():
            self._engine = VllmEngine(spec)
        self._converse(spec, Text(spec.model, chat=spec.chat) if spec.environment else None)

    def _converse(self, spec: RolloutSpec, text: Text | ByteText | None) -> None:
        self._conversations = Conversations(
            self._engine_now(),
            EnvironmentProcess(spec.environment, spec.folder) if spec.environment else None,
            text,
            turns=spec.turns,
            max_length=spec.max_model_len,
        )

    def submit(self, requests: Sequence[GenerationRequest], step: int) -> None:
        """Queue requests; their span counts to `step`."""
        with self._changed:
            self._incoming += list(requests)
            self._step = step
            self._changed.notify_all()

    def poll(self, at_least: int, limit_s: float) -> Reply:
        """Finished completions: at least that many unless `limit_s` passes or nothing is left to run."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while len(self._finished) < at_least and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._raise()
            done, self._finished = self._finished, []
        return Reply(value=done, recorded=self._tracer.take(), memory=self._reading)

    def give_back(self, most: int | None = None) -> Reply:
        """`Returned`: what goes on in another replica, all that is unfinished or at most so many."""
        return self._command(lambda: self._given_back(most))

    def _given_back(self, most: int | None) -> Returned:
        conversations = self._conversations
        assert conversations is not None, "the engine is built first"
        with self._changed:
            incoming, self._incoming = self._incoming, []
        conversations.add(incoming)  # these are the youngest
        requests = conversations.leave(most)
        sampled, conversations.sampled = conversations.sampled, 0
        return Returned(requests, sampled)

    def connect(self, links: Sequence[Link]) -> Reply:
        """Join weight channels: the link of each of the engine's workers."""
        return self._command(lambda: self._engine_now().connect(links))

    def receive(self, version: int, keep: bool, tags: Tags) -> Reply:
        """Load new weights between two scheduler steps."""
        return self._spanned(lambda: self._engine_now().receive(version), tags, keep=keep)

    def stage(self, version: int, tags: Tags) -> Reply:
        """Overlapped: receive while generation runs, then load between two steps."""
        engine = self._engine_now()
        with self._span("actor", tags):
            engine.stage(version)
            while not engine.staged():
                self._raise()
                time.sleep(IDLE_S)
            return self._command(engine.commit, keep=True)

    def sleep(self, level: int, tags: Tags) -> Reply:
        """Free memory."""
        return self._spanned(lambda: self._engine_now().sleep(level), tags)

    def release_kv_cache(self) -> Reply:
        """Free the KV cache; weights stay."""
        return self._command(lambda: self._engine_now().release_kv_cache())

    def wake(self, kv_cache: bool, tags: Tags) -> Reply:
        """Undo sleep, of the weights alone or with the KV cache."""
        return self._spanned(lambda: self._engine_now().wake(kv_cache=kv_cache), tags)

    def close(self) -> None:
        """Shut the engine down with all its processes."""
        if self._engine is not None and self._thread.is_alive():
            self._command(self._end_engine)
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _end_engine(self) -> None:
        engine, self._engine = self._engine_now(), None
        conversations, self._conversations = self._conversations, None
        if conversations is not None:
            conversations.close()
        engine.close()

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException as error:
            self._fail(error)

    def _turn(self) -> None:
        conversations = self._conversations
        if not self._commands.empty() and (self._commands.queue[0].keep or not self._running()):
            self._act(self._commands.get())
            return
        if conversations is None:
            self._pause()
            return
        with self._changed:
            fresh, self._incoming = (self._incoming, []) if self._commands.empty() else ([], self._incoming)
        if fresh:
            conversations.add(fresh)
            if self._busy_since is None:
                self._busy_since = self._began()
            self._tracer.counter("running", self._pool, float(conversations.unfinished), self._group)
        if conversations.unfinished:
            self._deliver(conversations.step())
        else:
            self._pause()

    def _deliver(self, done: list[Completion]) -> None:
        empty = not self._running()
        if not done and not empty:
            return
        with self._changed:
            self._finished += done
            if empty:
                self._end_span()
            self._changed.notify_all()

    def _end_span(self) -> None:
        """Ends the span of the batch that ran, if one did."""
        if self._busy_since is None:
            return
        self._note_span("actor.generate", self._pool, self._busy_since, time.time())
        if self._conversations is not None:
            for start_s, end_s in self._conversations.taken():
                self._note_span("environment.answer", CPU_POOL, start_s, end_s)
        self._tracer.counter("running", self._pool, 0.0, self._group)
        self._read_memory(self._busy_since)
        self._busy_since = None

    def _note_span(self, name: str, pool: str, start_s: float, end_s: float) -> None:
        role, _, kind = name.partition(".")
        span = Span(
            name=name,
            role=role,
            kind=kind,
            pool=pool,
            group=self._group,
            step=self._step,
            start_s=start_s,
            end_s=max(start_s, end_s),
            bound_by=MEASURED,
        )
        self._tracer.add(span)

    def _began(self) -> float:
        """Now, when a batch or a command begins."""
        if self._engine is not None:
            self._engine.forget_peaks()
        return time.time()

    def _read_memory(self, start_s: float) -> None:
        """Reads the memory of what began at `start_s` and has just ended."""
        if self._engine is not None:
            self._reading = dict(self._engine.memory())
            self._note_memory(self._reading, start_s)

    def _pause(self) -> None:
        with self._changed:
            if not self._incoming and self._commands.empty():
                self._changed.wait(IDLE_S)

    def _running(self) -> bool:
        return self._conversations is not None and self._conversations.unfinished > 0

    def _act(self, command: _Command) -> None:
        self._end_span()  # of a batch: the engine is halted
        start_s = self._began()
        try:
            command.result = command.act()
            self._read_memory(start_s)
        except BaseException as error:
            command.error = error
        command.done.set()
        if self._running():
            self._busy_since = self._began()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        while not self._commands.empty():
            command = self._commands.get()
            command.error = error
            command.done.set()
        with self._changed:
            self._changed.notify_all()

    # --- helpers ----------------------------------------------------------------------------------

    def _command(self, act: Callable[[], Any], *, keep: bool = True) -> Reply:
        self._raise()
        command = _Command(act=act, keep=keep, done=threading.Event())
        with self._changed:
            self._commands.put(command)
            self._changed.notify_all()
        while not command.done.wait(1.0):
            self._raise()
        if command.error is not None:
            raise command.error
        return Reply(value=command.result, recorded=self._tracer.take(), memory=self._reading)

    def _spanned(self, act: Callable[[], Any], tags: Tags, *, keep: bool = True) -> Reply:
        def timed() -> Any:
            with self._span("actor", tags):
                return act()

        return self._command(timed, keep=keep)

    def _engine_now(self) -> RolloutEngine:
        assert self._engine is not None, "the engine is built first"
        return self._engine

    def _raise(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the rollout engine failed: {self._failure}") from self._failure
