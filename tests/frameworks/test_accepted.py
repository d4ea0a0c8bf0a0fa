"""The frameworks' own parsers accept what `rlhfsim export` writes, and refuse what is spoiled."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhfsim.api import estimate, estimate_file
from rlhfsim.interchange.export import Exported, argument, export, override
from rlhfsim.interchange.given_data import LAUNCHER
from rlhfsim.interchange.verl.export import hydra
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Lora, Reward, Rules, Workload
from rlhfsim.what_if.design import design
from tests.frameworks.as_planned import DERIVED, SLOW, wrong

ROOT = Path(__file__).parents[2]
RULES = Reward(model=None, rules=Rules())


def workload(algorithm: str, **more: Any) -> Workload:
    given: dict[str, Any] = {
        "algorithm": algorithm,
        "model": "qwen2.5-7b",
        "prompts": 128,
        "samples": 8,
        "mini_batches": 2,
        "reward": RULES,
        "prompt_len": Fixed(value=1024),
        "response_len": Fixed(value=2048),
    }
    return Workload(**given | more)


def plan(
    work: Workload,
    backend: str,
    layout: Mapping[str, Any],
    rollout: Mapping[str, Any],
    apart: int = 0,
    schedule: Mapping[str, Any] | None = None,
    residency: str = "resident",
) -> Plan:
    """One pool, or two with `apart` GPUs for the rollout."""
    trained = 1
    for degree in ("tp", "pp", "cp", "dp"):
        trained *= layout.get(degree, 1)
    pools = [{"name": "train", "gpus": trained}]
    if apart:
        pools.append({"name": "rollout", "start": trained, "gpus": apart})
    placed = {"pool": "train", "layout": layout, "residency": residency}
    fields: dict[str, Any] = {
        "backend": backend,
        "pools": pools,
        "actor": placed,
        "rollout": {"pool": pools[-1]["name"], "layout": rollout, "sleep": 0 if apart else 2},
        "weight_path": "broadcast" if apart else "ipc",
        "schedule": schedule or {},
    }
    if work.has_critic:
        fields["critic"] = placed
    if work.has_reference:
        fields["reference"] = placed
    if work.has_reward_model:
        fields["reward"] = placed
    total = trained + apart
    cluster = Cluster(node_groups=(node_group("h100-sxm", total, gpus_per_node=min(8, total)),))
    return estimate(convert(Placement, parse_yaml("{}", "drawn"), fields), work, cluster)


ASYNC = {"staleness": 1}
FULL = {"zero": 3, "micro_batch": 4}
PACKS = {"pack_tokens": 8192, "score_pack_tokens": 16384}


def for_verl() -> Iterator[Plan]:
    for path in sorted((ROOT / "scenarios/recipes").glob("verl-*.yaml"))[::3]:
        yield estimate_file(path)
    fsdp = ({"dp": 8, "zero": 3}, {"dp": 4, "cp": 2, "zero": 3}, {"dp": 32, "zero": 2})
    for i, algorithm in enumerate(("grpo", "dr-grpo", "rloo", "reinforce++", "ppo")):
        for j, layout in enumerate(fsdp):
            gpus, more = layout["dp"] * layout.get("cp", 1), PACKS if (i + j) % 2 else {"micro_batch": 2}
            yield plan(workload(algorithm), "fsdp2", layout | more, {"tp": 2, "dp": gpus // 2})
    for algorithm in ("dapo", "gspo", "cispo"):
        yield plan(workload(algorithm), "fsdp2", {"dp": 8} | FULL, {"dp": 8})
    work = workload("grpo", kl=False, old_logprobs="rollout")
    for schedule in (ASYNC, {"staleness": 4, "partial_rollout": True, "lend": True}, {}):
        yield plan(work, "fsdp2", {"dp": 8, "zero": 3} | PACKS, {"tp": 2, "dp": 4}, 8, schedule)
        megatron = {"tp": 2, "pp": 2, "dp": 4, "zero": 1, "recompute": "selective"}
        yield plan(work, "megatron", megatron, {"tp": 4, "dp": 4}, 16, schedule)
    moe = workload("grpo", model="qwen3-30b-a3b")
    layout = {"tp": 2, "dp": 8, "ep": 8, "zero": 1} | PACKS
    yield plan(moe, "megatron", layout, {"tp": 4, "dp": 4}, residency="offloaded")
    yield plan(workload("grpo", lora=Lora(rank=32)), "fsdp2", {"dp": 8, "zero": 3}, {"dp": 8})
    scored = workload("grpo", reward=Reward(model="same"))
    for asked in ({}, {"architecture": "async", "allow": frozenset({"async"}), "max_staleness": 1}):
        cluster = Cluster(node_groups=(node_group("h100-sxm", 24, gpus_per_node=8),))
        request = Request(cluster=cluster, workload=scored, backend="fsdp2", framework="verl", **asked)
        designed = design(request, explain=False, rivals=False, simplest_s=None).chosen
        assert designed is not None
        yield designed


def for_openrlhf() -> Iterator[Plan]:
    for path in sorted((ROOT / "scenarios/recipes").glob("openrlhf-*.yaml")):
        yield estimate_file(path)
    for algorithm in ("grpo", "dr-grpo", "rloo", "reinforce++", "ppo"):
        for layout in (
            {"dp": 8, "zero": 3},
            {"dp": 16, "zero": 2},
            {"tp": 2, "dp": 4, "zero": 2, "sequence_parallel": False},
        ):
            gpus = layout["dp"] * layout.get("tp", 1)
            for more in ({"micro_batch": 4}, PACKS):
                yield plan(workload(algorithm), "deepspeed", layout | more, {"tp": 2, "dp": gpus // 2})
    for schedule in (ASYNC, {"staleness": 2, "partial_rollout": True}):
        yield plan(workload("grpo"), "deepspeed", {"dp": 8, "zero": 3} | PACKS, {"dp": 8}, 8, schedule)
    filtered = workload("grpo", dynamic_sampling=DynamicSampling(kept=0.5, gen_prompts=256))
    yield plan(filtered, "deepspeed", {"dp": 8} | FULL, {"dp": 8})


def for_trl() -> Iterator[Plan]:
    yield estimate_file(ROOT / "scenarios/recipes/trl-grpo-qwen2.5-72b.yaml")
    for algorithm in ("dapo", "gspo", "cispo"):
        yield plan(workload(algorithm), "fsdp2", {"dp": 8} | FULL, {"dp": 8})
    for algorithm in ("grpo", "dr-grpo", "rloo"):
        for backend, zero in (("deepspeed", 3), ("deepspeed", 2), ("fsdp2", 3)):
            layout = {"dp": 8, "zero": zero, "micro_batch": 4}
            yield plan(workload(algorithm), backend, layout, {"dp": 8})
            yield plan(workload(algorithm), backend, layout, {"tp": 4, "dp": 2}, 8)


def for_skyrl() -> Iterator[Plan]:
    for path in sorted((ROOT / "scenarios/recipes").glob("skyrl-*.yaml")):
        yield estimate_file(path)
    fsdp = ({"dp": 8, "zero": 3}, {"dp": 8, "cp": 4, "zero": 3, "shards": 8}, {"dp": 64, "zero": 2})
    for i, algorithm in enumerate(("grpo", "dr-grpo", "rloo", "reinforce++", "ppo")):
        for j, layout in enumerate(fsdp):
            gpus, more = layout["dp"] * layout.get("cp", 1), PACKS if (i + j) % 2 else {"micro_batch": 2}
            yield plan(workload(algorithm), "fsdp2", layout | more, {"tp": 2, "dp": gpus // 2})
    megatron = {"tp": 2, "pp": 2, "dp": 4, "zero": 1, "recompute": "selective"}
    for schedule in (ASYNC, {"staleness": 4, "partial_rollout": True}, {"staleness": 2}, {}):
        yield plan(workload("grpo"), "megatron", megatron, {"tp": 4, "dp": 4}, 16, schedule)
        yield plan(workload("rloo", kl=False), "fsdp2", {"dp": 8} | FULL, {"tp": 2, "dp": 4}, 8, schedule)
    moe = workload("grpo", model="qwen3-30b-a3b", prompts=1024)
    layout = {"tp": 2, "dp": 8, "ep": 8, "zero": 1}
    rollout = {"tp": 1, "attention_dp": 8, "ep": 8, "dp": 2}
    yield plan(moe, "megatron", layout | {"offload_optimizer": "cpu"}, rollout, residency="offloaded")
    yield plan(moe, "megatron", layout | PACKS | {"dp": 256}, {"tp": 8, "dp": 64})
    yield plan(workload("grpo", lora=Lora(rank=32)), "fsdp2", {"dp": 16} | FULL, {"dp": 16})
    yield plan(workload("grpo", lora=Lora(rank=32)), "megatron", megatron, {"tp": 2, "dp": 8})
    filtered = workload("grpo", dynamic_sampling=DynamicSampling(kept=0.5, gen_prompts=256))
    yield plan(filtered, "fsdp2", {"dp": 8} | FULL, {"dp": 8})
    eight = workload("grpo", rollout_precision="fp8", train_precision="fp8", gradients="bf16")
    yield plan(eight, "megatron", megatron, {"tp": 2, "dp": 8, "precision": "fp8"})


def for_areal() -> Iterator[Plan]:
    """Dense and MoE, 1 to 64 nodes, both trainers, shared and own GPUs, roles on GPUs of their own."""
    for path in sorted((ROOT / "scenarios/recipes").glob("areal-*.yaml")):
        yield estimate_file(path)
    for i, algorithm in enumerate(("grpo", "dr-grpo", "rloo", "reinforce++", "ppo")):
        more = PACKS if i % 2 else {"micro_batch": 2}
        work = workload(algorithm, old_logprobs="rollout" if i == 2 else "recompute")
        fsdp = {"tp": 2, "cp": 2, "dp": 2, "zero": 3} | more
        yield on_disk(plan(work, "fsdp2", fsdp, {"tp": 2, "dp": 4}, residency="offloaded"))
        yield plan(work, "fsdp2", {"dp": 8, "zero": 3} | more, {"dp": 8}, 8, {"staleness": 1})
        megatron = {"tp": 2, "pp": 2, "vp": 2, "dp": 4, "zero": 1, "recompute": "selective"} | more
        yield plan(work, "megatron", megatron, {"tp": 4, "pp": 2, "dp": 2}, 16, {})
        stale = {"staleness": 4, "partial_rollout": True}
        yield plan(
            work, "megatron", {"tp": 4, "pp": 4, "dp": 16, "zero": 1} | more, {"tp": 4, "dp": 64}, 256, stale
        )
    moe = workload("grpo", model="qwen3-30b-a3b")
    for layout in ({"tp": 2, "dp": 8, "ep": 8}, {"tp": 4, "dp": 4, "ep": 4, "etp": 2}):
        yield plan(moe, "megatron", layout | {"zero": 1} | PACKS, {"tp": 4, "dp": 2}, 8, {"staleness": 2})
    lora = workload("grpo", lora=Lora(rank=32))
    yield plan(lora, "fsdp2", {"dp": 8, "zero": 3}, {"dp": 8}, 8, {"staleness": 1})


def on_disk(asked: Plan) -> Plan:
    """The same with weights by disk, the way of AReaL on shared GPUs."""
    return replace(asked, placement=replace(asked.placement, weight_path="disk"))


def filled(text: str) -> str:
    """A value in place of each variable of a script."""
    names = ("MODEL", "TRAIN_FILES", "VAL_FILES", "REWARD_MODEL", "PROMPTS", "INPUT_KEY", "LABEL_KEY")
    text = re.sub(r'"\$\{(CRITIC_)?LR\}"', "1e-6", text)
    for name in names:
        text = text.replace(f'"${{{name}}}"', str(MODEL["path"]))
    return text.replace('"${REWARD}"', "http://127.0.0.1:1/reward")


MODEL: dict[str, Path] = {}


def arguments(found: Exported, number: int, folder: Path) -> list[str]:
    """What the script of an export hands to the framework."""
    settings = [setting for section in found.written.sections for setting in section.settings]
    if found.framework == "verl":
        return [filled(hydra(setting)) for setting in settings if not setting.key.startswith("--")]
    if found.framework == "skyrl":
        asked = [filled(override(setting)).replace('"', "") for setting in settings]
        return [re.sub(r"\$\{\w+\}", str(MODEL["path"]), text) for text in asked]
    if found.framework == "openrlhf":
        [command] = re.findall(r"-m openrlhf\.cli\.(\w+)", found.files["launch.sh"])
        handed = [
            s for section in found.written.sections for s in section.settings if section.title != LAUNCHER
        ]
        return [command, *(word for setting in handed for word in filled(argument(setting)).split(" "))]
    if found.framework == "areal":
        config = folder / f"{number}.yaml"
        config.write_text(found.files["config.yaml"])
        open_keys = ("actor.path", "train_dataset.path", "cluster.fileroot")
        rates = [
            f"{key}=1e-6"
            for key in ("actor.optimizer.lr", "critic.optimizer.lr")
            if key in found.written.values
        ]
        return ["--config", str(config), *(f"{key}=x" for key in open_keys), *rates]
    name = next(name for name in found.files if name not in ("accelerate.yaml", "launch.sh", "README.md"))
    config = folder / f"{number}.yaml"
    config.write_text(found.files[name])
    launcher = folder / f"{number}-accelerate.yaml"
    launcher.write_text(found.files["accelerate.yaml"])
    given = ["--config", str(config), "--model_name_or_path", "m", "--dataset_name", "d"]
    return [str(launcher), name.removesuffix(".yaml"), *given, "--output_dir", str(folder / "out")]


def verdicts(name: str, asks: list[list[str]], set_up: bool) -> list[dict[str, Any]]:
    """What `accept.py` says of lists of arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.accept", name],
        input=json.dumps([(ask, set_up) for ask in asks]),
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def installed(name: str) -> bool:
    """Whether the framework itself can be asked."""
    return importlib.util.find_spec(name) is not None


def set_up(
    name: str, plans: Sequence[Plan], folder: Path, *, derive: bool, spoiled: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What the framework says of the exports of plans, and of the last with each spoiling argument.

    `refused` is empty where it accepts, `derived` what its workers make of it.
    """
    from executor.tasks import tiny

    MODEL["path"] = tiny.build(folder / "model")
    asks = [arguments(export(p, name, frozenset()), i, folder) for i, p in enumerate(plans)]
    return verdicts(name, asks + [[*asks[-1], more] for more in spoiled], derive)


def answers(name: str, plans: Sequence[Plan], folder: Path, spoiled: Sequence[str] = ()) -> list[str]:
    """Why the framework refuses each, empty where it accepts."""
    return [said["refused"] for said in set_up(name, plans, folder, derive=False, spoiled=spoiled)]


SPOILED = {
    "verl": ("actor_rollout_ref.actor.nonsense=1", "data.train_batch_size=7"),
    "openrlhf": ("--nonsense", "--rollout.n_samples_per_prompt=1"),
    "trl": ("--nonsense=1", "--num_generations=7"),
    "skyrl": (
        "trainer.nonsense=1",
        "trainer.train_batch_size=100",
        "trainer.algorithm.advantage_estimator=gae",
    ),
    "areal": ("+actor.nonsense=1", "actor.backend=fsdp:p2"),
}
"""Arguments that each framework must refuse, so that acceptance says something."""


PLANS = {
    "verl": (for_verl, 30),
    "openrlhf": (for_openrlhf, 35),
    "trl": (for_trl, 19),
    "skyrl": (for_skyrl, 36),
    "areal": (for_areal, 24),
}
"""What is exported, and at least how many plans that are."""
EVERY = 3
"""The test command asks about every third plan: other releases of the frameworks run the long tests."""


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("name", PLANS)
def test_the_framework_itself_accepts_every_export_and_sets_it_up_as_planned(
    name: str, every: int, tmp_path: Path
) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    plans, least = PLANS[name]
    drawn = list(plans())
    assert len(drawn) >= least
    some = drawn[::-every][::-1]
    derive = name in DERIVED and (every == 1 or name not in SLOW)
    said = set_up(name, some, tmp_path, derive=derive, spoiled=SPOILED[name])
    checked = {i: wrong(p, name, said[i]) if derive else said[i]["refused"] for i, p in enumerate(some)}
    assert {i: found for i, found in checked.items() if found} == {}
    assert all(refusal["refused"] for refusal in said[len(some) :])
