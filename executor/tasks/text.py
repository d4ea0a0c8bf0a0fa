"""Text to token ids and back, by the tokenizer.json of a model folder; conversations by its chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from executor.samples import Tokens
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import convert, parse_json, read_text

Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""
Prompt = str | tuple[Message, ...]
"""What the model is asked: text that it continues, or a conversation that it answers."""
_ANSWER = "@@answer@@"
"""Stands for an answer in a conversation that is only shown."""
TOKENIZER, CONFIGS = "tokenizer.json", ("generation_config.json", "config.json")


STOPS = "eos_token_id"


@frozen
class StopKeys:
    """What is read of a generation config."""

    eos_token_id: int | tuple[int, ...] | None = None


def shown(prompt: Prompt) -> str:
    """As a text: of a conversation its contents, a turn a line."""
    return prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)


def tokenizer_of(folder: str | Path) -> Path:
    """The file of a model's tokenizer.

    Raises:
        RlhfsimError: the folder has none.
    """
    path = Path(folder) / TOKENIZER
    if not path.is_file():
        raise RlhfsimError(
            "no-tokenizer",
            f"{str(folder)!r} has no {TOKENIZER}",
            help="save a fast tokenizer next to the weights: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
        )
    return path


class Text:
    """A tokenizer without torch or transformers: the driver needs no more."""

    def __init__(self, folder: str | Path, *, chat: bool = False) -> None:
        """Read tokenizer.json and the end-of-sequence ids; with `chat` the chat template as well.

        Raises:
            RlhfsimError: no tokenizer there, one that cannot be read, or one without the template.
        """
        from tokenizers import Tokenizer

        path = tokenizer_of(folder)
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise RlhfsimError(
                "bad-tokenizer", f"cannot be read as a tokenizer: {error}"[:200], place=Place(file=str(path))
            ) from error
        self._chat = _chat(Path(folder)) if chat else None
        self._added = {"add_special_tokens": self._chat is None}  # the template has them
        self.stops = _stops(Path(folder))

    def encode(self, prompt: Prompt) -> Tokens:
        """(P,) ids: as the chat template has them, else with the special tokens that the tokenizer adds."""
        return np.asarray(self._tokenizer.encode(self._shown(prompt), **self._added).ids, np.int64)

    def lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Tokens of each as `encode` makes them."""
        shown = [self._shown(prompt) for prompt in prompts]
        return [len(encoded.ids) for encoded in self._tokenizer.encode_batch(shown, **self._added)]

    def identity(self) -> str:
        """Hash of the tokenizer and its chat template."""
        template = self._chat.chat_template if self._chat is not None else ""
        return hashlib.blake2b((self._tokenizer.to_str() + str(template)).encode()).hexdigest()

    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        known: dict[str, int] = self._tokenizer.get_vocab()
        return known

    def _shown(self, prompt: Prompt) -> str:
        if self._chat is None:
            assert isinstance(prompt, str), "checked when the data are read"
            return prompt
        shown = self._chat.apply_chat_template(_turns(prompt), add_generation_prompt=True, tokenize=False)
        return str(shown)

    def encode_response(self, text: str) -> Tokens:
        """(R,) token ids of a given response, ended by the end-of-sequence token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray([*ids, *self.stops[:1]], np.int64)

    def encode_observation(self, text: Prompt, last: int) -> Tokens:
        """(n,) ids of what comes between a turn that ended with the id `last` and the next one.

        With a chat template: as the template has it between an answer and the next, a text being a turn of
        the user. The end of the answer is left out where it was sampled.
        """
        shown = text
        if self._chat is not None:
            turns = [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": _ANSWER},
                *_turns(text),
            ]
            whole = self._chat.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            shown = str(whole).partition(_ANSWER)[2]
        ids = self._tokenizer.encode(shown, add_special_tokens=False).ids
        return np.asarray(ids[1:] if self._chat is not None and ids[:1] == [last] else ids, np.int64)

    def decode(self, rows: Sequence[Tokens]) -> list[str]:
        """Texts without special tokens, all at once and while other threads run."""
        texts: list[str] = self._tokenizer.decode_batch(
            [row.tolist() for row in rows], skip_special_tokens=True
        )
        return texts


def _chat(folder: Path) -> Any:
    """The tokenizer as transformers has it, which knows the template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise RlhfsimError(
            "no-chat-template",
            "data.chat_template is set, but the tokenizer has no template",
            place=Place(file=str(folder)),
            help="set data.chat_template: false, "
            "or save the tokenizer of an instruct model next to the weights",
        )
    return tokenizer


def _turns(prompt: Prompt) -> Sequence[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _stops(folder: Path) -> list[int]:
    """End-of-sequence ids; the generation config goes before the model's.

    Raises:
        RlhfsimError: one of them is no JSON object, or its ids are no whole numbers.
    """
    for name in CONFIGS:
        path = folder / name
        if path.is_file():
            source = parse_json(read_text(path), str(path))
            data = convert(dict[str, Any], source)
            ids = convert(StopKeys, source, {k: v for k, v in data.items() if k == STOPS}).eos_token_id
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []


class ByteText:
    """Bytes as tokens: for dry runs without a model."""

    def __init__(self) -> None:
        """Zero ends a response."""
        self.stops = [0]

    def encode(self, prompt: Prompt) -> Tokens:
        """(P,) bytes."""
        text = prompt if isinstance(prompt, str) else " ".join(turn["content"] for turn in prompt)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def lengths(self, prompts: Sequence[Prompt]) -> list[int]:
        """Bytes of each."""
        return [len(self.encode(prompt)) for prompt in prompts]

    def identity(self) -> str:
        """There is one such tokenizer."""
        return "bytes"

    def encode_response(self, text: str) -> Tokens:
        """(R,) bytes and the end."""
        return np.asarray([*text.encode(), 0], np.int64)

    def encode_observation(self, text: Prompt, last: int) -> Tokens:
        """(n,) bytes."""
        return self.encode(text)

    def decode(self, rows: Sequence[Tokens]) -> list[str]:
        """Texts of the bytes."""
        return [(row % 256).astype(np.uint8).tobytes().decode(errors="replace") for row in rows]
