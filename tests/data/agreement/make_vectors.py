"""Write vectors.json: what TRL and verl compute on random inputs, for tests/executor/test_agreement.py.

Nothing of this project is imported. Needs an environment of its own (see `libraries` in vectors.json for the
versions): torch, trl with transformers, and verl with the few packages that `verl.trainer.ppo.core_algos`
imports
(tensordict, omegaconf, hydra-core, ray, orjson, codetiming). Run: python make_vectors.py

The libraries' own functions compute in float64 on inputs that are exact in float32. Trainer methods are
called
on a stand-in for the trainer whose "model" returns the random log-probs.

Legend: B sequences, T tokens of the longest response.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import FSDPActorConfig

B, T = 8, 11
OWN = {
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
"""TRL's defaults for losses that docs/examples have."""
COVARIANCE = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
RNG = np.random.default_rng(20261121)


class Config(dict[str, Any]):
    """Settings by attribute and by key."""

    __getattr__ = dict.__getitem__


ACCELERATOR = SimpleNamespace(
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    num_processes=1,
    device=torch.device("cpu"),
    sync_gradients=True,
)


def trainer(**fields: Any) -> SimpleNamespace:
    """A stand-in for a TRL trainer on one process."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _total_train_tokens=0,
        _tp_size=1,
        **fields,
    )


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Random float64 that float32 can hold."""
    drawn = (RNG.standard_normal(shape) * scale + shift).astype(np.float32)
    return torch.from_numpy(drawn).double()


def ragged() -> Tensor:
    """(B, T) mask of random lengths, the longest T."""
    lengths = torch.from_numpy(RNG.integers(1, T + 1, B))
    lengths[0] = T
    return (torch.arange(T) < lengths[:, None]).double()


def policy_inputs() -> dict[str, Tensor]:
    """Log-probs of four models on the same tokens, advantages and entropy; gaps wide enough to clip."""
    old = -normal(B, T).abs() - 0.1
    return {
        "mask": ragged(),
        "old_logprobs": old,
        "logprobs": (old + normal(B, T, scale=0.5)).float().double(),
        "reference_logprobs": (old + normal(B, T, scale=0.3)).float().double(),
        "rollout_logprobs": (old + normal(B, T, scale=0.4)).float().double(),
        "advantages": normal(B)[:, None].expand(B, T).clone(),
        "entropy": normal(B, T).abs(),
    }


def case(source: str, inputs: dict[str, Any], settings: dict[str, Any], **outputs: Any) -> Any:
    """One entry of the file."""
    return {"source": source, "inputs": inputs, "settings": settings, "outputs": outputs}


def grpo(
    loss_type: str,
    aggregation: str,
    *,
    beta: float,
    delta: float | None,
    cap: float | None,
    policy_loss: str = "ppo",
    clip: tuple[float, float] = (0.2, 0.28),
) -> Any:
    """TRL's GRPO loss; `delta` is its dual clip, `cap` truncates the importance ratio to the sampler, of
    tokens, or of responses in the loss of GSPO."""
    x = policy_inputs()
    low, high = clip
    by_response = policy_loss == "gspo"
    logprobs = x["logprobs"].clone().requires_grad_()
    coefficient = 0.01 if loss_type == "dapo" else 0.0
    me = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, x["entropy"], None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if by_response else "token",
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=1 + high if policy_loss == "cispo" else high,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1, **OWN),
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=16,
        _entropy_bonus_enabled=coefficient > 0,
        use_adaptive_entropy=False,
        entropy_coef=coefficient,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    gap = (x["old_logprobs"] - x["rollout_logprobs"]) * x["mask"]
    gap = gap.sum(1, keepdim=True) if by_response else gap
    ratio = torch.exp(gap).clamp(max=cap or 1e9)
    batch = {
        "prompt_ids": torch.zeros(B, 1),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T),
        "completion_mask": x["mask"],
        "advantages": x["advantages"][:, 0],
        "old_per_token_logps": x["old_logprobs"],
        "ref_per_token_logps": x["reference_logprobs"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": x["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(me, None, batch)
    loss.backward()
    measured = {name: values[-1] for name, values in me._metrics["train"].items()}
    settings = {
        "clip_low": low,
        "clip_high": high,
        "dual_clip": delta,
        "kl_coefficient": beta,
        "kl_estimator": "k3",
        "entropy_coefficient": coefficient,
        "correction": "none" if cap is None else "truncated",
        "correction_cap": cap or 1.0,
        "aggregation": aggregation,
        "max_tokens": 16,
    }
    if policy_loss in ("sapo", "vespo"):  # of docs/examples, not of the executor
        settings |= {"correction": "none" if policy_loss == "vespo" else settings["correction"]}
    elif policy_loss != "ppo":
        settings |= {"policy_loss": policy_loss, "correction_level": "sequence" if by_response else "token"}
    metrics = {"policy/entropy": measured["entropy"]}
    if policy_loss == "ppo":  # the others count positive advantages alone, or responses
        metrics["policy/clip_fraction"] = measured["clip_ratio/region_mean"]
    if beta:
        metrics["kl/mean"] = measured["kl"]
    return case(
        "trl GRPOTrainer._compute_loss", x, settings, loss=loss, gradient=logprobs.grad, metrics=metrics
    )


def rloo() -> Any:
    """TRL's RLOO loss at its first update, where the sequence ratio is 1: its gradient is REINFORCE's."""
    x = policy_inputs()
    logprobs = x["logprobs"].clone().requires_grad_()
    me = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, x["entropy"], None),
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    batch = {
        "prompt_ids": torch.zeros(B, 1),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T),
        "completion_mask": x["mask"],
        "advantages": x["advantages"][:, 0],
        "old_logps": (x["logprobs"] * x["mask"]).sum(1),
    }
    RLOOTrainer._compute_loss(me, None, batch).backward()
    kept = {name: x[name] for name in ("mask", "logprobs", "advantages")}
    settings = {"aggregation": "constant", "max_tokens": 1}
    return case("trl RLOOTrainer._compute_loss", kept, settings, gradient=logprobs.grad)


def model(logprobs: Tensor) -> Any:
    """What a TRL preference trainer sees of a model: masked log-probs, and statistics that are not
    compared."""
    zeros = torch.zeros_like(logprobs)
    answer = SimpleNamespace(
        log_probs=logprobs, is_top1=zeros.bool(), entropy=zeros, mean_logits=zeros, aux_loss=None
    )
    return lambda **_: answer


def preference_inputs() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Log-probs of policy and reference, and TRL's batch around them; one prompt token each."""
    mask = ragged()
    x = {
        "mask": mask,
        "logprobs": (-normal(B, T).abs() * mask),
        "reference_logprobs": (-normal(B, T).abs() * mask),
    }
    full = torch.cat([torch.zeros(B, 1), mask], dim=1).long()
    batch = {"input_ids": torch.zeros(B, T + 1).long(), "completion_mask": full, "attention_mask": full}
    return x, batch


def dpo() -> Any:
    """TRL's DPO loss; its batch is [chosen, rejected]."""
    x, batch = preference_inputs()
    logprobs = x["logprobs"].clone().requires_grad_()
    me = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=0.0,
        use_weighting=False,
        args=SimpleNamespace(),
    )
    reference = x["reference_logprobs"].sum(1)
    batch |= {"ref_chosen_logps": reference[: B // 2], "ref_rejected_logps": reference[B // 2 :]}
    loss = DPOTrainer._compute_loss(me, model(logprobs * x["mask"]), batch, False)
    loss.backward()
    measured = {name: values[-1] for name, values in me._metrics["train"].items()}
    x |= {"group": torch.arange(B) % (B // 2), "labels": torch.where(torch.arange(B) < B // 2, 1.0, -1.0)}
    metrics = {
        "dpo/accuracy": measured["rewards/accuracies"],
        "dpo/margin": measured["rewards/margins"],
        "dpo/chosen_reward": measured["rewards/chosen"],
        "dpo/rejected_reward": measured["rewards/rejected"],
    }
    return case(
        "trl DPOTrainer._compute_loss", x, {"beta": 0.3}, loss=loss, gradient=logprobs.grad, metrics=metrics
    )


def kto() -> Any:
    """TRL's KTO loss with its KL baseline from mismatched responses."""
    x, batch = preference_inputs()
    logprobs = x["logprobs"].clone().requires_grad_()
    labels = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0])[:B]
    moved, moved_reference = normal(B), normal(B, shift=-0.5)
    me = trainer(
        _compute_kl_logps=lambda _model, _batch: moved,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.2,
        desirable_weight=1.5,
        undesirable_weight=0.75,
    )
    batch |= {"label": labels, "ref_logps": x["reference_logprobs"].sum(1), "ref_KL_logps": moved_reference}
    loss = KTOTrainer._compute_loss(me, model(logprobs * x["mask"]), batch, False)
    loss.backward()
    measured = {name: values[-1] for name, values in me._metrics["train"].items()}
    x |= {"labels": labels * 2.0 - 1.0, "moved": moved, "moved_reference": moved_reference}
    settings = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    metrics = {
        "kto/desirable_reward": measured["rewards/chosen"],
        "kto/undesirable_reward": measured["rewards/rejected"],
    }
    return case(
        "trl KTOTrainer._compute_loss",
        x,
        settings,
        loss=loss,
        gradient=logprobs.grad,
        metrics=metrics,
        baseline=measured["kl"],
    )


def verl_policy(mode: str, aggregation: str, kind: str, cap: float) -> Any:
    """verl's PPO loss with dual clip, asymmetric clip and importance weights of its own helper."""
    x = policy_inputs()
    logprobs = x["logprobs"].clone().requires_grad_()
    ratio = x["old_logprobs"] - x["rollout_logprobs"]
    weights, _ = compute_rollout_correction_weights(
        ratio,
        x["mask"],
        rollout_is="token",
        rollout_is_threshold=cap if kind == "truncated" else f"{1 / cap}_{cap}",
    )
    config = Config(
        clip_ratio=0.2, clip_ratio_low=0.15, clip_ratio_high=0.3, clip_ratio_c=1.5, global_batch_info={}
    )
    loss, measured = core_algos.compute_policy_loss_vanilla(
        x["old_logprobs"], logprobs, x["advantages"], x["mask"], mode, config, weights
    )
    loss.backward()
    settings = {
        "clip_low": 0.15,
        "clip_high": 0.3,
        "dual_clip": 1.5,
        "correction": kind,
        "correction_cap": cap,
        "aggregation": aggregation,
        "max_tokens": T,
    }
    metrics = {
        "policy/clip_fraction": measured["actor/pg_clipfrac"],
        "policy/dual_clip_fraction": measured["actor/pg_clipfrac_lower"],
    }
    return case(
        "verl compute_policy_loss_vanilla", x, settings, loss=loss, gradient=logprobs.grad, metrics=metrics
    )


def verl_kind(kind: str, aggregation: str, clip: tuple[float, float], correction: str, cap: float) -> Any:
    """verl's losses of GSPO and CISPO, with the weights of whole responses to the sampler."""
    x = policy_inputs()
    logprobs = x["logprobs"].clone().requires_grad_()
    weights, _ = compute_rollout_correction_weights(
        x["old_logprobs"] - x["rollout_logprobs"],
        x["mask"],
        rollout_is="sequence",
        rollout_is_threshold=cap if correction == "truncated" else f"{1 / cap}_{cap}",
    )
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_mini_batch_size=B,
        ppo_micro_batch_size_per_gpu=B,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
    )
    mode = {"token": "token-mean", "sequence": "seq-mean-token-mean"}[aggregation]
    compute = core_algos.get_policy_loss_fn(kind)
    loss, measured = compute(x["old_logprobs"], logprobs, x["advantages"], x["mask"], mode, config, weights)
    loss.backward()
    settings = {
        "policy_loss": kind,
        "clip_low": clip[0],
        "clip_high": clip[1],
        "correction": correction,
        "correction_cap": cap,
        "correction_level": "sequence",
        "aggregation": aggregation,
    }
    metrics = {"policy/clip_fraction": measured["actor/pg_clipfrac"]}
    return case(
        f"verl compute_policy_loss_{kind}", x, settings, loss=loss, gradient=logprobs.grad, metrics=metrics
    )


def verl_covariance(kind: str, share: float) -> Any:
    """verl's Clip-Cov with so large a share that all able tokens are chosen, and KL-Cov."""
    x = policy_inputs()
    x["advantages"] = normal(B, T)
    logprobs = x["logprobs"].clone().requires_grad_()
    constants = {f"{kind}_ratio": share, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0, "ppo_kl_coef": 0.7}
    named = defaultdict(lambda: None, constants)
    config = Config(
        clip_ratio=0.2,
        clip_ratio_low=0.15,
        clip_ratio_high=0.3,
        global_batch_info={},
        policy_loss=SimpleNamespace(**{name: named[name] for name in COVARIANCE}),
    )
    compute = core_algos.get_policy_loss_fn(kind)
    loss, measured = compute(x["old_logprobs"], logprobs, x["advantages"], x["mask"], "token-mean", config)
    loss.backward()
    settings = {
        "clip_low": 0.15,
        "clip_high": 0.3,
        "entropy_control": kind,
        "covariance_share": share,
        "covariance_bounds": [0.1, 2.0],
        "covariance_kl": 0.7,
        "aggregation": "token",
    }
    held = {"policy/controlled_fraction": measured["actor/pg_clipfrac"]} if kind == "clip_cov" else {}
    return case(
        f"verl compute_policy_loss_{kind}", x, settings, loss=loss, gradient=logprobs.grad, metrics=held
    )


def overlong() -> Any:
    """TRL's soft punishment of long responses (DAPO, equation 13), before, inside and behind its interval."""
    longest, last = 20, 8
    lengths = [1, 11, 12, 13, 16, 19, 20]
    punished = get_soft_overlong_punishment(longest, last)
    return case(
        "trl get_soft_overlong_punishment",
        {"length": lengths},
        {"overlong_tokens": last, "max_tokens": longest},
        penalty=[float(p) for p in punished([[0] * length for length in lengths])],
    )


def verl_value() -> Any:
    """verl's clipped value loss."""
    x = {"mask": ragged(), "old_values": normal(B, T), "returns": normal(B, T)}
    x["values"] = (x["old_values"] + normal(B, T, scale=0.4)).float().double()
    values = x["values"].clone().requires_grad_()
    loss, clipped = core_algos.compute_value_loss(values, x["returns"], x["old_values"], x["mask"], 0.2)
    loss.backward()
    return case(
        "verl compute_value_loss",
        x,
        {"value_clip": 0.2},
        loss=loss,
        gradient=values.grad,
        metrics={"value/clip_fraction": float(clipped)},
    )


def verl_kl(estimator: str) -> Any:
    """verl's KL estimates of one token; k3 also far out, where it is cut."""
    log_ratio = normal(40, scale=30.0 if estimator == "k3" else 1.0)
    found = core_algos.kl_penalty(log_ratio, torch.zeros(40).double(), estimator)
    return case("verl kl_penalty", {"log_ratio": log_ratio}, {"estimator": estimator}, kl=found)


def verl_gae_with_tools() -> Any:
    """verl's GAE before whitening where tokens of a tool stand inside the response."""
    mask = torch.from_numpy(RNG.integers(0, 2, (B, T))).double()
    x = {"mask": mask, "rewards": normal(B, T), "values": normal(B, T)}
    whitened, returns = core_algos.compute_gae_advantage_return(x["rewards"], x["values"], mask, 0.97, 0.9)
    return case(
        "verl compute_gae_advantage_return",
        x,
        {"gamma": 0.97, "lam": 0.9},
        whitened=whitened,
        returns=returns,
    )


def sample_inputs() -> tuple[dict[str, Tensor], Tensor]:
    """Rewards, log-probs and values of two groups of four, and verl's token rewards with KL inside."""
    mask = ragged()
    x = {
        "mask": mask,
        "reward": normal(B, scale=2.0),
        "old_logprobs": -normal(B, T).abs(),
        "reference_logprobs": -normal(B, T).abs(),
        "values": normal(B, T),
        "group": torch.arange(B) % 2,
    }
    last = mask.sum(1).long() - 1
    scores = torch.zeros(B, T).double().scatter(1, last[:, None], x["reward"][:, None])
    rewards = core_algos.compute_rewards(scores, x["old_logprobs"], x["reference_logprobs"], 0.05)
    return x, rewards * mask


def verl_advantages(algorithm: str) -> Any:
    """verl's advantages, with KL k1 in the reward."""
    x, rewards = sample_inputs()
    mask, index = x["mask"], x["group"].numpy()
    settings = {"kl_coefficient": 0.05, "kl_estimator": "k1", "kl_in": "reward", "gamma": 0.97, "lam": 0.9}
    match algorithm:
        case "ppo":
            found = core_algos.compute_gae_advantage_return(rewards, x["values"] * mask, mask, 0.97, 0.9)
        case "reinforce++":
            config = Config(gamma=0.97)
            found = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config)
        case "rloo":
            found = core_algos.compute_rloo_outcome_advantage(rewards, mask, index)
        case _:
            by_std = algorithm == "grpo"
            found = core_algos.compute_grpo_outcome_advantage(
                rewards, mask, index, norm_adv_by_std_in_grpo=by_std
            )
    return case(
        f"verl advantage of {algorithm}", x, settings, advantages=found[0] * mask, returns=found[1] * mask
    )


def plain(value: Any) -> Any:
    """Lists of numbers with ten digits."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def recipes() -> dict[str, Any]:
    """Cases of GSPO, CISPO, weights of whole responses, and penalties of long ones."""
    return {
        "policy-verl-gspo": verl_kind("gspo", "sequence", (0.04, 0.05), "truncated", 1.5),
        "policy-verl-gspo-token": verl_kind("gspo", "token", (0.1, 0.12), "masked", 3.0),
        "policy-verl-cispo": verl_kind("cispo", "token", (0.3, 0.4), "masked", 3.0),
        "policy-trl-gspo": grpo(
            "grpo", "sequence", beta=0.05, delta=None, cap=2.0, policy_loss="gspo", clip=(0.1, 0.12)
        ),
        "policy-trl-cispo": grpo(
            "cispo", "token", beta=0.0, delta=None, cap=1.3, policy_loss="cispo", clip=(1.0, 0.5)
        ),
        "overlong-trl": overlong(),
        "policy-verl-clip-cov": verl_covariance("clip_cov", 0.9),
        "policy-verl-kl-cov": verl_covariance("kl_cov", 0.2),
    }


def main() -> None:
    """Compute all cases and write them beside this file."""
    cases = {
        "policy-trl-token": grpo("dapo", "token", beta=0.04, delta=None, cap=None),
        "policy-trl-token-dual": grpo("bnpo", "token", beta=0.0, delta=1.4, cap=1.3),
        "policy-trl-sequence": grpo("grpo", "sequence", beta=0.1, delta=None, cap=2.0),
        "policy-trl-constant": grpo("dr_grpo", "constant", beta=0.0, delta=None, cap=None),
        "policy-trl-rloo": rloo(),
        "dpo-trl": dpo(),
        "kto-trl": kto(),
        "policy-verl-token": verl_policy("token-mean", "token", "truncated", 1.2),
        "policy-verl-sequence": verl_policy("seq-mean-token-mean", "sequence", "masked", 1.4),
        "policy-verl-constant": verl_policy("seq-mean-token-sum-norm", "constant", "truncated", 2.0),
        "value-verl": verl_value(),
        "gae-verl-tools": verl_gae_with_tools(),
        **{f"kl-verl-{name}": verl_kl(name) for name in ("k1", "k2", "k3")},
        **{
            f"advantages-verl-{name}": verl_advantages(name)
            for name in ("ppo", "grpo", "dr-grpo", "rloo", "reinforce++")
        },
        **recipes(),
        "own-trl-sapo": grpo("sapo", "sequence", beta=0.0, delta=None, cap=1.3, policy_loss="sapo"),
        "own-trl-vespo": grpo("vespo", "token", beta=0.0, delta=None, cap=3.0, policy_loss="vespo"),
    }
    libraries = {name: version(name) for name in ("trl", "verl", "torch", "transformers")}
    lines = [f"{json.dumps(name)}: {json.dumps(plain(entry))}" for name, entry in cases.items()]
    text = f'{{"libraries": {json.dumps(libraries)}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    Path(__file__).with_name("vectors.json").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
