"""The certificate of a search: where every plan of the space went."""

from __future__ import annotations

from dataclasses import asdict

from rlhfsim.frozen import frozen


@frozen
class Certificate:
    """Complete plans (the cross product of all choices) by what happened to them; disjoint."""

    space: int
    infeasible: int
    """Some pool does not hold its roles, or no weight path joins them."""
    dominated: int
    """Another plan is as good in everything that enters the step."""
    bounded: int
    """Their lower bound is no better than the best simulated plan."""
    simulated: int
    unexplored: int = 0
    """Left when the time limit ended the search; 0 when the optimum is proven."""
    gap: float = 0.0
    """Share of the best step by which an unexplored plan could still be shorter."""

    @property
    def proven(self) -> bool:
        """Whether no plan of the space is better than the answer."""
        return self.unexplored == 0

    def plus(self, other: Certificate) -> Certificate:
        """Certificate of two disjoint spaces with one incumbent."""
        mine, theirs = asdict(self), asdict(other)
        counts = {name: mine[name] + theirs[name] for name in mine}
        return Certificate(**{**counts, "gap": max(self.gap, other.gap)})
