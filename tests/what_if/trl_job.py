"""A job of TRL on CPU: trl_job.py FOLDER [KILLED_AT]; it goes on from the newest checkpoint, and kills itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

STEPS, SAVED = 12, 2


def main() -> None:
    """Train; what TRL prints goes to standard output, its metrics to TensorBoard."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder, killed_at = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.set_num_threads(1)

    class Killed(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        """Ends the process without a word, after the metrics of the step before are written."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == killed_at:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=STEPS,
            logging_steps=1,
            save_steps=SAVED,
            report_to="tensorboard",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+2="] * 40}),
        processing_class=AutoTokenizer.from_pretrained(str(folder / "model")),
        callbacks=[Killed()],
    )
    trainer.train(resume_from_checkpoint=any((folder / "out").glob("checkpoint-*")))


if __name__ == "__main__":
    main()
