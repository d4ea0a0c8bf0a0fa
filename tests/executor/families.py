"""Tiny models of twelve families, each trained one step, and what a vLLM engine says after it was synced.

The trainer (this process) and the engine (`python families.py FOLDER ...`) are processes of their own: vLLM
changes transformers' classes and its process for good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from executor.engines import weights
from executor.engines.transformers import heads
from executor.weight_transfer.packing import Named

BASE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
NO_HEAD_DIM = ("deepseek_v3", "olmo2", "phi3")
"""Types whose configuration derives it."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # vLLM's latent attention has kernels for DeepSeek-V3's own widths only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        **EXPERTS,
        "norm_topk_prob": True,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **LATENT,
        **SHARED,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        **SHARED,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
}
SENT = "sent.weights"


def build(family: str, folder: Path) -> Path:
    """A checkpoint of random weights; norms, biases and corrections too, which begin as ones or zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**BASE, "model_type": family, **FAMILIES[family]}
    if family in NO_HEAD_DIM:
        del fields["head_dim"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        flat = [p for p in model.parameters() if p.dim() < 2]
        for tensor in (*flat, *(b for name, b in model.named_buffers() if "correction" in name)):
            tensor.add_(0.1 * torch.randn(tensor.shape))
        model.save_pretrained(folder)
    return folder


def trained(folder: Path) -> heads.HeadedModel:
    """The trainer's model after one step on random tokens."""
    model = heads.load(str(folder), "causal", "fp32")
    tokens = torch.randint(4, 60, (1, 24), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    logprobs, _ = model(tokens, torch.arange(24)[None], torch.arange(23), tokens[0, 1:])
    (-logprobs.mean()).backward()
    optimizer.step()
    return model.requires_grad_(False)


def sent(model: heads.HeadedModel) -> Iterator[list[Named]]:
    """What the trainer's engines send."""
    return model.stored.of(weights.buckets(heads.named_tensors(model), 50_000, here=True))


def disagreement(model: heads.HeadedModel, rows: Sequence[Mapping[str, Any]]) -> float:
    """Largest difference of log-probs between an engine's rows and the trainer's forward."""
    worst = 0.0
    for row in rows:
        tokens = torch.tensor([row["prompt"] + row["tokens"]])
        first, last = len(row["prompt"]), tokens.shape[1]
        ours, _ = model(
            tokens, torch.arange(last)[None], torch.arange(first - 1, last - 1), tokens[0, first:]
        )
        worst = max(worst, float((ours - torch.tensor(row["logprobs"])).abs().max()))
    return worst


def engines_say(folders: Sequence[Path], variables: Mapping[str, str]) -> dict[str, Any]:
    """By folder: rows before and after two syncs of `SENT`, or the error that ended them."""
    command = [sys.executable, __file__, *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, env=dict(variables), check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {folder.name: json.loads((folder / "facts.json").read_text()) for folder in folders}


def main() -> None:
    """The engines' process."""
    from executor.engines.vllm.start import apply, environment

    apply(environment("cpu"))
    for folder in map(Path, sys.argv[1:]):
        (folder / "facts.json").write_text(json.dumps(_facts(folder)))


def _facts(folder: Path) -> Any:
    from safetensors.torch import load_file
    from vllm_rig import channel, engine_at, requests, sync

    from executor.weight_transfer.channel import Sender
    from rlhfsim.errors import RlhfsimError

    engine, asked = engine_at(folder), requests(4, temperature=1.0, top_p=1.0)

    def rows() -> list[dict[str, Any]]:
        return [
            {"prompt": r.prompt.tolist(), "tokens": c.tokens.tolist(), "logprobs": c.logprobs.tolist()}
            for r, c in zip(asked, engine.generate(asked), strict=True)
        ]

    facts = {"before": rows()}
    sender = Sender(channel(engine, "host", folder))
    try:
        for version in (1, 2):
            sync(engine, sender, iter([[pair] for pair in load_file(folder / SENT).items()]), version)
        facts["after"] = rows()
    except RlhfsimError as error:
        return error.message
    finally:
        sender.close()
        engine.close()
    return facts


if __name__ == "__main__":
    main()
