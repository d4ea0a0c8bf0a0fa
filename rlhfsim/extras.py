"""Libraries that the base install lacks, the extra that brings each, and the error where one is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from rlhfsim.errors import RlhfsimError

EXTRAS: Mapping[str, Sequence[str]] = {
    "desk": ("dash", "flask", "werkzeug"),
    "parquet": ("pyarrow",),
    "math": ("math_verify",),
    "tensorboard": ("tensorboardX", "google"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "adam8bit": ("bitsandbytes",),
    "ray": ("ray",),
    "real-gpu": (
        "vllm",
        "deepspeed",
        "ray",
        "torch",
        "transformers",
        "tokenizers",
        "accelerate",
        "peft",
        "safetensors",
        "datasets",
        "huggingface_hub",
        "pyarrow",
        "tensorboardX",
        "psutil",
        "blake3",
        "packaging",
    ),
}
"""Extra of this project -> the modules that it brings, the one it is for first."""
WITHOUT_GPU = "4.2 GB to download; without GPUs what requirements/cpu.lock lists: docs/executor.md"
"""Addition to the remedy `real-gpu`."""


def need(*modules: str, purpose: str, otherwise: str | None = None) -> None:
    """Check that libraries are installed; `otherwise` is what a user may do without them.

    Raises:
        RlhfsimError: one is not; names the extra.
    """
    missing = [name for name in modules if find_spec(name) is None]
    error = not_installed(missing, purpose=purpose, otherwise=otherwise)
    if error is not None:
        raise error


def not_installed(
    missing: Sequence[str], *, purpose: str, otherwise: str | None = None
) -> RlhfsimError | None:
    """The error of missing modules: the first extra that brings them all; None where no extra does."""
    extra = next((extra for extra, brought in EXTRAS.items() if missing and {*missing} <= {*brought}), None)
    if extra is None:
        return None
    other = WITHOUT_GPU if extra == "real-gpu" else otherwise
    return RlhfsimError(
        "missing-library",
        f"{purpose} needs {', '.join(missing)}, not installed here",
        help=f"pip install 'rlhfsim[{extra}]'" + (f" ({other})" if other else ""),
    )
