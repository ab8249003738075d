"""Write the generated parts of the documentation anew: `make docs`. A test holds them to the code."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any, Final, Literal

from pydantic.fields import FieldInfo

from nodetrack.settings import BackendList, Settings, StringList

DOCS: Final = Path(__file__).parent
_LISTS: Final = (typing.get_args(StringList)[0], typing.get_args(BackendList)[0])
_WORDS: Final = {
    str: "text",
    Path: "path",
    int: "integer",
    float: "number",
    bool: "`true`, `false`",
    types.NoneType: "",
}
_TABLE: Final = re.compile(
    "(<!-- settings: written by `make docs` -->\n).*(<!-- settings: end -->)", re.DOTALL
)


def settings_table() -> str:
    """Every setting: its name, what it can be, its default and what it means."""
    lines = ["| setting | can be | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        lines.append(f"| `{name}` | {_kind(field.annotation)} | {_default(field)} | {field.description} |")
    return "\n".join(lines)


def settings_page(page: str) -> str:
    """The page with its table written anew."""
    return _TABLE.sub(lambda found: f"{found[1]}{settings_table()}\n{found[2]}", page)


def _kind(annotation: Any) -> str:  # what pydantic calls it
    if annotation in _LISTS:
        return "list"
    if typing.get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return "".join(_kind(part) for part in typing.get_args(annotation))
    return _WORDS[annotation]


def _default(field: FieldInfo) -> str:
    if field.default is None or field.default == ():
        return "–"
    return f"`{field.default}`"


def main() -> None:
    page = DOCS / "settings.md"
    page.write_text(settings_page(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
