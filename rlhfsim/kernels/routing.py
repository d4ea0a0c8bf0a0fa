"""Where the experts of a token are, which says how often its hidden state travels."""

from __future__ import annotations

import math

from rlhfsim.frozen import frozen
from rlhfsim.specs.model.blocks import Moe


@frozen
class Routing:
    """How a router spreads the experts of one token."""

    top_k: int
    """Experts of a token (k)."""
    groups: int = 1
    """Groups of experts (G)."""
    token_groups: int = 1
    """Groups that a token's experts come from (g)."""

    def copies(self, parts: int) -> float:
        """Distinct parts, of equal many experts each, that hold the experts of one token.

            a (1 - (1 - 1/a)^k)         a = parts g / G                        parts above G
                                        a = parts (1 - C(G - s, g) / C(G, g))  s = G / parts groups in a part

        DeepSeek-V3 routes a token to 4 of 8 groups (arXiv 2412.19437, section 2.1.2: node-limited routing).
        """
        reached = float(parts)
        if parts >= self.groups:
            reached = parts * self.token_groups / self.groups
        elif self.groups % parts == 0:
            inside = self.groups // parts
            missed = math.comb(self.groups - inside, self.token_groups)
            reached = parts * (1 - missed / math.comb(self.groups, self.token_groups))
        return reached * (1 - (1 - 1 / reached) ** self.top_k)


def routing_of(moe: Moe) -> Routing:
    """The routing of a model's experts."""
    return Routing(top_k=moe.top_k, groups=moe.groups, token_groups=moe.token_groups)
