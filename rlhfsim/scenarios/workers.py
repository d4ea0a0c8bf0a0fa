"""Searches side by side: on the cores of this machine, or on a Ray cluster.

Locally searches run in forked processes, which start with everything already read and can be ended at
once. Each takes runs of neighbours, because like questions share bytes and prices (docs/search.md), and
forks none; where only one question is asked, its search uses every core itself.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.scenarios.designs import Runner, model_hash, search
from rlhfsim.scenarios.store import Found
from rlhfsim.search.parallel import cores, serial
from rlhfsim.search.request import Request

TICK = 0.5
"""Seconds after which a caller that waits hears that nothing has come yet."""
RUN = 6
"""Most neighbours that a process takes at a time."""
RUNS_EACH = 4
"""Runs that each process gets at least where there are questions enough, so that all end at about the same time."""
Step = tuple[int, Found] | None


def local(jobs: int | None = None) -> Runner:
    """Searches in up to `jobs` processes; default: one for each core."""
    most = jobs or cores()

    def run(requests: Sequence[Request]) -> Iterator[Step]:
        able = "fork" in multiprocessing.get_all_start_methods()
        if min(most, len(requests)) < 2 or not able:
            return ((i, search(request)) for i, request in enumerate(requests))
        return _forked(requests, most)

    return run


def _forked(requests: Sequence[Request], most: int) -> Iterator[Step]:
    run = max(1, min(RUN, len(requests) // (most * RUNS_EACH)))
    waiting = deque(range(start, min(start + run, len(requests))) for start in range(0, len(requests), run))  # fmt: skip
    busy: dict[Connection, Worker] = {}
    try:
        while waiting and len(busy) < most:
            worker = Worker(requests)
            busy[worker.pipe] = worker
            worker.give(waiting.popleft())
        while busy:
            ready = wait(list(busy), timeout=TICK)
            if not ready:
                yield None
            for worker in [w for pipe, w in busy.items() if pipe in ready]:
                yield worker.found()
                if worker.left:
                    continue
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    busy.pop(worker.pipe).end()
    finally:
        for worker in busy.values():
            worker.end()


class Worker:
    """A forked process that searches questions by their number."""

    def __init__(self, requests: Sequence[Request]) -> None:
        """It inherits the questions."""
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(requests, self.pipe, theirs), daemon=True
        )
        self.left = 0
        # Ctrl-C waits until the fork is over: Python drops what is raised inside it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def give(self, run: range) -> None:
        """Questions to search, one after the other."""
        self.left = len(run)
        self.pipe.send(run)

    def found(self) -> tuple[int, Found]:
        """The next design, once the pipe is ready.

        Raises:
            RlhfsimError: the process was ended from outside.
            Exception: that of the search, whatever it is.
        """
        try:
            index, result = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join()
            raise RlhfsimError("search-was-ended", f"the process of a search was ended from outside (exit code {self.process.exitcode})",
                               help="is memory short? try --jobs 1; finished designs are kept") from error  # fmt: skip
        if isinstance(result, Exception):
            raise result
        self.left -= 1
        return index, result

    def end(self) -> None:
        """At once."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(requests: Sequence[Request], parents: Connection, pipe: Connection) -> None:
    """In the process, until the parent is gone; Ctrl-C is left to it, and it ends this process.

    The parent's end of the pipe was inherited: left open here, it would never be closed. Ends of workers that
    were started before close as their heirs end, the last one first.
    """
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    with serial(), suppress(EOFError, OSError):  # what the pipe says when the parent is gone
        while True:
            for index in pipe.recv():
                pipe.send((index, _result(requests[index])))
                gc.collect()  # the command line has switched the collector off


def _result(request: Request) -> Found | Exception:
    try:
        return search(request)
    except Exception as error:
        return error


# --- Ray --------------------------------------------------------------------------------------------


def on_ray(address: str | None = None) -> Runner:
    """Searches as tasks of a Ray cluster; without an address of one that is started here and ended.

    The nodes need this version of rlhfsim installed; another one is refused, since it may predict
    otherwise.
    """

    def run(requests: Sequence[Request]) -> Iterator[Step]:
        try:
            import ray
        except ImportError as error:
            raise RlhfsimError("missing-library", "--ray needs Ray", help="pip install ray, or leave --ray out to use the cores of this machine") from error  # fmt: skip
        ours = not ray.is_initialized()
        if ours:
            _join(ray, address)
        task = ray.remote(num_cpus=1)(_on_node)
        pending = {task.remote(request): i for i, request in enumerate(requests)}
        try:
            while pending:
                done, _ = ray.wait(list(pending), num_returns=1, timeout=TICK)
                if not done:
                    yield None
                for one in done:
                    yield pending.pop(one), _checked(*ray.get(one))
        finally:
            for one in pending:
                ray.cancel(one, force=True)
            if ours:
                ray.shutdown()

    return run


def _join(ray: Any, address: str | None) -> None:
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:  # not one of RAY_ADDRESS
        quiet |= {"num_cpus": cores(), "include_dashboard": False}
    try:
        ray.init(address=address or "local", **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise RlhfsimError("no-ray-cluster", f"no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0][:120]}",
                           help="check the address, as in --ray 10.0.0.1:6379, or leave it out to start one here") from error  # fmt: skip


def _on_node(request: Request) -> tuple[str, Found | RlhfsimError]:
    """On a node: the design, and which model made it."""
    try:
        with serial():
            return model_hash(), search(request)
    except RlhfsimError as error:  # as a value: Ray would wrap it
        return model_hash(), error


def _checked(made_by: str, found: Found | RlhfsimError) -> Found:
    if isinstance(found, RlhfsimError):
        raise found
    if made_by != model_hash():
        raise RlhfsimError("other-version", "the nodes of the Ray cluster have another version of rlhfsim", help="install this version on every node")  # fmt: skip
    return found
