"""What `import nodetrack` offers, and what it costs: promise P10."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import nodetrack

PUBLIC_NAMES = {
    "Histogram",
    "Image",
    "MetricsLogger",
    "Run",
    "Table",
    "Text",
    "__version__",
    "config",
    "create_namespace",
    "finish",
    "init",
    "initialize_wandb",
    "load_hparams",
    "log",
    "run",
    "summary",
}
#: Nothing of these may be loaded by `import nodetrack`; P10 names the first five.
HEAVY = ("torch", "wandb", "influxdb_client", "numpy", "pydantic", "transformers", "rich", "typer")
#: Packages that only an extra brings.
OPTIONAL = (
    "torch",
    "wandb",
    "transformers",
    "numpy",
    "pyarrow",
    "influxdb_client",
    "tensorboard",
    "mlflow",
    "aim",
)
#: Programs, and what a backend imports when it is opened, after the SDK was looked for.
LATE = ("nodetrack.__main__", "nodetrack.delivery.__main__", "nodetrack.backends._tensorboard_events")
SOURCE = Path(nodetrack.__file__).parent


def python(program: str, *arguments: str) -> str:
    """What a new interpreter prints that finds nodetrack where this one does."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_of(names: tuple[str, ...], program: str) -> list[str]:
    """Which of the packages `names` are loaded after `program`."""
    report = f"import sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    return python(f"{program}\n{report}").split()


def test_the_public_names_are_exactly_these() -> None:
    assert set(nodetrack.__all__) == PUBLIC_NAMES
    assert len(nodetrack.__all__) == len(PUBLIC_NAMES)
    assert dir(nodetrack) == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES - {"run"}))
def test_every_public_name_can_be_reached(name: str) -> None:
    assert getattr(nodetrack, name) is not None


def test_there_is_no_run_before_init() -> None:
    assert nodetrack.run is None


def test_a_star_import_brings_the_public_names_and_nothing_else() -> None:
    namespace: dict[str, object] = {}
    exec("from nodetrack import *", namespace)
    assert set(namespace) - {"__builtins__"} == PUBLIC_NAMES


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initt'"):
        nodetrack.initt  # noqa: B018 - looking it up is the test


def test_type_checkers_see_the_same_names_as_programs() -> None:
    """The imports that only a type checker follows declare every public name, where it is loaded from."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(guarded.test) == "TYPE_CHECKING"
    places = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert places == nodetrack._PLACES
    declared = {ast.unparse(node.target) for node in guarded.body if isinstance(node, ast.AnnAssign)}
    assert set(places) | declared == PUBLIC_NAMES


def test_importing_nodetrack_loads_no_heavy_package() -> None:
    """P10."""
    assert loaded_of(HEAVY, "import nodetrack") == []


def test_a_training_process_loads_no_package_that_only_an_extra_brings() -> None:
    """`init`, `log` and `finish` do without torch, numpy and every SDK: training pays for none of them."""
    backends = "['tensorboard', 'influxdb']"
    program = (
        f"import nodetrack\nrun = nodetrack.init(project='p', backends={backends}, finish_timeout=0.1)\n"
        "run.log({'loss': 0.5})\nrun.finish()"
    )
    assert loaded_of((*OPTIONAL, "tenacity", "rich", "typer"), program) == []


def test_every_module_outside_the_demo_can_be_imported_where_no_extra_is_installed() -> None:
    """An optional package is imported where it is used, so that a sentence tells of its absence."""
    modules = [
        module.name
        for module in pkgutil.walk_packages([str(SOURCE)], "nodetrack.")
        if not module.name.startswith("nodetrack.demo") and module.name not in LATE
    ]
    assert "nodetrack.tracker" in modules
    program = (
        "import importlib, sys\n"
        f"for name in {OPTIONAL!r}: sys.modules[name] = None\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print('imported')"
    )
    assert python(program, *modules) == "imported"
