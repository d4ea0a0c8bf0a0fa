"""Every preset against published counts; names and aliases."""

from __future__ import annotations

import csv
import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.presets import aliases, preset, preset_name, preset_names, resolve_model
from rlhfsim.units import BILLION

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "lab" / "scoreboard" / "data"
WRONG_IN_TABLE = {"bloom-176b"}  # the table gives BLOOM the layers and width of GPT-3


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


COUNTS = {row["preset"]: row for row in _rows(ROOT / "tests" / "data" / "model_param_counts.csv")}
TABLE = [r for r in _rows(DATA / "model_configs.csv") if r["model"] not in WRONG_IN_TABLE]


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_parameters_are_those_published(name):
    row = COUNTS[name]
    assert preset(name).num_params == pytest.approx(
        int(row["num_params"]), rel=float(row["tolerance"]), abs=0
    )


def test_every_preset_has_a_published_count():
    in_table = {preset_name(row["model"]) for row in TABLE}
    assert set(preset_names()) - set(COUNTS) - in_table == set()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["model"])
def test_shapes_and_counts_agree_with_the_table(row):
    model = resolve_model(row["model"])
    assert model.num_layers == int(row["layers"])
    assert model.hidden == int(row["hidden"])
    assert model.attention.num_heads == int(row["heads"])
    indexer = model.num_layers * model.attention.index_bytes  # not in the table
    assert model.kv_bytes_per_token(2) - indexer == float(row["kv_bytes_per_token_bf16"])
    # the table leaves out biases, norms and learned positions (1 % of OPT-125M), GLM-5's indexer
    # and the narrow embedding of OPT-350M (6 %)
    loose = {"opt-350m": 0.07, "opt-125m": 0.011, "gpt2-medium": 0.006, "glm-5": 0.02}
    rel = loose.get(model.name, 0.005)
    total, active = row["params_total_b_computed"], row["params_active_b_computed"]
    language = model.num_params - model.params_vision  # the table counts no vision towers
    assert language == pytest.approx(float(total) * BILLION, rel=rel)
    assert model.num_active_params - model.params_vision == pytest.approx(float(active) * BILLION, rel=rel)


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("deepseek-v2", 21.4), ("qwen1.5-moe-a2.7b", 2.7)],
)
def test_active_parameters_are_the_vendors_figure(name, active):
    assert preset(name).num_active_params / BILLION == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("8b", "llama-3.1-8b"),
        ("70b", "llama-3.1-70b"),
        ("7b", "qwen2.5-7b"),
        ("13b", "olmo-2-13b"),
        ("34b", "codellama-34b"),
        ("405b", "llama-3.1-405b"),
        ("671B", "deepseek-v3"),
        ("32b", "qwen2.5-32b"),
        ("72b", "qwen2.5-72b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b"),
        ("Llama 3.3 70B", "llama-3.1-70b"),
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("Kimi_K2", "kimi-k2"),
        ("DeepSeekV3", "deepseek-v3"),
        ("OPT-350M", "opt-350m"),
        ("gpt3-175b (Megatron)", "gpt-175b"),
        ("phi-4", "phi-4-14b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("Nemotron_3_Super", "nemotron-3-super-120b-a12b"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80b-a3b"),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3.5-35b-a3b"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "moonlight-16b-a3b"),
        ("Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "llama-3.1-70b"),
    ],
)
def test_names_people_write_find_the_preset(name, expected):
    assert resolve_model(name).name == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/workspace/models/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("models/Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B/snapshots/d1497293", "qwen2.5-7b"),
        ("/runs/google/gemma-2-2b-it/global_step_58", "gemma-2-2b"),
    ],
)
def test_a_path_of_another_machine_is_resolved_by_its_name(path, expected):
    assert resolve_model(path).name == expected


def test_a_path_without_a_known_name_is_a_missing_file():
    with pytest.raises(RlhfsimError, match="no such file"):
        resolve_model("/runs/gemma/global_step_58")


def test_every_name_is_lower_case_and_every_alias_leads_to_a_preset():
    assert set(aliases().values()) <= set(preset_names())
    assert all(name == name.lower() for name in (*preset_names(), *aliases()))
    assert not set(aliases()) & set(preset_names())


def test_every_configuration_key_of_the_measurements_has_a_preset():
    keys = set()
    for table in ("training", "inference", "memory", "rlhf", "weight_sync"):
        keys |= {row["model_config_key"] for row in _rows(DATA / f"{table}.csv")}
    assert {key for key in keys if key and preset_name(key) is None} == set()


def test_an_unknown_name_is_told_its_neighbours():
    with pytest.raises(RlhfsimError, match="unknown model") as caught:
        resolve_model("llama-3.1-9b")
    assert "llama-3.1-8b" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "ai21labs/Jamba-v0.1",
        "deepseek-ai/DeepSeek-V4-Flash",
        "google/gemma-4-31B-it",
    ],
)
def test_a_model_that_cannot_be_expressed_says_why(name):
    with pytest.raises(RlhfsimError, match="cannot express") as caught:
        resolve_model(name)
    assert caught.value.code == "unsupported-model"


def test_every_preset_names_its_source_in_the_model():
    for name in preset_names():
        assert len(preset(name).source) > 8


def test_the_documentation_lists_every_preset_and_alias():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    missing = [name for name in (*preset_names(), *aliases()) if f"`{name}`" not in text]
    assert missing == []


def test_presets_ship_inside_the_package():
    data = json.loads(files("rlhfsim.specs.model").joinpath("presets.json").read_text())
    assert len(data["presets"]) == len(preset_names())


@given(st.text(max_size=80))
def test_any_name_is_a_model_or_an_error_for_people(name):
    error = None
    try:
        resolve_model(name)
    except RlhfsimError as refused:
        error = refused
    assert error is None or error.help
