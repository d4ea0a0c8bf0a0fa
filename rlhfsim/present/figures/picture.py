"""The plan as a picture of nodes: which GPUs each role has and how its model is cut over them; equal nodes stand once."""

from __future__ import annotations

from itertools import groupby

from rlhfsim.plan import Plan, RoleGpus
from rlhfsim.present.html import words
from rlhfsim.present.html.content import Figure, Lane, NodeGroup, Table, number
from rlhfsim.present.html.content import words as cell
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement

Seen = tuple[int, tuple[Lane, ...]]
"""What a node shows: its GPUs and lanes."""


def picture(plan: Plan) -> Figure:
    """Nodes, GPUs and roles."""
    groups = node_groups(plan)
    return Figure(
        key="nodes",
        title=_title(plan),
        nodes=groups,
        table=role_table(plan),
        alt="Nodes with a row for each role: "
        + "; ".join(f"{g.title}: {', '.join(lane.name for lane in g.lanes)}" for g in groups),
        how="A column is a GPU, a row a role, a piece the GPUs that work together on one shard of its model (TP: tensor parallel). Nodes that look the same are shown once.",
    )


def _title(plan: Plan) -> str:
    pools, total = plan.placement.pools, words.gpus(plan)
    if len(pools) == 1:
        return f"All {total:,} GPUs do every job in turn: {words.ARCHITECTURES[plan.architecture]}"
    shown = []
    for pool in pools:
        roles = [name for name, role in plan.placement.roles.items() if role.pool == pool.name]
        shown.append(f"{pool.gpus:,} GPU{'s' * (pool.gpus > 1)} for {words.listed(roles)}")
    return f"{words.capital(words.listed(shown))}: {words.ARCHITECTURES[plan.architecture]}"


def node_groups(plan: Plan) -> tuple[NodeGroup, ...]:
    """Runs of nodes that show the same."""
    nodes = [(node, _seen(plan, node, each)) for node, each in enumerate(_sizes(plan))]
    found = []
    for (gpus, lanes), run in groupby(nodes, key=lambda item: item[1]):
        first, *rest = [node for node, _ in run]
        last = rest[-1] if rest else first
        of = f"of {gpus} GPU{'s' * (gpus > 1)}"
        title = (
            f"Node {first:,} {of}"
            if first == last
            else f"Nodes {first:,} to {last:,}: {last - first + 1:,} equal nodes {of} (× {last - first + 1:,})"
        )
        found.append(NodeGroup(title=title, gpus=gpus, lanes=lanes))
    return tuple(found)


def _sizes(plan: Plan) -> list[int]:
    """GPUs of every node, the last one of a pool possibly fewer."""
    found = []
    for h in plan.hardware:
        found += [min(h.gpus_per_node, h.gpus - start) for start in range(0, h.gpus, h.gpus_per_node)]
    return found


def _seen(plan: Plan, node: int, gpus: int) -> Seen:
    lanes = (_lane(plan, role, node) for role in plan.gpu_map)
    return gpus, tuple(lane for lane in lanes if lane is not None)


def _lane(plan: Plan, at: RoleGpus, node: int) -> Lane | None:
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
    for _, run in groupby(sorted(ranks, key=lambda r: r[1]), key=lambda r: r[0]):
        held = [gpu for _, gpu in run]
        pieces.append((held[0], held[-1] - held[0] + 1, _piece(layout)))
    return Lane(role=at.role, name=at.role, pieces=tuple(pieces))


def _piece(layout: Layout | RolloutLayout) -> str:
    """What one tensor-parallel group holds: `TP8`, `stage` of a pipeline, `1/64` of everything, or a `copy`."""
    if layout.tp > 1:
        return f"TP{layout.tp}"
    if layout.pp > 1:
        return "stage"
    return (
        f"1/{layout.gpus}" if isinstance(layout, Layout) and layout.zero == 3 and layout.gpus > 1 else "copy"
    )


# --- the same in words ------------------------------------------------------------------------------


def role_table(plan: Plan) -> Table:
    """Every role with its GPUs, its model, its layout and what happens to it between its calls."""
    models = {m.role: m for m in plan.models}
    rows = []
    for name, role in plan.placement.roles.items():
        model = models["actor" if name == "rollout" else name]
        pool = plan.placement.pool(role.pool)
        rows.append(
            (
                cell(f"{name} ({words.ROLES[name]})"),
                cell(model.name),
                number(pool.gpus, f"{pool.gpus:,}"),
                cell(pool.name),
                cell(role.layout.label),
                cell(meaning(role)),
                cell(between(role)),
            )
        )
    return Table(
        caption="Who sits where",
        head=("role", "model", "GPUs", "pool", "layout", "in words", "between its calls"),
        rows=tuple(rows),
    )


def meaning(role: RolePlacement | RolloutPlacement) -> str:
    """A layout in words: `16 copies of the model, each over 32 GPUs`."""
    layout = role.layout
    if isinstance(layout, RolloutLayout):
        each = layout.gpus // layout.dp
        return f"{layout.dp:,} engine{'s' * (layout.dp > 1)}, each over {each} GPU{'s' * (each > 1)}"
    if layout.zero == 3 and layout.tp * layout.pp == 1:
        return f"one copy of weights and optimizer, spread over {layout.gpus:,} GPUs"
    each = layout.gpus // layout.dp
    copies = f"{layout.dp:,} cop{'ies' if layout.dp > 1 else 'y'} of the model, each over {each} GPU{'s' * (each > 1)}"
    return (
        f"{copies}; optimizer states are split among the copies" if layout.zero and layout.dp > 1 else copies
    )


def between(role: RolePlacement | RolloutPlacement) -> str:
    """What happens to a role between its calls."""
    if isinstance(role, RolloutPlacement):
        if role.residency != "resident":
            return role.residency
        return {0: "stays", 1: "sleeps, weights on the host", 2: "sleeps, memory freed"}[role.sleep]
    parts = (
        ["weights on the host"]
        if role.residency == "offloaded"
        else ["made anew"]
        if role.residency == "recreated"
        else []
    )
    parts += ["optimizer on the host"] if role.offload_between else []
    parts += ["Adam runs on the CPU"] if role.layout.offload_optimizer == "cpu" else []
    return ", ".join(parts) or "stays"
