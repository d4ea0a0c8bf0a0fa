"""One process that has imported the engines: ranks and Ray workers of the tests are forked from it.

`fork_server.py serve SOCKET` serves; with `commands` behind it, `rlhfsim design` is imported in place of the engines.
Any other words are Ray's: it is what Ray runs in place of its own setup_worker.py: it asks the server that FORK_SERVER names
for a fork, and lives and ends as that one does.
A fork runs the program that it would have run, with its arguments, environment, folder and outputs; what it
does not do again is importing torch, DeepSpeed and vLLM, which takes more CPU than most of the tests.
"""

from __future__ import annotations

import argparse
import array
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

ENGINES = (
    "executor.engines.deepspeed.engine",
    "executor.engines.fsdp2.engine",
    "executor.engines.pipeline.engine",
    "executor.engines.transformers.engine",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "executor.engines.vllm.engine",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
)
LOOK_FOR_RAY = ("vllm.v1.executor.ray_utils", "vllm.v1.metrics.ray_wrappers")
"""Imported by each fork for itself: they note whether Ray is there."""
COMMANDS = "rlhfsim.cli.design"
"""What most commands import."""
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""Read while the engines are imported; every test sets the same."""
VARIABLE = "FORK_SERVER"
"""Path of its socket."""
LENGTH_BYTES = 4
LIMIT_S = 400.0


# --- the asking side --------------------------------------------------------------------------------


def ask(
    address: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    folder: Path | None = None,
) -> socket.socket:
    """A fork that runs `words`; the connection gives its exit code, and closing it ends the fork."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    asked = {"words": words, "environment": dict(environment), "folder": str(folder or os.getcwd())}
    request = json.dumps(asked).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", outputs))]
    connection.sendmsg([len(request).to_bytes(LENGTH_BYTES, "big")], rights)
    connection.sendall(request)
    return connection


def ended(connection: socket.socket) -> tuple[int, float]:
    """Exit code and CPU seconds of the fork, when it has ended; -1: the server ended before."""
    code, _, cpu_s = connection.recv(64).decode().partition(" ")
    return int(code or "-1"), float(cpu_s or "0")


def exit_code(connection: socket.socket) -> int:
    """Exit code of the fork, when it has ended."""
    return ended(connection)[0]


@contextmanager
def serving(
    address: str, *words: str, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server in a process of its own, ready to be asked at `address`."""
    command = [python, *(["-P"] if words else []), __file__, "serve", address, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield address
        server.communicate()


def written_program(folder: Path, program: Path, address: str) -> Path:
    """A program of the same name in `folder` that runs `program` as a fork of the server at `address`."""
    asks = folder / program.name
    asks.write_text(
        f"#!{sys.executable} -SE\nimport os, sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        f"import fork_server\nwords = [{str(program)!r}, *sys.argv[1:]]\n"
        f"sys.exit(fork_server.exit_code(fork_server.ask({address!r}, words, os.environ, (1, 2))))\n"
    )
    asks.chmod(0o755)
    return asks


def run_ranks(address: str, program: str, world: int, *words: str, **variables: str) -> None:
    """Run `PROGRAM RANK PORT WORD...` of this folder for every rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run(address, [[program, str(rank), port, *words] for rank in range(world)], **variables)


def run(address: str, commands: Sequence[Sequence[str]], **variables: str) -> None:
    """Run programs of this folder at the same time, told the end of what a failed one printed."""
    environment = os.environ | ENVIRONMENT | variables
    with ExitStack() as opened:
        printed = [opened.enter_context(tempfile.TemporaryFile()) for _ in commands]
        ranks = [
            opened.enter_context(
                ask(
                    address,
                    [os.path.join(os.path.dirname(__file__), program), *words],
                    environment,
                    (out.fileno(), out.fileno()),
                )
            )
            for (program, *words), out in zip(commands, printed, strict=True)
        ]
        for connection in ranks:
            connection.settimeout(LIMIT_S)
        codes = [exit_code(connection) for connection in ranks]
        for code, out in zip(codes, printed, strict=True):
            out.seek(0)
            assert code == 0, (code, out.read().decode()[-4000:])


def set_up_worker() -> NoReturn:
    """Set the variables of a runtime environment and run the worker, as Ray's setup_worker.py does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    own, words = parser.parse_known_args()
    context = json.loads(own.serialized_runtime_env_context)
    environment = os.environ | context.get("env_vars", {})
    sys.exit(exit_code(ask(os.environ[VARIABLE], words, environment, (1, 2))))


# --- the serving side -------------------------------------------------------------------------------


def serve(address: str, *words: str) -> None:
    """Fork at each request, until the process that started this one ends."""
    if words:
        importlib.import_module(COMMANDS)
    else:
        _import_engines()
    gc.collect()
    gc.freeze()  # what all forks share is not collected, so not copied, in any
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
        listener.bind(address)
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        waiting.register(listener, selectors.EVENT_READ, None)
        waiting.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is sys.stdin:  # closed: nobody is there to ask
                    return
                if key.fileobj is listener:
                    _fork(listener, waiting)
                else:
                    _end(key, waiting)


def _import_engines() -> None:
    """Without Ray, which reads what a raylet says to its worker while it is imported."""
    os.environ |= ENVIRONMENT
    from executor.engines.vllm import start

    start.apply(start.environment("cpu"))
    sys.modules["ray"] = None  # type: ignore[assignment]  # its import fails
    for name in ENGINES:
        importlib.import_module(name)
    del sys.modules["ray"]
    for name in LOOK_FOR_RAY:
        parent, _, own = name.rpartition(".")
        if sys.modules.pop(name, None) is not None and hasattr(sys.modules[parent], own):
            delattr(sys.modules[parent], own)


def _fork(listener: socket.socket, waiting: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    head, rights, _, _ = connection.recvmsg(LENGTH_BYTES, socket.CMSG_SPACE(8))
    length = int.from_bytes(head, "big")
    request = connection.recv(length, socket.MSG_WAITALL) if rights else b""
    outputs = array.array("i", rights[0][2] if rights else b"")
    if not request or len(request) < length:  # who asked was ended in the middle
        connection.close()
        return
    child = os.fork()
    if child == 0:
        listener.close()
        _become(json.loads(request), outputs)
    for file in outputs:
        os.close(file)
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


def _become(request: dict[str, Any], outputs: array.array[int]) -> NoReturn:
    """Run the program; never returns into the server."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    program, *_ = sys.argv = list(request["words"])
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.dirname(program), *(folder for folder in own if folder not in sys.path)]
    code: Any = 0
    try:
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
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["serve"] else set_up_worker()
