"""Layers to one tree of values, each knowing where it came from and what it overrode.

The rules, for one key and the layers that name it:

- the highest layer decides;
- where it holds an object, objects directly below it are merged into it, key by key;
- anything else, lists and null included, replaces what is below whole;
- `{"$delete": true}` takes back what the nearest layer below said, so that the one beneath it counts
  again. A built-in default cannot be taken back; a key without one is gone.

Merging is associative as long as no layer deletes and no key is an object in one layer and something else
in another; `resolve` sees all layers at once, so it never depends on an order of merging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nodetrack.hparams.layers import Json, KeyPath, Layer, Origin, Setting

DELETE_MARKER: Mapping[str, Json] = {"$delete": True}


def is_delete_marker(value: Json) -> bool:
    """Whether a value takes back what the layer below said."""
    return isinstance(value, dict) and value.keys() == DELETE_MARKER.keys() and value["$delete"] is True


@dataclass(frozen=True, slots=True)
class Resolved:
    """What stands at one key. `children` is None unless it is an object; `overridden`: highest first."""

    value: Json
    origin: Origin
    overridden: tuple[Setting, ...]
    children: Mapping[str, Resolved] | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What one layer says about the key in question."""

    layer: Layer
    value: Json

    def setting(self, path: KeyPath) -> Setting:
        return Setting(self.value, self.layer.origin_of(path))

    def member(self, name: str) -> list[_Candidate]:
        """What the layer says about a key of this object: one candidate, or none."""
        if isinstance(self.value, dict) and name in self.value:
            return [_Candidate(self.layer, self.value[name])]
        return []


def resolve(layers: Sequence[Layer]) -> Mapping[str, Resolved]:
    """The tree of all layers, the lowest given first."""
    return _children((), [_Candidate(layer, layer.values) for layer in layers])


def plain(tree: Mapping[str, Resolved]) -> dict[str, Json]:
    """The values of a tree alone."""
    return {name: node.value for name, node in tree.items()}


def _children(path: KeyPath, objects: Sequence[_Candidate]) -> dict[str, Resolved]:
    names = dict.fromkeys(name for each in objects if isinstance(each.value, dict) for name in each.value)
    found = {
        name: _resolve((*path, name), [inner for each in objects for inner in each.member(name)])
        for name in names
    }
    return {name: node for name, node in found.items() if node is not None}


def _resolve(path: KeyPath, candidates: list[_Candidate]) -> Resolved | None:
    standing = _standing(candidates)
    if not standing:
        return None
    objects = _objects_on_top(standing)
    overridden = _overridden(path, candidates, objects or standing[-1:])
    origin = standing[-1].layer.origin_of(path)
    if not objects:
        return Resolved(standing[-1].value, origin, overridden)
    children = _children(path, objects)
    return Resolved(plain(children), origin, overridden, children)


def _standing(candidates: list[_Candidate]) -> list[_Candidate]:
    """The candidates that no marker has taken back."""
    standing: list[_Candidate] = []
    for candidate in candidates:
        if not is_delete_marker(candidate.value):
            standing.append(candidate)
        elif standing and standing[-1].layer.origin.kind != "default":
            standing.pop()
    return standing


def _objects_on_top(standing: list[_Candidate]) -> list[_Candidate]:
    """The objects that merge: those above the highest candidate that is none."""
    start = len(standing)
    while start and isinstance(standing[start - 1].value, dict):
        start -= 1
    return standing[start:]


def _overridden(path: KeyPath, candidates: list[_Candidate], used: list[_Candidate]) -> tuple[Setting, ...]:
    """What was said about the key and does not count, highest first."""
    return tuple(
        candidate.setting(path)
        for candidate in reversed(candidates)
        if not is_delete_marker(candidate.value) and not any(candidate is each for each in used)
    )
