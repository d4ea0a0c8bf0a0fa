"""Tokens a second of the executor's step loop on vLLM, beside vLLM's own `generate`, in turns on one engine.

python lab/benchmarks/step_loop_speed.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from executor.engines.protocols import RolloutSpec
from executor.engines.vllm.engine import VllmEngine
from executor.samples import GenerationRequest
from executor.tasks import tiny
from rlhfsim.specs.placement.layout import RolloutLayout

REQUESTS, TOKENS = 128, 48


def rates(engine: VllmEngine) -> tuple[float, float]:
    """Tokens a second: ours, vLLM's."""
    from vllm import SamplingParams

    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, 60, 5 + i % 12) for i in range(REQUESTS)]
    asked = [
        GenerationRequest(id=i, prompt=p, max_tokens=TOKENS, temperature=1.0, top_p=1.0, seed=i)
        for i, p in enumerate(prompts)
    ]
    start = time.monotonic()
    tokens = sum(len(completion.tokens) for completion in engine.generate(asked))
    ours = tokens / (time.monotonic() - start)
    params = [SamplingParams(max_tokens=TOKENS, seed=r.seed, logprobs=0, detokenize=False) for r in asked]
    start = time.monotonic()
    out = engine._llm.generate([{"prompt_token_ids": p.tolist()} for p in prompts], params, use_tqdm=False)
    tokens = sum(len(each.outputs[0].token_ids) for each in out)
    return ours, tokens / (time.monotonic() - start)


def main() -> None:
    """Print a line a repeat, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        layout = RolloutLayout(max_batched_tokens=2048)
        model = str(tiny.build(Path(folder) / "model"))
        spec = RolloutSpec(
            model=model, layout=layout, max_model_len=256, max_num_seqs=64, kv_bytes=32 * 2**20
        )
        engine = VllmEngine(spec)
        rates(engine)
        rows = [rates(engine) for _ in range(options.repeats)]
        engine.close()
    for ours, theirs in rows:
        print(f"step loop {ours:,.0f} tokens/s, vLLM {theirs:,.0f}, ratio {ours / theirs:.2f}")
    print(f"median ratio {statistics.median(ours / theirs for ours, theirs in rows):.2f}")


if __name__ == "__main__":
    main()
