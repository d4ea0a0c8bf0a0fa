"""A model folder as a module that returns what training and scoring need: log-probs or scalars.

The backbone comes from transformers. A value or score head is a linear layer to one scalar, `score` in the
checkpoint as in transformers' sequence classifiers; where the checkpoint has none it is drawn from a seed.

Legend: B sequences, L tokens, H hidden size, V vocabulary, N selected places.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.engines.transformers import attention
from executor.engines.transformers.shards import EmptyParameters, ModelFiles, expect, give_storage
from executor.engines.transformers.stored import StoredForm
from executor.settings import Precision
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.placement.engine_numbers import LOGIT_CHUNK_BYTES, LOGIT_CHUNK_ROWS
from rlhfsim.specs.workload.roles import Head

logger = logging.getLogger(__name__)

HEAD_NAMES = ("score.weight", "value_head.weight", "v_head.weight", "reward_head.weight", "rm_head.weight")
"""Names under which a scalar head is looked for, (1, H); it is written under the first."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TokenHead(nn.Module):
    """Log-probs of given tokens, (N, H) to (N,), in chunks of bounded memory.

    log-prob = z_target - logsumexp(z),  z = logits / temperature in fp32

    The backward pass starts with the last chunk, so its logits are kept; it computes the others again.
    """

    def __init__(self, linear: nn.Linear, config: Any, temperature: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.temperature = temperature
        self.cap = getattr(config, "final_logit_softcapping", None)
        # Cohere's logit_scale, one over Granite's logits_scaling
        scale = getattr(config, "logit_scale", None)
        self.scale = float(scale or 1.0 / float(getattr(config, "logits_scaling", None) or 1.0))

    def forward(self, hidden: Tensor, targets: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probs (N,), entropies (N,) or an empty tensor), fp32."""
        rows = max(LOGIT_CHUNK_ROWS, LOGIT_CHUNK_BYTES // (4 * self.weight.shape[0]))
        chunks = list(zip(hidden.split(rows), targets.split(rows), strict=True))
        again = chunks[:-1] if torch.is_grad_enabled() else []
        parts = [
            cast(tuple[Tensor, Tensor], checkpoint(self._chunk, *chunk, entropy, use_reentrant=False))
            for chunk in again
        ]
        parts += [self._chunk(*chunk, entropy) for chunk in chunks[len(again) :]]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _chunk(self, hidden: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logits = functional.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.temperature != 1.0:
            logits = logits / self.temperature
        norm = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - norm
        if not entropy:
            return logprobs, logprobs.new_zeros(0)
        return logprobs, norm - (torch.softmax(logits, dim=-1) * logits).sum(-1)


class ScalarHead(nn.Module):
    """One scalar a place, (N, H) to (N,), fp32."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor, targets: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(values (N,), an empty tensor): the same form as TokenHead."""
        values = functional.linear(hidden, self.weight)[:, 0].float()
        return values, values.new_zeros(0)


class HeadedModel(nn.Module):
    """Backbone and head in one module, so that ZeRO and AutoTP see one forward pass."""

    def __init__(
        self,
        backbone: nn.Module,
        head: TokenHead | ScalarHead,
        config: Any,
        head_name: str,
        stored: StoredForm,
    ) -> None:
        """`head_name`: of the head's module in a checkpoint; `stored`: its other names there."""
        super().__init__()
        self.stored = stored
        self.backbone, self.head, self.config, self.head_name = backbone, head, config, head_name
        self.prefix = f"{getattr(backbone, 'base_model_prefix', 'model')}."

    def forward(
        self, tokens: Tensor, positions: Tensor, index: Tensor, targets: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the head at `index` (N,) of the flattened hidden states (B L, H).

        No attention mask: rows are padded on the right, and attention keeps packed sequences apart.
        """
        lengths = attention.sequences(self.config, positions)
        output = self.backbone(input_ids=tokens, position_ids=positions, use_cache=False, **lengths)
        hidden = output.last_hidden_state.flatten(0, 1)[index]
        return cast(tuple[Tensor, Tensor], self.head(hidden, targets, entropy))


def load(
    folder: str,
    head: Head,
    precision: Precision,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> HeadedModel:
    """The model of `folder` on `device` with all of its weights; the host holds a block of them at a time.

    Raises:
        RlhfsimError: see `outline`.
    """
    model, unread = outline(folder, head, precision, temperature=temperature, seed=seed)
    if unread is not None:
        for name, parameter in unread.parameters(model):
            give_storage(parameter, device)
            unread.files.read_flat(name, parameter.data)
    return model.to(device)


def outline(
    folder: str, head: Head, precision: Precision, *, temperature: float = 1.0, seed: int = 0
) -> tuple[HeadedModel, EmptyParameters | None]:
    """The model with parameters on the meta device, and where to read them; the rest is on the CPU.

    Where its files cannot be read by parts it is whole, and there is nothing left to read.

    Raises:
        RlhfsimError: a folder without a model, a causal model without output matrix, or a tensor of another
            shape than configured.
    """

    def headed(*, whole: bool) -> HeadedModel:
        dtype = DTYPES[precision]
        if head == "causal":
            return _causal(folder, dtype, temperature, whole=whole)
        return _scalar(folder, dtype, seed, whole=whole)

    model = headed(whole=False)
    unread = _unread(model, folder)
    return (headed(whole=True), None) if unread is None else (model, unread)


def checkpoint_name(model: HeadedModel, name: str) -> str:
    """Hugging Face name of a parameter of `HeadedModel`."""
    part, rest = name.split(".", 1)
    return model.prefix + rest if part == "backbone" else f"{model.head_name}.{rest}"


def named_tensors(model: HeadedModel) -> dict[str, Tensor]:
    """Every parameter and stored buffer once, by name; a tied output matrix counts as the embedding.

    Routers of DeepSeek-V3 and GLM-4.5 keep the correction of their scores in a buffer, which vLLM loads.
    """
    kept = {name for name in model.state_dict() if "backbone." in name}
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in kept)]
    return {checkpoint_name(model, name): value for name, value in named}


def configuration(folder: str) -> Any:
    """Configuration of the model in `folder`, dropout off: equal weights must give equal log-probs.

    Raises:
        RlhfsimError: a folder without a model.
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise RlhfsimError(
            "no-model",
            f"{folder} is not a model folder: it has no config.json",
            help="give a folder as transformers' save_pretrained writes it",
        )
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float) and value > 0:
            logger.warning(
                "%s: %s %g is off: with it ratios would compare unlike passes", folder, name, value
            )
            setattr(config, name, 0.0)
    return config


def _built(auto: Any, folder: str, dtype: torch.dtype, *, whole: bool) -> Any:
    """A model of transformers with its weights, or with values in its buffers only."""
    from transformers.utils import logging as progress

    progress.disable_progress_bar()
    config = configuration(folder)
    how = {"dtype": dtype, "attn_implementation": attention.implementation(config, dtype)}
    if whole:
        return auto.from_pretrained(folder, config=config, trust_remote_code=False, **how)
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, **how)
    model.tie_weights()  # the context made two parameters of one
    return model


def _unread(model: HeadedModel, folder: str) -> EmptyParameters | None:
    """Where the files have each parameter on the meta device; buffers that they have are read at once.

    None where transformers changes tensors while it reads them: PyTorch's own files, experts that it merges,
    quantised weights, modules that stay in fp32.
    """
    files, names = ModelFiles(folder), dict[str, str]()
    parameters = {name: p for name, p in model.named_parameters() if p.is_meta}
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        full = checkpoint_name(model, name)  # backbones are stored with or without their prefix
        stored = files.stored(full, full.removeprefix(model.prefix))
        if stored is not None:
            files.expect(stored, tuple(tensor.shape))
            if name in parameters:
                names[name] = stored
            else:
                files.read_flat(stored, tensor)
    changed = "quantization_config" in vars(model.config) or (
        getattr(model.backbone, "_keep_in_fp32_modules_strict", None)
        and next(iter(parameters.values())).dtype != torch.float32
    )
    if changed or len(names) < len(parameters):
        logger.warning("%s cannot be read by parts: each rank reads all of it", folder)
        return None
    return EmptyParameters(files=files, names=names)


def _causal(folder: str, dtype: torch.dtype, temperature: float, *, whole: bool) -> HeadedModel:
    from transformers import AutoModelForCausalLM

    causal = _built(AutoModelForCausalLM, folder, dtype, whole=whole)
    linear = causal.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise RlhfsimError(
            "no-output-matrix",
            f"the model in {folder} has no linear output layer",
            help="use a causal language model",
        )
    head = TokenHead(linear, causal.config, temperature)
    logger.info("%s: output matrix %s", folder, "tied" if causal.config.tie_word_embeddings else "read")
    name = next(name for name, module in causal.named_modules() if module is linear)
    return HeadedModel(causal.base_model, head, causal.config, name, StoredForm(causal))


def _scalar(folder: str, dtype: torch.dtype, seed: int, *, whole: bool) -> HeadedModel:
    from transformers import AutoModel

    backbone = _built(AutoModel, folder, dtype, whole=whole)
    head = ScalarHead(backbone.config.hidden_size, dtype)
    files = ModelFiles(folder)
    name = files.stored(*HEAD_NAMES)
    if name is not None:
        files.expect(name, tuple(head.weight.shape))
        files.read_flat(name, head.weight.data)
    elif (stored := stored_head(folder)) is not None:  # in a file of PyTorch's own
        name, values = stored
        expect(folder, name, tuple(values.shape), tuple(head.weight.shape))
        head.weight.data.copy_(values.view_as(head.weight))
    else:
        draw_head(head.weight, backbone.config, seed)
    logger.info("%s: scalar head %s", folder, f"{name} read" if name else f"drawn from seed {seed}")
    return HeadedModel(backbone, head, backbone.config, "score", StoredForm(backbone))


def has_head(folder: str) -> bool:
    """Whether a model folder holds a scalar head."""
    return ModelFiles(folder).stored(*HEAD_NAMES) is not None or stored_head(folder) is not None


def stored_head(folder: str) -> tuple[str, Tensor] | None:
    """Name and values of the scalar head in files of PyTorch's own (pytorch_model*.bin)."""
    for path in sorted(Path(folder).glob("pytorch_model*.bin")):
        held: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for name in HEAD_NAMES:
            if name in held:
                return name, held[name]
    return None


def draw_head(weight: nn.Parameter, config: Any, seed: int) -> None:
    """Fill a scalar head (1, H) that the checkpoint lacks, from a seed."""
    spread = getattr(config, "initializer_range", None) or 1 / math.sqrt(weight.shape[1])
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * spread)
