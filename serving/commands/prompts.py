"""Prompts from text, and completions as text or JSON."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m31jax import Completion, Engine


def encode(engine: "Engine", text: str, *, is_raw: bool) -> list[int]:
    """Token ids of a text: one user turn where there is a chat template, else the text as it is.

    Raises:
      RequestError: the model has no tokenizer.
    """
    tokenizer = engine.tokenizer
    if is_raw or tokenizer is None or tokenizer.chat_template is None:
        return list(engine.encode(text))
    turn = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(turn, add_special=False)


def join_ids(ids: Sequence[int]) -> str:
    """Ids as `--prompt-ids` takes them."""
    return ",".join(map(str, ids))


def as_object(prompt_ids: Sequence[int], completion: "Completion") -> dict[str, Any]:
    """The JSON answer of one completion."""
    return {
        "prompt_ids": list(prompt_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
        "stats": completion.stats,
    }
