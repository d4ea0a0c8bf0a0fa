"""Why a framework has no plan, or fewer, for what is fixed and forbidden."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import Runs

CUT = ("tp", "pp", "cp", "ep", "etp")
"""Degrees that cut a model, as `--fix` names them."""


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
    for same in runs.says.alike(request.backend):
        for degree in CUT if same.aspect in ("cut", "groups") else ():
            fixed = {role: request.fix.get(role, {}).get(degree) for role in same.roles}
            given = {role: value for role, value in fixed.items() if value is not None}
            if len(set(given.values())) > 1:
                roles, asked = " and ".join(given), (f"{role}.{degree}={v}" for role, v in given.items())
                one = f"one {'key' if same.aspect == 'cut' else 'process'} of {runs.title}"
                yield f"{one} has {degree} for {roles}: {', '.join(asked)} cannot be told"
