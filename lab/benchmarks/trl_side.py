"""What TRL's interpreter runs for `trl_speed.py`: warm-up, then a block of iterations a line.

    python trl_side.py FOLDER    (reads FOLDER/case.json, prompts.json and the model that case.json names)

Imports nothing of this project.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """One JSON line after the warm-up and after every block."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    work = Path(sys.argv[1])
    case: dict[str, Any] = json.loads((work / "case.json").read_text())
    torch.set_num_threads(case["threads"])
    turns, lengths = _turns(case)
    batch = case["prompts"] * case["samples"]
    config = GRPOConfig(
        output_dir=str(work / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # TRL's defaults: slower here, and not what ours does
        per_device_train_batch_size=batch // case["trl_micro_batches"],
        gradient_accumulation_steps=case["trl_micro_batches"],
        num_generations=case["samples"],
        max_completion_length=case["tokens"],
        max_steps=case["iterations"],
        beta=0.0,
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
    )

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": json.loads((work / "prompts.json").read_text())}),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
        callbacks=[turns],
    )
    trainer.train()


def _turns(case: dict[str, Any]) -> tuple[Any, list[int]]:
    """The callback that reports and waits, and the list that takes the length of every response."""
    from transformers import TrainerCallback

    seconds: list[float] = []
    lengths: list[int] = []

    class Turns(TrainerCallback):
        """Reports at the end of the warm-up and of every block, then waits for the next line."""

        begin = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)
            if len(seconds) == (case["warm_up"] if self.warming else case["block"]):
                report = {
                    "seconds": statistics.median(seconds),
                    "tokens_per_s": sum(lengths) / sum(seconds),
                    "lengths": lengths,
                }
                print("\n" + json.dumps(report), flush=True)
                seconds.clear()
                lengths.clear()
                self.warming = False
                sys.stdin.readline()
            self.begin = time.perf_counter()

        warming = True

    return Turns(), lengths


if __name__ == "__main__":
    main()
