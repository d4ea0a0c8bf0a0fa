"""Numbers from a Python dict as a log prints it, also from one that is cut off."""

from __future__ import annotations

import re

from rlhfsim.frameworks.logs.records import number

_ITEM = re.compile(r"['\"]([^'\"]+)['\"]: ('[^']*'|\"[^\"]*\"|[^,{}\[\]]+)(?=[,}])")
"""A key and a value that ends: of a dict that is cut off the last item does not count."""


def pairs(text: str) -> dict[str, float]:
    """`{'a': 1.5, 'b': np.float64(2.0), 'c': '3'}` as numbers by name; what is no number is left out."""
    found = ((key, number(value.strip().strip("'\""))) for key, value in _ITEM.findall(text))
    return {key: value for key, value in found if value is not None}
