"""TRL's GRPOTrainer on the task, warm models and seeds of learning.py: the band in which our GRPO (grpo-64) should lie.

    PYTHONPATH=.:FOLDER_OF_TRL python lab/benchmarks/trl_learning.py [--seeds 0 1 2] [--out reports]

The model that our run starts from, the same prompts in the same order, the same rule, batch, mini-batches, optimizer,
learning rate by step and greedy evaluation of the same problems. TRL generates with transformers, as it does
without vLLM. Its loss is averaged over the tokens of a mini-batch (`bnpo`), as ours is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learning import (
    EVALUATIONS,
    HELD_OUT,
    MOST_TOKENS,
    RECIPES,
    ROOT,
    WARM_UP_OF_RATE,
    problems_of,
    shrink,
    start_of,
)
from process import bind

NAME, TASK = "trl-grpo", "comparison"


def main() -> None:
    """Every seed, then the files of learning.py."""
    from learning_report import write

    parser = argparse.ArgumentParser(description="TRL's GRPO on the task of learning.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "reports")
    parser.add_argument("--warm", type=Path, help="folder that keeps the warm models for further runs")
    parser.add_argument("--quick", action="store_true", help="8 small iterations, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        shrink()
    cores = bind()
    for seed in options.seeds:
        result = measure(seed, options.warm) | {"cores": cores}
        print(f"TRL seed {seed}: {result['start']:.3f} -> {result['end']:.3f} in {result['seconds']:.0f} s")
        write(options.out, result)


def measure(seed: int, kept: Path | None) -> dict[str, Any]:
    """Warm-up and run of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        model, warm = start_of(TASK, seed, kept or Path(folder))
        begin = time.perf_counter()
        run = Run(model, problems_of(TASK, seed), seed, Path(folder))
        run.trainer.train()
    iterations = RECIPES[NAME].iterations
    return {
        "task": TASK,
        "algorithm": NAME,
        "seed": seed,
        "recipe": asdict(RECIPES[NAME]),
        "start": run.accuracy["0"],
        "end": run.accuracy[str(iterations)],
        "seconds": time.perf_counter() - begin + warm["warm_up_s"],
        **warm,
        "iteration_s": (run.ended - run.began) / iterations,
        "load": os.getloadavg()[1],
        "accuracy": run.accuracy,
        "reward": run.reward,
    }


class Run:
    """A trainer, the accuracy by iteration and the reward of every iteration."""

    def __init__(self, model: Path, task: Any, seed: int, folder: Path) -> None:
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOTrainer

        from executor.rewards.answers import is_right

        recipe = RECIPES[NAME]
        self.problems, self.accuracy, self.reward = task.held_out(HELD_OUT), {}, []
        self.began = self.ended = 0.0
        rows = task.batch(0, recipe.iterations * recipe.prompts)
        actor: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)

        def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            scores = [float(is_right(c, a)) for c, a in zip(completions, answer, strict=True)]
            self.reward.append(statistics.mean(scores))
            return scores

        self.trainer = GRPOTrainer(
            model=actor,
            reward_funcs=reward,
            args=configuration(folder, seed),
            train_dataset=Dataset.from_dict(
                {"prompt": [str(r.prompt) for r in rows], "answer": [r.answer for r in rows]}
            ),
            processing_class=self.tokenizer,
            callbacks=[self.callback()],
            optimizers=optimizers(actor),
        )

    def callback(self) -> Any:
        """Evaluates before the first step and after as many iterations as our runs do."""
        from transformers import TrainerCallback

        outer, recipe = self, RECIPES[NAME]
        every = recipe.iterations // EVALUATIONS * recipe.mini_batches

        class Evaluate(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
                outer.accuracy["0"] = outer.held_out(model)
                outer.began = time.perf_counter()

            def on_step_end(self, _: Any, state: Any, *__: Any, model: Any, **___: Any) -> None:
                if state.global_step % every == 0:
                    step = state.global_step // recipe.mini_batches
                    outer.accuracy[str(step)] = outer.held_out(model)
                    print(f"  {step}: {outer.accuracy[str(step)]:.3f}", flush=True)
                outer.ended = time.perf_counter()

        return Evaluate()

    def held_out(self, model: Any) -> float:
        """Share of held-out problems that the greedy response answers right."""
        import torch

        from executor.rewards.answers import is_right

        training = model.training
        model.eval()
        texts = [str(p.prompt) for p in self.problems]
        inputs = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=MOST_TOKENS,
                do_sample=False,
            )
        model.train(training)
        responses = self.tokenizer.batch_decode(
            tokens[:, inputs.input_ids.shape[1] :], skip_special_tokens=True
        )
        return statistics.mean(
            float(is_right(r, p.answer)) for r, p in zip(responses, self.problems, strict=True)
        )


def configuration(folder: Path, seed: int) -> Any:
    """TRL's settings of our recipe."""
    from trl import GRPOConfig

    recipe = RECIPES[NAME]
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=recipe.prompts * recipe.samples // recipe.mini_batches,
        gradient_accumulation_steps=1,
        steps_per_generation=recipe.mini_batches,
        num_generations=recipe.samples,
        max_completion_length=MOST_TOKENS,
        max_steps=recipe.iterations * recipe.mini_batches,
        beta=0.0,
        epsilon=0.2,
        loss_type="bnpo",
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=seed,
        shuffle_dataset=False,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def optimizers(model: Any) -> Any:
    """AdamW and the learning rate of every step as ours."""
    import torch

    from executor.engines.optimizers import learning_rate
    from executor.settings import Optimizer

    recipe = RECIPES[NAME]
    ours = Optimizer(
        learning_rate=recipe.learning_rate, betas=(0.9, 0.99), schedule="linear", warmup_steps=WARM_UP_OF_RATE
    )
    total = recipe.iterations * recipe.mini_batches
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=ours.learning_rate,
        betas=ours.betas,
        eps=ours.eps,
        weight_decay=ours.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda step: learning_rate(ours, step, total) / ours.learning_rate
    )
    return adamw, schedule


if __name__ == "__main__":
    main()
