"""Schemas of TRL's releases from the text of its configuration classes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.trl_keys import BASE, CLASSES, defaults_of, schema
from rlhfsim.interchange.configuration.keys import _plain, key_table

TEXT = {
    BASE: "class _BaseConfig(TrainingArguments):\n    bf16: bool | None = field(default=None)\n    _hidden = 1\n",
    CLASSES["grpo"][0]: (
        "class GRPOConfig(_BaseConfig):\n"
        "    _valid: list = None\n"
        "    beta: float = field(default=0.0, metadata={})\n"
        "    kept: list[str] = field(default_factory=lambda: ['a'])\n"
        "    plain: int = 3\n"
        "    wanted: str\n"
    ),
}


def test_fields_of_a_class_and_its_bases_have_the_defaults_that_they_are_written_with() -> None:
    found = defaults_of(TEXT.__getitem__, "grpo")
    assert found == {
        "bf16": "None", "beta": "0.0", "kept": "None", "plain": "3", "wanted": "None",
    }  # fmt: skip
    whole = {"learning_rate": "1e-06", "beta": "0.04", "gone": "1"}
    read = schema(TEXT.__getitem__, "grpo", whole, {"beta", "gone"})
    assert read == {"learning_rate": "1e-06", **found}


def test_the_installed_release_reads_as_it_is_recorded() -> None:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    root, table = Path(spec.origin).parents[1], key_table("trl")
    place = table.releases.index("1.16.0")
    for key, default in defaults_of(lambda name: (root / name).read_text(), "grpo").items():
        recorded = table.at(key, place)
        assert recorded is not None, key
        assert _plain(default) in recorded.defaults


def test_releases_of_trl_differ_in_the_keys_that_they_brought() -> None:
    table = key_table("trl")
    assert len(table.releases) == 17
    place = table.releases.index
    assert table.at("router_aux_loss_coef", place("1.6.0")) is None
    assert table.at("router_aux_loss_coef", place("1.7.0")) is not None
    assert table.at("use_vllm", place("1.0.0")) is not None
    assert table.at("num_processes", place("1.0.0")) is not None  # of accelerate, with any release
