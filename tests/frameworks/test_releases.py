"""`rlhfsim export --version`: older releases get their own keys; what they lack is said with its cost, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhfsim.api import cluster_of, estimate, estimate_file
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import Exported, export, exporter
from rlhfsim.plan import Plan, Prediction, write_plan
from rlhfsim.specs.workload.sampling import DynamicSampling

ROOT = Path(__file__).parents[2]
RELEASES = [(name, release) for name in ("verl", "openrlhf") for release in exporter(name).releases]
RECIPES = {name: sorted((ROOT / "scenarios/recipes").glob(f"{name}-*.yaml")) for name in ("verl", "openrlhf")}


@cache
def planned(path: Path) -> Plan:
    return estimate_file(path)


@cache
def keys_of(name: str, release: str) -> frozenset[str]:
    lines = (ROOT / f"tests/data/framework_keys/{name}_releases.txt").read_text().splitlines()[1:]
    return frozenset(key for key, *releases in map(str.split, lines) if release in releases)


def price(plan: Plan) -> Prediction:
    return estimate(plan.placement, plan.workload, cluster_of(plan)).prediction


def written(name: str, path: Path, release: str) -> Exported:
    return export(planned(path), name, frozenset(), version=release)


@pytest.mark.parametrize(("name", "release"), RELEASES)
def test_every_key_is_one_of_the_release(name: str, release: str) -> None:
    known, newest = keys_of(name, release), exporter(name).version
    for path in RECIPES[name]:
        found = written(name, path, release)
        assert {key for key in found.written.values if not key.startswith("+")} <= known
        assert found.version == release
        assert release in found.files["README.md"].splitlines()[0]
        assert newest not in found.files["launch.sh"]
        assert set(found.written.values.values()) <= set(written(name, path, newest).written.values.values())


def test_keys_with_other_names_keep_their_values() -> None:
    path = next(p for p in RECIPES["verl"] if "ppo" in p.stem and planned(p).placement.backend == "fsdp2")
    new, old = (written("verl", path, release).written.values for release in ("0.9.1", "0.7.1"))
    assert new["critic.fsdp.param_offload"] == old["critic.model.fsdp_config.param_offload"]
    ulysses = "ulysses_sequence_parallel_size"
    assert new[f"critic.fsdp.{ulysses}"] == old[f"critic.{ulysses}"]
    path = RECIPES["openrlhf"][0]
    new, old = (written("openrlhf", path, release).written.values for release in ("0.11.2", "0.9.10"))
    assert new["--train.batch_size"] == old["--train_batch_size"]
    assert new["--vllm.num_engines"] == old["--vllm_num_engines"]
    assert new["--actor.num_nodes"] == old["--actor_num_nodes"]


def test_what_a_release_lacks_is_said_with_its_cost() -> None:
    path = next(p for p in RECIPES["verl"] if planned(p).workload.algorithm == "grpo")
    sampling = DynamicSampling(kept=0.5)
    plan = replace(planned(path), workload=replace(planned(path).workload, dynamic_sampling=sampling))
    found = export(plan, "verl", frozenset(), price, version="0.8.0")
    assert not [key for key in found.written.values if "filter_groups" in key]
    said = next(x for x in found.written.unsaid if x.what == "groups whose rewards differ")
    assert said.nearest is not None
    assert price(said.nearest).step_s < price(plan).step_s
    assert said.cost.startswith("-")
    assert said.sentence in found.files["README.md"]


def test_a_plan_that_a_release_cannot_run_is_refused_and_so_is_an_unknown_release(tmp_path: Path) -> None:
    plan = planned(ROOT / "scenarios/recipes/skyrl-async-1.5b.yaml")
    with pytest.raises(RlhfsimError, match=r"verl 0\.8\.0 has no key for a rollout on GPUs of its own"):
        export(plan, "verl", frozenset(), version="0.8.0")
    write_plan(tmp_path / "plan.json", plan)
    asked = ["export", str(tmp_path / "plan.json"), "--to", "verl", "--out", str(tmp_path / "run")]
    with pytest.raises(RlhfsimError) as error:
        CliRunner().invoke(cli, [*asked, "--version", "0.2"], catch_exceptions=False)
    assert error.value.code == "version-not-written"
    assert "0.9.1, 0.8.0, 0.7.1" in str(error.value)
    assert not (tmp_path / "run").exists()
