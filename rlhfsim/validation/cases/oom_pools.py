"""Which GPUs each role of a user's configuration has, from the words of its `placement` cell."""

from __future__ import annotations

import re

from rlhfsim.specs.placement.placement import ResourcePool
from rlhfsim.specs.workload.roles import MODELS
from rlhfsim.validation.rows import Row


def gpu_sets(sizes: dict[str, int]) -> tuple[ResourcePool, ...]:
    """The pools one after the other."""
    start, sets = 0, []
    for name, size in sizes.items():
        if size > 0:
            sets.append(ResourcePool(name=name, start=start, gpus=size))
            start += size
    return tuple(sets)


def pools(row: Row, gpus: int) -> tuple[dict[str, int], dict[str, str]]:
    """Pool sizes and the pool of each role.

    Disaggregated rows name their groups as in `actor 4x8; ref 4x8; vllm 1xTP8`; NeMo-RL rows name
    the generation nodes.
    """
    roles = MODELS
    arch, text = row.words("arch"), row.words("placement").lower()
    engine = (row.integer("rollout_tp") or 1) * (row.integer("rollout_engines") or 1)
    if "disaggregated" not in arch:
        return {"all": gpus}, dict.fromkeys((*roles, "rollout"), "all")
    generation = re.search(r"nodes=(\w+) gpus_per_node=(\d+)", text)
    if generation:
        nodes = 1 if generation[1] == "none" else int(generation[1])
        engine = nodes * int(generation[2])
        return {"train": gpus - engine, "rollout": engine}, _on("train", roles)
    split = re.search(r"(\d+) train \+ (\d+) infer", text)
    if split:
        return {"train": int(split[1]), "rollout": int(split[2])}, _on("train", roles)
    if "train" in row.words("gpus") or not text:
        return {"train": gpus, "rollout": engine}, _on("train", roles)
    sizes: dict[str, int] = {}
    placed_roles: dict[str, str] = {"rollout": "rollout"}
    for role in roles:
        word = {"reference": "ref"}.get(role, role)
        size = re.search(rf"\b{word}\w*\)?\s*(\d+)(?:x(\d+))?", text)
        group = re.search(r"\(critic\+reward colocated\)(\d+)", text)
        if group and word in ("critic", "reward"):
            sizes["critic"], placed_roles[role] = int(group[1]), "critic"
        elif size:
            sizes[role], placed_roles[role] = int(size[1]) * int(size[2] or 1), role
    return {**sizes, "rollout": engine}, placed_roles


def _on(pool: str, roles: tuple[str, ...]) -> dict[str, str]:
    return {**dict.fromkeys(roles, pool), "rollout": "rollout"}
