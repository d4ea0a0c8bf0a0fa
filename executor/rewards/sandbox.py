"""Untrusted Python code, confined and limited: network, files, processes, memory, CPU and wall time, output.

Each worker is a small interpreter (executor/rewards/fork_server.py) inside bubblewrap where it is installed, else
inside namespaces of its own, else under landlock and seccomp alone; every execution is a fresh fork of it that
can be killed with all its descendants. `strength` says in words what is in force. Where neither namespaces nor
landlock with seccomp can be had, nothing runs.

What it does not do: total memory over several processes is not capped (each process is, and by default there is
only one); a bug in the kernel is a way out.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from executor.rewards.confined import MODES as MODES
from executor.rewards.confined import Mode as Mode
from executor.rewards.confined import Worker, impossible
from rlhfsim.errors import RlhfsimError

Status = Literal["passed", "failed", "error", "exited", "timeout", "memory", "output", "killed"]
"""failed: a test; error: the code itself; exited: ended before its tests; output: wrote too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One execution."""

    code: str
    tests: str = ""
    """Statements (asserts) that run after the code in its namespace; empty: the code is run as `__main__`."""
    stdin: str = ""
    wall_s: float = 5.0
    memory_bytes: int = 256 * 2**20
    """Address space that a process may take beyond the interpreter's own."""
    output_bytes: int = 65536
    """Most that may be written to stdout, and to stderr."""
    processes: int = 1
    """More than 1 lets it start others, where pid namespaces can be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an execution ended."""

    status: Status
    output: str
    errors: str
    error: str
    """Why it did not pass."""
    seconds: float


class Sandbox:
    """A pool of confined workers; `run` may be called from several threads."""

    def __init__(self, workers: int = 1, *, mode: Mode | None = None) -> None:
        """`mode` None: the strongest that works here."""
        assert workers >= 1, "a sandbox needs a worker"
        if sys.platform != "linux":
            raise impossible("untrusted code can be confined on Linux only")
        first = _first_worker(mode)
        self.mode: Mode = first.mode
        self.facts: Mapping[str, Any] = first.facts
        others = [Worker(self.mode) for _ in range(workers - 1)]
        self._workers = [first, *others]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def run(self, program: Program) -> Outcome:
        """Execute one program; waits for a free worker."""
        worker = self._free.get()
        try:
            job = {name: getattr(program, name) for name in Program.__slots__}
            return Outcome(**worker.run(job))
        finally:
            self._free.put(worker)

    def map(self, programs: Sequence[Program]) -> list[Outcome]:
        """Execute many, as many at once as there are workers; outcomes in their order."""
        if len(self._workers) == 1:
            return [self.run(program) for program in programs]
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(self.run, programs))

    def strength(self) -> str:
        """The protections in force, in words, a line each."""
        return describe(self.mode, self.facts)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def strength(mode: Mode | None = None) -> str:
    """The protections that this machine offers (in `mode`), in words."""
    with Sandbox(mode=mode) as sandbox:
        return sandbox.strength()


def describe(mode: Mode, facts: Mapping[str, Any]) -> str:
    """Words for what a worker reported."""
    private = mode != "kernel"
    who = {
        "bubblewrap": "bubblewrap",
        "namespaces": "own namespaces (bubblewrap is not installed or not wanted)",
        "kernel": "no namespaces: landlock, seccomp and kernel limits only",
    }[mode]
    ruled = f"landlock version {facts['landlock']}"
    filtered = "seccomp filter" if facts["seccomp"] else ""
    user = f"user id {facts['uid']}" if facts["uid"] is not None else "the caller's user"
    lines = {
        "confined by": who,
        "files": "private root with read-only system and Python files, one scratch folder in memory"
        if private
        else "scratch folder only for writing; system and Python files readable",
        "more on files": ruled if facts["landlock"] else "no landlock in this kernel",
        "network": ", ".join(filter(None, ["no interfaces" if private else "", filtered])),
        "processes": "pid namespace of its own per execution, killed as a whole"
        if facts["pids"]
        else "cannot start any (seccomp), so that none can be left",
        "user": f"{user}, no capabilities, no new privileges",
        "limits": "address space per process, CPU and wall time, tasks, file size, output",
    }
    return "\n".join(f"{name}: {text}" for name, text in lines.items() if text)


def _first_worker(mode: Mode | None) -> Worker:
    """A worker in the given mode, or in the strongest that starts and is strong enough."""
    reasons = []
    for candidate in MODES if mode is None else (mode,):
        try:
            return Worker(candidate)
        except RlhfsimError as error:
            reasons.append(f"{candidate}: {error.message}")
    raise impossible("; ".join(reasons))
