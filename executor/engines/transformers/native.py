"""Which types of models transformers has itself, without code that comes with a model, and as what."""

from __future__ import annotations


def is_native(model_type: str) -> bool:
    """Whether transformers reads such a config.json without code of the model's own."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def is_causal(model_type: str) -> bool:
    """Whether transformers loads it as a causal language model; true of types that it does not have."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING
