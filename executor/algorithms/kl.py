"""Per-token estimates of a KL divergence from samples, for tensors (losses) and numpy arrays (rewards).

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from executor.samples import Floats

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Array = TypeVar("Array", "Tensor", Floats)
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before `exp`: an output-only cut leaves inf * 0 = nan in the gradient."""
KL_LIMIT = 10.0
"""Most that one token may count by k3."""


def kl(log_ratio: Array, estimator: Estimator, exp: Callable[[Array], Array]) -> Array:
    """Estimates of KL(p || q) a token, of the shape of `log_ratio`, for tokens drawn from p.

        l = log p - log q       k1 = l       k2 = l^2 / 2       k3 = exp(-l) - 1 + l

    k1 and k3 are unbiased, k3 is never negative and varies least while p and q are near; k2 is biased, but
    its gradient is that of the KL. The gradient of k1 averages to zero on samples of p: as a loss it only
    adds noise. `exp` is torch.exp or numpy.exp. Of k3 the input is cut at +-20, the output at +-10.
    """
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return 0.5 * log_ratio * log_ratio
        case "k3":
            cut = log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            estimate: Array = exp(-cut) - 1.0 + cut
            return estimate.clip(-KL_LIMIT, KL_LIMIT)
