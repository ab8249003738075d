"""A node that uses the real `wandb` in a process of its own, and what it leaves on the disk."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.views import ViewRow, all_rows

BEGIN = """
import logging, os, sys
from types import SimpleNamespace
import nodetrack, wandb
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
def start(**arguments):
    config = SimpleNamespace(project="demo", **CONFIG)
    return nodetrack.initialize_wandb("miner-", "3", config, "miners", "training",
                                      **{"version": "0.1.0", **arguments})
CONFIG = {}
"""
_BLOCK = 32 * 1024
_FIRST_BLOCK_STARTS = 7  # ":W&B", a magic number of two bytes, a version of one


@dataclass
class Node:
    """A folder in which a node is started again and again."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"WANDB_MODE": "offline"})

    def run(self, code: str, *, check: bool = True) -> str:
        """Runs the code in a fresh interpreter without a terminal. In its output warnings begin with LOG."""
        known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment = {
            **known,
            "HOME": str(self.folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "WANDB_SILENT": "true",
        }
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + textwrap.dedent(code)],
            cwd=self.folder,
            env={**environment, "WANDB_ERROR_REPORTING": "false", **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def id_file(self) -> Path:
        return self.folder / "wandb" / "wandb_run_id_miner-3.txt"

    def wandb_rows(self) -> list[dict[str, object]]:
        """The rows of all offline runs, in the order of starts, each with W&B's `_step`."""
        return [
            {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            | {"_step": record.history.step.num}
            for record in self.wandb_records()
            if record.WhichOneof("record_type") == "history"
        ]

    def wandb_records(self) -> Iterator:  # of wandb's protobuf records
        from wandb.proto.wandb_internal_pb2 import Record

        for path in sorted(
            self.folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns
        ):
            for payload in _payloads(path.read_bytes()):
                yield Record.FromString(payload)

    @property
    def journal(self) -> RunFolder:
        [run] = TrackingFolder(self.folder / ".nodetrack").runs("demo")
        return run

    def journal_rows(self) -> list[ViewRow]:
        return list(all_rows(self.journal))


def _payloads(content: bytes) -> Iterator[bytes]:
    """The payloads of a `.wandb` file, which is a LevelDB log; wandb 0.31 has no reader of it in Python."""
    assert content[:4] == b":W&B"
    position, parts = _FIRST_BLOCK_STARTS, b""
    while position + 7 <= len(content):
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < 7:
            position += left_in_block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole payload, or the last part of one
            yield parts
            parts = b""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)
