"""Models by name: published shapes in `presets.json`, one Hugging Face config each.

A name may be a preset (`llama-3.1-8b`), an alias (`8b`), a Hugging Face id with or without its
owner (`Qwen/Qwen3-8B`), or the path of a `config.json`. Case, spaces and underscores do not matter;
endings that do not change the shape (`-Instruct`, `-FP8`, `-2507`) are dropped. See docs/models.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.config import DESCRIBED, load_config, read_config
from rlhfsim.specs.model.model import ModelSpec

_ENDING = re.compile(
    r"[-.](instruct|chat|base|it|pt|hf|thinking|preview|fp8|fp8-block|fp8-dynamic|bf16|nvfp4|mxfp4|"
    r"awq|gptq|int4|int8|w8a8|quantized|static|pertensor|\d{4})$"
)
_FILE = Path(__file__).with_name("presets.json")
_MAX_NAME = 4096


def resolve_model(name: str) -> ModelSpec:
    """The model of a preset, alias, Hugging Face id, config file or folder.

    Raises:
        RlhfsimError: unknown name (with the nearest ones), a model that cannot be expressed, or a
            file that cannot be read.
    """
    key = preset_name(name)
    if key is not None:
        return preset(key)
    path = Path(name)
    if _is_path(name) and os.path.exists(path):
        return load_config(path)
    if (key := elsewhere(name)) is not None:
        return preset(key)
    if _is_path(name):
        return load_config(path)
    reason = _unsupported(name)
    if reason is not None:
        raise RlhfsimError(
            "unsupported-model",
            f"{name[:80]} {reason}",
            help=f"{DESCRIBED}; take a model of this size as a stand-in",
        )
    raise unknown_name("model", name[:80], {*preset_names(), *aliases()})


def preset_name(name: str) -> str | None:
    """The preset that a name, alias or Hugging Face id means; None when there is none."""
    known, short = _data()["presets"], aliases()
    for spelling in _spellings(name):
        key = short.get(spelling, spelling)
        if key in known:
            return key
    return None


def elsewhere(name: str) -> str | None:
    """The preset that a path on another machine names: by its last folder that does; None where none does.

    `/workspace/models/Qwen2.5-7B`, and the Hugging Face cache `models--Qwen--Qwen2.5-7B/snapshots/1f2e`.
    """
    if len(name) > _MAX_NAME or not (name.startswith("/") or name.count("/") > 1):
        return None
    parts = [part.removeprefix("models--").replace("--", "/") for part in name.split("/") if part]
    return next((key for part in reversed(parts) if (key := preset_name(part)) is not None), None)


@cache
def preset(name: str) -> ModelSpec:
    """The model of a preset; an unknown name is our own bug (see `resolve_model`)."""
    entry = _data()["presets"][name]
    source = Source(f"preset {name}", "", entry["config"])
    return read_config(source, name, origin=entry["source"])


def published_config(name: str) -> Mapping[str, Any] | None:
    """The Hugging Face config of a preset, alias or id, as published; None when there is none."""
    key = preset_name(name)
    return None if key is None else cast(Mapping[str, Any], _data()["presets"][key]["config"])


@cache
def published_type(name: str) -> str | None:
    """`model_type` of a preset's published config; None where there is no preset."""
    config = published_config(name)
    return None if config is None else str(config.get("model_type"))


def preset_names() -> tuple[str, ...]:
    """All presets, families together."""
    return tuple(_data()["presets"])


def aliases() -> Mapping[str, str]:
    """Alias to preset, both in lower case."""
    return cast(Mapping[str, str], _data()["aliases"])


@cache
def _data() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(_FILE.read_text(encoding="utf-8")))


def _spellings(name: str) -> list[str]:
    """The name in lower case with dashes, without owner, then ending by ending shorter."""
    text = re.sub(r"[\s_]+", "-", name[:_MAX_NAME].strip().lower())
    text = text.rsplit("/", 1)[-1] if text.count("/") == 1 else text
    spellings = [text]
    while (shorter := _ENDING.sub("", spellings[-1])) != spellings[-1]:
        spellings.append(shorter)
    return spellings + [spelling.removeprefix("meta-") for spelling in spellings]


def _unsupported(name: str) -> str | None:
    reasons: Mapping[str, str] = _data()["unsupported"]
    text = _spellings(name.rpartition("/")[2])[0]
    return next((reason for start, reason in reasons.items() if text.startswith(start)), None)


def _is_path(name: str) -> bool:
    if "\0" in name or len(name) > _MAX_NAME:
        return False
    if name.endswith(".json") or name.startswith(("/", "./", "../")):
        return True
    return os.path.isfile(name) or os.path.isfile(Path(name) / "config.json")
