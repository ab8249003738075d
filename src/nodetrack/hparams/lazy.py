"""What a namespace builds from its values with transformers: the tokenizer and the model's configuration.

transformers is imported here and only when one of the two is touched, so a node that uses neither starts
without it and without network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from nodetrack.errors import HparamsError, MissingExtraError

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase

_KEY_NEEDED = {"tokenizer": "tokenizer_name_or_path", "model_config": "hidden_size"}

_CONFIG_KEYS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "sequence_length": "max_position_embeddings",
    "activation_function": "hidden_act",
}
"""Our key, and the argument of `LlamaConfig` that it becomes. A key that is missing or None is left out."""


@dataclass(frozen=True, slots=True)
class Built:
    """A built object and the values it was built from."""

    inputs: dict[str, object]
    value: object


def can_build(namespace: SimpleNamespace, name: str) -> bool:
    """Whether the namespace holds the key that this lazy attribute starts from."""
    return _KEY_NEEDED[name] in vars(namespace)


def build(namespace: SimpleNamespace, name: str, cache: dict[str, Built]) -> object:
    """The lazy attribute: from the cache while the values it was built from are the same."""
    inputs = {key: vars(namespace).get(key) for key in _inputs(name)}
    known = cache.get(name)
    if known is None or known.inputs != inputs:
        known = cache[name] = Built(copy.deepcopy(inputs), _BUILDERS[name](namespace))
    return known.value


def _inputs(name: str) -> tuple[str, ...]:
    tokenizer = ("tokenizer_name_or_path",)
    return tokenizer if name == "tokenizer" else (*_CONFIG_KEYS, "vocab_size", *tokenizer)


def _tokenizer(namespace: SimpleNamespace) -> PreTrainedTokenizerBase:
    """Raises `HparamsError` when no tokenizer is named or it cannot be loaded."""
    source = namespace.tokenizer_name_or_path
    if source is None:
        raise _error("hparams.tokenizer needs tokenizer_name_or_path; set it to a folder or a name.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers", "hparams.tokenizer") from error
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise _error(f"No tokenizer could be loaded from {source!r}: {_first_line(error)}") from error


def _model_config(namespace: SimpleNamespace) -> LlamaConfig:
    """Raises `HparamsError` when the values do not make a model."""
    try:
        from transformers import LlamaConfig
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers", "hparams.model_config") from error
    values = {theirs: vars(namespace).get(ours) for ours, theirs in _CONFIG_KEYS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    vocab_size = _vocab_size(namespace)
    try:
        return LlamaConfig(**given, vocab_size=vocab_size)
    except Exception as error:  # its validation raises classes of huggingface_hub's own
        raise _error(f"These hyper-parameters make no LlamaConfig: {_last_line(error)}") from error


def _vocab_size(namespace: SimpleNamespace) -> int:
    """The given size, or the tokenizer's; a size too small for the tokenizer would fail in training."""
    given = vars(namespace).get("vocab_size")
    if vars(namespace).get("tokenizer_name_or_path") is None:
        if given is None:
            raise _error(
                "hparams.model_config needs vocab_size or tokenizer_name_or_path; set one.", "vocab_size"
            )
        return int(given)
    needed = len(namespace.tokenizer)
    if given is not None and given < needed:
        advice = "set it to null to follow the tokenizer"
        raise _error(f"vocab_size is {given}, but the tokenizer has {needed} tokens; {advice}.", "vocab_size")
    return needed if given is None else int(given)


def _error(message: str, key: str = "tokenizer_name_or_path") -> HparamsError:
    return HparamsError(message, key=key)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2].strip()


_BUILDERS: dict[str, Callable[[SimpleNamespace], object]] = {
    "tokenizer": _tokenizer,
    "model_config": _model_config,
}
