"""One layer against the declared keys: values take their types, unknown keys are named.

Every layer is checked by itself, overridden or not, so a fault is found where it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nodetrack.errors import HparamsError
from nodetrack.hparams.coerce import CannotCoerceError, coerce, is_worth_a_notice, shown
from nodetrack.hparams.fields import Field, Group
from nodetrack.hparams.layers import Json, KeyPath, Layer, Origin, Problem, dotted
from nodetrack.hparams.merge import is_delete_marker

_NO_MARKER = 'is no marker; the only one is {"$delete": true}, and it stands alone'


@dataclass(frozen=True, slots=True)
class CheckedLayer:
    """A layer whose declared values have their types, and what there is to say about it."""

    layer: Layer
    notices: tuple[str, ...]
    problems: tuple[Problem, ...]


def check_layer(layer: Layer, declared: Group) -> CheckedLayer:
    """Type the layer's values and name its unknown keys, which are kept.

    Raises `HparamsError` for a value that cannot take its type, breaks its field's rule, or is no marker.
    """
    check = _Check(layer, declared)
    check.refuse_other_markers(layer.values, ())
    values = check.object(layer.values, declared, ())
    return CheckedLayer(replace(layer, values=values), tuple(check.notices), tuple(check.problems))


class _Check:
    def __init__(self, layer: Layer, declared: Group) -> None:
        self._layer = layer
        self._declared = declared
        self._is_typed_text = layer.origin.kind in ("environment", "override")
        self.notices: list[str] = []
        self.problems: list[Problem] = []

    def refuse_other_markers(self, values: dict[str, Json], path: KeyPath) -> None:
        for name, value in values.items():
            if name.startswith("$"):
                raise self._error((*path, name), _NO_MARKER)
            if isinstance(value, dict) and not is_delete_marker(value):
                self.refuse_other_markers(value, (*path, name))

    def object(self, values: dict[str, Json], group: Group, path: KeyPath) -> dict[str, Json]:
        return {
            name: self._value(value, group.members.get(name), (*path, name)) for name, value in values.items()
        }

    def _value(self, value: Json, member: Field | Group | None, path: KeyPath) -> Json:
        if member is None:
            self._report_unknown(value, path)
            return value
        if value is None or is_delete_marker(value):
            return value
        if isinstance(member, Field):
            return self._field(value, member, path)
        if isinstance(value, dict):
            return self.object(value, member, path)
        raise self._error(path, f"must be an object of {', '.join(member.members)}, not {shown(value)}")

    def _field(self, value: Json, field: Field, path: KeyPath) -> Json:
        typed = self._typed(value, field, path)
        broken = field.broken_rule(typed)
        if broken:
            raise self._error(path, f"is {shown(typed)}, and {broken}")
        return typed

    def _typed(self, value: Json, field: Field, path: KeyPath) -> Json:
        if field.value_type is None:
            return value
        try:
            typed = coerce(value, field.value_type)
        except CannotCoerceError as error:
            raise self._error(path, str(error)) from None
        if is_worth_a_notice(value, typed) and not self._is_typed_text:
            self.notices.append(
                f"{self._origin(path).place}: {dotted(path)} is {shown(value)}, read as {shown(typed)}."
            )
        return typed

    def _report_unknown(self, value: Json, path: KeyPath) -> None:
        for key_path in self._misplaced(value, path):
            origin, nearest = self._origin(key_path), self._declared.nearest(key_path)
            advice = (
                f"did you mean {nearest!r}?"
                if nearest
                else 'a key of the project\'s own belongs under "extra".'
            )
            message = f"{origin.place}: unknown key {dotted(key_path)!r}; {advice}"
            self.problems.append(Problem(message, origin, dotted(key_path)))

    def _misplaced(self, value: Json, path: KeyPath) -> list[KeyPath]:
        """The known names inside an unknown object when they are the likelier slip, else its own name."""
        if self._declared.nearest(path) or not isinstance(value, dict):
            return [path]
        names = {member.path[-1] for member in self._declared.walk()}
        return [leaf for leaf in _leaves(value, path) if leaf[-1] in names] or [path]

    def _origin(self, path: KeyPath) -> Origin:
        return self._layer.origin_of(path)

    def _error(self, path: KeyPath, reason: str) -> HparamsError:
        origin, key = self._origin(path), dotted(path)
        message = f"{origin.place}: {key} {reason}."
        return HparamsError(message, path=origin.path, line=origin.line, column=origin.column, key=key)


def _leaves(values: dict[str, Json], path: KeyPath) -> Iterator[KeyPath]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name)
