"""One confined worker of the sandbox: how its process is started, talked to, killed and replaced."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from executor.rewards import isolation, protocol
from rlhfsim.errors import RlhfsimError

_log = logging.getLogger(__name__)

Mode = Literal["bubblewrap", "namespaces", "kernel"]
MODES: tuple[Mode, ...] = ("bubblewrap", "namespaces", "kernel")
"""Strongest first."""

_BOOT = "import sys; sys.path.insert(0, {root!r}); import executor.rewards.fork_server as z; sys.path.pop(0); z.main(sys.argv[1])"
_INSIDE = "/sandbox"  # where bubblewrap shows the worker's own code
_FIRST_UID, _NUM_UIDS = 1_900_000_000, 100_000_000
_START_S = 30.0
_GRACE_S = 10.0  # beyond the wall limit, until the worker itself counts as lost
_CAPABILITIES = "SYS_ADMIN SETUID SETGID SETPCAP KILL CHOWN DAC_OVERRIDE FOWNER"
_WORKER_PARTS = ("__init__", "fork_server", "isolation", "seccomp", "program", "protocol")


def impossible(reason: str) -> RlhfsimError:
    """The error for a machine, or a mode, that cannot confine code."""
    return RlhfsimError(
        "sandbox-unavailable",
        f"untrusted code cannot be confined here: {reason}",
        help="install bubblewrap, allow user namespaces, or use a kernel with landlock and seccomp (5.13 or newer)",
    )


class Worker:
    """One interpreter that executes programs one after the other; replaced when it is lost."""

    def __init__(self, mode: Mode) -> None:
        """Start it.

        Raises:
            RlhfsimError: the mode cannot be had here, or is too weak.
        """
        self.mode = mode
        self.facts: dict[str, Any] = {}
        self._start()

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The outcome of one program, its fields as a dictionary; bounded by its wall limit."""
        try:
            if self._process.poll() is not None:
                self._restart()
            protocol.write_message(self._input, job)
            reply: dict[str, Any] = self._receive(job["wall_s"] + _GRACE_S)
        except (OSError, TimeoutError, EOFError) as error:
            _log.warning("a sandbox worker is lost and replaced: %s", error)
            self._restart()
            empty = {"output": "", "errors": "", "seconds": 0.0}
            return {"status": "killed", "error": str(error), **empty}
        return reply

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
        shutil.rmtree(self._scratch, ignore_errors=True)
        if os.path.exists(self._scratch):  # a tree too deep for Python
            subprocess.run(["rm", "-rf", "--", self._scratch], check=False, timeout=_GRACE_S)

    def _restart(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()
        self._start()

    def _start(self) -> None:
        if self.mode == "bubblewrap" and shutil.which("bwrap") is None:
            raise impossible("bwrap is not installed")
        self._scratch = tempfile.mkdtemp(prefix="rlhfsim-sandbox-")
        self._process = subprocess.Popen(
            _command(self.mode, self._scratch),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            facts = self._receive(_START_S)
        except (TimeoutError, EOFError) as error:
            facts = {"failed": str(error)}
        reason = _too_weak(facts)
        if reason:
            self.close()
            raise impossible(reason)
        self.facts = facts

    def _receive(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        (size,) = struct.unpack("!I", self._exactly(4, deadline))
        return json.loads(self._exactly(size, deadline))

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = b""
        descriptor = self._output.fileno()
        poll = select.poll()  # not select: descriptors may be above 1024
        poll.register(descriptor, select.POLLIN)
        while len(data) < count:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("the sandbox worker did not answer in time")
            part = os.read(descriptor, count - len(data))
            if not part:
                raise EOFError("the sandbox worker ended")
            data += part
        return data


def _too_weak(facts: Mapping[str, Any]) -> str:
    """Why the worker's protections are not enough; empty where they are."""
    if "failed" in facts:
        return str(facts["failed"])
    if facts["mode"] == "kernel" and not (facts["seccomp"] and facts["landlock"]):
        return "this kernel offers no namespaces and not both of seccomp and landlock"
    if not (facts["pids"] or facts["seccomp"]):
        return "processes can neither be counted nor refused"
    return ""


def _command(mode: Mode, scratch: str) -> list[str]:
    python = str(getattr(sys, "_base_executable", sys.executable))
    root = Path(__file__).resolve().parents[2]
    # a user id of this worker alone (as root), so that its task count is its own
    uid = _FIRST_UID + secrets.randbelow(_NUM_UIDS)
    argument = json.dumps({"mode": mode, "scratch": scratch, "uid": uid})
    shown = _INSIDE if mode == "bubblewrap" else str(root)
    start = [os.path.realpath(python), "-I", "-S", "-c", _BOOT.format(root=shown), argument]
    return [*_bubblewrap(root, scratch), *start] if mode == "bubblewrap" else start


def _bubblewrap(root: Path, scratch: str) -> list[str]:
    """bwrap with the same view as `isolation.enter_namespaces`; as root it keeps what the worker needs to drop root."""
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--dev", "/dev", "--proc", "/proc", "--chdir", "/"]
    if os.geteuid() == 0:
        for name in _CAPABILITIES.split():
            command += ["--cap-add", f"CAP_{name}"]
    else:
        command += ["--unshare-user", "--uid", str(isolation.NOBODY), "--gid", str(isolation.NOBODY)]
    for path in isolation.readable():
        if path.startswith("/dev/"):
            continue
        for parent in reversed(Path(path).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        link = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    for name in ("__init__", *(f"rewards/{part}" for part in _WORKER_PARTS)):
        inside = f"{_INSIDE}/executor/{name}.py"
        command += ["--ro-bind", str(root / "executor" / f"{name}.py"), inside]
    size = ["--perms", "0700", "--size", str(isolation.SCRATCH_BYTES)]
    return [*command, *size, "--tmpfs", scratch, "--"]
