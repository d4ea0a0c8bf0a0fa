"""Untrusted Python code, confined and limited: network, files, processes, memory, CPU and wall time, output.

Each worker is a small interpreter (fork_server.py) inside bubblewrap where it is installed, else inside
namespaces of its own, else under landlock and seccomp alone (isolation.py); every execution is a fresh fork
of it that can be killed with all its descendants. `strength` says in words what is in force. Where neither
namespaces nor landlock with seccomp can be had, nothing runs.

What it does not do: the tests' process has a memory limit of its own, as large as the program's; a bug in the
kernel is a way out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from executor.rewards import isolation, protocol
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen

_log = logging.getLogger(__name__)

Mode = Literal["bubblewrap", "namespaces", "kernel"]
MODES: tuple[Mode, ...] = ("bubblewrap", "namespaces", "kernel")
"""Strongest first."""

_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); import executor.rewards.fork_server as server; "
    "sys.path.pop(0); server.main(sys.argv[1])"
)
_INSIDE = "/sandbox"  # where bubblewrap shows the worker's own code
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000_000
_START_S = 30.0
_GRACE_S = 10.0  # beyond the wall limit, until the worker itself counts as lost
_REMOVAL_S = 120.0  # of a tree that is a thousand folders deep, on a slow disk
_CAPABILITIES = "SYS_ADMIN SETUID SETGID SETPCAP KILL CHOWN DAC_OVERRIDE FOWNER"
_SERVER_PARTS = "__init__ cases fork_server isolation seccomp protocol problem program values verifier"


Status = Literal["passed", "failed", "error", "exited", "timeout", "memory", "output", "killed"]
"""failed: a test; error: the code itself; exited: ended before its tests; output: wrote too much."""


@frozen
class CodeRun:
    """One execution."""

    code: str
    tests: str = ""
    """Statements (asserts) that call what the code defines (verifier.py); empty: it is run as `__main__`."""
    prefix: str = ""
    """The problem's own text before the code; what it defines in full the tests take from it."""
    entry_point: str = ""
    """What is tested, where the tests define `check(candidate)` or the name is a built-in's."""
    stdin: str = ""
    wall_s: float = 5.0
    memory_bytes: int = 256 * 2**20
    """Memory that the program may take beyond the interpreter's own, its processes and files together."""
    output_bytes: int = 65536
    """Most that may be written to stdout, and to stderr."""
    processes: int = 1
    """More than 1 lets it start others, where pid namespaces can be had."""


@frozen
class CodeOutcome:
    """How an execution ended."""

    status: Status
    output: str
    errors: str
    error: str
    """Why it did not pass."""
    seconds: float


class Sandbox:
    """A pool of confined workers; `run` may be called from several threads."""

    def __init__(self, workers: int = 1, *, mode: Mode | None = None, modules: Sequence[str] = ()) -> None:
        """`mode` None: the strongest that works here. `modules` of others that programs may import.

        Raises:
            RlhfsimError: nothing confines here, or a module is not installed.
        """
        assert workers >= 1, "a sandbox needs a worker"
        if sys.platform != "linux":
            raise _impossible("untrusted code can be confined on Linux only")
        first = _first_worker(mode, Modules.of(modules))
        self.mode: Mode = first.mode
        self.facts: Mapping[str, Any] = first.facts
        self._workers = [first, *(ConfinedWorker(self.mode, first.modules) for _ in range(workers - 1))]
        self._free: queue.SimpleQueue[ConfinedWorker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def run(self, program: CodeRun) -> CodeOutcome:
        """Execute one program; waits for a free worker."""
        worker = self._free.get()
        try:
            return CodeOutcome(**worker.run(program))
        finally:
            self._free.put(worker)

    def map(self, programs: Sequence[CodeRun]) -> list[CodeOutcome]:
        """Execute many, as many at once as there are workers; outcomes in their order."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(self.run, programs))

    def strength(self) -> str:
        """The protections in force, in words, a line each."""
        private = self.mode != "kernel"
        who = {
            "bubblewrap": "bubblewrap",
            "namespaces": "own namespaces (bubblewrap is not installed or not wanted)",
            "kernel": "no namespaces: landlock, seccomp and kernel limits only",
        }[self.mode]
        ruled = f"landlock version {self.facts['landlock']}"
        filtered = "seccomp filter" if self.facts["seccomp"] else ""
        user = f"user id {self.facts['uid']}" if self.facts["uid"] is not None else "the caller's user"
        lines = {
            "confined by": who,
            "files": "private root with read-only system and Python files, one scratch folder in memory"
            if private
            else "scratch folder only for writing; system and Python files readable",
            "more on files": ruled if self.facts["landlock"] else "no landlock in this kernel",
            "network": ", ".join(filter(None, ["no interfaces" if private else "", filtered])),
            "processes": "pid namespace of its own per execution, killed as a whole"
            if self.facts["pids"]
            else "cannot start any (seccomp), so that none can be left",
            "user": f"{user}, no capabilities, no new privileges",
            "verdict": "tests in a process that the program cannot touch, which gets plain data only",
            "limits": "memory (address space, files, buffers), CPU and wall time, tasks, file size, output",
        }
        return "\n".join(f"{name}: {text}" for name, text in lines.items() if text)

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


def _first_worker(mode: Mode | None, modules: Modules) -> ConfinedWorker:
    """A worker in the given mode, or in the strongest that starts and is strong enough."""
    reasons = []
    for candidate in MODES if mode is None else (mode,):
        try:
            return ConfinedWorker(candidate, modules)
        except RlhfsimError as error:
            reasons.append(f"{candidate}: {error.message}")
    raise _impossible("; ".join(reasons))


def _impossible(reason: str) -> RlhfsimError:
    """The error for a machine, or a mode, that cannot confine code."""
    return RlhfsimError(
        "sandbox-unavailable",
        f"untrusted code cannot be confined here: {reason}",
        help="install bubblewrap, allow user namespaces, "
        "or use a kernel with landlock and seccomp (5.13 or newer)",
    )


@frozen
class Modules:
    """What programs may import beyond the standard library."""

    names: tuple[str, ...]
    places: tuple[str, ...]
    """Folders in which they and what they need lie."""

    @classmethod
    def of(cls, names: Sequence[str]) -> Modules:
        """Where they are installed."""
        origins = {name: getattr(importlib.util.find_spec(name), "origin", None) for name in names}
        if absent := [name for name, origin in origins.items() if origin is None]:
            raise RlhfsimError(
                "sandbox-modules",
                f"rewards[].modules: {', '.join(absent)} cannot be imported here",
                help="install it where the run starts, or leave it out",
            )
        files = [Path(str(origin)) for origin in origins.values()]
        places = [file.parents[1] if file.name == "__init__.py" else file.parent for file in files]
        return cls(names=tuple(names), places=tuple(dict.fromkeys(map(str, places))))


class ConfinedWorker:
    """One interpreter that executes programs one after the other; replaced when it is lost."""

    def __init__(self, mode: Mode, modules: Modules) -> None:
        """Start it.

        Raises:
            RlhfsimError: the mode cannot be had here, or is too weak.
        """
        self.mode, self.modules = mode, modules
        self.facts: dict[str, Any] = {}
        self._start()

    def run(self, program: CodeRun) -> dict[str, Any]:
        """The outcome of one program, its fields as a dictionary; bounded by its wall limit."""
        try:
            if self._process.poll() is not None:
                self._restart()
            job = asdict(program) | {"tested": bool(program.tests)}
            tests = {name: job.pop(name) for name in ("tests", "entry_point")}
            protocol.write_message(self._input, json.dumps(job).encode())
            if program.tests:
                tests["prefix"] = program.prefix
                protocol.write_message(self._input, json.dumps(tests).encode())
            return self._receive(program.wall_s + _GRACE_S)
        except (OSError, TimeoutError, EOFError) as error:
            _log.warning("a sandbox worker is lost and replaced: %s", error)
            self._restart()
            empty = {"output": "", "errors": "", "seconds": 0.0}
            return {"status": "killed", "error": str(error), **empty}

    def close(self) -> None:
        """End the worker and remove its scratch folder."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_GRACE_S)
        self._output.close()
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self._scratch, ignore_errors=True)
        if os.path.exists(self._scratch):  # a tree too deep for Python
            subprocess.run(["rm", "-rf", "--", self._scratch], check=False, timeout=_REMOVAL_S)

    def _restart(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()
        self._start()

    def _start(self) -> None:
        if self.mode == "bubblewrap" and shutil.which("bwrap") is None:
            raise _impossible("bwrap is not installed")
        self._scratch = tempfile.mkdtemp(prefix="rlhfsim-sandbox-", dir=_scratch_parent(self.mode))
        python, root = (
            str(getattr(sys, "_base_executable", sys.executable)),
            Path(__file__).resolve().parents[2],
        )
        # a user id of this worker alone (as root), so that its task count is its own
        uid = _FIRST_UID + secrets.randbelow(_NUM_UIDS)
        settings = {"mode": self.mode, "scratch": self._scratch, "uid": uid} | asdict(self.modules)
        around = self.mode == "bubblewrap"
        boot = _BOOT.format(root=_INSIDE if around else str(root))
        command = [os.path.realpath(python), "-I", "-S", "-c", boot, json.dumps(settings)]
        if around:
            command = [*_bubblewrap(root, self._scratch, self.modules.places), *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8"} | {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            facts = self._receive(_START_S)
        except (TimeoutError, EOFError) as error:
            facts = {"failed": str(error)}
        if reason := _too_weak(facts):
            self.close()
            raise _impossible(reason)
        self.facts = facts

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        message = protocol.receive(self._output.fileno(), timeout_s, "the sandbox worker")
        return json.loads(message)  # type: ignore[no-any-return]


def _scratch_parent(mode: Mode) -> str | None:
    """Where scratch folders lie; in namespaces each is a small file system of its own.

    Raises:
        RlhfsimError: files would take memory that no limit counts.
    """
    if mode != "kernel":
        return None
    for folder in (tempfile.gettempdir(), "/var/tmp"):
        if os.access(folder, os.W_OK) and not isolation.in_memory(folder):
            return folder
    raise _impossible("its files would lie in memory, beyond the limit: set TMPDIR to a folder on a disk")


def _too_weak(facts: Mapping[str, Any]) -> str:
    """Why the worker's protections are not enough; empty where they are."""
    if "failed" in facts:
        return str(facts["failed"])
    if facts["mode"] == "kernel" and not (facts["seccomp"] and facts["landlock"]):
        return "this kernel offers no namespaces and not both of seccomp and landlock"
    if not (facts["pids"] or facts["seccomp"]):
        return "processes can neither be counted nor refused"
    return ""


def _bubblewrap(root: Path, scratch: str, places: Sequence[str]) -> list[str]:
    """bwrap with the view of `isolation.enter_namespaces`; as root it keeps what it needs to drop root."""
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup-try", "--dev", "/dev", "--proc", "/proc", "--chdir", "/"]
    if os.geteuid() == 0:
        for name in _CAPABILITIES.split():
            command += ["--cap-add", f"CAP_{name}"]
    else:
        command += ["--unshare-user", "--uid", str(isolation.NOBODY), "--gid", str(isolation.NOBODY)]
    for path in isolation.readable(places):
        if path.startswith("/dev/"):
            continue
        for parent in reversed(Path(path).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        link = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    for name in ("__init__", *(f"rewards/{part}" for part in _SERVER_PARTS.split())):
        inside = f"{_INSIDE}/executor/{name}.py"
        command += ["--ro-bind", str(root / "executor" / f"{name}.py"), inside]
    size = ["--perms", "0700", "--size", str(isolation.SCRATCH_BYTES)]
    # its own root and /dev are in memory too: nothing but the scratch folder may grow
    fixed = ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, *size, "--tmpfs", scratch, *fixed, "--"]
