"""Searches side by side: on the cores of this machine, or on a Ray cluster.

Locally searches run in forked processes, which start with everything already read and can be ended at
once. Each takes runs of neighbours, because like questions share bytes and prices (docs/search.md), and
forks none; where only one question is asked, its search uses every core itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need
from rlhfsim.ray_token import keep_private
from rlhfsim.search.parallel import TICK, cores, forked, may_fork, serial
from rlhfsim.search.request import Request
from rlhfsim.what_if.scenarios.designs import DesignResult, Runner, model_hash, search

RUN = 6
"""Most neighbours that a process takes at a time."""
RUNS_EACH = 4
"""Runs that each process gets at least where there are enough, so that all end at about the same time."""
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


def on_ray(address: str | None = None) -> Runner:
    """Searches as tasks of a Ray cluster; without an address of one that is started here and ended.

    The nodes need this version of rlhfsim installed; another one is refused, since it may predict
    otherwise.
    """

    def run(requests: Sequence[Request]) -> Iterator[Step]:
        need("ray", purpose="--ray", otherwise="or leave it out to use the cores of this machine")
        import ray

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
    keep_private(make=address is None)
    try:
        ray.init(address=address or "local", **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise RlhfsimError(
            "no-ray-cluster",
            f"no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0][:120]}",
            help="check the address, as in --ray 10.0.0.1:6379, or leave it out to start one here",
        ) from error


def _on_node(request: Request) -> tuple[str, DesignResult | RlhfsimError]:
    """On a node: the design, and which model made it."""
    try:
        with serial():
            return model_hash(), search(request)
    except RlhfsimError as error:  # as a value: Ray would wrap it
        return model_hash(), error


def _checked(made_by: str, designed: DesignResult | RlhfsimError) -> DesignResult:
    if isinstance(designed, RlhfsimError):
        raise designed
    if made_by != model_hash():
        raise RlhfsimError(
            "other-version",
            "the nodes of the Ray cluster have another version of rlhfsim",
            help="install this version on every node",
        )
    return designed
