"""Supervised warm-up of a tiny model on a generated task, and its greedy accuracy; plain torch, one process.

A random model never earns a rule reward, so that policy gradients have nothing to follow; some steps of
supervised learning leave it between ignorance and mastery, from where a run can climb. Not a trainer for
real models: everything is full precision and in memory.

Legend: B problems, T tokens (padded), V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from executor.tasks.prompts import Problem, ProblemSource

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_IGNORED = -100  # of cross_entropy


def warm_up(
    folder: str | Path,
    out: str | Path,
    task: ProblemSource,
    steps: int,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
) -> list[float]:
    """Teach the model in `folder` the answers of `task`, save it to `out`, return the loss of every step.

    Cross-entropy (nats a token) of answer and end-of-sequence, given the prompt; AdamW, linear decay to 0.
    `seed` starts the stream: the first problem is number seed * steps * batch.
    """
    import torch

    model, tokenizer = _load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model.train()
    losses = []
    start = seed * steps * batch
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        loss = _loss(model, tokenizer, task.batch(start + step * batch, batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _log.info("warm-up of %d steps: loss %.3f to %.3f", steps, losses[0], losses[-1])
    return losses


def greedy_accuracy(
    folder: str | Path, problems: Sequence[Problem], *, max_tokens: int = 8, batch: int = 256
) -> float:
    """Share of problems whose greedy response, without special tokens, is exactly the answer."""
    model, tokenizer = _load(folder)
    model.eval()
    hits = 0
    for start in range(0, len(problems), batch):
        some = problems[start : start + batch]
        responses = _greedy(model, tokenizer, [str(p.prompt) for p in some], max_tokens)
        hits += sum(r == p.answer for r, p in zip(responses, some, strict=True))
    return hits / max(1, len(problems))


def _load(folder: str | Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load = cast(Any, AutoModelForCausalLM).from_pretrained
    model = load(folder, dtype=torch.float32, trust_remote_code=False)
    return model, cast(Any, AutoTokenizer).from_pretrained(folder, trust_remote_code=False)


def _loss(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens of a batch."""
    import torch

    rows, labels = [], []
    for problem in problems:
        prompt = tokenizer(problem.prompt).input_ids
        answer = [*tokenizer(problem.answer).input_ids, tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([_IGNORED] * len(prompt) + answer))
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)  # (B, T)
    targets = pad(labels, batch_first=True, padding_value=_IGNORED)  # (B, T)
    logits = model(input_ids=ids).logits  # (B, T, V); padding is right of all that is scored
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED
    )


def _greedy(model: Any, tokenizer: Any, prompts: list[str], max_tokens: int) -> list[str]:
    """Responses to one batch, padded on the left."""
    import torch

    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    responses = tokens[:, inputs.input_ids.shape[1] :]
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))
