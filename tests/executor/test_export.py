"""The copy of a model for users: files of a bounded size, written one after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from executor.engines import checkpoints, lora, weights
from executor.engines.background import Background
from executor.engines.transformers import heads
from executor.tasks import tiny

MIB = 2**20


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)


@pytest.mark.parametrize("beside", [False, True])
def test_a_large_model_is_cut_into_files_that_its_readers_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    source = tiny.build(tmp_path / "source", layers=2)
    model = heads.load(str(source), "causal", "fp32")
    named = heads.named_tensors(model)
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 400_000)
    saved = _saved(source, model, named)
    monkeypatch.setattr(checkpoints, "GATHER_BYTES", 100_000)
    folder = tmp_path / "copy"
    folder.mkdir()
    background = Background(1) if beside else None
    checkpoints.export(saved, folder, background)
    if background is not None:
        with torch.no_grad():
            wanted_before = {name: parameter.clone() for name, parameter in named.items()}
            for parameter in named.values():  # the next step
                parameter.add_(1.0)
        while not background.written():
            time.sleep(0.001)
        named = {name: torch.nn.Parameter(tensor) for name, tensor in wanted_before.items()}
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 410_000 for file in files)
    assert not list(folder.glob("*.part"))
    again = heads.load(str(folder), "causal", "fp32")
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, wanted in named.items():
        assert torch.equal(heads.named_tensors(again)[name], wanted)
        assert torch.equal(dict(theirs.named_parameters())[name], wanted)


def _saved(source: Path, model: heads.HeadedModel, named: dict[str, torch.Tensor]) -> Any:
    return SimpleNamespace(
        model=model,
        buckets=lambda size: weights.buckets(named, size, here=True),
        spec=SimpleNamespace(model=str(source), head="causal", lora_rank=None),
    )


def test_a_small_model_is_one_file_without_index(tmp_path: Path) -> None:
    source = tiny.build(tmp_path / "source", layers=1)
    model = heads.load(str(source), "causal", "fp32")
    saved = _saved(source, model, heads.named_tensors(model))
    (tmp_path / "copy").mkdir()
    checkpoints.export(saved, tmp_path / "copy")
    assert [file.name for file in (tmp_path / "copy").glob("model*")] == ["model.safetensors"]
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("head", ["causal", "score"])
def test_peft_reads_the_adapter_and_gives_the_logits_of_the_trained_model(tmp_path: Path, head: Any) -> None:
    source = tiny.build(tmp_path / "source", layers=2)
    model = heads.load(str(source), head, "fp32")
    lora.attach(model, 4, seed=0)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    spec = SimpleNamespace(model=str(source), head=head, lora_rank=4)
    saved: Any = SimpleNamespace(
        model=model, spec=spec, buckets=lambda size: lora.merged(model, size, here=True)
    )
    (tmp_path / "copy").mkdir()
    checkpoints.export(saved, tmp_path / "copy")
    automatic: Any = hf.AutoModelForCausalLM if head == "causal" else hf.AutoModelForSequenceClassification
    options: dict[str, Any] = {"dtype": torch.float32} | ({} if head == "causal" else {"num_labels": 1})
    base = automatic.from_pretrained(source, **options)
    import peft  # seconds, in every process that collects tests

    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "copy" / checkpoints.ADAPTER))
    merged = automatic.from_pretrained(tmp_path / "copy", **options)
    tokens, index = torch.arange(3, 11)[None], torch.arange(7)

    def outputs(theirs: Any) -> torch.Tensor:
        logits: torch.Tensor = theirs(tokens).logits[0]
        return logits if head == "score" else logits.log_softmax(-1)[index, tokens[0, 1:]]

    with torch.no_grad():
        wanted = model(tokens, index.new_tensor([[*range(8)]]), index, tokens[0, 1:])[0]
        if head == "score":
            base.config.pad_token_id = merged.config.pad_token_id = 0
            wanted = model(tokens, index.new_tensor([[*range(8)]]), index[-1:] + 1, tokens[0, -1:])[0]
        for theirs in (adapted, merged):
            torch.testing.assert_close(outputs(theirs), wanted, rtol=0, atol=1e-5)
        with adapted.disable_adapter():
            assert (outputs(adapted) - wanted).abs().max() > 1e-2
    config = json.loads((tmp_path / "copy" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(source))
    assert "q_proj" in config["target_modules"]
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "copy").get_vocab()


def test_rank_0_holds_the_tensors_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB in files of 16 MiB."""

    def buckets(_: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number in range(64):
            yield [(f"layers.{number}.weight", torch.full((MIB,), float(number)))]

    monkeypatch.setattr(checkpoints, "FILE_BYTES", 16 * MIB)
    config = SimpleNamespace(save_pretrained=lambda folder: None)
    spec = SimpleNamespace(model=str(tmp_path / "source"), head="causal", lora_rank=None)
    saved: Any = SimpleNamespace(model=SimpleNamespace(config=config), buckets=buckets, spec=spec)
    checkpoints.export(saved, tmp_path)  # what the libraries allocate once
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    checkpoints.export(saved, tmp_path)
    assert _status("VmHWM") - before < 64 * MIB
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 256 * MIB
    assert len(set(index["weight_map"].values())) == 16


def test_other_ranks_take_part_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def buckets(_: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number in range(3):
            gathered.append(number)
            yield []

    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 1)
    saved: Any = SimpleNamespace(buckets=buckets, spec=SimpleNamespace(lora_rank=None))
    checkpoints.export(saved, tmp_path)
    assert gathered == [0, 1, 2]
    assert not list(tmp_path.iterdir())


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])
