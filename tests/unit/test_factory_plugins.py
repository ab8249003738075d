"""A backend of another package: installed, found by its entry point, parsed, built, and used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.plugin import Jsonlines

from nodetrack.backends import factory
from nodetrack.backends.factory import backend_class, build_backend, known_kinds, parse_backends
from nodetrack.errors import BackendError, SettingsError


def test_an_installed_plug_in_is_known_by_its_kind(jsonlines: Jsonlines) -> None:
    assert "jsonlines" in known_kinds()
    [config] = parse_backends([jsonlines.config]).values()
    backend = build_backend(config)
    assert type(backend) is backend_class("jsonlines")
    assert config.destination() == str(jsonlines.path)


def test_a_child_process_knows_the_plug_in_too(jsonlines: Jsonlines) -> None:
    """It is found by its metadata, so it was installed and not only put on a path."""
    code = "from nodetrack.backends.factory import known_kinds; print('jsonlines' in known_kinds())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "True\n"


def test_a_wrong_option_of_a_plug_in_is_named(jsonlines: Jsonlines) -> None:
    with pytest.raises(SettingsError, match=r"'jsonlines' has no option 'colour'; it has .*path, control"):
        parse_backends([{**jsonlines.config, "colour": "red"}])


def test_a_secret_is_in_no_message_even_under_a_misspelt_name(jsonlines: Jsonlines) -> None:
    for options in ({"tokne": "s3cret"}, {"token": ["s3cret"]}):
        with pytest.raises(SettingsError) as raised:
            parse_backends([{**jsonlines.config, **options}])
        assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:Backend", "of nodetrack-broken .no_such_module:Backend. cannot be loaded"),
        ("json:loads", "is no subclass of nodetrack.backends.base.Backend"),
    ],
)
def test_a_broken_plug_in_is_named_with_its_package_and_others_go_on(
    target: str, words: str, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip leaves of an installed package are these two files."""
    metadata = tmp_path / "site" / "nodetrack_broken-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nodetrack-broken\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[nodetrack.backends]\nbroken = {target}\n")
    monkeypatch.syspath_prepend(str(metadata.parent))
    factory._plug_ins.cache_clear()
    assert {"broken", "jsonlines", "tensorboard"} < set(known_kinds())
    with pytest.raises(BackendError, match=words):
        parse_backends(["broken"])
    assert list(parse_backends([jsonlines.config])) == ["jsonlines"]


def test_a_node_logs_to_the_plug_in_from_a_script(jsonlines: Jsonlines) -> None:
    """The whole way: a name in `init`, the delivery process that finds the package, the file."""
    code = f"""
import nodetrack
run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", backends=[{jsonlines.config!r}], quiet=True)
for step in range(20):
    run.log({{"loss": step / 2}}, step=step)
run.finish()
print(run.health().backends["jsonlines"].delivered)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("20\n", "")
    assert [(row["step"], row["values"]) for row in jsonlines.rows()] == [
        (step, [step / 2]) for step in range(20)
    ]
