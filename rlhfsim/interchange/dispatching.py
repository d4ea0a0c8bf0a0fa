"""How tokens reach their experts, in the keys of Megatron-Core, vLLM and SGLang, which frameworks pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Value
from rlhfsim.interchange.table import Codec, FixedKey, Key, bare
from rlhfsim.specs.placement.layout import Dispatcher

MEGATRON: Mapping[Dispatcher, tuple[str, str]] = {
    "alltoall": ("alltoall", ""),
    "allgather": ("allgather", ""),
    "deepep": ("flex", "deepep"),
    "hybridep": ("flex", "hybridep"),
}
"""Dispatcher -> moe_token_dispatcher_type and moe_flex_dispatcher_backend of Megatron-Core."""
ENABLED = "moe_enable_deepep"
"""The flag of older releases of Megatron-Core for the backend deepep."""
VLLM: Mapping[Any, str] = {
    "allgather": "allgather_reducescatter",
    "deepep": "deepep_high_throughput",
    "deepep-ll": "deepep_low_latency",
}
"""Dispatcher -> all2all_backend of vLLM 0.11 and later."""
SGLANG: Mapping[Dispatcher, tuple[str, str]] = {
    "allgather": ("none", ""),
    "deepep": ("deepep", "normal"),
    "deepep-ll": ("deepep", "auto"),
}
"""Dispatcher -> moe-a2a-backend and deepep-mode of SGLang."""


def in_megatron(role: str, group: str, *, flag: bool = False) -> tuple[Key | FixedKey, ...]:
    """Rows of a training role; `group` comes before Megatron-Core's names. `flag`: `ENABLED` says DeepEP."""
    backend, when = f"{group}{_like(group, 'moe_flex_dispatcher_backend')}", f"{role}.ep>1"
    sent, enabled = f"{group}{_like(group, 'moe_token_dispatcher_type')}", f"{group}{_like(group, ENABLED)}"

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> Dispatcher | None:
        named = "deepep" if s.flag(bare(enabled)) else str(s.find(bare(backend)) or "")
        said = str(s.find(*keys) or ""), named
        return next((name for name, words in MEGATRON.items() if words == said), None)

    known: dict[Any, Value] = {"deepep": True}
    if not flag:
        known = {name: words[1] or None for name, words in MEGATRON.items()}
    values = {name: words[0] for name, words in MEGATRON.items() if not words[1] or name in known}
    return (
        Key(f"{role}.dispatcher", sent, codec=Codec(values.get, read, tuple(values)), when=when),
        *(
            FixedKey(enabled if flag else backend, word, f"{when} {role}.dispatcher={name}")
            for name, word in known.items()
        ),
    )


def _like(group: str, name: str) -> str:
    return name.replace("_", "-") if group.endswith("--") else name


def named(names: Mapping[Any, str]) -> Codec:
    """A word for each dispatcher; where none is set, the dispatcher is not said."""
    meant = {word: name for name, word in names.items()}
    return Codec(names.get, lambda s, keys, default: meant.get(str(s.find(*keys))), tuple(names))


ENGINE_WORD = Codec(
    lambda engine: engine or "vllm", lambda s, keys, default: "sglang" if s.find(*keys) == "sglang" else None
)
"""The engine of a framework that has vLLM where a plan names none."""


def in_vllm(key: str) -> Key:
    """The row of a rollout on vLLM."""
    return Key("rollout.dispatcher", key, codec=named(VLLM), when="rollout.ep>1")


def in_sglang(prefix: str) -> tuple[Key | FixedKey, ...]:
    """Rows of a rollout on SGLang, after the `prefix` of its names."""
    sent, mode = f"{prefix}moe-a2a-backend", f"{prefix}deepep-mode"

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> Dispatcher | None:
        said = str(s.find(*keys) or ""), "normal" if s.find(bare(mode)) == "normal" else "auto"
        return next((name for name, words in SGLANG.items() if words in (said, (said[0], ""))), None)

    values: dict[Any, str] = {name: words[0] for name, words in SGLANG.items()}
    return (
        Key("rollout.dispatcher", sent, codec=Codec(values.get, read, tuple(values)), when="rollout.ep>1"),
        *(
            FixedKey(mode, word, f"rollout.ep>1 rollout.dispatcher={name}")
            for name, (_, word) in SGLANG.items()
            if word
        ),
    )
