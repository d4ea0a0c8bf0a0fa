"""The FSDP2 engine over gloo ranks against plain PyTorch and DeepSpeed; the checks run in fsdp2_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor.engines.fsdp2 import config
from executor.engines.protocols import EngineSpec
from executor.settings import Optimizer
from rlhfsim.errors import RlhfsimError
from rlhfsim.memory import states
from rlhfsim.specs.model.config import load_config
from rlhfsim.specs.placement.layout import Layout
from tests.executor.test_deepspeed import ranks, write_models

FULL_PRECISION = ("zero0", "zero2 packed", "zero3", "zero3 packed recompute", "zero3 offload")
HALF_PRECISION = ("bf16 zero0", "bf16 zero2", "bf16 zero3 recompute")
COMPARED = ("grpo", "grpo packed", "dpo", "dpo packed")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fsdp2")
    write_models(made)
    return made


@pytest.fixture(scope="module")
def first(fork_server: str, folder: Path) -> dict[str, Any]:
    return ranks(fork_server, "first", folder, "fsdp2_ranks.py")


@pytest.fixture(scope="module")
def second(fork_server: str, folder: Path, first: dict[str, Any]) -> dict[str, Any]:
    return ranks(fork_server, "second", folder, "fsdp2_ranks.py")


@pytest.fixture(scope="module")
def on_four(fork_server: str, folder: Path) -> dict[str, Any]:
    return ranks(fork_server, "compared", folder, "fsdp2_ranks.py", world=4)


@pytest.fixture(scope="module")
def hybrid(fork_server: str, folder: Path) -> dict[str, Any]:
    return ranks(fork_server, "hybrid", folder, "fsdp2_ranks.py", world=4)


@slow
@pytest.mark.parametrize("name", FULL_PRECISION)
def test_training_is_that_of_one_process_whatever_stage_and_packing(first: dict[str, Any], name: str) -> None:
    assert first[name]["weights"] < 2e-6
    assert first[name]["norms"] < 2e-6


@slow
@pytest.mark.parametrize("name", ["hsdp", "hsdp zero2 packed"])
def test_copies_of_shards_learn_as_one_process_and_resume(hybrid: dict[str, Any], name: str) -> None:
    assert hybrid[name]["weights"] < 2e-6
    assert hybrid[name]["norms"] < 2e-6
    assert hybrid[name]["skipped"] == 1.0
    assert hybrid[f"{name} resumed"]["digest"] == hybrid[name]["digest"]


@slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", COMPARED)
def test_losses_are_those_of_zero_3(
    first: dict[str, Any], on_four: dict[str, Any], name: str, world: int
) -> None:
    found = (first if world == 2 else on_four)[name]
    for key in ("losses", "norms"):
        assert found["fsdp2"][key] == pytest.approx(found["deepspeed"][key], abs=1e-4)
    assert found["weights"] < 1e-5


@slow
@pytest.mark.parametrize("name", FULL_PRECISION + HALF_PRECISION)
def test_resumed_training_is_bit_identical(first: dict[str, Any], second: dict[str, Any], name: str) -> None:
    assert second[name]["digest"] == first[name]["digest"]


@pytest.fixture(scope="module", params=[1, 4])
def resharded(
    request: pytest.FixtureRequest, fork_server: str, folder: Path, first: dict[str, Any]
) -> dict[str, Any]:
    """What two ranks saved goes on with one and with four."""
    return ranks(fork_server, "resharded", folder, "fsdp2_ranks.py", world=request.param)


@slow
@pytest.mark.parametrize("name", FULL_PRECISION)
def test_another_number_of_ranks_goes_on_as_one_process_would(resharded: dict[str, Any], name: str) -> None:
    assert resharded[name]["weights"] < 2e-6
    assert resharded[name]["norms"] < 2e-6


@slow
@pytest.mark.parametrize("name", FULL_PRECISION + HALF_PRECISION)
def test_offload_brings_every_bit_back_and_a_broken_step_is_skipped(first: dict[str, Any], name: str) -> None:
    assert first[name]["files"] >= 1
    assert first[name]["kept"]
    assert first[name]["skipped"] == 1.0
    assert first[name]["unharmed"]


@slow
@pytest.mark.parametrize("name", HALF_PRECISION)
def test_half_precision_learns_as_full_precision_does(first: dict[str, Any], name: str) -> None:
    assert first[name]["losses"] == pytest.approx(first["zero0"]["losses"], abs=0.05)


@slow
@pytest.mark.parametrize("name", ["lora zero0", "lora zero3", "lora bf16"])
def test_lora_merges_on_the_fly_and_its_base_is_the_reference(first: dict[str, Any], name: str) -> None:
    found = first[name]
    assert found["moved"] > 1e-3
    assert found["reference"] == 0.0
    assert found["merged"] < (0.1 if "bf16" in name else 1e-5)
    assert found["adapters"] == found["exported"] == 28
    assert found["name"] == "model.layers.0.self_attn.q_proj.weight.lora_A"


@slow
def test_a_critic_learns_like_one_process(first: dict[str, Any]) -> None:
    assert first["value"]["weights"] < 2e-6


@slow
def test_sharded_scoring_agrees_with_one_process_and_holds_its_share(first: dict[str, Any]) -> None:
    assert first["scoring"]["logprobs"] < 1e-5
    assert first["scoring"]["reloaded"] < 1e-5
    assert first["scoring"]["scores"] < 1e-5
    assert first["scoring"]["held"] == pytest.approx(0.5, abs=0.01)


@slow
def test_full_recompute_runs_every_layer_twice(first: dict[str, Any]) -> None:
    assert first["recompute"]["full"] == 2 * first["recompute"]["none"]


@slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_ledger_prices_what_a_rank_holds(
    first: dict[str, Any], on_four: dict[str, Any], folder: Path, zero: int, world: int
) -> None:
    held = (first if world == 2 else on_four)[f"bytes zero{zero}"]
    layout = Layout(dp=world, zero=zero)
    part = states.shard(load_config(folder / "llama"), layout, "fsdp2")
    priced = states.trained_states(part, layout, "fsdp2")
    for name in ("weights", "gradients", "optimizer"):
        assert held[name] == pytest.approx(getattr(priced, name), rel=0.02), name
    assert held["away"] == pytest.approx(priced.optimizer, rel=0.02)  # offload_between: all but the weights
    assert held["changed"] == 0.0


@pytest.mark.parametrize(
    ("code", "layout", "kind"),
    [
        ("fsdp2-layout", {"tp": 2, "zero": 3}, "adam"),
        ("fsdp2-layout", {"cp": 2, "zero": 3}, "adam"),
        ("fsdp2-layout", {"zero": 1}, "adam"),
        ("fsdp2-layout", {"zero": 3, "recompute": "selective"}, "adam"),
        ("fsdp2-layout", {"zero": 3, "offload_optimizer": "cpu"}, "adam"),
        ("fsdp2-adam8bit", {"zero": 3}, "adam8bit"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(code: str, layout: dict[str, Any], kind: Any) -> None:
    spec = EngineSpec(
        role="actor",
        model="",
        backend="fsdp2",
        layout=Layout(**layout),
        optimizer=Optimizer(),
        optimizer_kind=kind,
    )
    with pytest.raises(RlhfsimError) as refused:
        config.check(spec)
    assert refused.value.code == code
