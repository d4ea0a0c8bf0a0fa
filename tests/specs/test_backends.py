"""The table of what each training backend runs, rule by rule."""

from __future__ import annotations

import pytest

from rlhfsim.specs.placement.backends import BACKENDS, Backend, violation
from rlhfsim.specs.placement.layout import Layout

ZERO = (0, 1, 2, 3)


def allowed(backend: Backend, **degrees: int) -> tuple[int, ...]:
    return tuple(z for z in ZERO if violation(backend, Layout(zero=z, **degrees)) is None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "degrees", "stages"),
    [
        ("deepspeed", {"dp": 8}, (0, 1, 2, 3)),
        ("deepspeed", {"tp": 4, "dp": 2}, (0, 1, 2)),  # AutoTP
        ("deepspeed", {"pp": 4, "dp": 2}, (0, 1)),  # pipeline engine
        ("deepspeed", {"tp": 2, "pp": 2, "dp": 2}, (0, 1)),  # shards of our own inside its stages
        ("deepspeed", {"cp": 2, "dp": 4}, (0, 1, 2, 3)),  # Ulysses, ring attention
        ("deepspeed", {"dp": 8, "ep": 2}, ()),
        ("fsdp2", {"dp": 8}, (0, 2, 3)),
        ("fsdp2", {"tp": 2, "dp": 4}, (3,)),
        ("fsdp2", {"pp": 2, "dp": 4}, ()),
        ("fsdp2", {"cp": 2, "dp": 4}, (0, 2, 3)),
        ("fsdp2", {"dp": 8, "ep": 4}, (0, 2, 3)),
        ("megatron", {"tp": 4, "pp": 2, "dp": 4, "ep": 8}, (0, 1)),
        ("megatron", {"tp": 2, "cp": 2, "pp": 2, "dp": 2}, (0, 1)),
    ],
)
def test_zero_stages_of_each_backend(
    backend: Backend, degrees: dict[str, int], stages: tuple[int, ...]
) -> None:
    assert allowed(backend, **degrees) == stages


def test_tp_with_pp_runs_where_it_was_shown_to_run() -> None:
    assert violation("deepspeed", Layout(tp=2, pp=2, zero=1)) is None
    reason = violation("fsdp2", Layout(tp=2, pp=2, zero=3))
    assert reason == "PyTorch FSDP2 has no pipeline parallelism"


@pytest.mark.parametrize(
    ("backend", "layout", "reason"),
    [
        ("deepspeed", Layout(tp=2, zero=3), "runs ZeRO 0, 1, 2 with this tp and pp, not ZeRO-3"),
        ("deepspeed", Layout(pp=2, zero=2), "runs ZeRO 0, 1 with this tp and pp, not ZeRO-2"),
        ("deepspeed", Layout(pp=2, vp=2), "no interleaved pipeline"),
        ("deepspeed", Layout(recompute="selective"), "no selective recompute"),
        ("fsdp2", Layout(pp=2), "no pipeline parallelism"),
        ("fsdp2", Layout(dp=8, zero=1), "not ZeRO-1"),
        ("megatron", Layout(dp=8, zero=3), "not ZeRO-3"),
    ],
)
def test_a_refusal_names_backend_and_rule(backend: Backend, layout: Layout, reason: str) -> None:
    found = violation(backend, layout)
    assert found is not None
    assert found.startswith(BACKENDS[backend].title)
    assert reason in found


def test_every_row_of_the_table_names_its_source() -> None:
    assert all(rules.source for rules in BACKENDS.values())
