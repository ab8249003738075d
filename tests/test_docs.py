"""The documentation says what is there: links, promises, settings and commands are held to the code."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer

import nodetrack
from nodetrack.cli.main import app
from nodetrack.journal.folder import TrackingFolder
from nodetrack.journal.views import current_rows

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """The text and the target of each link to another place in the repository."""
    for found in LINK.finditer(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
        if not found["target"].startswith(("http://", "https://", "mailto:")):
            yield found["text"], found["target"]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def names_of_tests(path: Path) -> set[str]:
    """The names of the tests in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {name for name in functions if name.startswith("test_")}


def commands(group: object, prefix: str = "nodetrack") -> Iterator[str]:
    """The full name of every command that the program has."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}"


def generator() -> ModuleType:
    """`docs/generate.py`, which is a program and not part of a package."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ALL_COMMANDS = sorted(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for text, target in links(page):
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        assert file.exists(), f"{page.name}: [{text}] leads to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {file.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_that_names_a_test_leads_to_the_file_that_has_it(page: Path) -> None:
    for text, target in links(page):
        if target.endswith(".py") and text.strip("`").startswith("test_"):
            path = (page.parent / target).resolve()
            name = text.strip("`")
            assert name in {path.name, *names_of_tests(path)}, f"{page.name}: {target} has no {name}"


def test_every_promise_of_the_readme_names_a_test_that_tries_to_break_it() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    promises = [line for line in lines if re.search(r"\bP\d+\b", line)]
    assert promises, "README.md lists no promise"
    for line in promises:
        targets = [found["target"] for found in LINK.finditer(line)]
        assert any(target.startswith("tests/") for target in targets), f"No test is linked: {line}"


def test_every_page_of_the_documentation_is_reached_from_the_readme() -> None:
    named = {(ROOT / target.partition("#")[0]).resolve() for _, target in links(ROOT / "README.md")}
    assert {page for page in (ROOT / "docs").glob("*.md") if page not in named} == set()


def test_the_table_of_settings_is_the_one_that_the_code_gives() -> None:
    """When this fails: `make docs`."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert generator().settings_page(page) == page
    assert "| `heartbeat_seconds` | number | `15.0` |" in page


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    assert command in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    groups = {command.split()[1] for command in ALL_COMMANDS}
    for code in CODE.findall(page.read_text(encoding="utf-8")):
        for word in re.findall(r"(?:^|[`$\n] ?)nodetrack ([a-z]+)\b(?![.:=])", code):
            assert word in groups, f"{page.name}: there is no command `nodetrack {word}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_verb_of_make_that_a_page_shows_exists(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for code in CODE.findall(page.read_text(encoding="utf-8")):
        for word in re.findall(r"(?:^|[`$\n] ?)make ([a-z]+)", code):
            assert word in verbs, f"{page.name}: there is no `make {word}`"


class CrashError(Exception):
    """What ends the first start of the example."""


def test_the_example_of_the_readme_runs_as_it_stands() -> None:
    """With the functions that are the reader's own. It crashes once, and goes on from its checkpoint."""
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    saved: list[dict[str, object]] = []
    calls = itertools.count()

    def train_one_step(learning_rate: float) -> float:
        if next(calls) == 250:
            raise CrashError
        return learning_rate

    own = {
        "load_checkpoint": lambda: saved[-1] if saved else None,
        "train_one_step": train_one_step,
        "evaluate": lambda: 0.5,
        "save_checkpoint": saved.append,
    }
    with pytest.raises(CrashError):
        exec(example, {**own})
    nodetrack.finish(exit_code=1)
    exec(example, {**own})
    assert [state["nodetrack"]["step"] for state in saved] == list(range(100, 1001, 100))
    [run] = TrackingFolder(Path(".nodetrack")).runs("my-network")
    losses = [row.step for row in current_rows(run) if "train/loss" in row.values]
    assert losses == list(range(1000))
    assert run.detail().rows == 1000 + 50 + 10
