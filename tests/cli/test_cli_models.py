from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli.models import models
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.words import parameters
from rlhfsim.specs.model.presets import preset_names


def run(*arguments: str, columns: int = 100) -> str:
    result = CliRunner().invoke(models, arguments, catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.output


def one(name: str) -> dict[str, Any]:
    (entry,) = json.loads(run(name, "--json"))["models"]
    assert isinstance(entry, dict)
    return entry


def test_every_preset_has_a_line_and_an_entry() -> None:
    entries = json.loads(run("--json"))["models"]
    assert len(entries) == len(preset_names())
    starts = {line.split(" ", 1)[0] for line in run().splitlines()}
    assert {e["name"] for e in entries} <= starts


@pytest.mark.parametrize("columns", [100, 80])
@pytest.mark.parametrize("arguments", [(), ("70b",), ("deepseek-v3",)])
def test_output_stays_within_the_terminal(arguments: tuple[str, ...], columns: int) -> None:
    assert max(map(len, run(*arguments, columns=columns).splitlines())) <= columns


def test_an_alias_shows_the_published_shape() -> None:
    entry = one("70b")
    assert entry["name"] == "llama-3.1-70b"
    assert (entry["num_layers"], entry["num_heads"], entry["num_kv_heads"]) == (80, 64, 8)
    assert entry["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert entry["valid_tp"] == [1, 2, 4, 8, 16, 32, 64]


def test_a_model_with_experts_tells_active_from_all() -> None:
    entry = one("deepseek-v3")
    assert entry["active_params"] < entry["params"] / 10
    assert "256 in 58 layers, 8 per token" in run("deepseek-v3")


def test_a_config_file_of_the_user_is_read(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert one(str(path))["num_layers"] == 2


def test_an_unknown_name_is_an_error_on_the_command_line() -> None:
    with pytest.raises(RlhfsimError, match="unknown model") as caught:
        run("llama-9000b")
    assert caught.value.place is not None


def test_counts_read_as_people_write_them() -> None:
    assert parameters(70_553_706_496) == "70.6B"
    assert parameters(494_032_768) == "494M"
