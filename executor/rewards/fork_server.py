"""The fork server of the sandbox: a small, confined interpreter, one fresh child for every execution.

Forking a warm interpreter costs about a millisecond, starting one fifteen. The parent talks to it over stdin
and stdout in JSON (protocol.py); nothing that untrusted code writes is ever unpickled or executed outside of
its own child. Standard library only; runs under `python -I -S`.

The verdict comes from the same process as the code, with a token that the fork server made: an early exit, a
signal or a printed "passed" earns nothing. Code that searches the interpreter's frames for the token could
still forge it; tests by input and output (executor/rewards/rules.py) are compared outside and cannot be
forged.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import json
import os
import secrets
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from executor.rewards import isolation, protocol, seccomp

_PRELOADED = (
    "array ast base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal "
    "enum fractions functools hashlib heapq inspect io itertools json linecache math numbers operator queue "
    "random re statistics string struct textwrap threading tokenize typing unicodedata uuid"
)
"""Imported once, for all children: faster, and there even where a child may not read the files."""
_REPORT = 3  # file descriptor of the child's verdict
_TASKS = 32  # threads of a program that may not start processes
_CHUNK = 65536
_MAX_ERROR = 2000  # characters


def main(argument: str) -> None:
    """Serve executions until stdin closes."""
    settings = json.loads(argument)
    requests, replies = _take_pipes()

    def reply(message: Mapping[str, Any]) -> None:
        protocol.write_message(replies, json.dumps(message).encode())

    for name in _PRELOADED.split():
        __import__(name)
    try:
        facts, ruleset = _confine(settings["mode"], settings["scratch"], settings["uid"])
    except OSError as error:
        reply({"failed": str(error)})
        return
    reply(facts)
    _settle(settings["scratch"])
    for processes in (False, True) if facts["seccomp"] else ():
        _executing(None, processes)  # kept, for the children
    while (request := protocol.read_message(requests)) is not None:
        reply(_Execution(json.loads(request), facts, ruleset, settings["scratch"]).outcome())


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move stdin and stdout away, so that nothing prints into the protocol."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    return pipes


def _confine(mode: str, scratch: str, wanted: int) -> tuple[dict[str, Any], int | None]:
    """Enter the mode's namespaces, try every further protection once; what is in force, landlock ruleset."""
    root = os.geteuid() == 0
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # there is no /proc later
    uid = _mapped(wanted) if root else None
    if mode == "namespaces":
        isolation.enter_namespaces(scratch)
    elif mode == "bubblewrap" and not root:
        with contextlib.suppress(OSError):
            isolation.own_user_namespace(os.geteuid(), os.getegid())
    if uid is not None:
        os.chown(scratch, uid, uid)
    isolation.hide()
    isolation.renounce()
    ruleset = isolation.landlock(scratch) if isolation.landlock_version() else None
    facts = {
        "mode": mode,
        "uid": uid,
        "baseline": pages * os.sysconf("SC_PAGE_SIZE"),
        "pids": mode != "kernel" and _own_pids_work(),
        "landlock": isolation.landlock_version() if ruleset is not None else 0,
        "seccomp": seccomp.available() and seccomp.install(isolation.LIBC, seccomp.lasting()),
    }
    return facts, ruleset


def _mapped(wanted: int) -> int:
    """The wanted user id; nobody where ids are scarce (containers that map 65536 of them)."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= wanted < first + count:
            return wanted
    return isolation.NOBODY


def _settle(scratch: str) -> None:
    """Do once what would be the same in every child."""
    os.chdir(scratch)
    os.environ.clear()
    os.environ.update(HOME=scratch, TMPDIR=scratch, PATH="/usr/bin:/bin")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # objects over the numbers 0 to 2: a child puts its own files behind them
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    gc.freeze()  # children do not visit, hence do not copy, what is here


def _own_pids_work() -> bool:
    """Whether a child can be process 1 of a pid namespace."""
    try:
        pid = isolation.clone(own_pids=True)
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


class _Execution:
    """One program in one child."""

    def __init__(self, job: dict[str, Any], facts: dict[str, Any], ruleset: int | None, scratch: str) -> None:
        self.job, self.facts, self.ruleset, self.scratch = job, facts, ruleset, scratch
        self.token = secrets.token_hex(16)
        self.processes = int(job["processes"]) if facts["pids"] else 1

    def outcome(self) -> dict[str, Any]:
        """Run it to its end or its limits; afterwards nothing of it is left."""
        pipes = [os.pipe() for _ in range(3)]  # output, errors, verdict
        start = time.monotonic()
        pid = isolation.clone(own_pids=self.facts["pids"])
        if pid == 0:
            self._child([write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        reads = [read for read, _ in pipes]
        stopped, texts = self._watch(pid, reads, start + self.job["wall_s"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # process 1 of its namespace: all others die with it
        _, status, usage = os.wait4(pid, 0)
        for read in reads:
            os.close(read)
        self._clean()
        if not stopped and os.WIFSIGNALED(status) and usage.ru_utime >= self._cpu_s() - 0.5:
            stopped = "timeout"
        return {
            **self._verdict(stopped, status, texts[2]),
            "output": texts[0].decode(errors="replace"),
            "errors": texts[1].decode(errors="replace"),
            "seconds": time.monotonic() - start,
        }

    def _cpu_s(self) -> int:
        return int(self.job["wall_s"]) + 2

    def _watch(self, pid: int, reads: list[int], deadline: float) -> tuple[str, list[bytes]]:
        """Collect what the child writes until it ends; `timeout` or `output` where a limit ended it."""
        limit = self.job["output_bytes"]
        texts = {read: bytearray() for read in reads}
        end = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (*reads, end):
            poll.register(descriptor, select.POLLIN)
        stopped, ended = "", False
        while not stopped and not ended:
            left = deadline - time.monotonic()
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)]
            stopped = "" if left > 0 else "timeout"
            ended = end in ready
            for read in texts.keys() & set(ready):
                if not _read_into(read, texts[read], limit):
                    poll.unregister(read)
                if len(texts[read]) > limit:
                    stopped = "output"
        os.close(end)
        for read, text in texts.items() if ended else ():
            os.set_blocking(read, False)
            with contextlib.suppress(BlockingIOError):
                while len(text) <= limit and _read_into(read, text, limit):
                    pass
        return stopped, [bytes(text[:limit]) for text in texts.values()]

    def _verdict(self, stopped: str, status: int, report: bytes) -> dict[str, Any]:
        if stopped:
            return {"status": stopped, "error": ""}
        try:
            verdict = json.loads(report)
            if secrets.compare_digest(str(verdict["token"]), self.token):
                return {"status": str(verdict["status"]), "error": str(verdict["error"])}
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # it ended before its verdict, or forged one
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return {"status": "killed", "error": f"ended by {name}"}
        return {"status": "exited", "error": f"exit status {os.WEXITSTATUS(status)}"}

    def _clean(self) -> None:
        """Empty the scratch folder; where that fails, end: the parent then starts a worker with a new one."""
        os.chmod(self.scratch, 0o700)
        for name in os.listdir(self.scratch):
            path = os.path.join(self.scratch, name)
            if os.path.isdir(path) and not os.path.islink(path):
                _open_up(path)
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def _child(self, writes: list[int]) -> None:
        """In the child: confine, run, report; never returns."""
        try:
            self._prepare(writes)
            report = _run_program(self.job)
            os.write(_REPORT, json.dumps({**report, "token": self.token}).encode())
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _prepare(self, writes: list[int]) -> None:
        os.setsid()
        text = os.memfd_create("stdin")
        os.write(text, self.job["stdin"].encode(errors="replace"))
        os.lseek(text, 0, os.SEEK_SET)
        # first to numbers above all targets: dup2 must not overwrite a descriptor that is still needed
        ruleset = None if self.ruleset is None else _above(self.ruleset)
        high = [_above(descriptor) for descriptor in (text, *writes)]
        for target, source in enumerate(high):
            os.dup2(source, target)
        self._confine(ruleset)
        os.closerange(_REPORT + 1, 1024)

    def _confine(self, ruleset: int | None) -> None:
        tasks = _TASKS if self.processes == 1 else self.processes
        memory = int(self.job["memory_bytes"]) + self.facts["baseline"]
        isolation.drop_privileges(self.facts["uid"])
        isolation.limit(memory=memory, cpu_s=self._cpu_s(), tasks=tasks)
        if ruleset is not None:
            isolation.restrict(ruleset)
        if self.facts["seccomp"]:
            pid = None if self.facts["pids"] else os.getpid()
            steps = _executing(pid, self.processes > 1)
            if not seccomp.install(isolation.LIBC, steps):
                raise OSError("the seccomp filter was refused")


def _run_program(job: dict[str, Any]) -> dict[str, str]:
    """The code, then its tests in the same namespace; in the child."""
    space: dict[str, Any] = {"__name__": "solution" if job["tests"] else "__main__"}
    for part, failure in (("code", "error"), ("tests", "failed")):
        try:
            exec(compile(job[part], f"<{part}>", "exec"), space)
        except MemoryError:
            return {"status": "memory", "error": "MemoryError"}
        except BaseException as error:
            if not (part == "code" and isinstance(error, SystemExit)):
                message = "".join(traceback.format_exception_only(error)).strip()[-_MAX_ERROR:]
                return {"status": failure, "error": message}
            if error.code not in (None, 0) or job["tests"]:
                return {"status": failure, "error": f"exit with {error.code!r}"}
    return {"status": "passed", "error": ""}


def _open_up(folder: str) -> None:
    """Let the owner list and empty all folders below."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


@functools.cache
def _executing(pid: int | None, processes: bool) -> bytes:
    return seccomp.executing(pid, processes=processes)


def _above(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100)


def _read_into(read: int, text: bytearray, limit: int) -> bool:
    """One read; False at the end of the pipe. Keeps one byte more than `limit` at most."""
    data = os.read(read, _CHUNK)
    text += data[: limit + 1 - len(text)]
    return bool(data)
