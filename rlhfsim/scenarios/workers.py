"""Searches side by side: on the cores of this machine, or on a Ray cluster.

Locally each search is a forked process of its own, so that it starts with everything already read,
returns its memory when it ends, and can be ended at once. A search that has a process of its own forks
none; where only one runs, it uses every core itself.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.scenarios.designs import Runner, model_hash, search
from rlhfsim.scenarios.store import Found
from rlhfsim.search.parallel import cores, serial
from rlhfsim.search.request import Request

TICK = 0.5
"""Seconds after which a caller that waits hears that nothing has come yet."""
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
    waiting = deque(enumerate(requests))
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                index, request = waiting.popleft()
                ours, process = _started(request)
                running[ours] = index, process
            ready = wait(list(running), timeout=TICK)
            if not ready:
                yield None
            for ours in [one for one in running if one in ready]:
                index, process = running.pop(ours)
                yield index, _received(ours, process)
    finally:
        for ours, (_, process) in running.items():
            process.terminate()
            process.join()
            ours.close()


def _started(request: Request) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(request, theirs), daemon=True)
    # Ctrl-C waits until the fork is over: Python drops what is raised inside it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, process


def _work(request: Request, out: Connection) -> None:
    """In the process: one search; Ctrl-C is left to the parent, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with serial():
            result: Found | Exception = search(request)
    except Exception as error:
        result = error
    out.send(result)


def _received(ours: Connection, process: Any) -> Found:
    """What a process found.

    Raises:
        RlhfsimError: it was ended from outside.
        Exception: its own, whatever it is.
    """
    try:
        result = ours.recv()
    except EOFError as error:
        process.join()
        raise RlhfsimError("search-was-ended", f"the process of a search was ended from outside (exit code {process.exitcode})",
                           help="is memory short? try --jobs 1; finished designs are kept") from error  # fmt: skip
    finally:
        ours.close()
    process.join()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Found)
    return result


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
