"""Kernel timings of the aiconfigurator_core package as coordinates and seconds (development only).

Which table serves which curve, and why, stands in `CHOICES`. Latencies are milliseconds of one
kernel call, replayed from a CUDA graph. Message sizes of collectives are elements of two bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlhfsim.units import MILLISECOND

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

PACKAGE, MODULE = "aiconfigurator-core", "aiconfigurator_core"
SYSTEMS: Mapping[str, str] = {
    "a100_sxm": "a100_sxm",
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "b200_sxm": "b200_sxm",
    "b300_sxm": "b300_sxm",
    "gb200_nvl72": "gb200",
    "gb300_nvl72": "gb300",
    "l40s": "l40s",
}
"""Profiles with tables of their own, and the package's name of the system."""
BY_ENGINE: Mapping[str, tuple[str, ...]] = {
    "gemm/fp8_static": ("h100_sxm", "h200_sxm"),
    "moe/fp8_static": ("h100_sxm", "h200_sxm"),
    "decode/fp8_trtllm": ("h100_sxm", "h200_sxm"),
    "decode/fp8_sglang": ("h100_sxm", "h200_sxm"),
    **dict.fromkeys(("decode/bf16_sglang", "prefill/sglang"), tuple(x for x in SYSTEMS if x != "l40s")),
}
"""Curves of one engine, and where its kernel is another one: FP8 caches on Hopper reach 0.82 to 0.86 of HBM in
TensorRT-LLM, 0.61 to 0.79 in vLLM and 0.50 to 0.61 in SGLang. Its BF16 attention on L40S follows no smooth curve."""
ROUTING = "power_law_1.01"
"""Expert load: the package also has `balanced` and `power_law_1.2`."""
WHOLE = 4
"""A table of a release counts as whole from a quarter of the rows of the largest on."""
ELEMENT = 2
"""Bytes of an element of a message (half, bfloat16)."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured points of one curve."""

    name: str
    """`gemm/bf16`, `collective/all_reduce`: kind and variant."""
    coordinates: tuple[Floats, ...]
    """In the order of `costs.kernel_work.KINDS[kind].axes`."""
    seconds: Floats
    shape: list[str]
    """What the first hold-out hashes."""
    family: list[str]
    """What the second hold-out hashes: the weight matrix, the head layout, the group."""
    work: Floats
    """What the third hold-out sorts by."""
    source: str

    def half(self) -> Mask:
        """True for the half of the shapes that the committed curve is fitted on."""
        return even(self.shape)

    def families(self) -> Mask:
        """True for the families that stay in when whole families are held out."""
        return even(self.family)


def even(keys: list[str]) -> Mask:
    """True for the half of the keys that a fit sees."""
    digests = {key: hashlib.md5(key.encode()).digest()[-1] % 2 == 0 for key in set(keys)}
    return np.array([digests[key] for key in keys])


@dataclass(frozen=True, slots=True)
class Choice:
    """Which table a curve is read from."""

    folder: str
    file: str
    frameworks: tuple[str, ...]
    """In order of preference."""
    pick: Callable[[pd.DataFrame], pd.DataFrame]
    """Rows of the curve."""
    read: Callable[[pd.DataFrame], dict[str, Any]]
    """Coordinates, family and work of the rows."""
    less: tuple[str, ...] = ()
    """Tables of `quantize` whose time at the same m and k is in the row's and does not belong there."""
    whole: bool = False
    """Releases that timed a few new models only are passed over."""


def installed() -> bool:
    """Whether the package is there."""
    return find_spec(MODULE) is not None


def package() -> str:
    """Name and version of the package, for `source` fields."""
    return f"{PACKAGE} {version(PACKAGE)}"


def read(profile: str) -> list[Samples]:
    """All curves that the package has for a profile."""
    wanted = (name for name in CHOICES if profile in BY_ENGINE.get(name, (profile,)))
    return [s for name in wanted if (s := read_curve(profile, name)) is not None]


def read_curve(profile: str, name: str) -> Samples | None:
    """The measured points of one curve, None where the package has none."""
    choice = CHOICES[name]
    for framework in choice.frameworks:
        picked = [
            (choice.pick(pd.read_parquet(path)), path)
            for path in _versions(SYSTEMS[profile], choice, framework)
        ]
        most = max((len(rows) for rows, _ in picked), default=0)
        for rows, path in picked:
            if choice.whole and len(rows) < most / WHOLE:
                continue
            for file in choice.less if len(rows) else ():
                rows = _less(rows, root() / SYSTEMS[profile] / "quantize" / framework, file)
            if len(rows):
                return _samples(name, choice, rows, path)
    return None


def _less(rows: pd.DataFrame, folder: Path, file: str) -> pd.DataFrame:
    """The rows without the time of a quantisation kernel; those whose m and k it does not have are left out."""
    newest = max(folder.glob(f"*/{file}_perf.parquet"), key=lambda path: _key(path.parent.name))
    known = pd.read_parquet(newest)
    each = known[known.quant_dtype == "fp8"].groupby(["m", "k"]).latency.median().rename("spared")
    joined = rows.join(each, on=["m", "k"]).dropna(subset="spared")
    rest = joined.assign(latency=joined.latency - joined.spared).drop(columns="spared")
    return rest[rest.latency > 0]


def root() -> Path:
    """The folder of the package's tables, a subfolder a system."""
    spec = find_spec(MODULE)
    assert spec, f"{PACKAGE} is not installed"
    assert spec.origin
    return Path(spec.origin).parent / "systems" / "data"


def _versions(system: str, choice: Choice, framework: str) -> list[Path]:
    """Files of one framework, newest version first."""
    folder = root() / system / choice.folder / framework
    found = folder.glob(f"*/{choice.file}_perf.parquet")
    return sorted(found, key=lambda path: _key(path.parent.name), reverse=True)


def _key(text: str) -> tuple[int, ...]:
    """`1.3.0rc20` sorts before `1.3.0` and after `1.3.0rc5`."""
    release, _, candidate = text.partition("rc")
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")]
    return (*(numbers + [0] * 4)[:4], int(candidate) if candidate else 10_000)


def _samples(name: str, choice: Choice, rows: pd.DataFrame, path: Path) -> Samples:
    """One point per shape: the median where a shape was measured more than once."""
    parts = choice.read(rows)
    family, work = parts.pop("family"), parts.pop("work")
    frame = pd.DataFrame({**parts, "family": family, "work": work})
    frame["seconds"] = rows["latency"].to_numpy(dtype=np.float64) * MILLISECOND
    keys = [key for key in parts if key != "shape"]
    frame["shape"] = parts.get("shape", _joined(frame, keys))
    merged = frame.groupby("shape", sort=True).agg(
        {**dict.fromkeys(keys, "first"), "family": "first", "work": "first", "seconds": "median"}
    )
    return Samples(
        name=name,
        coordinates=tuple(merged[key].to_numpy(dtype=np.float64) for key in keys),
        seconds=merged["seconds"].to_numpy(dtype=np.float64),
        shape=[str(key) for key in merged.index],
        family=[str(key) for key in merged["family"]],
        work=merged["work"].to_numpy(dtype=np.float64),
        source=f"{package()}: {path.relative_to(root()).as_posix()}",
    )


def _joined(frame: pd.DataFrame, keys: list[str]) -> list[str]:
    return ["x".join(f"{v:g}" for v in row) for row in frame[keys].to_numpy(dtype=np.float64)]


def _text(rows: pd.DataFrame, *columns: str) -> list[str]:
    return ["x".join(str(v) for v in row) for row in rows[list(columns)].to_numpy()]


def _floats(rows: pd.DataFrame, column: str) -> Floats:
    return rows[column].to_numpy(dtype=np.float64)


def _gemm(rows: pd.DataFrame) -> dict[str, Any]:
    m, n, k = (_floats(rows, c) for c in ("m", "n", "k"))
    return {"m": m, "n": n, "k": k, "family": _text(rows, "n", "k"), "work": m * n * k}


def _attention(rows: pd.DataFrame, length: Floats, power: int) -> dict[str, Any]:
    batch, heads, kv, dim = (
        _floats(rows, c) for c in ("batch_size", "num_heads", "num_key_value_heads", "head_dim")
    )
    shape = pd.DataFrame({"b": batch, "c": length, "a": heads, "g": kv, "d": dim})
    return {
        "streams": batch * kv,
        "length": length,
        "queries": heads / kv,
        "dim": dim,
        "shape": _joined(shape, [str(c) for c in shape]),
        "work": batch * heads * dim * length**power,
        "family": _text(rows, "num_heads", "num_key_value_heads", "head_dim"),
    }


def _mla(rows: pd.DataFrame, length: Floats, power: int) -> dict[str, Any]:
    batch, heads = _floats(rows, "batch_size"), _floats(rows, "num_heads")
    work = batch * heads * length**power
    return {"b": batch, "c": length, "a": heads, "family": _text(rows, "num_heads"), "work": work}


def _decode(rows: pd.DataFrame) -> dict[str, Any]:
    return _attention(rows, _floats(rows, "isl") + _floats(rows, "step"), 1)


def _prefill(rows: pd.DataFrame) -> dict[str, Any]:
    return _attention(rows, _floats(rows, "isl"), 2)


def _mla_decode(rows: pd.DataFrame) -> dict[str, Any]:
    return _mla(rows, _floats(rows, "isl") + _floats(rows, "step"), 1)


def _mla_prefill(rows: pd.DataFrame) -> dict[str, Any]:
    return _mla(rows, _floats(rows, "isl"), 2)


def _moe(rows: pd.DataFrame) -> dict[str, Any]:
    tokens, hidden, ffn, top_k, experts, tp, ep = (
        _floats(rows, c)
        for c in (
            "num_tokens",
            "hidden_size",
            "inter_size",
            "topk",
            "num_experts",
            "moe_tp_size",
            "moe_ep_size",
        )
    )
    shape = pd.DataFrame({"t": tokens, "h": hidden, "f": ffn, "k": top_k, "e": experts, "tp": tp, "ep": ep})
    return {
        "rows": tokens * top_k / experts,
        "experts": experts / ep,
        "ffn": ffn / tp,
        "hidden": hidden,
        "spread": ep / top_k,
        "shape": _joined(shape, [str(c) for c in shape]),
        "family": _text(rows, "hidden_size", "inter_size", "topk", "num_experts"),
        "work": tokens * top_k * hidden * ffn / tp / ep,
    }


def _messages(rows: pd.DataFrame) -> dict[str, Any]:
    size = _floats(rows, "message_size") * ELEMENT
    ranks = _floats(rows, "num_gpus")
    return {"ranks": ranks, "size": size, "family": _text(rows, "num_gpus"), "work": size}


def _where(**wanted: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Rows whose columns have these values; an older table without a column has its default only."""

    def pick(rows: pd.DataFrame) -> pd.DataFrame:
        for column, value in wanted.items():
            if column in rows:
                rows = rows[rows[column] == value]
        return rows

    return pick


def _gemm_choice(dtype: str, *frameworks: str) -> Choice:
    return Choice("gemm", "gemm", frameworks, _where(gemm_dtype=dtype), _gemm)


def _moe_choice(dtype: str, *frameworks: str) -> Choice:
    pick = _where(moe_dtype=dtype, distribution=ROUTING)
    return Choice("moe", "moe", frameworks or _ANY, pick, _moe, whole=True)


def _full(kv: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return _where(window_size=0, kv_cache_dtype=kv)


def _nccl(op: str) -> Choice:
    return Choice("comm", "nccl", ("nccl",), _where(op_name=op, nccl_dtype="half"), _messages)


_ANY = ("vllm", "sglang", "trtllm")
_KERNEL_ONLY = ("sglang", "trtllm")
CHOICES: Mapping[str, Choice] = {
    "gemm/bf16": _gemm_choice("bfloat16", *_ANY),
    "gemm/fp8": _gemm_choice("fp8", *_ANY),
    # checkpoints with static scales (ModelOpt): quantisation is fused into norm and activation
    "gemm/fp8_static": Choice(
        "gemm", "gemm", ("trtllm",), _where(gemm_dtype="fp8"), _gemm, ("computescale", "scale_matrix")
    ),
    # vLLM's block-scaled table holds 55 to 280 us of host time a call (no CUDA graph), SGLang's on
    # Hopper has shapes at twice the time of both neighbours (m = 1024, n = k = 4096: 93 us, 46 at 1025)
    "gemm/fp8_block": _gemm_choice("fp8_block", "trtllm", "sglang"),
    "gemm/fp4": _gemm_choice("nvfp4", *_ANY),
    "decode/bf16": Choice("attention", "generation_attention", _ANY, _full("bfloat16"), _decode),
    "decode/fp8": Choice("attention", "generation_attention", _ANY, _full("fp8"), _decode),
    "decode/fp8_trtllm": Choice("attention", "generation_attention", ("trtllm",), _full("fp8"), _decode),
    "decode/fp8_sglang": Choice("attention", "generation_attention", ("sglang",), _full("fp8"), _decode),
    "prefill": Choice("attention", "context_attention", _ANY, _full("bfloat16"), _prefill),
    # SGLang's attention takes 0.89 of vLLM's time on Hopper; its experts in FP8 the same, its GEMMs 1.03
    "decode/bf16_sglang": Choice(
        "attention", "generation_attention", ("sglang",), _full("bfloat16"), _decode
    ),
    "prefill/sglang": Choice("attention", "context_attention", ("sglang",), _full("bfloat16"), _prefill),
    # vLLM publishes MLA as modules with projections; the kernel alone is in the other two
    "mla_decode/bf16": Choice(
        "mla", "generation_mla", _KERNEL_ONLY, _where(kv_cache_dtype="bfloat16"), _mla_decode
    ),
    "mla_decode/fp8": Choice(
        "mla", "generation_mla", _KERNEL_ONLY, _where(kv_cache_dtype="fp8"), _mla_decode
    ),
    "mla_prefill": Choice(
        "mla", "context_mla", _KERNEL_ONLY, _where(kv_cache_dtype="bfloat16"), _mla_prefill
    ),
    "moe/bf16": _moe_choice("bfloat16"),
    "moe/fp8": _moe_choice("fp8"),
    "moe/fp8_block": _moe_choice("fp8_block"),
    # one scale a tensor, by the checkpoint (ModelOpt); vLLM's per-tensor kernel above takes two to four times that
    "moe/fp8_static": _moe_choice("fp8", "trtllm"),
    "moe/fp4": _moe_choice("nvfp4"),
    "collective/all_reduce": _nccl("all_reduce"),
    "collective/all_gather": _nccl("all_gather"),
    "collective/reduce_scatter": _nccl("reduce_scatter"),
    "collective/all_to_all": _nccl("alltoall"),
    "collective/custom_all_reduce": Choice(
        "comm", "custom_allreduce", ("vllm",), _where(kernel_source="vLLM_custom_graph"), _messages
    ),
}
"""Curves and the tables they are read from; vLLM first where its table is the kernel's time."""
