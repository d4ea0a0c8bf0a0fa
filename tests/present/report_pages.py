"""Names that the tests of pages share."""

from __future__ import annotations

HOSTILE = "</script><img src=x onerror=alert(1)>"
"""What a model, a pool or a title may be called."""
NAMES = ("plan", "async", "run", "whatif", "hostile")
"""Pages that every check opens."""
