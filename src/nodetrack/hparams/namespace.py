"""Hyper-parameters as attributes: a `SimpleNamespace` that gives plain dicts back and helps with slips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nodetrack.errors import UsageError

if TYPE_CHECKING:
    from nodetrack.hparams.lazy import Built


class _AlwaysAMethod:
    """A method that a key of the same name cannot hide: as a data descriptor it wins over the instance."""

    def __init__(self, function: Callable[[Namespace], dict[str, object]]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Namespace | None, owner: type[Namespace]) -> Callable[..., dict[str, object]]:
        return self._function if instance is None else self._function.__get__(instance, owner)

    def __set__(self, instance: Namespace, value: object) -> None:
        vars(instance)["to_dict"] = value


class Namespace(SimpleNamespace):
    """Values as attributes, nested objects as namespaces: `hparams.torchtitan.dp_shard`.

    Compares, prints, copies and pickles as `types.SimpleNamespace` does. `to_dict()` gives plain dicts and
    lists back. A key that no attribute can be named after, or that is called `to_dict`, is reached through
    `vars(namespace)` and comes back from `to_dict()` like any other.

    A namespace with `tokenizer_name_or_path` has a `tokenizer`, and one with `hidden_size` a `model_config`
    (a transformers `LlamaConfig`). Both are built from the values when first touched, kept until those
    values change, and no part of comparing, printing, copying, pickling and `to_dict`. A key of the same
    name hides them.
    """

    __slots__ = ("_built",)
    _built: dict[str, Built]

    # A namespace holds whatever the project put into it, so no narrower type than Any is true.
    def __getattr__(self, name: str) -> Any:
        """Called only when there is no such attribute: build a lazy one, or say what was probably meant."""
        if name in ("tokenizer", "model_config"):
            from nodetrack.hparams.lazy import build, can_build

            if can_build(self, name):
                return build(self, name, self._cache())
        raise AttributeError(self._missing(name))

    @_AlwaysAMethod
    def to_dict(self) -> dict[str, object]:
        """The values as plain dicts and lists, new ones at every call."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def _cache(self) -> dict[str, Built]:
        try:
            return object.__getattribute__(self, "_built")  # type: ignore[no-any-return]  # a slot
        except AttributeError:
            self._built = {}
            return self._built

    def _missing(self, name: str) -> str:
        nearest = get_close_matches(name, [key for key in vars(self) if isinstance(key, str)], n=1)
        advice = f"; did you mean {nearest[0]!r}?" if nearest else "."
        return f"The hyper-parameters have no {name!r} here{advice}"


def create_namespace(values: Mapping[str, object]) -> Namespace:
    """The values as a `Namespace`, objects inside (in lists too) as namespaces; `to_dict` is the inverse.

    A dict inside whose keys are not all text stays a dict. Raises `UsageError` when `values` is no mapping
    with text keys.
    """
    if not _is_mapping_of_names(values):
        raise UsageError(
            f"create_namespace needs a dict with text keys, not {type(values).__name__} {values!r:.60}."
        )
    namespace = Namespace()
    vars(namespace).update({name: _attribute(value) for name, value in values.items()})
    return namespace


def _is_mapping_of_names(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _attribute(value: object) -> object:
    if isinstance(value, Namespace):
        return value
    if isinstance(value, Mapping) and _is_mapping_of_names(value):
        return create_namespace(value)
    return [_attribute(item) for item in value] if isinstance(value, list) else value


def _plain(value: object) -> object:
    if isinstance(value, SimpleNamespace):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
