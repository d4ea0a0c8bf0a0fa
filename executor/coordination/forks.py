"""One process that has imported the engines: ranks and replicas of a run are forked from it.

Torch, DeepSpeed and vLLM take more CPU to import than a small engine takes to build, and every process of a
run would import them. `forks.py serve SOCKET MODULE...` imports the modules once and serves; any other words
are Ray's: it is what Ray runs in place of its own setup_worker.py. It asks the server that FORK_SERVER names
for a fork, and lives and ends as that one does; where none answers it becomes the worker itself. A fork runs
the program that it would have run, with its arguments, environment, folder and outputs; so do processes that
`multiprocessing` spawns, with the pipes that they are given. Standard library only, until the modules are
imported. Not for GPUs: libraries that have looked for one must not be forked.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

LOOK_FOR_RAY = ("vllm.v1.executor.ray_utils", "vllm.v1.metrics.ray_wrappers")
"""Imported by each fork for itself: they note whether Ray is there."""
OF_COMPILERS = ("torch._inductor.lowering", "scipy.signal")
"""A quarter of all imports. Where nothing is compiled nobody needs them: vLLM 0.32 patches the one where it
is there (env_override.py), and resamples sound, which no run has, with the other (multimodal/audio.py)."""
VARIABLE = "FORK_SERVER"
"""Path of its socket."""
LENGTH_BYTES = 4
FORKED = b"f"
"""What the server says first."""
PREFIX = "rlhfsim-forks-"
"""Prefix of the folder of a run's socket."""
SERVED_FILES = 256
"""Numbers of files that a fork does not take over from the server end below."""
MAX_FILES = 64
"""Files that a fork is given, its outputs among them."""
SPAWNED = "--multiprocessing-fork"
"""Last word of the command of a process that `multiprocessing` spawns."""


# --- the asking side --------------------------------------------------------------------------------


def ask(
    address: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    folder: Path | None = None,
    files: Sequence[int] = (),
) -> socket.socket:
    """A fork that runs `words`; the connection gives its exit code, and closing it ends the fork.

    `files`: numbers of open files that it has too, under the same numbers.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    asked = {"words": words, "environment": dict(environment), "folder": str(folder or os.getcwd())}
    request = json.dumps(asked | {"files": list(files)}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*outputs, *files]))]
    connection.sendmsg([len(request).to_bytes(LENGTH_BYTES, "big")], rights)
    connection.sendall(request)
    return connection


def ended(connection: socket.socket) -> tuple[int, float]:
    """Exit code and CPU seconds of the fork, when it has ended; -1: the server ended before."""
    said = connection.recv(64)
    if said == FORKED:
        said = connection.recv(64)
    code, _, cpu_s = said.removeprefix(FORKED).decode().partition(" ")
    return int(code or "-1"), float(cpu_s or "0")


def exit_code(connection: socket.socket) -> int:
    """Exit code of the fork, when it has ended."""
    return ended(connection)[0]


def start(
    address: str,
    modules: Sequence[str],
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    errors: int | None = None,
) -> subprocess.Popen[str]:
    """A server in a process of its own, which says `ready` when all is imported, and ends with its input.

    `errors`: the file for what libraries say while they are imported; None: where this process says it.
    """
    return subprocess.Popen(
        [python, "-P", __file__, "serve", address, *modules],
        text=True,
        env=environment,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )


@contextmanager
def of_run(modules: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """Inside, workers of a cluster that is started here are forks of a process with these modules.

    Nobody waits for it; where this process has such a server already, that one serves.
    """
    if VARIABLE in os.environ:
        yield
        return
    own = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    variables = os.environ | environment | {"PYTHONPATH": own}
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        log.open("w") as said,
    ):
        address = os.path.join(folder, "socket")
        with start(address, modules, environment=variables, errors=said.fileno()) as server:
            os.environ[VARIABLE] = address
            try:
                yield
            finally:
                del os.environ[VARIABLE]
                server.kill()  # its forks end with the cluster


@contextmanager
def in_place_of_new_workers() -> Iterator[None]:
    """Inside, Ray is started with this program to set its workers up, where a server can be asked."""
    from ray._private import ray_constants as ray

    usual = ray.SETUP_WORKER_FILENAME
    if VARIABLE in os.environ:
        ray.SETUP_WORKER_FILENAME = __file__  # joined to the folder of Ray's own: an absolute path stays
    try:
        yield
    finally:
        ray.SETUP_WORKER_FILENAME = usual


def set_up_worker() -> NoReturn:
    """Set the variables of a runtime environment and run the worker, as Ray's setup_worker.py does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    own, words = parser.parse_known_args()
    context = json.loads(own.serialized_runtime_env_context)
    os.environ |= context.get("env_vars", {})
    _run(words)


def _run(words: Sequence[str], files: Sequence[int] = ()) -> NoReturn:
    """A fork of the server runs `python WORD...`; where none answers, this process."""
    with suppress(OSError), ask(os.environ[VARIABLE], words, os.environ, (1, 2), files=files) as connection:
        if connection.recv(len(FORKED)):
            sys.exit(exit_code(connection))
    os.execv(sys.executable, [sys.executable, *words])


def in_place_of_spawned() -> None:
    """From now on processes that this one spawns are forks, where a server can be asked."""
    if VARIABLE in os.environ:
        spawn: Any = importlib.import_module("multiprocessing.spawn")
        spawn.get_command_line = _command_line


def _command_line(**pipes: int) -> list[str]:
    """Words for a process that asks for the fork, in place of `multiprocessing.spawn.get_command_line`."""
    given = ", ".join(f"{name}={number}" for name, number in pipes.items())
    program = f"from multiprocessing.spawn import spawn_main; spawn_main({given})"
    return [sys.executable, "-S", __file__, "-c", program, SPAWNED]


def _open_files() -> list[int]:
    """Numbers of this process's open files, without its inputs and outputs."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # what listed them
            os.fstat(number)
            found += [number] * (number > 2)
    return found


# --- the serving side -------------------------------------------------------------------------------


def serve(address: str, *modules: str) -> None:
    """Fork at each request, until the process that started this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run hears of it, and ends its processes
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
        listener.bind(address)
        listener.listen(64)
        _import(modules)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        waiting.register(listener, selectors.EVENT_READ, None)
        waiting.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is sys.stdin:  # closed: nobody is there to ask, or to clean up
                    _remove(Path(address).parent)
                    return
                if key.fileobj is listener:
                    _fork(listener, waiting)
                else:
                    _end(key, waiting)


def _remove(folder: Path) -> None:
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def _import(modules: Sequence[str]) -> None:
    """Without Ray, which reads what a raylet says to its worker while it is imported."""
    gc.disable()
    compiled = os.environ.get("TORCHDYNAMO_DISABLE") != "1"
    left_out = [n for n in ("ray", *(() if compiled else OF_COMPILERS)) if n not in sys.modules]
    sys.modules |= dict.fromkeys(left_out)  # their imports fail
    for name in modules:
        with suppress(ImportError):  # a fork that needs it says why
            importlib.import_module(name)
    for name in left_out:
        del sys.modules[name]
    for name in LOOK_FOR_RAY:
        parent, _, own = name.rpartition(".")
        if sys.modules.pop(name, None) is not None and hasattr(sys.modules[parent], own):
            delattr(sys.modules[parent], own)
    gc.enable()
    gc.freeze()  # what all forks share is not collected, so not copied, in any


def _fork(listener: socket.socket, waiting: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    files = array.array("i")
    head, rights, _, _ = connection.recvmsg(LENGTH_BYTES, socket.CMSG_SPACE(MAX_FILES * files.itemsize))
    length = int.from_bytes(head, "big")
    request = connection.recv(length, socket.MSG_WAITALL) if rights else b""
    files = array.array("i", rights[0][2] if rights else b"")
    if not request or len(request) < length:  # who asked was ended in the middle
        connection.close()
        return
    child = os.fork()
    if child == 0:
        listener.close()
        _become(json.loads(request), files)
    for file in files:
        os.close(file)
    with suppress(OSError):
        connection.sendall(FORKED)
    fork = (child, connection)
    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, fork)
    waiting.register(connection, selectors.EVENT_READ, fork)


def _end(key: selectors.SelectorKey, waiting: selectors.BaseSelector) -> None:
    if waiting.get_map().get(key.fd) != key:  # the other of the two was first in the same round
        return
    child, connection = key.data
    if key.fileobj is connection:  # who asked has ended
        waiting.unregister(connection)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        return
    waiting.unregister(key.fileobj)
    os.close(int(key.fd))
    with suppress(KeyError):
        waiting.unregister(connection)
    _, status, usage = os.wait4(child, 0)
    with connection, suppress(OSError):
        cpu_s = usage.ru_utime + usage.ru_stime
        connection.sendall(f"{os.waitstatus_to_exitcode(status)} {cpu_s:.3f}".encode())


def _become(request: dict[str, Any], files: array.array[int]) -> NoReturn:
    """Run the program; never returns into the server."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    received = [fcntl.fcntl(file, fcntl.F_DUPFD, SERVED_FILES) for file in files]
    os.closerange(3, SERVED_FILES)
    for file, number in zip(received, (1, 2, *request["files"]), strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["words"][0] == "-c":
        with suppress(ImportError):  # looks for the place of its title while the environment is the server's
            importlib.import_module("setproctitle").getproctitle()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    in_place_of_spawned()
    program, *_ = sys.argv = list(request["words"])
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.dirname(program), *(folder for folder in own if folder not in sys.path)]
    code: Any = 0
    try:
        if program == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    elif sys.argv[-1] == SPAWNED:
        _run(sys.argv[1:], _open_files())
    else:
        set_up_worker()
