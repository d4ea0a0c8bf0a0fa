"""Weights of twelve families reach vLLM whole: by names, and by the log-probs of an engine that was synced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor import refusals
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import KINDS
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import published_config
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.verdict import refusal

EXACT = 1e-5
SEEN = 0.1
"""A step that was not taken over shows at least this much."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_trainer_sends_the_names_and_values_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    """transformers holds the experts of a layer together, and the router's correction in a buffer."""
    stored = load_file(families.build(family, tmp_path) / "model.safetensors")
    model = families.heads.load(str(tmp_path), "causal", "fp32").requires_grad_(False)
    buckets = [list(bucket) for bucket in families.sent(model)]
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    for bucket in buckets:
        copied = [t.untyped_storage().data_ptr() not in own for _, t in bucket]
        sliced = ".experts." in bucket[-1][0]
        assert copied == [False] * (len(bucket) - 1) + [sliced], "a last that readers keep is no view of all"
    sent = dict(pair for bucket in buckets for pair in bucket)
    assert [*families.sent(model)] == [[]] * len(buckets), "readers' lists do not keep what was sent"
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in sent.values())
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in stored)


def test_launch_refuses_vision_models_and_sinks_in_the_words_of_design(tmp_path: Path) -> None:
    vision = {**(published_config("qwen2.5-vl-7b") or {}), "model_type": "qwen2_5_vl"}
    (tmp_path / "config.json").write_text(json.dumps(vision))
    with pytest.raises(RlhfsimError, match="our own executor does not run vision towers") as refused:
        refusals.check_model(str(tmp_path))
    assert KINDS["vision towers"] in str(refused.value.help)
    words = "our own executor does not run weight sync of attention sinks"
    grpo, tiny = Workload(model="gpt-oss-20b"), {**families.BASE, "model_type": "gpt_oss"}
    job: Any = SimpleNamespace(model="tiny", plan=SimpleNamespace(workload=grpo))
    with pytest.raises(RlhfsimError, match=words):
        refusals.check_family(job, tiny | families.FAMILIES["gpt_oss"])
    at_design = refusal(Request(workload=grpo, cluster=parse_cluster(8)))
    assert at_design is not None
    assert at_design.message == words


@pytest.mark.long
def test_engines_of_twelve_families_agree_with_the_trainer_after_a_sync(tmp_path: Path) -> None:
    models = {}
    for family in families.FAMILIES:
        folder = families.build(family, tmp_path / family)
        models[family] = model = families.trained(folder)
        save_file({n: t.contiguous() for b in families.sent(model) for n, t in b}, folder / families.SENT)
    folders = [tmp_path / family for family in models]
    facts = families.engines_say(folders, os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert "left 4 layers without all of their weights" in facts.pop("gpt_oss")
    for family in facts.keys() & models.keys():
        assert families.disagreement(models[family], facts[family]["after"]) < EXACT, family
        assert families.disagreement(models[family], facts[family]["before"]) > SEEN, family
