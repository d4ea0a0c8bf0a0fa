"""What a row of training.csv says: model, cluster, layout, batch, software, and the measured step.

Only the row's configuration is read for the prediction; its results only for the measured value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, cast, get_args

import yaml

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.flop import attention_flop, matmul_flop
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.hardware.hardware import Cluster, Fabric, NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.config import read_config
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import preset, preset_name, published_config
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, Recompute
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Lora, Precision, Workload
from rlhfsim.step.calls import CallSetting
from rlhfsim.training.layer_time import OPERATORS
from rlhfsim.training.packing import sequences_of
from rlhfsim.units import TERA
from rlhfsim.validation.outcome import Skip, needed
from rlhfsim.validation.rows import Row, zero_stage

FABRICS: tuple[str, ...] = get_args(Fabric)


@frozen
class TrainingJob:
    """One training job as a user writes it: the actor of a KTO plan, the one workload that trains on given
    sequences. Its reference waits on the host."""

    setting: CallSetting
    stated: tuple[str, ...]
    """What the software of the row is taken to do, with its source."""

    @property
    def device(self) -> Device:
        """A GPU of the cluster."""
        return self.setting.device(self.setting.placement.actor)

    @property
    def model(self) -> ModelSpec:
        """What is trained."""
        return self.setting.models.actor

    @property
    def layout(self) -> Layout:
        """How it is cut."""
        return self.setting.placement.actor.layout

    @property
    def sequences(self) -> Sequences:
        """One optimizer step."""
        return sequences_of(self.setting.workload)


Lookup = Callable[[str], Profile]
"""Finds a hardware profile by name or alias; always the same object for the same name."""


shipped_profile: Lookup = cache(load_profile)
"""A profile by name or alias, read once."""


@cache
def _known_software() -> dict[str, Any]:
    """`training_software.yaml`: what frameworks and the recipes of their releases do, with sources."""
    text = (resources.files("rlhfsim.validation") / "training_software.yaml").read_text(encoding="utf-8")
    known: dict[str, Any] = yaml.safe_load(text)
    return known


def job(row: Row, lookup: Lookup = shipped_profile) -> TrainingJob:
    """The job of a row; assumptions.yaml is already applied.

    Raises:
        Skip: a column that decides the time is blank, or the model cannot be expressed.
    """
    software, exchange, stated = software_of(row)
    model, layout = model_of(row), replace(layout_of(row), **exchange)
    group = nodes_of(row, layout, lookup)
    trained = RolePlacement(pool="all", layout=layout)
    return TrainingJob(
        setting=CallSetting(
            models=Models(actor=model, reference=model),
            placement=Placement(
                pools=(ResourcePool(name="all", gpus=layout.gpus),),
                actor=trained,
                reference=replace(trained, residency="offloaded"),
                backend=backend_of(row, layout),
                software=software,
            ),
            workload=workload_of(row, layout, model, precision_of(row, group.profile)),
            cluster=Cluster(node_groups=(group,)),
        ),
        stated=stated,
    )


def workload_of(row: Row, layout: Layout, model: ModelSpec, precision: Precision) -> Workload:
    """The sequences of one optimizer step, all of one length, and what is trained on them."""
    count, length = batch(row, layout)
    # AutoModel runs one pipeline schedule per local batch: it drains once per accumulation step
    drains = row.framework.startswith("NeMo AutoModel") and layout.pp > 1
    return Workload(
        algorithm="kto",
        model=model.name,
        prompts=count,
        prompt_len=Fixed(value=length - 1),
        response_len=Fixed(value=1),
        mini_batches=(row.integer("grad_accum") or 1) if drains else 1,
        packing=False,
        lora=Lora(rank=32) if row.words("workload") == "LoRA" else None,
        train_precision=precision,
    )


def model_of(row: Row) -> ModelSpec:
    """The model of a row, from its preset or its config.json."""
    known = config_of(row)
    if isinstance(known, str):
        return preset(known)
    return read_config(Source(row.file, "", known), row.text("model") or "gpt")


def config_of(row: Row) -> str | Mapping[str, Any]:
    """A preset by config key or name, or its config cut to the `layers`; else GPT-2's by the shape."""
    layers, hidden = row.integer("layers"), row.integer("hidden")
    named = re.sub(r"\s*\(.*?\)|\s+2-node|\s+MoE(?= \d)", "", row.words("model"))
    for name in (row.text("model_config_key"), re.sub(r"^Llama-like ", "llama-2-", named)):
        known = preset_name(name) if name else None
        if known:
            model = preset(known)
            if hidden in (None, model.hidden):
                deep = layers or _predicting(row, model) or model.num_layers
                return known if deep == model.num_layers else _cut(known, deep)
    if layers is None or hidden is None or _has_experts(row):
        raise Skip(f"no shape of model {row.text('model')}")
    return _gpt(row)


def _has_experts(row: Row) -> bool:
    """Whether a row without a known model says that it is a mixture of experts: no column gives its shape."""
    whole, active = row.number("params_b"), row.number("params_active_b")
    if whole and active and active < 0.95 * whole:
        return True
    named = re.search(r"moe|mixture|mixtral|\d+x\d+b|\ba\d+(\.\d+)?b\b", row.words("model").lower())
    return named is not None or (row.integer("ep") or 1) > 1


def _predicting(row: Row, model: ModelSpec) -> int | None:
    """Layers of DeepSeek-V3 with its multi-token-prediction layer, which Megatron-Bridge trains too.

    Its tables print 260 GFLOP a token, and 249 in the rows `w/o MTP` of release 25.11. The second
    pass through the LM head is not counted.
    """
    bridge = row.framework.startswith("Megatron-Bridge")
    name = row.words("model")
    trains = bridge and name.startswith("DeepSeekV3") and "w/o MTP" not in name
    return model.num_layers + 1 if trains else None


def _cut(known: str, layers: int) -> Mapping[str, Any]:
    """The published config of a preset with another number of layers, one of them with experts at least."""
    config = dict(published_config(known) or {})
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers - 1)
    return config


def _gpt(row: Row) -> Mapping[str, Any]:
    """GPT-2's block, which GPT-3 has too; vocabulary from the notes."""
    hidden = row.integer("hidden") or 0
    heads = row.integer("heads") or max(1, hidden // 128)
    vocab = re.search(r"vocab (\d+)", row.words("notes"))
    return {
        "model_type": "gpt2",
        "n_layer": row.integer("layers") or 0,
        "n_embd": hidden,
        "n_head": heads,
        "num_key_value_heads": row.integer("kv_heads") or heads,
        "vocab_size": int(vocab[1]) if vocab else 51200,
        "n_positions": row.integer("seq_len") or 2048,
    }


def layout_of(row: Row) -> Layout:
    """The layout; data parallelism is what the other degrees leave of the GPUs."""
    gpus, tp, pp = (row.integer(c) or 1 for c in ("gpus", "tp", "pp"))
    cp, vp, micro = row.integer("cp") or 1, row.integer("vp") or 1, row.integer("micro_batch")
    if micro is None:
        raise Skip("micro-batch is not published")
    if gpus % (tp * pp * cp):
        raise Skip("the published degrees do not divide the GPUs")
    dp = gpus // (tp * pp * cp)
    ep = min(row.integer("ep") or 1, dp * cp * tp)
    zero = _zero(row.words("fsdp_or_zero"), row.framework)
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        vp=vp if pp > 1 else 1,
        micro_batch=micro,
        # pipelines accumulate gradients before they reduce them: ZeRO-2 and 3 then exchange as ZeRO-1
        zero=1 if zero >= 2 and pp > 1 else zero,
        sequence_parallel=(row.text("sequence_parallel") or "yes") != "no",
        recompute=_recompute(row.text("recompute")),
        offload_optimizer="cpu" if "optim" in row.words("offload") else "none",
    )


def _zero(text: str, framework: str) -> int:
    text = text.lower()
    stage = zero_stage(text)
    if stage is not None:
        return stage
    if "grad_op" in text or "optimizer+gradient" in text:
        return 2
    if text and "no fsdp" not in text and "no_shard" not in text:
        return 3
    return 0 if framework == "Megatron-LM (2021)" else 1


def _recompute(text: str | None) -> Recompute:
    text = needed(text, "recomputation is not published")
    if text.startswith("full"):
        return "full"
    core = "core_attn" in text or "attention core" in text
    return "selective" if core else "none"


def recomputed(text: str | None, framework: str = "") -> tuple[str, ...]:
    """Modules that selective recomputation repeats in addition to the attention core; by operator in
    torchtitan."""
    if framework.startswith("torchtitan") and (text or "").startswith("selective"):
        return (OPERATORS,)
    known = ("mla_up_proj", "mlp", "moe_act", "moe", "layernorm")
    names = re.split(r"[,+]\s*", (text or "").partition(":")[2].strip())
    return tuple(n.strip() for n in names if n.strip() in known)


def nodes_of(row: Row, layout: Layout, lookup: Lookup) -> NodeGroup:
    """The GPUs in their usual nodes, behind the stated fabric; NVL72 profiles keep their rack."""
    name = row.words("gpu_type").strip()
    try:
        profile = lookup(name)
    except RlhfsimError as error:
        raise Skip(f"no hardware profile for {name}") from error
    node, said = min(profile.node.gpus, layout.gpus), row.words("fabric").lower()
    if said and said not in FABRICS:
        raise Skip(f"no network {said!r}: {', '.join(FABRICS)}")
    fabric = cast(Fabric, said) if said else None
    return NodeGroup(profile=profile, gpus=layout.gpus, gpus_per_node=node, fabric=fabric)


def batch(row: Row, layout: Layout) -> tuple[int, float]:
    """Sequences of one optimizer step, and their length in tokens."""
    count = row.integer("global_batch_seqs")
    if count is None and (accumulated := row.integer("grad_accum")):
        count = accumulated * layout.micro_batch * layout.dp
    if count is None and (match := re.search(r"batch size per DP (\d+)", row.words("notes"))):
        count = int(match[1]) * layout.dp
    length = row.number("seq_len")
    if count is None or length is None:
        raise Skip("global batch or sequence length is not published")
    if count < layout.dp:
        raise Skip("the published degrees leave ranks without a sequence")
    return count, length


def precision_of(row: Row, profile: Profile) -> Precision:
    """`bf16`, `fp8` or `fp4`."""
    text = row.words("precision").lower()
    if not text:
        raise Skip("precision is not published")
    known: tuple[Precision, ...] = ("fp4", "fp8", "fp16")
    precision: Precision = next((name for name in known if name in text), "bf16")
    if profile.peak.get(precision) is None:
        raise Skip(f"{profile.title} has no {precision}")
    return precision


def backend_of(row: Row, layout: Layout) -> Backend:
    """Whose sharding runs: ZeRO-3 is FSDP2's, and what it does in a pipeline is Megatron's ZeRO-1.

    There weights are gathered once a step (`reshard_after_forward = not pp_enabled` of torchtitan 9dec370).
    """
    if layout.zero == 3:
        return "fsdp2"
    known = _habits(row)
    return known["backend"] if known and layout.pp == 1 else "megatron"


def _habits(row: Row) -> Mapping[str, Any] | None:
    entries = _known_software()["frameworks"]
    return next((entry for entry in entries if row.framework.startswith(entry["prefix"])), None)


def software_of(row: Row) -> tuple[Software, dict[str, Any], tuple[str, ...]]:
    """What the training stack does, fields of the layout on which tokens travel, and where that is stated."""
    framework, known = row.framework, _habits(row)
    software, stated = Software(stack="eager", fused=False), "eager PyTorch modules (default)"
    if known:
        software, stated = Software(**known["software"]), known["source"]
    if row.words("source").startswith(("arXiv:2205.05198", "NVIDIA/Megatron-LM@README.md")):
        software, stated = replace(software, flash=False), "arXiv 2205.05198: before FlashAttention"
    software, exchange, recipe = recipe_of(row, software)
    for phrase in _known_software()["said"]:
        if re.search(phrase["words"], row.words("notes")):
            software = replace(software, **phrase.get("software", {}))
            exchange = {**exchange, **phrase.get("layout", {})}
    software = replace(software, recomputed=recomputed(row.text("recompute"), framework))
    return software, exchange, (stated, recipe) if recipe else (stated,)


def recipe_of(row: Row, software: Software) -> tuple[Software, dict[str, Any], str]:
    """The software of a row as its release's recipe sets it (`training_software.yaml`)."""
    framework, text = row.framework, row.words("precision")
    release = re.search(r"\((\d\d\.\d\d(?:\.\d\d)?)", framework)
    if not release or "Megatron-Bridge" not in framework:
        return software, {}, ""
    model, gpu = row.words("model"), row.words("gpu_type")
    if "tokendrop" in model:
        return replace(software, graphs="partial"), {}, "token drop: fixed capacity, no host waits"
    known = _known_software()
    for recipe in known["recipes"]:
        fits = model.startswith(tuple(recipe["models"])) and gpu in recipe["gpus"]
        if fits and recipe.get("precision", "") in text and release[1] >= recipe["since"]:
            stated = known["recipes_source"] + recipe["source"]
            said: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in recipe["software"].items()
            }
            return replace(software, **said), recipe.get("layout", {}), stated
    return software, {}, "recipe: no CUDA graphs"


def measured(row: Row, training: TrainingJob) -> tuple[float, str]:
    """Seconds of one optimizer step as published, and from which figure.

    Order: step time, tokens/s/GPU, sequences/s, then TFLOP/s over the source's own FLOP count.
    """
    gpus, tokens = training.layout.gpus, training.sequences.tokens
    seconds = row.number("step_time_s")
    if seconds and row.framework.lower().startswith("prime-rl"):
        rank = training.sequences.count / training.layout.dp / training.layout.micro_batch
        return seconds * max(1.0, rank), "seconds per micro-batch"
    if seconds:
        return seconds, "step time"
    if rate := row.number("tokens_per_s_per_gpu"):
        return tokens / (rate * gpus), "tokens/s/GPU"
    if rate := row.number("seqs_per_s_total"):
        return training.sequences.count / rate, "sequences/s"
    if rate := row.number("model_tflops_per_gpu"):
        flop, rule = published_flop(row, training)
        return flop / (rate * TERA * gpus), f"TFLOP/s ({rule})"
    raise Skip("no result is published")


def published_flop(row: Row, training: TrainingJob) -> tuple[float, str]:
    """FLOP of one step as the source counts them.

        Megatron 2021: 96 B s L h^2 (1 + s/6h + V/16Lh), recomputation included, attention full
        Megatron-Core 2024, NeMo 25: 6 N_a, attention over the full square
        Megatron-Bridge, others: 6 N_a, attention causal

    Sources: arXiv 2104.04473 section 3.4 (equation 3); NVIDIA/NeMo nemo/utils/flops_formulas.py
    (commit 034b17b362); tokens/s against TFLOP/s printed together in the Megatron-Bridge tables.
    """
    framework, full = (row.framework, ("Megatron-LM (2021)", "Megatron-Core", "NeMo 25"))
    square = framework.startswith(full)
    dense = matmul_flop(training.model, training.sequences.tokens)
    cores = attention_flop(training.model, training.sequences, causal=not square)
    if framework == "Megatron-LM (2021)":
        head = 2 * training.model.params_lm_head * training.sequences.tokens
        return 4 * (dense - head + cores) + 3 * head, "recomputation counted, full attention"
    return 3 * (dense + cores), "full attention" if square else "causal attention"
