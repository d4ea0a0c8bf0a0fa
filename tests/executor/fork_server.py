"""The engines of all tests, imported once by `executor.coordination.forks`: ranks and Ray workers are forked from it."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from executor.coordination import forks
from executor.coordination.forks import ask, exit_code

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
COMMANDS = ("rlhfsim.cli.design",)
"""What most commands import."""
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Read while the engines are imported; every test sets the same."""
LIMIT_S = 400.0


@contextmanager
def serving(
    address: str, *modules: str, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server of these modules, else of the engines, ready to be asked at `address`."""
    own = os.environ | ENVIRONMENT if environment is None else environment
    with forks.start(address, modules or ENGINES, python, own) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield address
        server.communicate()


def written_program(folder: Path, program: Path, address: str) -> Path:
    """A program of the same name in `folder` that runs `program` as a fork of the server at `address`."""
    asks = folder / program.name
    asks.write_text(
        f"#!{sys.executable} -SE\nimport os, sys\nsys.path.insert(0, {os.path.dirname(forks.__file__)!r})\n"
        f"import forks\nwords = [{str(program)!r}, *sys.argv[1:]]\n"
        f"sys.exit(forks.exit_code(forks.ask({address!r}, words, os.environ, (1, 2))))\n"
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
