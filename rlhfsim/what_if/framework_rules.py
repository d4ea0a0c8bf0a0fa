"""Why a framework has no plan, or fewer, for what is fixed and forbidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhfsim.frameworks.runs import Runs, frameworks
from rlhfsim.search.request import Request
from rlhfsim.search.space import partitions
from rlhfsim.specs.model.roles import Models

CUT = ("tp", "pp", "cp", "ep", "etp")
"""Degrees that cut a model, as `--fix` names them."""


def elsewhere(request: Request, models: Models) -> str | None:
    """That the framework runs no plan of this kind, and which ones do: a sentence; None where none does."""
    if request.runs is None:
        return None
    able = []
    for runs in frameworks():
        backend = request.backend if request.backend in runs.trainers else next(iter(runs.trainers))
        if any(True for _ in partitions(replace(request, framework=runs.name, backend=backend), models)):
            able.append(f"--framework {runs.name}" + f" --backend {backend}" * (backend != request.backend))
    if not able:
        return None
    return f"{request.runs.title} runs no such plan; these do: {', '.join(able)}"


def rules_broken(request: Request) -> Iterator[str]:
    """Rules of the framework's configuration that the request goes against, a sentence each."""
    runs = request.runs
    if runs is None:
        return
    yield from _one_key(request, runs)
    moved = runs.says.sharing.between.get("actor", ("stays",))
    if runs.says.moves_with and "stays" not in moved and "offload" in request.left_out:
        states = "weights and optimizer states" if moved == ("leaves",) else "optimizer states"
        other = "another role" if runs.says.moves_with == "any" else "the rollout"
        yield (
            f"{runs.title} moves {states} of a policy that shares GPUs with {other} to the host, whatever "
            "its configuration says: without offload only plans on GPUs of their own compete"
        )


def _one_key(request: Request, runs: Runs) -> Iterator[str]:
    """Degrees that are fixed differently for roles whose models one key cuts."""
    for same in runs.says.same:
        for degree in CUT if same.aspect == "cut" else ():
            fixed = {role: request.fix.get(role, {}).get(degree) for role in same.roles}
            given = {role: value for role, value in fixed.items() if value is not None}
            if len(set(given.values())) > 1:
                roles, asked = " and ".join(given), (f"{role}.{degree}={v}" for role, v in given.items())
                yield f"one key of {runs.title} says {degree} for {roles}: {', '.join(asked)} cannot be told"
