"""The keys of a Hugging Face config.json, read with their bounds; every refusal names its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.blocks import MAX_WIDTH
from rlhfsim.specs.model.families import FAMILIES, Flag
from rlhfsim.specs.model.older_configs import rewrite


class ConfigKeys:
    """The keys of one language model with their places."""

    def __init__(self, source: Source, path: tuple[str, ...], data: Mapping[str, Any]) -> None:
        self.source, self.path = source, path
        self.kind = str(data.get("model_type") or source.data.get("model_type") or "")[:60]
        known = FAMILIES.get(self.kind)
        self.known = known is not None
        self.family, self.data = rewrite(self.kind, known or FAMILIES["llama"], data)

    def error(self, code: str, message: str, key: str | None, remedy: str) -> RlhfsimError:
        """A refusal at the place of `key`."""
        place = self.source.place(self.path + ((key,) if key else ()))
        return RlhfsimError(code, message, place=place, help=remedy)

    def value(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first of several spellings that is present and not null."""
        for data in (self.data, self.family.defaults):
            for key in keys:
                if data.get(key) is not None:
                    return key, data[key]
        return keys[0], None

    def optional(self, keys: tuple[str, ...], low: int, high: int) -> int | None:
        """A whole number that may be absent."""
        key, value = self.value(keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            message = f"{key} must be a whole number from {low} to {high}, got {repr(value)[:40]}"
            raise self.error("bad-model-shape", message, key, "compare with the published config")
        return value

    def number(self, keys: tuple[str, ...], high: int = MAX_WIDTH) -> int:
        """A whole number that must be there."""
        value = self.optional(keys, 1, high)
        if value is None:
            kind = f" of a {self.kind} model" if self.kind else ""
            message = f"{' or '.join(map(repr, keys[:2]))}{kind} is missing"
            raise self.error("missing-key", message, None, f"add {keys[0]} to the config")
        return value

    def flag(self, flag: Flag) -> bool:
        """A fact of the family, or the key that decides it."""
        if isinstance(flag, bool):
            return flag
        key, default = flag
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            message = f"{key} must be true or false, got {repr(value)[:40]}"
            raise self.error("bad-model-shape", message, key, "write true or false")
        return value

    def items(self, key: str, length: int) -> list[Any] | None:
        """A list with one entry per layer."""
        value = self.data.get(key)
        if not isinstance(value, list):
            return None
        if len(value) != length:
            message = f"{key} has {len(value)} entries for {length} layers"
            raise self.error("bad-model-shape", message, key, "give one entry per layer")
        return value
