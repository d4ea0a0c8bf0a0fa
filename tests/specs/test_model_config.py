"""Hugging Face configs: what is read, what is refused, and that nothing else can happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import checked, parse_json
from rlhfsim.specs.model import families
from rlhfsim.specs.model.config import load_config, read_config
from rlhfsim.specs.model.families import FAMILIES, REFUSED, Family
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import _data, preset, resolve_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
DEEPSEEK = _data()["presets"]["deepseek-v3"]["config"]


def read(config: object) -> ModelSpec:
    return read_config(parse_json(json.dumps(config, indent=1), "config.json"), "m")


def refusal(config: object) -> RlhfsimError | None:
    """The error for people that a config meets; any other exception fails the test."""
    try:
        assert read(config).num_params > 0
    except RlhfsimError as error:
        return error
    return None


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_a_config_file_a_folder_and_a_name_give_the_same_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_config(path) == load_config(tmp_path) == resolve_model(str(path))
    assert load_config(path).num_params == preset("llama-3.1-8b").num_params
    assert load_config(path).name == tmp_path.name


def test_the_language_model_inside_a_composite_config_is_read():
    nested = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"image_size": 336}}
    assert read(nested).num_params == 8_030_261_248


def test_an_unknown_type_with_the_common_keys_is_read_as_a_llama_block():
    assert read(LLAMA | {"model_type": "novel"}).num_params == 8_030_261_248


def test_an_unknown_type_must_say_whether_its_embeddings_are_tied():
    with pytest.raises(RlhfsimError, match="tie_word_embeddings"):
        read(without(LLAMA, "tie_word_embeddings") | {"model_type": "novel"})


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", False), ("gemma2", True), ("opt", True), ("qwen2", False)]
)
def test_an_absent_tie_word_embeddings_takes_the_default_of_its_type(model_type, tied):
    config = without(LLAMA, "tie_word_embeddings") | {"model_type": model_type, "ffn_dim": 14336}
    assert read(config).tied_embeddings is tied


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_shape_is_named(key):
    with pytest.raises(RlhfsimError, match=key) as caught:
        read(without(LLAMA, key))
    assert caught.value.place.line == 1


@pytest.mark.parametrize(
    "key", ["moe_intermediate_size", "num_experts_per_tok", "v_head_dim", "qk_rope_head_dim"]
)
def test_a_missing_shape_of_experts_or_latents_is_named(key):
    with pytest.raises(RlhfsimError, match=key):
        read(without(DEEPSEEK, key))


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "head_dim",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 10**30, "4096", 1.5, float("nan"), float("inf"), True, [], {}])
def test_a_bad_number_is_refused_with_its_place(key, value):
    with pytest.raises(RlhfsimError, match=key) as caught:
        read(LLAMA | {key: value})
    assert key in caught.value.place.text
    assert caught.value.help


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "do not divide the hidden size"),
        ({"num_key_value_heads": 7}, "do not divide 32 query heads"),
        ({"layer_types": ["full_attention"]}, "1 entries for 32 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "neither full nor windowed"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"mamba_d_state": 128}, "state-space"),
        ({"block_configs": [1]}, "different attention"),
    ],
)
def test_a_model_that_does_not_add_up_is_refused(change, message):
    with pytest.raises(RlhfsimError, match=message) as caught:
        read(LLAMA | change)
    assert caught.value.help


def test_the_file_of_families_holds_what_its_types_say() -> None:
    text = json.loads(Path(families.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    rows = json.dumps([entry["implies"] for entry in text["families"]])
    assert len(TypeAdapter(list[checked(Family)]).validate_json(rows, strict=True)) > 40
    assert len(FAMILIES) == sum(len(entry["types"].split()) for entry in text["families"])


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_other_kinds_of_models_are_refused_by_name(kind):
    with pytest.raises(RlhfsimError, match=f"'{kind}'") as caught:
        read(LLAMA | {"model_type": kind})
    assert caught.value.code == "unsupported-model"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "not valid JSON") for text in ("", " ", "{", '{"hidden_size": 40', "nul", "\ufeff{}")),
        *((text, "one mapping of keys to values\n") for text in ("[]", "null", "3", '"x"')),
        ("{}", "and this one is empty"),
        ("[" * 5000, "nested more than"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(RlhfsimError, match=said) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_binary_huge_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(RlhfsimError, match="cannot read"):
        load_config(path)
    path.write_bytes(b"\x80\x81\xff")
    with pytest.raises(RlhfsimError, match="text file"):
        load_config(path)
    path.write_bytes(b" " * (5 * 2**20))
    with pytest.raises(RlhfsimError, match="larger than"):
        load_config(path)


@pytest.mark.parametrize(
    ("model_type", "more", "window", "layers"),
    [
        ("mistral", {"sliding_window": 4096}, 4096, 32),
        ("mistral", {"sliding_window": None}, None, 0),
        ("mistral", {"sliding_window": 131072}, None, 0),
        ("gemma2", {}, 4096, 16),
        ("gemma3_text", {"sliding_window": 1024}, 1024, 27),
        ("cohere2", {"sliding_window": 4096, "sliding_window_pattern": 4}, 4096, 24),
        ("exaone4", {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, 4096, 24),
        ("qwen2", {"sliding_window": 4096, "max_window_layers": 28}, None, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, 4096, 4),
        ("llama4_text", {"attention_chunk_size": 8192}, 8192, 24),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 64},
            64,
            16,
        ),
    ],
)
def test_windows_follow_the_rule_of_the_type(model_type, more, window, layers):
    attention = read(LLAMA | {"model_type": model_type} | more).attention
    assert (attention.sliding_window, attention.num_windowed_layers) == (window, layers)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"first_k_dense_replace": 3}, 58),
        ({"first_k_dense_replace": 0}, 61),
        ({"moe_layer_freq": [0] * 11 + [1] * 50}, 50),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"] * 56}, 56),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 1, "mlp_only_layers": [0, 60]}, 59),
    ],
)
def test_layers_with_experts_are_counted(more, expected):
    assert read(DEEPSEEK | more).num_moe_layers == expected


def test_every_second_layer_may_have_experts():
    assert preset("llama-4-maverick").num_moe_layers == 24
    assert preset("llama-4-scout").num_moe_layers == 48


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *sorted({key for entry in _data()["presets"].values() for key in entry["config"]}),
        "layer_types",
        "mlp_layer_types",
        "text_config",
        "attn_config",
        "ffn_config",
        "n_inner",
        "architectures",
        "index_topk",
        "no_bias",
        "sliding_window_pattern",
        "mlp_only_layers",
    ]
)


@settings(max_examples=200)
@given(JSON)
def test_arbitrary_json_is_a_model_or_an_error_for_people(data):
    error = refusal(data)
    assert error is None or error.place is not None


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(_data()["presets"])),
    st.dictionaries(KEYS, JSON, max_size=4),
    st.sampled_from([*sorted(FAMILIES), "novel", None]),
)
def test_a_damaged_config_is_a_model_or_an_error_for_people(name, damage, kind):
    config = _data()["presets"][name]["config"] | ({"model_type": kind} if kind else {}) | damage
    error = refusal(config)
    assert error is None or (error.help and error.place)


@settings(max_examples=200)
@given(st.text(max_size=200))
def test_arbitrary_text_is_an_error_for_people(text):
    with pytest.raises(RlhfsimError):
        read_config(parse_json(text, "config.json"), "m")


@pytest.mark.parametrize(
    ("said", "groups"), [({}, (8, 4)), ({"n_group": 1, "topk_group": 1}, (1, 1)), ({"n_group": None}, (1, 1))]
)
def test_groups_of_experts_are_read_and_default_to_one(said: dict[str, Any], groups: tuple[int, int]) -> None:
    moe = read(DEEPSEEK | said).moe
    assert moe is not None
    assert (moe.groups, moe.token_groups) == groups


def test_a_token_from_more_groups_than_there_are_is_refused() -> None:
    error = refusal(DEEPSEEK | {"n_group": 8, "topk_group": 9})
    assert error is not None
    assert "topk_group" in str(error)
