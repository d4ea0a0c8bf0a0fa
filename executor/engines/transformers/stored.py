"""Weights as checkpoints hold them and vLLM loads them, of a model that transformers keeps in another form.

transformers 5 keeps the experts of a layer in one parameter, (E, 2 F, H) and (E, H, F), and renames some
modules; its checkpoints have a matrix for each expert and projection. This undoes what it does to a
checkpoint when it reads one, as its own `save_pretrained` does.

Legend: E experts, H hidden size, F feed-forward size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError


class _Uncopied(Tensor):
    """A tensor whose parts stay views: transformers would copy gates and ups of all experts at once."""

    def contiguous(self, *_: Any, **__: Any) -> _Uncopied:
        return self


class StoredForm:
    """The conversions of one model, undone a bucket at a time."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: of transformers, with its head."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        every: Any = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
        self._conversions = [one for one in every if not isinstance(one, PrefixChange)]
        self._config: Any = model.config

    def of(self, buckets: Iterable[list[Named]]) -> Iterator[list[Named]]:
        """The same weights by the names of a checkpoint.

        Raises:
            RlhfsimError: a model that keeps in several parameters what a checkpoint has in one.
        """
        self._check()
        for bucket in buckets:
            stored = self._undone(bucket) if bucket and self._conversions else bucket
            yield stored
            stored.clear()  # readers still have the list while the next bucket is read

    def _undone(self, bucket: list[Named]) -> list[Named]:
        from transformers.core_model_loading import revert_weight_conversion

        model: Any = SimpleNamespace(_weight_conversions=self._conversions, config=self._config)
        stored = revert_weight_conversion(model, {name: t.as_subclass(_Uncopied) for name, t in bucket})
        *most, (name, last) = [(n, t.as_subclass(Tensor).contiguous()) for n, t in stored.items()]
        view = last.untyped_storage().nbytes() > last.nbytes
        return [*most, (name, last.clone() if view else last)]  # whoever reads keeps the last with the next

    def _check(self) -> None:
        for one in self._conversions:
            if getattr(one, "operations", None) and len(one.target_patterns) > 1:
                raise RlhfsimError(
                    "weights-fused-in-files",
                    f"{self._config.model_type}: checkpoints hold {one.source_patterns[0]!r} in one tensor, "
                    f"transformers in {len(one.target_patterns)}; they are not put together again",
                    help="train a model of another family, or export the plan to another framework",
                )
