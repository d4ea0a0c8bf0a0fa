"""Two processes on the rehearsal device: `device.py pairs.py FOLDER` writes FOLDER/pairs.json.

Both are forks of one that has imported torch and not used the device, as a process that has cannot fork on it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from executor.coordination.detectors import Expected, findings
from executor.coordination.failures import PartFailed
from executor.coordination.gpu_faults import fault_of, stop_of
from executor.coordination.metrics import engine_metrics
from executor.engines import learner
from executor.weight_transfer.control import seal, unseal

FOLDER = Path(sys.argv[1])
SECRET, SIZE = "ab" * 32, 2**20
LIMIT_S = 3.0
"""Of a collective."""


def forked(call: Callable[[Any], None]) -> tuple[int, Any]:
    """A child that does something with its end of a pipe; its process id and this end."""
    here, there = Pipe()
    if pid := os.fork():
        there.close()
        return pid, here
    try:
        call(there)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


# --- memory that another process opens --------------------------------------------------------------


def owner(asked: Connection[Any, Any]) -> None:
    """Shows a tensor, writes it late, frees it, says what it holds."""
    tensor = torch.arange(SIZE, dtype=torch.float32, device="cuda")
    asked.send(seal(SECRET, "handle", reduce_tensor(tensor)[1]))
    new = torch.ones(SIZE, device="cuda")
    asked.recv()
    tensor.copy_(new)  # a kernel of the stream: not there yet
    asked.send("given")
    asked.recv()
    torch.accelerator.synchronize()
    asked.send("done")
    asked.recv()
    del tensor
    asked.send(torch.accelerator.memory_allocated())
    asked.recv()
    torch.cuda.ipc_collect()
    asked.send(torch.accelerator.memory_allocated())
    again = torch.ones(SIZE, device="cuda")
    asked.send(seal(SECRET, "handle", reduce_tensor(again)[1]))
    asked.recv()


def ask(end: Any) -> Any:
    """What the other process says after it may go on."""
    end.send("go on")
    return end.recv()


def handle(end: Any) -> tuple[Any, ...]:
    """As it came through a channel."""
    arrived: tuple[Any, ...] = unseal(SECRET, "handle", end.recv().encode())
    return arrived


def handles() -> dict[str, Any]:
    """A handle in the life of what it names, and after."""
    pid, end = forked(owner)
    tensor = rebuild_cuda_tensor(*handle(end))
    found: dict[str, Any] = {"first": float(tensor[-1])}
    ask(end)
    found["before"] = float(tensor[-1])
    ask(end)
    found["after"] = float(tensor[-1])
    found["kept"] = ask(end) - 4 * SIZE  # beside `new`
    found["others"] = torch.cuda.get_device_properties(0).total_memory - torch.cuda.mem_get_info()[0]
    del tensor
    found["left"] = ask(end) - 4 * SIZE
    late = handle(end)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        rebuild_cuda_tensor(*late)
    except RuntimeError as error:
        found["freed"] = told("rollout replica 0", "actor.sync", str(error).splitlines()[0])
    return found


def told(part: str, call: str, text: str) -> str:
    """The message that a run ends with."""
    failed = PartFailed(part, "raised", text, call)
    fault = fault_of(failed)
    assert fault is not None, text
    error = stop_of(failed, fault)
    return f"{error.code}: {error.message} {error.help}"


# --- collectives of two ranks -----------------------------------------------------------------------


def ranks(what: Callable[[int], Any], port: int) -> list[Any]:
    """What each of two ranks returns, or the text of what it raises; and the seconds that it took."""

    def rank(end: Any, number: int) -> None:
        if what is detailed:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=number,
            world_size=2,
            timeout=timedelta(seconds=30),
        )
        dist.barrier()
        start = time.monotonic()
        try:
            answer = what(number)
        except Exception as error:
            answer = str(error).partition("\nException raised")[0]
        end.send((answer, time.monotonic() - start))
        end.recv()

    both = [forked(lambda end, number=number: rank(end, number)) for number in (0, 1)]
    answers = [answered(end) for _, end in both]
    for pid, _ in both:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return answers


def answered(end: Any) -> Any:
    """None of a process that ended."""
    try:
        return end.recv() if end.poll(60) else None
    except EOFError:
        return None


def order(number: int) -> float:
    """Rank 1 enters another collective."""
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor) if number == 0 else dist.broadcast(tensor, 0)
    return float(tensor.sum())


def detailed(number: int) -> float:
    """The same, where torch checks what ranks enter (TORCH_DISTRIBUTED_DEBUG)."""
    del os.environ["REHEARSAL_NCCL"]
    return order(number)


def shape(number: int) -> float:
    """Rank 1 has another shape."""
    tensor = torch.ones(4 + number, device="cuda")
    dist.all_reduce(tensor)
    return float(tensor.sum())


def late_within(number: int) -> float:
    """Rank 1 comes late, and in time."""
    time.sleep(0.3 * LIMIT_S * number)
    return order(0)


def late_beyond(number: int) -> float:
    """Rank 1 comes after the limit."""
    time.sleep(2 * LIMIT_S * number)
    return order(0)


def lost(number: int) -> float:
    """Rank 1 does not come at all."""
    if number:
        os._exit(1)
    return order(0)


def not_a_number(number: int) -> str:
    """The finding of a run whose rank 1 computes nan."""
    rank: Any = SimpleNamespace(_counts=lambda: True)
    value = torch.tensor(torch.nan if number else 0.5, device="cuda")
    step = learner.metrics.finish(learner.Learner._reduced(rank, {"loss": value}))
    [found] = findings([engine_metrics("actor", [step]) | {"step": 2.0}], Expected())
    return f"{found.code}: {found.what} {found.advice}"


def collectives() -> dict[str, Any]:
    """By kind: what the ranks say, and the longest wait."""
    found: dict[str, Any] = {}
    for what in (order, detailed, shape, late_within, late_beyond, lost, not_a_number):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        answers = ranks(what, port)
        texts = [
            told(f"actor rank {number}", "actor.train", answer[0])
            if answer and ("Watchdog" in str(answer[0]) or "mismatch" in str(answer[0]))
            else answer and answer[0]
            for number, answer in enumerate(answers)
        ]
        found[what.__name__] = {
            "said": texts,
            "seconds": max(answer[1] for answer in answers if answer is not None),
        }
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["REHEARSAL_NCCL"] = str(int(LIMIT_S))
    (FOLDER / "pairs.json").write_text(json.dumps(collectives() | {"handles": handles()}, indent=1))
