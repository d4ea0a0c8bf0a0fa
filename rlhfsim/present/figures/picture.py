"""The plan as a picture of nodes: the GPUs of each role and how its model is cut; equal nodes appear once."""

from __future__ import annotations

from itertools import groupby

from rlhfsim.plan import Plan, RoleGpus
from rlhfsim.present import words
from rlhfsim.present.answers.tree import Column, EqualNodes, Figure, RoleLane, TypedTable, table_of
from rlhfsim.present.tables import COUNT
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.roles import BY_NAME


def picture(plan: Plan) -> Figure:
    """Nodes, GPUs and roles."""
    groups = node_groups(plan)
    return Figure(
        "nodes",
        _title(plan),
        nodes=groups,
        table=role_table(plan),
        alt="Nodes with a row for each role: "
        + "; ".join(f"{g.title}: {', '.join(lane.name for lane in g.lanes)}" for g in groups),
        how="A column is a GPU, a row a role, a piece the GPUs that work together on one shard of its "
        "model (TP: tensor parallel; PP4: one of four pipeline stages, PP 2/4: the second). Below a role "
        "is its layout. Nodes that look the same are shown once.",
    )


def _title(plan: Plan) -> str:
    pools, architecture = plan.placement.pools, words.ARCHITECTURES[plan.architecture][1]
    if len(pools) == 1:
        return f"All {words.gpus(plan):,} GPUs do every job in turn: {architecture}"
    return f"{words.capital(words.pools(plan))}: {architecture}"


KINDS = 4
"""Kinds of nodes up to which a picture says which stage of a pipeline each holds."""


def node_groups(plan: Plan) -> tuple[EqualNodes, ...]:
    """Runs of nodes that show the same; the stages of a pipeline are told apart where that makes few."""
    groups = _node_groups(plan, staged=True)
    return groups if len(groups) <= KINDS else _node_groups(plan, staged=False)


def _node_groups(plan: Plan, *, staged: bool) -> tuple[EqualNodes, ...]:
    nodes = [
        (node, gpus, tuple(filter(None, (_lane(plan, role, node, staged=staged) for role in plan.gpu_map))))
        for node, gpus in enumerate(_sizes(plan))
    ]
    groups = []
    for (gpus, lanes), run in groupby(nodes, key=lambda item: item[1:]):
        first, *_, last = [node for node, *_ in run] * 2
        count, of = last - first + 1, f"of {words.plural(gpus, 'GPU')}"
        title = f"Nodes {first:,} to {last:,}: {count:,} equal nodes {of} (× {count:,})"
        groups.append(
            EqualNodes(title=title if count > 1 else f"Node {first:,} {of}", gpus=gpus, lanes=lanes)
        )
    return tuple(groups)


def _sizes(plan: Plan) -> list[int]:
    """GPUs of every node, the last one of a pool possibly fewer."""
    return [
        min(h.gpus_per_node, h.gpus - start)
        for h in plan.hardware
        for start in range(0, h.gpus, h.gpus_per_node)
    ]


def _lane(plan: Plan, at: RoleGpus, node: int, *, staged: bool) -> RoleLane | None:
    """The pieces of a role on a node; a piece is a run of GPUs of one tensor-parallel group."""
    layout = plan.placement.roles[at.role].layout
    ranks = [
        (rank // layout.tp, gpu)
        for rank, (n, gpu) in enumerate(zip(at.nodes, at.gpus, strict=True))
        if n == node
    ]
    if not ranks:
        return None
    pieces = []
    for group, run in groupby(sorted(ranks, key=lambda r: r[1]), key=lambda r: r[0]):
        gpus = [gpu for _, gpu in run]
        label = _piece(layout, stage_of(layout, group) if staged else None)
        pieces.append((gpus[0], gpus[-1] - gpus[0] + 1, label))
    return RoleLane(role=at.role, name=at.role, layout=layout.label, pieces=tuple(pieces))


def stage_of(layout: Layout | RolloutLayout, group: int) -> int:
    """The stage, from 0, of a tensor-parallel group: outermost in training, inside a copy in a rollout."""
    copies = layout.gpus // (layout.tp * layout.pp)
    return group % layout.pp if isinstance(layout, RolloutLayout) else group // copies


def _piece(layout: Layout | RolloutLayout, stage: int | None) -> str:
    """What a tensor-parallel group holds: `TP8`, `TP8 PP 2/4`, `1/64` of everything, or a `copy`."""
    tensor = f"TP{layout.tp}" if layout.tp > 1 else ""
    if layout.pp > 1:
        pipeline = f"PP{layout.pp}" if stage is None else f"PP {stage + 1}/{layout.pp}"
        return f"{tensor} {pipeline}".strip()
    if tensor:
        return tensor
    return (
        f"1/{layout.gpus}" if isinstance(layout, Layout) and layout.zero == 3 and layout.gpus > 1 else "copy"
    )


# --- the same in words ------------------------------------------------------------------------------


def role_table(plan: Plan) -> TypedTable:
    """Every role with its GPUs, its model, its layout and what happens to it between its calls."""
    models = {m.role: m for m in plan.models}
    pool = plan.placement.pool
    return table_of(
        "Who sits where",
        plan.placement.roles.items(),
        Column("role", lambda item: f"{item[0]} ({BY_NAME[item[0]].does})"),
        Column("model", lambda item: models["actor" if item[0] == "rollout" else item[0]].name),
        Column("GPUs", lambda item: pool(item[1].pool).gpus, COUNT),
        Column("pool", "1.pool"),
        Column("layout", "1.layout.label"),
        Column("in words", lambda item: meaning(item[1])),
        Column("between its calls", lambda item: between(item[1])),
    )


def meaning(role: RolePlacement | RolloutPlacement) -> str:
    """A layout in words: `16 copies of the model, each over 32 GPUs`."""
    layout = role.layout
    if isinstance(layout, RolloutLayout):
        return (
            f"{words.plural(layout.dp, 'engine')}, each over {words.plural(layout.gpus // layout.dp, 'GPU')}"
        )
    if layout.zero == 3 and layout.tp * layout.pp == 1:
        return f"one copy of weights and optimizer, spread over {layout.gpus:,} GPUs"
    each = words.plural(layout.gpus // layout.dp, "GPU")
    copies = f"{layout.dp:,} cop{'ies' if layout.dp > 1 else 'y'} of the model, each over {each}"
    return (
        f"{copies}; optimizer states are split among the copies" if layout.zero and layout.dp > 1 else copies
    )


def between(role: RolePlacement | RolloutPlacement) -> str:
    """What happens to a role between its calls."""
    if isinstance(role, RolloutPlacement):
        if role.residency != "resident":
            return role.residency
        return {0: "stays", 1: "sleeps, weights on the host", 2: "sleeps, memory freed"}[role.sleep]
    rest = {"offloaded": "weights on the host", "recreated": "made anew", "swapped": "swapped with the actor"}
    parts = [rest[role.residency]] if role.residency in rest else []
    parts += ["optimizer on the host"] if role.offload_between else []
    parts += ["Adam runs on the CPU"] if role.layout.offload_optimizer == "cpu" else []
    return ", ".join(parts) or "stays"
