"""Tiny causal language models with a character tokenizer, made on the spot: no test needs a download.

A model is a folder with config.json, model.safetensors and tokenizer.json, as Hugging Face and vLLM load
them. `config` writes config.json alone, without torch, for the planner. Weights are random:
`lab.warm_up` teaches them a task. What it is not: a model of language; upper-case letters are unknown
to its tokenizer.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

Family = Literal["qwen2", "llama", "qwen3"]

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=<>?!.,:;()[]{}_'\"\n"
VOCABULARY = (*SPECIAL, *CHARACTERS)
"""64 tokens; a token's id is its index."""

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MAX_POSITIONS = 512
_FEED_FORWARD = 2  # times hidden: most of what a tiny model learns sits in attention
_INITIALIZER_RANGE = 0.05  # 0.02 suits widths of thousands; narrow models learn faster from more


class Shape(TypedDict, total=False):
    """Arguments of `config` that `build` hands on; the signature of `config` has the defaults."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool


def config(
    folder: str | Path,
    *,
    family: Family = "qwen2",
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
) -> Path:
    """Write config.json of such a model and return the folder; needs no torch."""
    assert hidden % heads == 0, "hidden must be a multiple of heads"
    assert heads % kv_heads == 0, "heads must be a multiple of kv_heads"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": _FEED_FORWARD * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": tied,
        "initializer_range": _INITIALIZER_RANGE,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "pad_token_id": VOCABULARY.index(PAD),
        "bos_token_id": VOCABULARY.index(BOS),
        "eos_token_id": VOCABULARY.index(EOS),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return folder


def build(folder: str | Path, *, seed: int = 0, **shape: Unpack[Shape]) -> Path:
    """Write a randomly initialised model with its tokenizer and return the folder.

    Equal arguments give equal weights; the caller's random state stays as it was.
    """
    import torch

    folder = config(folder, **shape)
    with _cpu_for_deepspeed(), torch.random.fork_rng(devices=[]):
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForCausalLM).from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.float32
        )
        model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def _cpu_for_deepspeed() -> Iterator[None]:
    """Transformers looks for DeepSpeed, which asks for an accelerator; later processes are not told."""
    name = "DS_ACCELERATOR"
    before = os.environ.get(name)
    os.environ[name] = before or "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def tokenizer() -> Any:
    """The character tokenizer as `PreTrainedTokenizerFast`; it adds no special tokens by itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # byte-level spelling and no merges: transformers replaces the tokenizer of a qwen2 folder by
    # its own byte-level class, which with this vocabulary gives the same ids
    spelled = {" ": "\u0120", "\n": "\u010a"}
    ids = {spelled.get(token, token): number for number, token in enumerate(VOCABULARY)}
    raw = Tokenizer(models.BPE(ids, [], unk_token=UNKNOWN))
    characters = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = cast(Any, pre_tokenizers.Sequence([characters, bytes_]))
    raw.decoder = cast(Any, decoders.ByteLevel())
    return cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=raw,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=_MAX_POSITIONS,
    )
