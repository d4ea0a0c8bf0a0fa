"""Which types of models transformers has itself, without code that comes with a model."""

from __future__ import annotations


def is_native(model_type: str) -> bool:
    """Whether transformers reads such a config.json without code of the model's own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES
