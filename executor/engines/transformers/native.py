"""Which types of models transformers has itself, without code that comes with a model."""

from __future__ import annotations


def is_native(model_type: str) -> bool:
    """Whether transformers reads such a config.json without code of the model's own."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
