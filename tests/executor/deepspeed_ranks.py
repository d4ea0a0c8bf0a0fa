"""One rank of the checks in test_deepspeed.py: `deepspeed_ranks.py RANK PORT PART FOLDER` writes
FOLDER/PART.json.

Both ranks run the same checks in the same order in one process each, because imports take longer than checks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from executor.algorithms import losses
from executor.engines import checkpoints, packing, training
from executor.engines.background import Background
from executor.engines.deepspeed import config, experts
from executor.engines.protocols import EngineSpec, MiniBatch
from executor.engines.transformers import heads
from executor.samples import LossSpec, Sample
from executor.settings import Optimizer
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.layout import Layout

RANK, PORT, PART, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
WORLD = int(os.environ.get("RANKS", "2"))
LOSS = LossSpec(name="policy", settings={"kl_coefficient": 0.1, "entropy_coefficient": 0.01})
VALUE = LossSpec(name="value", settings={})
# a large eps: with a small one Adam turns rounding errors of tiny gradients into whole steps
OPTIMIZER = Optimizer(
    learning_rate=1e-2, eps=1e-2, max_grad_norm=0.5, weight_decay=0.1, schedule="linear", warmup_steps=2
)
STEPS = 4
STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0, "micro_batch": 2},
    "zero1 packed": {"zero": 1, "micro_batch": 3, "packing": True},
    "zero2 recompute": {"zero": 2, "micro_batch": 4, "recompute": "full"},
    "zero3": {"zero": 3, "micro_batch": 2},
    "zero3 packed recompute": {
        "zero": 3,
        "micro_batch": 1,
        "packing": True,
        "micro_tokens": 20,
        "score_tokens": 30,
        "recompute": "full",
    },
}
BF16: dict[str, dict[str, Any]] = {
    "bf16 zero0": {"zero": 0, "precision": "bf16"},
    "bf16 zero2 offload": {"zero": 2, "precision": "bf16", "offload_optimizer": "cpu"},
    **{f"bf16 zero{z} fp32 sums": {"zero": z, "precision": "bf16", "gradients": "fp32"} for z in (1, 2, 3)},
    "bf16 zero3 offload": {
        "zero": 3,
        "precision": "bf16",
        "offload_optimizer": "cpu",
        "offload_params": "cpu",
    },
}


def model(family: str) -> str:
    return str(FOLDER / family)


def spec(folder: str, **options: Any) -> EngineSpec:
    options = {
        "optimizer": OPTIMIZER,
        "total_steps": 6,
        "micro_batch": 2,
        "recompute": "none",
        "dp": WORLD,
    } | options
    names = {"zero", "micro_batch", "recompute", "dp", "tp", "shards", "offload_optimizer", "offload_params"}
    layout = Layout(**{name: options.pop(name) for name in sorted(names & set(options))})
    return EngineSpec(role="actor", model=folder, layout=layout, **options)


def samples(count: int, seed: int) -> list[Sample]:
    draw = np.random.default_rng(seed)
    return [_sample(number, draw) for number in range(count)]


def _sample(number: int, draw: np.random.Generator) -> Sample:
    prompt, response = int(draw.integers(2, 7)), int(draw.integers(1, 9))

    def floats(mean: float) -> Any:
        return draw.normal(mean, 0.3, response).astype(np.float32)

    return Sample(
        id=number,
        group=number,
        prompt=draw.integers(0, 64, prompt),
        response=draw.integers(0, 64, response),
        old_logprobs=floats(-4.0),
        reference_logprobs=floats(-4.0),
        advantages=floats(0.0),
        returns=floats(0.0),
        values=floats(0.0),
    )


def batch(step: int, dp: int = WORLD) -> MiniBatch:
    """Nine samples, of which data-parallel ranks have different numbers."""
    everything = samples(9, step)
    cuts = {1: (9,), 2: (2, 7), 4: (1, 3, 0, 5)}[dp]
    rank = 0 if dp == 1 else RANK
    mine = everything[sum(cuts[:rank]) : sum(cuts[: rank + 1])]
    tokens = sum(sample.num_tokens for sample in everything)
    return MiniBatch(samples=tuple(mine), global_tokens=tokens, global_sequences=9)


def plain(folder: str, steps: int, loss: LossSpec = LOSS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms of the same steps in plain PyTorch, the whole batch at once."""
    head = "value" if loss.name == "value" else "causal"
    module = heads.load(folder, head, "fp32")
    adam = torch.optim.AdamW(
        module.parameters(), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    norms = []
    for step in range(steps):
        everything = samples(9, step)
        micro = packing.micro_batch(everything, packed=False)
        out, entropy = module(micro.tokens, micro.positions, micro.index, micro.targets, head == "causal")
        rows = {"values" if head == "value" else "logprobs": micro.rows(out)}
        rows |= {"entropy": micro.rows(entropy)} if head == "causal" else {}
        tokens = sum(sample.num_tokens for sample in everything)
        value, _ = losses.compute(
            loss, losses.collate(everything, num_tokens=tokens, num_sequences=9, **rows)
        )
        for group in adam.param_groups:
            group["lr"] = OPTIMIZER.learning_rate * (0.5, 1.0, 1.0, 0.75)[step]
        adam.zero_grad()
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), OPTIMIZER.max_grad_norm)))
        adam.step()
    return {name: p.detach() for name, p in heads.named_tensors(module).items()}, norms


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for bucket in engine.buckets(2**15) for name, tensor in bucket}


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    if RANK:
        return 0.0
    assert set(first) == set(second), set(first) ^ set(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def digest(engine: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights(engine).items()):
        found.update(name.encode() + tensor.float().numpy().tobytes())
    return found.hexdigest()


def close_to(first: Any, second: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


def check_stage(name: str, options: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Two steps, save, offload to files and back, two more; then a step that has no finite gradient."""
    engine = training.build(spec(model("llama"), **options))
    seen = [engine.train(batch(step), LOSS) for step in range(2)]
    background = None if options.get("backend") == "fsdp2" else Background(WORLD)
    engine.save(FOLDER / "checkpoints" / name, background)
    before = digest(engine)
    engine.offload(FOLDER / "offload")
    files = len(list((FOLDER / "offload").iterdir()))
    engine.reload()
    kept = digest(engine) == before
    seen += [engine.train(batch(step), LOSS) for step in range(2, STEPS)]
    found = {"digest": digest(engine), "kept": kept, "files": files}
    if expected is not None:
        found["weights"] = distance(weights(engine), expected[0])
        found["norms"] = max(abs(m["grad_norm"] - norm) for m, norm in zip(seen, expected[1], strict=True))
    found |= {"losses": [m["loss"] for m in seen], "rates": [m["learning_rate"] for m in seen]}
    if background is not None:  # the copies are of the state at the save, whatever came after
        while not background.written():
            time.sleep(0.01)
    broken = batch(0)
    if broken.samples:
        broken.samples[0].advantages[0] = np.nan  # type: ignore[index]
    found["skipped"] = engine.train(broken, LOSS)["skipped"]
    found["unharmed"] = digest(engine) == found["digest"]
    engine.close()
    return found


def check_resumed(name: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = training.build(spec(model("llama"), **options))
    engine.load(FOLDER / "checkpoints" / name)
    for step in range(2, STEPS):
        engine.train(batch(step), LOSS)
    found = {"digest": digest(engine)}
    engine.close()
    return found


def check_resharded(name: str, options: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Two more steps from what two ranks saved, as plain PyTorch makes them."""
    engine = training.build(spec(model("llama"), **options))
    engine.load(FOLDER / "checkpoints" / name)
    norms = [engine.train(batch(step), LOSS)["grad_norm"] for step in range(2, STEPS)]
    found = {
        "weights": distance(weights(engine), expected[0]),
        "norms": max(abs(norm - wanted) for norm, wanted in zip(norms, expected[1][2:], strict=True)),
    }
    engine.close()
    return found


def resharded() -> dict[str, Callable[[], Any]]:
    expected = plain(model("llama"), STEPS)
    return {name: partial(check_resharded, name, options, expected) for name, options in STAGES.items()}


def check_tensor_parallel(zero: int, family: str) -> dict[str, Any]:
    engine = training.build(spec(model(family), zero=zero, tp=2, dp=1))
    stored = {
        name: p.detach()
        for name, p in heads.named_tensors(heads.load(model(family), "causal", "fp32")).items()
    }
    found = {"loaded": distance(weights(engine), stored)}
    shard = sum(parameter.numel() for parameter in engine.model.parameters())
    found["share"] = shard / sum(parameter.numel() for parameter in stored.values())
    seen = [engine.train(batch(step, dp=1), LOSS) for step in range(2)]
    expected = plain(model(family), 2)
    found["weights"] = distance(weights(engine), expected[0])
    found["norms"] = max(abs(m["grad_norm"] - norm) for m, norm in zip(seen, expected[1], strict=True))
    engine.close()
    return found


def check_lora(zero: int, **options: Any) -> dict[str, Any]:
    engine = training.build(spec(model("llama"), zero=zero, lora_rank=4, **options))
    some = samples(3 + RANK, 7)
    before = engine.logprobs(some)
    for step in range(2):
        engine.train(batch(step), LOSS)
    after, reference = engine.logprobs(some), engine.reference_logprobs(some)
    adapters = engine.adapters()
    merged = weights(engine)
    saved = FOLDER / f"lora-{options.get('backend', 'deepspeed')}-{zero}"
    saved.mkdir(exist_ok=True)
    checkpoints.export(engine, saved)
    engine.close()
    copy = heads.load(model("llama"), "causal", "fp32")
    found = {"moved": close_to(before, after), "reference": close_to(before, reference)}
    if RANK == 0:
        for name, parameter in heads.named_tensors(copy).items():
            parameter.data.copy_(merged[name])
        micro = packing.micro_batch(some, packed=False)
        again = micro.split(copy(micro.tokens, micro.positions, micro.index, micro.targets)[0])
        found |= {"merged": close_to(after, again), "adapters": len(adapters), "name": adapters[0][0]}
        named = load_file(saved / "adapter" / "adapter_model.safetensors")
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        found["exported"] = len(named) if torch.equal(named[key], adapters[0][1].cpu()) else 0
    return found


def check_value_head(**options: Any) -> dict[str, Any]:
    engine = training.build(spec(model("qwen3"), zero=2, head="value", **options))
    for step in range(2):
        engine.train(batch(step), VALUE)
    expected = plain(model("qwen3"), 2, VALUE)
    found = {"weights": distance(weights(engine), expected[0])}
    engine.close()
    return found


def check_scoring() -> dict[str, Any]:
    some = samples(5 - 4 * RANK, 3)  # rank 1 has fewer micro-batches
    whole = training.build(spec(model("qwen2"), zero=0, optimizer=None))
    wanted = whole.logprobs(some)
    sharded = training.build(spec(model("qwen2"), zero=3, optimizer=None, packing=True))
    stored = heads.named_tensors(heads.load(model("qwen2"), "causal", "fp32"))
    found = {"logprobs": close_to(wanted, sharded.logprobs(some))}
    found["loaded"] = distance(weights(sharded), {name: p.detach() for name, p in stored.items()})
    sharded.offload(FOLDER / "offload")
    sharded.reload()
    found["reloaded"] = close_to(wanted, sharded.logprobs(some))
    sharded.close()
    whole.close()
    return found | _tensor_parallel_scores()


def _tensor_parallel_scores() -> dict[str, Any]:
    """Scores of a head that the checkpoint lacks: of one process, and of weights split in two."""
    some = samples(5, 3)
    options: dict[str, Any] = {"optimizer": None, "head": "score", "precision": "bf16", "zero": 1, "seed": 5}
    whole = training.build(spec(model("qwen3"), **options))
    split = training.build(spec(model("qwen3"), tp=2, dp=1, **options))
    wanted, found = whole.scores(some), split.scores(some)
    whole.close()
    split.close()
    return {"scores": float(np.abs(np.subtract(wanted, found)).max()), "spread": float(np.std(wanted))}


def check_recompute(zero: int, loss: LossSpec) -> int:
    """Runs of the first layer in the first step, of two micro-batches, of a new engine."""
    pairs = tuple(replace(sample, group=sample.id // 2) for sample in samples(4, 0))
    tokens = sum(sample.num_tokens for sample in pairs)
    engine = training.build(spec(model("llama"), zero=zero, recompute="full"))
    runs: list[None] = []
    attention = engine.model.backbone.layers[0].self_attn
    attention.register_forward_hook(lambda *_: runs.append(None))
    engine.train(MiniBatch(samples=pairs, global_tokens=tokens, global_sequences=4), loss)
    engine.close()
    return len(runs)


def check_sums(**options: Any) -> dict[str, float]:
    """Norm of the gradient of 64 like micro-batches over that of one, all of which have the same mean."""
    engine = training.build(spec(model("llama"), micro_batch=1, precision="bf16", **options))
    rank = samples(2, 5)[RANK]
    norms = []
    for count in (1, 64):
        mine = tuple(replace(rank, id=number) for number in range(count))
        tokens = count * sum(sample.num_tokens for sample in samples(2, 5))
        one = MiniBatch(samples=mine, global_tokens=tokens, global_sequences=count * 2)
        engine.load(FOLDER / "sums") if norms else engine.save(FOLDER / "sums")
        norms.append(engine.train(one, LOSS)["grad_norm"])
    engine.close()
    return {"ratio": norms[1] / norms[0]}


def check_refused() -> str:
    engine = training.build(spec(model("llama"), zero=2))
    try:
        engine.load(FOLDER / "checkpoints" / "zero3")
    except RlhfsimError as error:
        return error.code
    finally:
        engine.close()
    return ""


def check_memory() -> dict[str, Any]:
    """Resident bytes around offload of a model of about 100 MB."""
    engine = training.build(spec(model("large"), zero=1))
    engine.train(batch(0), LOSS)
    resident = psutil.Process().memory_info
    size = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    before = resident().rss
    engine.offload(FOLDER / "offload")
    away = resident().rss
    engine.reload()
    loss = engine.train(batch(1), LOSS)["loss"]
    engine.close()
    return {"size": size, "freed": before - away, "loss": loss}


def check_closed() -> dict[str, bool]:
    """Whether a closed engine's weights are still somewhere, and another's learn as before."""
    found, other = {}, training.build(spec(model("llama"), zero=3))
    other.train(batch(0), LOSS)
    for zero, recompute in ((1, "none"), (3, "none"), (3, "full")):
        engine = training.build(spec(model("llama"), zero=zero, recompute=recompute))
        engine.train(batch(0), LOSS)
        kept = weakref.ref(engine.engine.module)
        engine.close()
        found[f"zero{zero} recompute {recompute}"] = kept() is not None
    found["other learns"] = math.isfinite(other.train(batch(1), LOSS)["loss"])
    other.close()
    return found


def check_experts() -> dict[str, Any]:
    """Bytes of whole weights that a rank has at the loss and after a step, where places of experts are saved,
    where views are and where layers are computed again; and how far apart the weights are that they learn."""
    config.DEEPSPEED = replace(config.DEEPSPEED, live=1, reuse=1, prefetch=1)
    found, learnt, save_places = {}, [], experts.save_places
    for name in ("places", "views", "recompute"):
        experts.save_places = save_places if name == "places" else lambda model: None
        engine = training.build(
            spec(model("qwen3_moe"), zero=3, recompute="full" if name == "recompute" else "none")
        )
        alive, at_loss = _gathered(engine), []
        back = engine._backward
        engine._backward = lambda loss, last, back=back, alive=alive, at_loss=at_loss: (
            at_loss.append(sum(alive.values())),
            back(loss, last=last),
        )
        norms = [engine.train(batch(step), LOSS)["grad_norm"] for step in range(2)]
        found[name] = {"bytes": max(at_loss), "norms": norms, "later": sum(alive.values())}
        learnt.append(weights(engine))
        engine.close()
    return found | {"apart": max(distance(learnt[0], other) for other in learnt[1:])}


def _gathered(engine: Any) -> dict[int, int]:
    """Storages of gathered weights that are alive, and their bytes; it goes on as passes do."""
    alive: dict[int, int] = {}

    def note(module: Any, _inputs: object) -> None:
        for parameter in module.parameters(False):
            storage = parameter.untyped_storage()
            if storage._cdata not in alive and storage.nbytes():
                alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, alive.pop, storage._cdata)

    for module in engine.model.backbone.layers.modules():
        module.register_forward_pre_hook(note)
    return alive


def first() -> dict[str, Callable[[], Any]]:
    """Checks by name, in order."""
    expected = plain(model("llama"), STEPS)
    stages = {name: partial(check_stage, name, options, expected) for name, options in STAGES.items()}
    half = {name: partial(check_stage, name, options, None) for name, options in BF16.items()}
    tensor = {
        f"tp zero{zero}": partial(check_tensor_parallel, zero, family)
        for zero, family in enumerate(("llama", "qwen3", "qwen2"))
    }
    adapters = {f"lora zero{zero}": partial(check_lora, zero) for zero in (2, 3)}
    others = {
        "value": check_value_head,
        "recompute dpo": partial(check_recompute, 3, LossSpec(name="dpo", settings={})),
        "recompute policy": partial(check_recompute, 2, LOSS),
        "bf16 sums": partial(check_sums, zero=2),
        **{f"fp32 sums {stage}": partial(check_sums, zero=stage, gradients="fp32") for stage in (1, 2, 3)},
        "refused": check_refused,
        "scoring": check_scoring,
        "memory": check_memory,
        "closed": check_closed,
    }
    return {**stages, **half, **tensor, **adapters, **others}


def second() -> dict[str, Callable[[], Any]]:
    """Checks of a new process."""
    return {name: partial(check_resumed, name, options) for name, options in (STAGES | BF16).items()}


def main(parts: Mapping[str, Callable[[], dict[str, Callable[[], Any]]]]) -> None:
    torch.set_num_threads(1)
    training.start(RANK, WORLD, 0, "127.0.0.1", PORT, 60.0)
    found: dict[str, Any] = {}
    for name, check in parts[PART]().items():
        began = time.monotonic()
        found[name] = check()
        found[f"seconds of {name}"] = time.monotonic() - began
        if RANK == 0:
            (FOLDER / f"{PART}.json").write_text(json.dumps(found))
    dist.barrier()
    training.stop()


if __name__ == "__main__":
    parts = {"first": first, "second": second, "resharded": resharded}
    main({**parts, "experts": lambda: {"experts": check_experts}})
