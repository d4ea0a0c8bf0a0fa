"""Something that a user should know of a configuration or a plan."""

from __future__ import annotations

from rlhfsim.frozen import frozen


@frozen
class Finding:
    """One thing that its user should know."""

    what: str
    """With the numbers."""
    keys: tuple[str, ...] = ()
    """Keys that it is about."""
    remedy: str = ""
    stops: bool = False
    """Whether the run ends there, however much memory there is."""
