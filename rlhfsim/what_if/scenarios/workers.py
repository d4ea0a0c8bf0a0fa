"""Searches side by side: on the cores of this machine, or on a Ray cluster.

Locally searches run in forked processes, which start with everything already read and can be ended at
once. Each takes runs of neighbours, because like questions share bytes and prices (docs/search.md), and
forks none; where only one question is asked, its search uses every core itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need
from rlhfsim.ray_token import keep_private
from rlhfsim.search.parallel import TICK, cores, forked, may_fork, serial
from rlhfsim.search.request import Request
from rlhfsim.what_if.design import design
from rlhfsim.what_if.scenarios.designs import DesignResult, Runner, model_hash

RUN = 6
"""Most neighbours that a process takes at a time."""
RUNS_EACH = 4
"""Runs that each process gets at least where there are enough, so that all end at about the same time."""
AHEAD = 2
"""Tasks of a Ray cluster that are there for each of its cores."""
Step = tuple[int, DesignResult] | None


def local(jobs: int | None = None) -> Runner:
    """Searches in up to `jobs` processes; default: one for each core."""
    processes = jobs or cores()

    def run(requests: Sequence[Request]) -> Iterator[Step]:
        if min(processes, len(requests)) < 2 or not may_fork():
            return ((i, search(request)) for i, request in enumerate(requests))
        neighbours = max(1, min(RUN, len(requests) // (processes * RUNS_EACH)))
        return forked(_collected, requests, processes, run=neighbours)

    return run


def search(request: Request) -> DesignResult:
    """The best plan of a request, or what is missing."""
    begin = time.perf_counter()
    # plans that wait for the same learner tie: the warm start decides, so it is that of `rlhfsim design`
    answer = design(request, explain=False, rivals="async" in request.switches, simplest_s=None)
    return DesignResult(
        plan=answer.chosen,
        shortage=None if answer.chosen else answer.shortage or "no plan fits with these choices",
        gap=answer.certificate.gap,
        seconds=time.perf_counter() - begin,
    )


def _collected(request: Request) -> DesignResult:
    """A search in a process of its own, whose collector is off: a third of the time would go there.

    Only what came since the search before is looked at; what is kept for the next one stays.
    """
    try:
        return search(request)
    finally:
        gc.collect()
        gc.freeze()


# --- Ray --------------------------------------------------------------------------------------------


@contextmanager
def on_ray(address: str | None = None) -> Iterator[Runner]:
    """Searches as tasks of a Ray cluster; without an address of one that is started here.

    It is joined at the first search and left at the end, however many lists of requests come between. A task
    whose node is lost is searched again on another one. The nodes need this version of rlhfsim installed;
    another one is refused, since it may predict otherwise.
    """
    joined = False

    def run(requests: Sequence[Request]) -> Iterator[Step]:
        nonlocal joined
        need("ray", purpose="--ray", otherwise="or leave it out to use the cores of this machine")
        import ray

        if not ray.is_initialized():
            _join(ray, address)
            joined = True
        yield from _tasks(ray, requests)

    try:
        yield run
    finally:
        if joined:
            import ray

            ray.shutdown()


def _tasks(ray: Any, requests: Sequence[Request]) -> Iterator[Step]:
    """Runs of neighbours as tasks; no more wait in the cluster than keep its cores busy."""
    at_once = max(1, round(ray.cluster_resources().get("CPU", 1)))
    each = max(1, min(RUN, len(requests) // (at_once * RUNS_EACH)))
    left = iter(range(0, len(requests), each))
    task, pending = ray.remote(num_cpus=1)(_on_node), dict[Any, int]()
    try:
        while True:
            for first in islice(left, max(0, AHEAD * at_once - len(pending))):
                pending[task.remote(requests[first : first + each])] = first
            if not pending:
                return
            done, _ = ray.wait(list(pending), num_returns=1, timeout=TICK)
            if not done:
                yield None
            for one in done:
                first = pending.pop(one)
                for i, found in enumerate(_checked(*ray.get(one))):
                    yield first + i, found
    finally:
        for one in pending:
            ray.cancel(one, force=True)


def _join(ray: Any, address: str | None) -> None:
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:  # not one of RAY_ADDRESS
        quiet |= {"num_cpus": cores(), "include_dashboard": False}
    keep_private(make=address is None)
    try:
        ray.init(address=address or "local", **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise RlhfsimError(
            "no-ray-cluster",
            f"no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0][:120]}",
            help="check the address, as in --ray 10.0.0.1:6379, or leave it out to start one here",
        ) from error


def _on_node(requests: Sequence[Request]) -> tuple[str, list[DesignResult] | RlhfsimError]:
    """On a node: the designs, and which model made them."""
    try:
        with serial():
            return model_hash(), [search(request) for request in requests]
    except RlhfsimError as error:  # as a value: Ray would wrap it
        return model_hash(), error


def _checked(made_by: str, designed: list[DesignResult] | RlhfsimError) -> list[DesignResult]:
    if isinstance(designed, RlhfsimError):
        raise designed
    if made_by != model_hash():
        raise RlhfsimError(
            "other-version",
            "the nodes of the Ray cluster have another version of rlhfsim",
            help="install this version on every node",
        )
    return designed
