"""Values from the environment and from `key=value` arguments, each as a layer of its own.

Both are text. A declared text takes it as it stands; anywhere else it is read as JSON, and as text when it
is none. `null` is None everywhere, and a JSON string, `"null"` with its quotes, is that text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodetrack.errors import HparamsError
from nodetrack.hparams.fields import Field, Group
from nodetrack.hparams.json_text import DuplicateKey, JsonTextError, describe_duplicate, parse_json
from nodetrack.hparams.layers import Json, KeyPath, Layer, Origin, Problem, Reading, dotted

ENVIRONMENT_PREFIX = "NODETRACK_HPARAMS__"


def environment_layers(environment: Mapping[str, str], declared: Group) -> list[Reading]:
    """`NODETRACK_HPARAMS__torchtitan__dp_shard=2` and its like, in the order of their names.

    Declared keys may be written in any case, because variables often are in capitals.
    """
    names = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX))
    return [_environment_layer(name, environment[name], declared) for name in names]


def override_layers(overrides: Iterable[str], declared: Group) -> list[Reading]:
    """`torchtitan.dp_shard=2` and its like, in the order given: the last one counts."""
    if isinstance(overrides, str):
        raise HparamsError(f"overrides is the text {overrides!r}; pass a list, such as [{overrides!r}].")
    return [_override_layer(override, declared) for override in overrides]


def _environment_layer(name: str, text: str, declared: Group) -> Reading:
    parts = tuple(name.removeprefix(ENVIRONMENT_PREFIX).split("__"))
    if not all(parts):
        raise HparamsError(
            f"${name} names no key; write {ENVIRONMENT_PREFIX}key or {ENVIRONMENT_PREFIX}group__key."
        )
    return _reading(_as_declared(parts, declared), text, Origin("environment", f"${name}"), declared)


def _override_layer(override: str, declared: Group) -> Reading:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise HparamsError(
            f"Override {override!r} is not of the form key=value, such as torchtitan.dp_shard=2."
        )
    return _reading(path, text, Origin("override", f"override {override}"), declared)


def _as_declared(parts: KeyPath, declared: Group) -> KeyPath:
    """The key with declared names spelled as they are declared."""
    node: Field | Group | None = declared
    spelled: list[str] = []
    for part in parts:
        members: Mapping[str, Field | Group] = node.members if isinstance(node, Group) else {}
        known = _spelling(part, members)
        spelled.append(known)
        node = members.get(known)
    return tuple(spelled)


def _spelling(part: str, members: Iterable[str]) -> str:
    """The declared name that a part is, if need be in another case."""
    if part in members:
        return part
    return next((name for name in members if name.lower() == part.lower()), part)


def _reading(path: KeyPath, text: str, origin: Origin, declared: Group) -> Reading:
    value, duplicates = _value(text, declared.find(path), origin)
    problems = tuple(_duplicate(found, origin) for found in duplicates)
    return Reading(Layer(origin, _nested(path, value)), problems)


def _nested(path: KeyPath, value: Json) -> dict[str, Json]:
    name, *rest = path
    return {name: _nested(tuple(rest), value) if rest else value}


def _value(text: str, member: Field | Group | None, origin: Origin) -> tuple[Json, tuple[DuplicateKey, ...]]:
    written = text.strip()
    is_text = isinstance(member, Field) and member.value_type is str
    if is_text and written != "null" and not written.startswith(('"', "{")):
        return text, ()
    try:
        document = parse_json(written)
    except JsonTextError as error:
        if written.startswith(("{", "[")) and not is_text:
            raise HparamsError(f"{origin.source}: the value is not JSON, {error}.") from None
        return text, ()
    return document.value, document.duplicates


def _duplicate(found: DuplicateKey, origin: Origin) -> Problem:
    return Problem(f"{origin.source}: {describe_duplicate(found)}.", origin, dotted(found.path))
