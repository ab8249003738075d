"""`nodetrack hparams show | explain | diff`: what the hyper-parameters are, and why.

Values and tables go to standard output, warnings and errors to standard error. Exit codes: 0 done, 2 the
hyper-parameters cannot be read (or, with `--strict`, are doubtful).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.text import Text

from nodetrack.cli.command import ends_well, note
from nodetrack.cli.plain_help import PlainCommand, PlainGroup
from nodetrack.cli.terminal import console, print_table, table
from nodetrack.errors import UsageError
from nodetrack.hparams.explain import Entry, Explained, explain_defaults, explain_file, explain_hparams
from nodetrack.hparams.layers import Json, KeyPath, Origin, Setting, dotted
from nodetrack.redact import MASK, redact, redact_text
from nodetrack.settings import resolve

app = typer.Typer(
    name="hparams",
    help="Show the hyper-parameters, explain where each value comes from, and compare two sets.",
    cls=PlainGroup,
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="Folder with hparams.json.")]
Local = Annotated[bool, typer.Option("--local", help="Add the layer hparams-local-run.json.")]
Strict = Annotated[bool, typer.Option("--strict", help="Unknown keys and other doubts are errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Changed = Annotated[
    bool, typer.Option("--changed", help="Only values that differ from the built-in defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as torchtitan.dp_shard=2."),
]
KeysAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY]... [KEY=VALUE]...", help="Keys or groups to explain (all when none), and overrides."
    ),
]
SidesAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="A [B] [KEY=VALUE]...", help="Folders or JSON files. With A alone: defaults against A."
    ),
]


Pair = tuple[Entry | None, Entry | None]

_WIDEST_KEY_COLUMN = 40
_UNCHANGED = "Every value is the built-in default."
_THE_SAME = "No value differs."


@app.command(cls=PlainCommand)
@ends_well
def show(
    overrides: Overrides = None,
    folder: Folder = Path(),
    local: Local = False,
    strict: Strict = False,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Print the values that a node started now would have."""
    mask = _Mask()
    explained = _told(explain_hparams(folder, local, overrides or (), strict))
    entries = [entry for entry in explained.entries if entry.is_changed or not changed]
    if as_json:
        _print_json(_only(mask.all(explained.values), {entry.path for entry in entries}))
    else:
        rows = [_show_row(mask.entry(entry, explained.values)) for entry in entries]
        _print_table(("key", "value", "unit", "meaning"), rows, nothing=_UNCHANGED)


@app.command(cls=PlainCommand)
@ends_well
def explain(
    keys_and_overrides: KeysAndOverrides = None,
    folder: Folder = Path(),
    local: Local = False,
    strict: Strict = False,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Print where each value was written and what it overrode."""
    mask = _Mask()
    keys, overrides = _split(keys_and_overrides or ())
    explained = _told(explain_hparams(folder, local, overrides, strict))
    selected = [entry for key in keys for entry in explained.select(key)] if keys else explained.entries
    entries = [
        mask.entry(entry, explained.values) for entry in _once(selected) if entry.is_changed or not changed
    ]
    if as_json:
        _print_json({"hparams": [_explain_json(entry) for entry in entries]})
    else:
        rows = [_explain_row(entry) for entry in entries]
        _print_table(("key", "value", "origin", "overridden"), rows, nothing=_UNCHANGED)


@app.command(cls=PlainCommand)
@ends_well
def diff(
    sides_and_overrides: SidesAndOverrides,
    folder: Folder = Path(),
    local: Local = False,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Print the values in which two folders or JSON files differ.

    A and B are looked up in --dir. A file counts as one layer above the built-in defaults.

    --local and overrides apply to the last side: `diff . . --local` shows what that layer changes.
    """
    mask = _Mask()
    sides, overrides = _split(sides_and_overrides)
    before, after = _sides(sides, folder, local, overrides, strict)
    differences = [mask.pair(pair, before, after) for pair in _pairs(before, after) if _differ(*pair)]
    if as_json:
        _print_json({"differences": [_diff_json(pair) for pair in differences]})
    else:
        last = " ".join(
            [_title(folder, sides[-1]), *(["--local"] if local else []), *map(redact_text, overrides)]
        )
        first = _title(folder, sides[0]) if len(sides) > 1 else "built-in defaults"
        _print_table(("key", first, last), [_diff_row(pair) for pair in differences], nothing=_THE_SAME)


class _Mask:
    """Hides secrets from a screen and whatever keeps what it shows, as `nodetrack show` does."""

    def __init__(self) -> None:
        self._extra_keys = resolve().settings.redact

    def all(self, values: dict[str, Json]) -> dict[str, Json]:
        """The values under their names."""
        return cast("dict[str, Json]", redact(values, self._extra_keys))

    def entry(self, entry: Entry, among: Mapping[str, Json]) -> Entry:
        """An entry without its secrets; the values among which it stands may tell that it is one."""
        value, *overridden = (
            self._setting(entry.path, setting, among)
            for setting in (Setting(entry.value, entry.origin), *entry.overridden)
        )
        default = self._value(entry.path, entry.default, among)
        return replace(
            entry, value=value.value, origin=value.origin, overridden=tuple(overridden), default=default
        )

    def pair(self, pair: Pair, before: Explained, after: Explained) -> Pair:
        """Both sides of a difference."""
        left, right = pair
        return left and self.entry(left, before.values), right and self.entry(right, after.values)

    def _setting(self, path: KeyPath, setting: Setting, among: Mapping[str, Json]) -> Setting:
        """An override is its own origin, so its value is hidden there too."""
        value, origin = self._value(path, setting.value, among), setting.origin
        is_told = origin.kind == "override" and value != setting.value
        source = f"override {dotted(path)}={MASK}" if is_told else redact_text(origin.source)
        return Setting(value, replace(origin, source=source))

    def _value(self, path: KeyPath, value: Json, among: Mapping[str, Json]) -> Json:
        """A value, which the names above it or a `name` beside it may make a secret."""
        for name in path[:-1]:
            inner = among.get(name)
            among = inner if isinstance(inner, dict) else {}
        beside = {"name": among["name"]} if "name" in among and path[-1] != "name" else {}
        nested: dict[str, Json] = {**beside, path[-1]: value}
        for name in reversed(path[:-1]):
            nested = {name: nested}
        masked: Json = self.all(nested)
        for _ in path:
            masked = [*cast("dict[str, Json]", masked).values()][-1]
        return masked


def _told(explained: Explained) -> Explained:
    for message in explained.messages:
        note(message)
    return explained


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those without an equals sign, and the overrides."""
    names = [argument for argument in arguments if "=" not in argument]
    return names, [argument for argument in arguments if "=" in argument]


def _once(entries: Sequence[Entry]) -> list[Entry]:
    return list({entry.path: entry for entry in entries}.values())


def _only(values: dict[str, Json], chosen: set[KeyPath], path: KeyPath = ()) -> dict[str, Json]:
    """The part of an object that lies at the chosen keys."""
    kept: dict[str, Json] = {}
    for name, value in values.items():
        here = (*path, name)
        if here in chosen:
            kept[name] = value
        elif isinstance(value, dict):
            inner = _only(value, chosen, here)
            kept.update({name: inner} if inner else {})
    return kept


def _sides(
    sides: Sequence[str], folder: Path, local: bool, overrides: Sequence[str], strict: bool
) -> tuple[Explained, Explained]:
    if len(sides) not in (1, 2):
        raise UsageError(f"diff compares one or two folders or files, not {len(sides)}; name A and B.")
    _need_all([folder / side for side in sides])
    after = _told(_side(folder / sides[-1], local, overrides, strict))
    if len(sides) == 1:
        return explain_defaults(), after
    return _told(_side(folder / sides[0], False, (), strict)), after


def _need_all(paths: Sequence[Path]) -> None:
    """Name all that are missing at once."""
    missing = [str(path) for path in dict.fromkeys(paths) if not path.exists()]
    if missing:
        verb, what = (
            ("do", "folders or JSON files") if len(missing) > 1 else ("does", "a folder or a JSON file")
        )
        raise UsageError(f"{' and '.join(missing)} {verb} not exist; name {what}.")


def _title(folder: Path, side: str) -> str:
    """The side as it was named; where dots say all of it, the name of the folder."""
    return side if Path(side).name.strip(".") else (folder / side).resolve().name or side


def _side(path: Path, local: bool, overrides: Sequence[str], strict: bool) -> Explained:
    if path.is_dir():
        return explain_hparams(path, local, overrides, strict)
    if local:
        raise UsageError(f"--local needs a folder, and {path} is none; name the file itself.")
    return explain_file(path, overrides, strict)


def _pairs(before: Explained, after: Explained) -> list[Pair]:
    """The entries of both sides by key; None where a side has no such key.

    An object that is empty on one side only is none of them: what the other side has in it says so.
    """
    left, right = ({entry.path: entry for entry in side.entries} for side in (before, after))
    paths = list(dict.fromkeys([*left, *right]))
    objects = {path[:length] for path in paths for length in range(len(path))}
    return [
        (left.get(path), right.get(path))
        for path in paths
        if path not in objects or not _is_empty_object(left.get(path) or right.get(path))
    ]


def _is_empty_object(entry: Entry | None) -> bool:
    return entry is not None and entry.value == {}


def _key(pair: Pair) -> str:
    return next(entry.key for entry in pair if entry)


def _differ(before: Entry | None, after: Entry | None) -> bool:
    """As JSON has it: 1 and true are two values."""
    return _value_json(before) != _value_json(after)


def _value_json(entry: Entry | None) -> str | None:
    return None if entry is None else _json(entry.value)


def _diff_json(pair: Pair) -> dict[str, Json]:
    """A side without the key has neither `a` nor `a_origin`, because null is a value."""
    shown: dict[str, Json] = {"key": _key(pair)}
    for side, entry in zip("ab", pair, strict=True):
        if entry:
            shown |= {side: entry.value, f"{side}_origin": str(entry.origin)}
    return shown


def _diff_row(pair: Pair) -> tuple[str, ...]:
    return (_key(pair), *(f"{_json(entry.value)}\n{entry.origin}" if entry else "(none)" for entry in pair))


def _show_row(entry: Entry) -> tuple[str, ...]:
    return (entry.key, _json(entry.value), entry.unit or "", entry.description or "")


def _explain_row(entry: Entry) -> tuple[str, ...]:
    overridden = "\n".join(f"{_json(setting.value)} ({setting.origin})" for setting in entry.overridden)
    return (entry.key, _json(entry.value), str(entry.origin), overridden)


def _explain_json(entry: Entry) -> dict[str, Json]:
    return {
        "key": entry.key,
        "value": entry.value,
        "origin": _origin_json(entry.origin),
        "overridden": [
            {"value": setting.value, "origin": _origin_json(setting.origin)} for setting in entry.overridden
        ],
        "is_declared": entry.is_declared,
        "is_changed": entry.is_changed,
        "default": entry.default,
        "unit": entry.unit,
        "description": entry.description,
    }


def _origin_json(origin: Origin) -> dict[str, Json]:
    path = None if origin.path is None else str(origin.path)
    return {
        "layer": origin.kind,
        "source": origin.source,
        "path": path,
        "line": origin.line,
        "column": origin.column,
    }


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, nothing: str) -> None:
    """The key stays whole; values, origins and meanings may take several lines. Without rows, a sentence."""
    if not rows:
        typer.echo(nothing)
        return
    listed = table(columns[0], *(f"{column}~" for column in columns[1:]))
    listed.columns[0].min_width = min(_WIDEST_KEY_COLUMN, max((len(row[0]) for row in rows), default=0))
    for row in rows:
        listed.add_row(*(Text(_printable(cell)) for cell in row))
    print_table(console(), listed)


def _printable(text: str) -> str:
    """Half a surrogate pair, which JSON can spell and no terminal can print, as its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
