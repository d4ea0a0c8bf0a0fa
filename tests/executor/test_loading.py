"""Host memory that ranks take while they load a model of 1 GB; they run in loading_ranks.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest

pytestmark = pytest.mark.slow
WORLD = 4


def write_model(folder: Path) -> int:
    """Random weights of a Llama of four layers in two files; its bytes."""
    import torch
    import transformers as hf
    from safetensors.torch import save_file

    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=2048,
        max_position_embeddings=128,
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in hf.LlamaForCausalLM(config).named_parameters()}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    names, files = list(shapes), ("first.safetensors", "second.safetensors")
    for file, some in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: torch.randn(shapes[name]) for name in some}, folder / file, {"format": "pt"})
    size = sum((folder / file).stat().st_size for file in files)
    index = {name: files[number % 2] for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    return size


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Most bytes of any rank, by layout."""
    server = request.getfixturevalue("fork_server")
    folder = tmp_path_factory.mktemp("loading")
    size = write_model(folder / "model")
    assert 1.0e9 < size < 1.02e9
    fork_server.run_ranks(server, "loading_ranks.py", WORLD, str(folder))
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    most = {name: {key: max(r[name][key] for r in ranks) for key in ("peak", "kept")} for name in ranks[0]}
    for name, bytes_ in most.items():
        sys.stderr.write(f"{name}: peak {bytes_['peak'] / 1e9:.2f} GB, kept {bytes_['kept'] / 1e9:.2f} GB\n")
    return most


@pytest.mark.parametrize("layout", ["zero3", "tp", "pp"])
def test_a_rank_holds_its_shard_of_1_gb_and_little_more(found: dict[str, Any], layout: str) -> None:
    assert found[layout]["peak"] < 0.6e9


def test_a_whole_replica_is_on_the_host_once(found: dict[str, Any]) -> None:
    assert found["whole"]["peak"] < 1.2e9
