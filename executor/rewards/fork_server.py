"""The fork server of the sandbox: a small, confined interpreter, one fresh child for every execution.

Forking a warm interpreter costs about a millisecond, starting one fifteen. The parent talks to it over stdin
and stdout in JSON (protocol.py); nothing that untrusted code writes is ever unpickled or executed outside of
its own child. Standard library only; runs under `python -I -S`.

A program with tests is two children: the code, which answers calls (program.py), and the tests, which make
the verdict (verifier.py) in an interpreter that the code never enters. The tests are never in this process's
memory, of which the code has a copy: the verifier reads them from the pipe itself. A program without tests is
judged outside, by its output (executor/rewards/rules.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from executor.rewards import isolation, program, protocol, seccomp, verifier
from executor.rewards.values import Channel

_PRELOADED = (
    "array ast base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal "
    "enum fractions functools hashlib heapq inspect io itertools json linecache math numbers operator queue "
    "random re statistics string struct textwrap threading tokenize typing unicodedata uuid"
)
"""Imported once, for all children: faster, and there even where a child may not read the files."""
_TASKS = 32  # threads of a program that may not start processes
_CHUNK = 65536
_ENDING_S = 0.2


def main(argument: str) -> None:
    """Serve executions until stdin closes."""
    settings = json.loads(argument)
    requests, replies = _take_pipes()

    def reply(message: Mapping[str, Any]) -> None:
        protocol.write_message(replies, json.dumps(message).encode())

    sys.path += settings["places"]
    try:
        for name in (*_PRELOADED.split(), *settings["names"]):
            __import__(name)
        facts, ruleset = _confine(settings)
    except (OSError, ImportError) as error:
        reply({"failed": str(error)})
        return
    reply(facts)
    _settle(settings["scratch"], settings["names"])
    for processes in (False, True) if facts["seccomp"] else ():
        _executing(None, processes)  # kept, for the children
    with contextlib.suppress(EOFError):
        while True:
            job = requests.receive()
            if "code" in job:  # else tests, whose verifier died before it read them
                reply(_Execution(job, facts, ruleset, settings["scratch"], requests).outcome())


def _take_pipes() -> tuple[Channel, BinaryIO]:
    """Move stdin and stdout away, so that nothing prints into the protocol."""
    pipes = Channel(os.dup(0), -1), os.fdopen(os.dup(1), "wb")
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    return pipes


def _confine(settings: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Enter the mode's namespaces, try every further protection once; what is in force, landlock ruleset."""
    mode, scratch = settings["mode"], settings["scratch"]
    paths = isolation.readable(settings["places"])
    root = os.geteuid() == 0
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # there is no /proc later
    uid = _mapped(settings["uid"]) if root else None
    if mode == "namespaces":
        isolation.enter_namespaces(scratch, paths)
    elif mode == "bubblewrap" and not root:
        with contextlib.suppress(OSError):
            isolation.own_user_namespace(os.geteuid(), os.getegid())
    if uid is not None:
        os.chown(scratch, uid, uid)
    isolation.hide()
    isolation.renounce()
    ruleset = isolation.landlock(scratch, paths) if isolation.landlock_version() else None
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


def _settle(scratch: str, modules: Sequence[str]) -> None:
    """Do once what would be the same in every child."""
    sys.meta_path.insert(0, program.Allowed(modules))
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


@dataclass(frozen=True, slots=True)
class _Execution:
    """One program in one child, its tests in another."""

    job: dict[str, Any]
    facts: dict[str, Any]
    ruleset: int | None
    scratch: str
    requests: Channel

    def outcome(self) -> dict[str, Any]:
        """Run it to its end or its limits; afterwards nothing of it is left."""
        start = time.monotonic()
        children, reads = self._started()
        stopped, texts = self._watch(children[-1], reads, start + self.job["wall_s"])
        report = _report(texts[2])
        if report.get("status") == "gone":  # its descriptors close before it has ended
            end = os.pidfd_open(children[0])
            select.select([end], [], [], _ENDING_S)
            os.close(end)
        statuses = []
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # process 1 of its namespace: all others die with it
            _, status, usage = os.wait4(pid, 0)
            statuses.append(status)
            if not stopped and os.WIFSIGNALED(status) and usage.ru_utime >= self._cpu_s() - 0.5:
                stopped = "timeout"
        for read in reads:
            os.close(read)
        self._clean()
        return {
            **_verdict(stopped, report, statuses),
            "output": texts[0].decode(errors="replace"),
            "errors": texts[1].decode(errors="replace"),
            "seconds": time.monotonic() - start,
        }

    def _started(self) -> tuple[list[int], list[int]]:
        """Processes, the last of which reports; where to read output, errors and the report."""
        job, pids = self.job, self.facts["pids"]
        reads, (output, errors, report) = zip(*(os.pipe() for _ in range(3)), strict=True)
        text = os.memfd_create("stdin")
        os.write(text, job["stdin"].encode(errors="replace"))
        os.lseek(text, 0, os.SEEK_SET)
        standard, given = [text, output, errors], [text, output, errors, report]
        code = job["prefix"] + job["code"]
        if job["tested"]:
            asked, asks = os.pipe()
            answers, answered = os.pipe()
            given += [asked, asks, answers, answered]
            # forked together: both confine themselves while the other one works
            children = [
                self._start([*standard, asked, answered], lambda: program.answer_calls(code), pids),
                self._start(
                    [*standard, answers, asks, report, self.requests.read], verifier.main, own_pids=False
                ),
            ]
        else:
            children = [self._start([*standard, report], lambda: program.run_alone(code), pids)]
        for descriptor in given:
            os.close(descriptor)
        return children, list(reads)

    def _cpu_s(self) -> int:
        return int(self.job["wall_s"]) + 2

    def _watch(self, pid: int, reads: list[int], deadline: float) -> tuple[str, list[bytes]]:
        """Collect what is written until `pid` ends; `timeout` or `output` where a limit ended it."""
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

    def _start(self, descriptors: list[int], work: Callable[[], None], own_pids: bool) -> int:
        """Fork a child that confines itself and works; its descriptors are these, from 0 on."""
        pid = isolation.clone(own_pids=own_pids)
        if pid:
            return pid
        try:
            os.setsid()
            # first to numbers above all targets: dup2 must not overwrite a descriptor that is still needed
            ruleset = None if self.ruleset is None else _above(self.ruleset)
            high = [_above(descriptor) for descriptor in descriptors]
            for target, source in enumerate(high):
                os.dup2(source, target)
            self._confine(ruleset, own_pids)
            os.closerange(len(descriptors), 1024)
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _confine(self, ruleset: int | None, own_pids: bool) -> None:
        processes = int(self.job["processes"]) if own_pids else 1
        tasks = _TASKS if processes == 1 else processes
        memory = isolation.address_space(int(self.job["memory_bytes"]), processes) + self.facts["baseline"]
        isolation.drop_privileges(self.facts["uid"])
        isolation.limit(memory=memory, cpu_s=self._cpu_s(), tasks=tasks)
        if ruleset is not None:
            isolation.restrict(ruleset)
        if self.facts["seccomp"]:
            steps = _executing(None if own_pids else os.getpid(), processes > 1)
            if not seccomp.install(isolation.LIBC, steps):
                raise OSError("the seccomp filter was refused")


def _report(text: bytes) -> dict[str, str]:
    """What the last process said; empty where it ended before, or said no sense."""
    try:
        report = json.loads(text)
        return {name: str(report[name]) for name in ("status", "error")}
    except (ValueError, KeyError, TypeError):
        return {}


def _verdict(stopped: str, report: dict[str, str], statuses: list[int]) -> dict[str, str]:
    """Limits first, then the report, then how the program ended (the verifier, where it did not report)."""
    if stopped:
        return {"status": stopped, "error": ""}
    if report and report["status"] != "gone":
        return report
    status = statuses[0 if report else -1]
    if os.WIFSIGNALED(status):
        return {"status": "killed", "error": f"ended by {signal.Signals(os.WTERMSIG(status)).name}"}
    return {"status": "exited", "error": f"exit status {os.WEXITSTATUS(status)}"}


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
