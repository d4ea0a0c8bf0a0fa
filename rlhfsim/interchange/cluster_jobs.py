"""A launch as a job of Slurm or SkyPilot: nodes, Ray or one process a node, then the script of an export.

The same steps as the examples for our own launch (docs/examples): the head starts Ray, the others join, and
the one command runs on the head. Frameworks without Ray start their script on every node that trains, as well
as the engine of a rollout that has GPUs of its own. No cluster has run these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import yaml

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.outputs import comment
from rlhfsim.plan import Plan

Manager = Literal["slurm", "skypilot"]
MANAGERS: tuple[str, ...] = get_args(Manager)
FILES: Mapping[str, str] = {"slurm": "job.sbatch", "skypilot": "sky.yaml"}
"""Who manages the cluster -> the job's file."""
ACCELERATORS = {
    "a100_sxm": "A100-80GB",
    "a100_sxm_40gb": "A100",
    "a10g": "A10G",
    "b200_sxm": "B200",
    "h100_pcie": "H100",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx_4090": "RTX4090",
    "v100_sxm": "V100",
}
"""Profile -> GPU in SkyPilot's catalogue."""
RAY_PORT, RANK_PORT, ENGINE_PORT = 6399, 29500, 8000
MASTER = "MASTER"
"""Variable of a script that torchrun starts on several nodes, which a job sets itself: where they meet."""


@frozen
class JobShape:
    """Nodes of a plan, and which of them do what where there is no Ray."""

    nodes: int
    gpus: int
    """GPUs of each node."""
    trainers: int
    """Nodes that train, the first ones."""
    engine: bool
    """The rollout's engine is a process of its own."""
    train_gpus: str = ""
    """Those of a node that training and engine share, as in CUDA_VISIBLE_DEVICES; empty: all of each."""
    engine_gpus: str = ""
    torchrun: bool = False
    """Ranks are started by torchrun and meet at `MASTER`, not by accelerate."""


def shape_of(plan: Plan, *, ray: bool) -> JobShape:
    """What a plan needs of a cluster.

    Raises:
        RlhfsimError: two kinds of nodes, or an engine without Ray that spans nodes.
    """
    if len(plan.hardware) > 1:
        raise RlhfsimError(
            "job-of-two-kinds",
            f"one job has nodes of one kind, the plan has {len(plan.hardware)}",
            help="leave out --with, and start launch.sh on your own cluster",
        )
    gpus, each = plan.hardware[0].gpus, min(plan.hardware[0].gpus, plan.hardware[0].gpus_per_node)
    nodes = -(-gpus // each)
    placement = plan.placement
    if ray or placement.rollout is None or placement.rollout.pool == placement.actor.pool:
        return JobShape(nodes=nodes, gpus=each, trainers=nodes, engine=False)
    train, own = placement.pool(placement.actor.pool), placement.pool(placement.rollout.pool)
    if nodes == 1:
        return JobShape(
            nodes=1,
            gpus=each,
            trainers=1,
            engine=True,
            train_gpus=_listed(train.start, train.gpus),
            engine_gpus=_listed(own.start, own.gpus),
        )
    if own.gpus > each or train.gpus % each:
        raise RlhfsimError(
            "engine-over-nodes",
            f"a rollout of {own.gpus} GPUs next to {train.gpus} that train is not one whole node of {each} "
            "apart from others, and without Ray one process serves it",
            help="leave out --with, or design with a rollout pool of one node",
        )
    return JobShape(nodes=nodes, gpus=each, trainers=train.gpus // each, engine=True)


def _listed(start: int, count: int) -> str:
    return ",".join(str(gpu) for gpu in range(start, start + count))


def job(
    manager: str, plan: Plan, head: str, needs: Mapping[str, str], install: str, *, ray: str
) -> tuple[str, str]:
    """(content of the job's file, command that starts it); `needs`: variables that the scripts read.

    Raises:
        RlhfsimError: nodes that no such job holds, or a GPU without a name in SkyPilot.
    """
    shape = replace(shape_of(plan, ray=bool(ray)), torchrun=MASTER in needs)
    needs = {name: what for name, what in needs.items() if name != MASTER}
    if manager == "slurm":
        return _slurm(shape, head, needs, ray=ray), f"sbatch {FILES[manager]}"
    given = [f"--env {name}" for name in needs] + (["--secret RAY_AUTH_TOKEN"] if ray else [])
    content = _skypilot(plan, shape, head, needs, install, ray=ray)
    return content, " ".join(["sky launch -c rlhf", FILES[manager], *given])


# --- Slurm ----------------------------------------------------------------------------------------------

_ON = """on() { # NODE COMMAND...: one task on one node, with all its CPUs, while other steps run
    srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --nodelist="$1" "${@:2}"
}
address() { getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }'; }"""


def _slurm(shape: JobShape, head: str, needs: Mapping[str, str], *, ray: str) -> str:
    lines = [
        "#!/bin/bash",
        comment(f"{head}: on Slurm."),
        "# Environment and folders lie on a shared file system.",
    ]
    lines += ["#SBATCH --job-name=rlhf", f"#SBATCH --nodes={shape.nodes}", "#SBATCH --ntasks-per-node=1"]
    lines += [f"#SBATCH --gpus-per-node={shape.gpus}", "#SBATCH --exclusive", "#SBATCH --mem=0"]
    lines += ["set -euo pipefail", *(f': "${{{name}:?{what}}}"' for name, what in needs.items()), ""]
    lines += ['mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")', *_ON.splitlines()]
    lines += ['head=$(address "${nodes[0]}")', *(_slurm_ray(ray) if ray else _slurm_ranks(shape))]
    return "\n".join(lines) + "\n"


def _slurm_ray(ray: str) -> Iterator[str]:
    yield f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS=$head:{RAY_PORT}"
    yield "RAY_AUTH_TOKEN=$(openssl rand -hex 32)"
    start = f'{ray} start --head --node-ip-address="$head" --port={RAY_PORT} --block'
    yield f'on "${{nodes[0]}}" env -u RAY_ADDRESS {start} &'
    yield 'for node in "${nodes[@]:1}"; do'
    joins = f'until {ray} start --address="$RAY_ADDRESS" --block; do sleep 5; done'
    yield f"""    on "$node" bash -c '{joins}' &"""
    yield "done"
    status = f""""$(on "${{nodes[0]}}" {ray} status 2> /dev/null | grep -c ' node_')\""""
    yield f'until [ {status} -ge "${{#nodes[@]}}" ]; do sleep 5; done'
    yield 'on "${nodes[0]}" bash launch.sh "$@"'


def _slurm_ranks(shape: JobShape) -> Iterator[str]:
    if shape.torchrun:
        yield f'export {MASTER}="$head:{RANK_PORT}"'
        yield 'for node in "${nodes[@]:1}"; do'
        yield '    on "$node" bash launch.sh "$@" &'
        yield "done"
        yield 'on "${nodes[0]}" bash launch.sh "$@"'
        return
    ranks = f'--main_process_ip "$head" --main_process_port {RANK_PORT}'
    if shape.engine:
        where = 0 if shape.engine_gpus else shape.trainers
        yield f'engine=$(address "${{nodes[{where}]}}")'
        yield f'on "${{nodes[{where}]}}" {_only(shape.engine_gpus)}bash server.sh &'
        yield f'until curl -sf "http://$engine:{ENGINE_PORT}/health" > /dev/null; do sleep 5; done'
        ranks += ' --vllm_server_host "$engine"'
    train = f"{_only(shape.train_gpus)}bash launch.sh"
    yield f"for ((rank = 1; rank < {shape.trainers}; rank++)); do"
    yield f'    on "${{nodes[rank]}}" {train} --machine_rank "$rank" {ranks} "$@" &'
    yield "done"
    yield f'on "${{nodes[0]}}" {train} --machine_rank 0 {ranks} "$@"'


def _only(gpus: str) -> str:
    return f"env CUDA_VISIBLE_DEVICES={gpus} " if gpus else ""


# --- SkyPilot -------------------------------------------------------------------------------------------


def _skypilot(
    plan: Plan, shape: JobShape, head: str, needs: Mapping[str, str], install: str, *, ray: str
) -> str:
    profile = plan.hardware[0].profile
    if profile not in ACCELERATORS:
        raise RlhfsimError(
            "gpu-without-name",
            f"SkyPilot's name of {profile} is not known here",
            help="use --with slurm, or start launch.sh on your own cluster",
        )
    data: dict[str, Any] = {
        "name": "rlhf",
        "num_nodes": shape.nodes,
        "workdir": ".",
        "resources": {"accelerators": f"{ACCELERATORS[profile]}:{shape.gpus}", "disk_size": 500},
        "envs": dict.fromkeys(needs) | ({"RAY_AUTH_MODE": "token"} if ray else {}),
        "setup": install,
        "run": "\n".join(_skypilot_ray(ray) if ray else _skypilot_ranks(shape)) + "\n",
    }
    if ray:
        data["secrets"] = {"RAY_AUTH_TOKEN": None}
    notes = [comment(f"{head}: on SkyPilot. Paths of `envs` are those of the nodes;")]
    notes += ["# add `volumes` for a file system that all of them see.", ""]
    return "\n".join(notes) + yaml.dump(data, Dumper=_Blocks, sort_keys=False)


class _Blocks(yaml.SafeDumper):
    """Scripts as blocks."""


_Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _skypilot_ray(ray: str) -> Iterator[str]:
    yield 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    yield 'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then'
    yield f'  until {ray} start --address="$head:{RAY_PORT}"; do sleep 5; done'
    yield f'  while {ray} status --address="$head:{RAY_PORT}" > /dev/null 2>&1; do sleep 30; done'
    yield "  exit 0"
    yield "fi"
    yield f"{ray} start --head --port={RAY_PORT} --block &  # one of our own: SkyPilot has another"
    yield "ours=$!"
    yield "trap 'kill $ours' EXIT"
    yield f'export RAY_ADDRESS="$head:{RAY_PORT}"'
    yield f'until [ "$({ray} status | grep -c " node_")" -ge "$SKYPILOT_NUM_NODES" ]; do sleep 5; done'
    yield "bash launch.sh"


def _skypilot_ranks(shape: JobShape) -> Iterator[str]:
    ranks = f'--machine_rank "$SKYPILOT_NODE_RANK" --main_process_ip "$head" --main_process_port {RANK_PORT}'
    yield 'mapfile -t nodes <<< "$SKYPILOT_NODE_IPS"'
    yield "head=${nodes[0]}"
    if shape.torchrun:
        yield f'export {MASTER}="$head:{RANK_PORT}"'
        yield "bash launch.sh"
        return
    if shape.engine and shape.engine_gpus:
        yield f"{_only(shape.engine_gpus)}bash server.sh &"
        yield "ours=$!"
        yield "trap 'kill $ours' EXIT"
    elif shape.engine:
        trains = f'(exec 3<> "/dev/tcp/$head/{RANK_PORT}") 2> /dev/null'
        yield f'if [ "$SKYPILOT_NODE_RANK" -ge {shape.trainers} ]; then  # serves as long as the first trains'
        yield "  bash server.sh &"
        yield "  ours=$!"
        yield f"  until {trains}; do sleep 5; done"
        yield f"  while {trains}; do sleep 30; done"
        yield "  kill $ours"
        yield "  exit 0"
        yield "fi"
    if shape.engine:
        yield f"engine=${{nodes[{0 if shape.engine_gpus else shape.trainers}]}}"
        yield f'until curl -sf "http://$engine:{ENGINE_PORT}/health" > /dev/null; do sleep 5; done'
        ranks += ' --vllm_server_host "$engine"'
    yield f"{_only(shape.train_gpus)}bash launch.sh {ranks}"
