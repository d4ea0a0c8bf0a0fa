"""What an RL framework adds to its calls: host time, whatever the GPU computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.devices import device_on
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.step.framework_overhead import framework_call, launched_layers
from tests.one_call import forward, train

CLUSTER = parse_cluster(8, "h100")
NEMO = device_on(replace(CLUSTER, framework="nemo-rl"), 0, "megatron")
VERL = device_on(replace(CLUSTER, framework="verl"), 0, "fsdp2")
POOLED = device_on(CLUSTER, 0, "fsdp2")
LAYOUT = Layout(dp=8, zero=3, micro_batch=8)
SEQUENCES = Sequences(count=320, mean=400, mean_square=400**2, maximum=400, packed=True)


@pytest.mark.parametrize("kernels_s", [1.0, 100.0])
def test_a_call_takes_the_same_host_time_whatever_its_kernels_take(kernels_s: float) -> None:
    call = framework_call(NEMO, Cost(parts=(part("compute", kernels_s, "x"),)), 1000)
    assert call.seconds - kernels_s == pytest.approx(1.14 + 1000 * 1.33e-3)


def test_layers_are_launched_once_forward_once_backward_and_once_to_recompute() -> None:
    layout = Layout(pp=4, dp=2)
    assert launched_layers(layout, 80, 3, trained=False) == 60
    assert launched_layers(replace(layout, recompute="none"), 80, 3, trained=True) == 120
    assert launched_layers(replace(layout, recompute="full"), 80, 3, trained=True) == 180


def test_adapters_that_are_shards_of_their_own_are_gathered_for_every_pass_and_reduced() -> None:
    model, lora = resolve_model("qwen2.5-7b"), Lora(rank=32)
    layout = replace(LAYOUT, recompute="full")

    def slower(trained: bool, adapters: Lora | None) -> float:
        price = train if trained else forward
        one, two = (
            price(d, model, layout, SEQUENCES, backend="fsdp2", lora=adapters).seconds for d in (POOLED, VERL)
        )
        return two - one

    one = 5 * model.num_layers * VERL["adapter_gather_time"]
    assert slower(trained=False, adapters=lora) == pytest.approx(one)
    assert slower(trained=True, adapters=lora) == pytest.approx(4 * one)
    assert slower(trained=True, adapters=None) == 0


def test_several_sets_of_adapters_cost_host_time_in_every_pass_and_one_set_does_not() -> None:
    model, layout = resolve_model("qwen3-4b"), replace(LAYOUT, recompute="full")

    def seconds(adapters: int) -> float:
        stack = Software(stack="compiled", adapters=adapters)
        lora = Lora(rank=16)
        return train(POOLED, model, layout, SEQUENCES, backend="fsdp2", lora=lora, software=stack).seconds

    assert seconds(4) - seconds(1) == pytest.approx(4 * 5 * model.num_layers * POOLED["adapter_sets_time"])
