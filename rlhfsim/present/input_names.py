"""Dotted paths in words: `cluster.node_groups.0.gpus` is `number of GPUs`."""

from __future__ import annotations

NAMES = {
    "cluster.node_groups": "nodes",
    "cluster.node_groups.gpus": "number of GPUs",
    "cluster.node_groups.gpu": "kind of GPU",
    "cluster.node_groups.gpus_per_node": "GPUs per node",
    "cluster.node_groups.price": "price of a GPU-hour",
    "cluster.node_groups.nic": "network of a node",
    "cluster.node_groups.storage": "storage of a node",
    "cluster.oversubscription": "oversubscription of the network",
    "hardware.gpus": "number of GPUs",
    "hardware.profile": "kind of GPU",
    "hardware.profile_hash": "content of the hardware profile",
    "workload.prompts": "prompts per step",
    "workload.samples": "responses per prompt",
    "workload.epochs": "passes over the batch",
    "workload.mini_batches": "optimizer updates per pass",
    "workload.kl": "KL term",
    "workload.custom": "own parts of the algorithm",
    "workload.reward": "reward",
    "workload.reward.model": "reward model",
    "workload.reward.rules.seconds_per_sample": "seconds of a reward by rules",
    "request.allow": "what may compete too",
    "request.forbid": "what must not compete",
    "request.max_staleness": "largest staleness",
    "request.max_oom": "largest risk of running out of memory",
    "request.time_limit": "longest search",
    "hardware.price.value": "price of a GPU-hour",
    "hardware.market": "market of the price",
    "run.steps": "steps of the run",
    "run.deadline": "deadline of the run",
    "run.budget": "budget of the run",
    "run.faults": "failures",
    "run.faults.mtbf": "time between failures of a node",
    "run.faults.restart": "time of a restart",
    "run.faults.checkpoint": "time of a checkpoint",
    "run.faults.checkpoint_interval": "time between checkpoints",
    "run.staleness_penalty.per_version": "steps that a stale version adds",
}
"""Path without the numbers of list items -> words."""
LENGTHS = {
    "prompt_len": "length of prompts",
    "response_len": "length of responses",
    "value": "",
    "mean": "mean",
    "max": "longest",
    "min": "shortest",
    "std": "standard deviation of",
    "sigma": "spread (sigma) of",
    "kind": "distribution of",
}


def input_name(path: str) -> str:
    """What an input is called: words where it has some, else its last parts; later items are numbered."""
    parts = path.split(".")
    number = next((int(p) for p in parts if p.isdecimal()), 0)
    named = [p for p in parts if not p.isdecimal()]
    words = NAMES.get(".".join(named)) or _length(named) or _plain(named)
    return words if number == 0 else f"{words}, node group {number + 1}"


def _length(parts: list[str]) -> str | None:
    """`mean length of responses`."""
    if len(parts) < 2 or parts[1] not in ("prompt_len", "response_len"):
        return None
    quantity = LENGTHS.get(parts[2], "") if len(parts) > 2 else ""
    return f"{quantity} {LENGTHS[parts[1]]}".strip()


def _plain(parts: list[str]) -> str:
    """`actor layout dp`, `algorithm`; the first part goes where it only says which file has it."""
    rest = parts[1:] if len(parts) > 1 and parts[0] in ("workload", "cluster", "request", "run") else parts
    return " ".join(rest).replace("_", " ")
