"""Where the grids of the kernel curves have knots, and which GPU borrows from which."""

from __future__ import annotations

from collections.abc import Mapping

Axis = tuple[float, ...]

SMOOTHING = 0.2
"""Weight of a bend of one e-fold per octave against one sample's error of one e-fold."""

FLATNESS = 0.02
"""The same for a slope of the efficiency: decides only where there are no data."""


def _octaves(first: int, last: int, step: int = 1) -> Axis:
    return tuple(float(2**e) for e in range(first, last + 1, step))


_ROWS: Axis = (
    1,
    16,
    32,
    64,
    96,
    128,
    160,
    192,
    224,
    256,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    8192,
    32768,
)
_FINE_COLUMNS: Axis = (
    32,
    256,
    512,
    1024,
    1536,
    2048,
    3072,
    4096,
    5120,
    6144,
    7168,
    8192,
    10240,
    12288,
    16384,
    51200,
    65536,
)
_FINE_DEPTHS: Axis = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
_HEAD_DIM: Axis = (64, 128, 256, 512)
_GROUP: Axis = (1, 4, 8, 64)
_STREAMS: Axis = (1, *_octaves(4, 12, 2), 16384)
_CONTEXTS: Axis = (2, 64, *_octaves(8, 14, 2), 131072)
KNOTS: Mapping[str, tuple[Axis, ...]] = {
    "gemm/bf16": (_ROWS, _FINE_COLUMNS, _FINE_DEPTHS),
    "gemm": (
        _ROWS,
        (32, 128, 512, 1024, 2048, 3072, 4096, 6144, 8192, 16384, 65536),
        (32, 256, 1024, 2048, 4096, 8192, 16384, 65536),
    ),
    "decode": ((1, 4, *_octaves(4, 12), 16384), (2, 64, *_octaves(7, 15), 131072), _GROUP, _HEAD_DIM),
    # the kernel of groups of queries is another one than that of single queries
    "decode/fp8_trtllm": (
        (1, *_octaves(4, 12), 16384),
        (2, 64, *_octaves(7, 15), 131072),
        (1, 2, 4, 8, 64),
        (64, 128, 256),
    ),
    "decode/fp8_sglang": (_STREAMS, _CONTEXTS, _GROUP, _HEAD_DIM),
    # what SGLang does otherwise than vLLM is smooth: a few knots each keep the profiles small
    "decode/bf16_sglang": (
        (1, 16, 256, 4096, 16384),
        (2, 256, 2048, 16384, 131072),
        (1, 8, 64),
        (64, 128, 256),
    ),
    "prefill/sglang": ((1, 16, 256, 8192), (1, 128, 512, 2048, 16384), (1, 8, 64), (64, 128, 256)),
    "prefill": ((1, *_octaves(2, 11), 8192), (1, 64, *_octaves(7, 12), 16384), _GROUP, _HEAD_DIM),
    "mla_decode": (_octaves(0, 10), (2, 64, *_octaves(8, 17)), (1, 16, 32, 64, 128)),
    "mla_prefill": (_octaves(0, 8), (1, 64, *_octaves(7, 15)), (1, 4, 16, 32, 64, 128)),
    "moe": (
        (2**-5, 2**-3, 0.5, 2, 8, 32, 128, 512, 2048),
        (4, 16, 64, 256),
        (256, 1024, 4096),
        (2048,),
        (1,),
    ),
    "collective": ((2, 4, 8, 16), (*_octaves(9, 30, 2), 2.0**30)),
}
"""Knots per kind or per curve, clipped to what was measured.

Chosen on H100, with its held-out half in view; those of `gemm/bf16` on an inner split of the fit half
of B300 and A100. H200, GB200 and GB300 had no part; see the preface of reports/kernel_curves.md.
"""
TARGETS: Mapping[str, float] = {"gemm": 0.04, "decode": 0.07, "prefill": 0.07, "collective": 0.08}
"""Median absolute relative error to reach on the first hold-out, by kind."""

BORROWERS: Mapping[str, Mapping[str, str | float]] = {
    "v100_sxm": {
        "from": "a100_sxm",
        "widen": 1.4,
        "reason": "no table; previous generation, efficiencies of A100 at its own peaks",
    },
    "a100_sxm_40gb": {"from": "a100_sxm", "widen": 1.1, "reason": "same chip, slower memory"},
    "a800_sxm": {"from": "a100_sxm", "widen": 1.1, "reason": "same chip, NVLink capped"},
    "h100_pcie": {"from": "h100_sxm", "widen": 1.2, "reason": "same chip at 350 W, fewer SMs, HBM2e"},
    "h800_sxm": {"from": "h100_sxm", "widen": 1.1, "reason": "same chip, NVLink capped"},
    "h20_sxm": {
        "from": "h200_sxm",
        "widen": 1.25,
        "compute": 1.18,
        "reason": "same kernels with 15 % of the tensor throughput: not power limited, so large products reach 0.95 of the peak, not 0.80 (MAMF of H200 794.5 of 989)",
    },
    "l4": {"from": "l40s", "widen": 1.4, "reason": "same generation at 72 W"},
    "a10g": {"from": "l40s", "widen": 1.4, "reason": "next generation's tables at its own peaks"},
    "a6000": {"from": "l40s", "widen": 1.4, "reason": "next generation's tables at its own peaks"},
    "a40": {"from": "l40s", "widen": 1.4, "reason": "next generation's tables at its own peaks"},
    "l20": {"from": "l40s", "widen": 1.3, "reason": "same chip at a third of the tensor throughput"},
    "rtx_4090": {"from": "l40s", "widen": 1.3, "reason": "same chip, GDDR6X"},
    "mi250x": {
        "from": "h100_sxm",
        "widen": 1.6,
        "compute": 0.64,
        "reason": "no table of CDNA; best GEMM 0.51 of the peak (MI300X MAMF 668 of 1307) against H100's 0.80",
    },
    "mi300x": {
        "from": "h100_sxm",
        "widen": 1.5,
        "compute": 0.637,
        "reason": "no table of CDNA; MAMF 668.4 of 1307 against H100's 794.5 of 989",
    },
    "mi325x": {
        "from": "h100_sxm",
        "widen": 1.5,
        "compute": 0.752,
        "reason": "no table of CDNA; MAMF 784.9 of 1300 against H100's 794.5 of 989",
    },
    "mi355x": {
        "from": "h100_sxm",
        "widen": 1.5,
        "compute": 0.779,
        "reason": "no table of CDNA; MAMF 1565 of 2500 against H100's 794.5 of 989",
    },
}
"""Profiles without tables: the lender, gains on its efficiencies, factor on its interval, why."""
