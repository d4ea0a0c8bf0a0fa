"""DeepSpeed's configuration from a layout, and the learning rate of every step."""

from __future__ import annotations

import json

import pytest

from executor.engines.deepspeed.config import ds_config
from executor.engines.optimizers import adam, learning_rate
from executor.engines.protocols import EngineSpec
from executor.settings import Optimizer
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Workload


def test_the_configuration_is_plain_json() -> None:
    config = ds_config(Layout(dp=4, zero=3, micro_batch=2), Optimizer(), "bf16", cuda=True)
    assert json.loads(json.dumps(config)) == config


def test_zero_stage_and_clipping_come_from_layout_and_settings() -> None:
    config = ds_config(Layout(dp=2, zero=2), Optimizer(max_grad_norm=0.5), "fp32")
    assert config["zero_optimization"]["stage"] == 2
    assert config["gradient_clipping"] == 0.5
    assert not config["bf16"]["enabled"]


def test_plain_fp32_is_clipped_by_the_engine_which_then_knows_the_norm() -> None:
    assert ds_config(Layout(zero=0), Optimizer(), "fp32")["gradient_clipping"] == 0.0
    assert ds_config(Layout(zero=0), Optimizer(), "bf16")["gradient_clipping"] == 1.0


def test_accumulation_is_left_to_the_engine() -> None:
    config = ds_config(Layout(micro_batch=8), Optimizer(), "fp32")
    assert config["gradient_accumulation_steps"] == 1
    assert config["train_micro_batch_size_per_gpu"] == 8


def test_sums_in_fp32_are_asked_for_where_weights_are_bf16() -> None:
    for stage in (1, 2, 3):
        config = ds_config(Layout(dp=2, zero=stage), Optimizer(), "bf16", gradients="fp32")
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert config["bf16"]["immediate_grad_update"] is (stage == 1)
    assert "data_types" not in ds_config(Layout(dp=2), Optimizer(), "fp32", gradients="fp32")
    assert "data_types" not in ds_config(Layout(dp=2), Optimizer(), "bf16")


@pytest.mark.parametrize("layout", [Layout(zero=0), Layout(dp=2, zero=2, offload_optimizer="cpu")])
def test_sums_in_fp32_are_refused_where_deepspeed_has_none(layout: Layout) -> None:
    with pytest.raises(RlhfsimError) as refused:
        ds_config(layout, Optimizer(), "bf16", gradients="fp32")
    assert refused.value.code == "deepspeed-fp32-sums"
    lacks = framework("rlhfsim").lacks_layout("deepspeed", layout, Workload(gradients="fp32"), "actor")
    assert lacks is not None
    assert lacks.code == "fp32-sums-not-run"


def test_offload_names_the_host_and_pins_its_memory_only_beside_a_gpu() -> None:
    layout = Layout(zero=3, offload_optimizer="cpu", offload_params="cpu")
    on_cpu = ds_config(layout, Optimizer(), "bf16")["zero_optimization"]
    on_gpu = ds_config(layout, Optimizer(), "bf16", cuda=True)["zero_optimization"]
    assert on_cpu["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert on_gpu["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_inference_has_no_optimizer_to_offload() -> None:
    config = ds_config(Layout(zero=3, offload_optimizer="cpu"), None, "bf16")
    assert "offload_optimizer" not in config["zero_optimization"]


def test_inference_shards_weights_or_nothing() -> None:
    stages = [ds_config(Layout(zero=zero), None, "bf16")["zero_optimization"]["stage"] for zero in range(4)]
    assert stages == [0, 0, 0, 3]


def test_eight_bit_adam_is_refused_by_name_without_a_gpu() -> None:
    spec = EngineSpec(
        role="actor", model="", layout=Layout(), optimizer=Optimizer(), optimizer_kind="adam8bit"
    )
    with pytest.raises(RlhfsimError) as refused:
        adam(spec, [])
    assert refused.value.code == "adam8bit-unavailable"


def test_tensor_parallelism_is_autotp() -> None:
    config = ds_config(Layout(tp=4, zero=1), Optimizer(), "fp32")
    assert config["tensor_parallel"]["autotp_size"] == 4
    assert "tensor_parallel" not in ds_config(Layout(), Optimizer(), "fp32")


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        (Layout(tp=2, zero=3), "deepspeed-layout"),
        (Layout(cp=2), "deepspeed-layout"),
        (Layout(recompute="selective"), "deepspeed-layout"),
        (Layout(offload_optimizer="nvme"), "deepspeed-nvme"),
        (Layout(zero=2, offload_params="cpu"), "deepspeed-offload-params"),
        (Layout(zero=0, offload_optimizer="cpu"), "deepspeed-layout"),
    ],
)
def test_layouts_that_do_not_run_are_refused_by_name(layout: Layout, code: str) -> None:
    with pytest.raises(RlhfsimError) as refused:
        ds_config(layout, Optimizer(), "bf16")
    assert refused.value.code == code


def test_warm_up_rises_to_the_full_rate() -> None:
    optimizer = Optimizer(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(optimizer, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_ends_above_zero_and_cosine_is_half_way_in_the_middle() -> None:
    linear = Optimizer(learning_rate=1.0, schedule="linear")
    cosine = Optimizer(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(linear, step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert learning_rate(cosine, 2, 4) == pytest.approx(0.5)


def test_a_run_longer_than_planned_does_not_get_a_negative_rate() -> None:
    assert learning_rate(Optimizer(schedule="linear"), 20, 10) == 0.0
