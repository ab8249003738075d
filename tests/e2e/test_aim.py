"""Runs as Aim keeps them, in a real repository, read with Aim's own reader in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import nodetrack
from nodetrack.backends.aim import AimBackend, AimConfig
from nodetrack.delivery.engine import Delivery
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.records import AttemptFinished, ConfigSet, RunEdited, SummarySet, SystemRow
from nodetrack.testing import Attempt
from nodetrack.values import Histogram, Text

pytestmark = pytest.mark.filterwarnings("ignore")  # Aim's own, of SQLAlchemy and others

READ = """
import json, sys
from aim.sdk.repo import Repo
from aim.sdk.sequence_collection import SingleRunSequenceCollection as Series
from aim.sdk.sequences.distribution_sequence import Distributions
from aim.sdk.sequences.text_sequence import Texts

runs = []
for run in Repo.from_path(sys.argv[1]).iter_runs():
    metrics = [[m.name, dict(m.context.to_dict()), *m.data.items_list()] for m in run.metrics()]
    texts = [[m.name, [t.data for t in m.data.items_list()[1][0]]] for m in Series(run, seq_cls=Texts)]
    histograms = [
        [m.name, [[d.weights.tolist(), d.ranges.tolist()] for d in m.data.items_list()[1][0]]]
        for m in Series(run, seq_cls=Distributions)
    ]
    runs.append({
        "hash": run.hash, "name": run.name, "notes": run.description, "experiment": run.experiment,
        "tags": sorted(run.tags), "params": run.get(..., {}), "metrics": metrics, "texts": texts,
        "histograms": histograms,
    })
print(json.dumps(runs))
"""


def read(repo: Path) -> list[dict[str, Any]]:
    """All runs of the repository, as another process sees them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, str(repo)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return runs


def points(run: dict[str, Any], name: str) -> dict[int, float]:
    """Values by step of the only series of that name."""
    [(steps, values)] = [(steps, columns[0]) for found, _, steps, columns in run["metrics"] if found == name]
    return dict(zip(steps, values, strict=True))


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "aim"


@pytest.fixture
def attempt() -> Attempt:
    return Attempt("run1")


def opened(repo: Path, attempt: Attempt, memory: dict[str, Any] | None = None) -> AimBackend:
    backend = AimBackend(AimConfig(repo=str(repo)))
    backend.memory = json.loads(json.dumps(memory or {}))
    backend.open(attempt.info)
    return backend


def test_a_run_is_readable_as_soon_as_the_backend_is_closed(repo: Path, attempt: Attempt) -> None:
    """With the times at which the rows were logged; Aim itself would show nothing before its page has run."""
    backend = opened(repo, attempt)
    row = attempt.row(7, {"loss": 0.25}, {"stage": "train", "version": "mine"})
    backend.write(attempt.batch(*attempt.begin(), row))
    backend.close()
    [run] = read(repo)
    [[name, context, steps, [values, _, times]]] = run["metrics"]
    assert (name, steps, values) == ("loss", [7], [0.25])
    assert context == {"stage": "train", "_version": "mine", "version": "0.1.0"}
    assert times == [pytest.approx(row.time_ns / 1e9)]
    assert (run["name"], run["experiment"], run["tags"]) == (
        "miner 7",
        "contract",
        ["contract", "nodetrack:run1"],
    )
    assert run["params"]["config"] == {"learning_rate": 0.1, "model": {"layers": [1, 2], "name": None}}


def test_the_run_is_found_again_with_and_without_a_cursor(repo: Path, attempt: Attempt) -> None:
    """By its hash, or by its tag; another run is another one."""
    memory: dict[str, Any] = {}
    for step, known in ((0, {}), (1, {}), (2, memory)):
        backend = opened(repo, attempt, known)
        backend.write(attempt.batch(*attempt.rows(step)))
        backend.close()
        memory.update(backend.memory)
    other = Attempt("run10")
    opened(repo, other).close()
    runs = {run["params"]["nodetrack"]["run"]: run for run in read(repo)}
    assert runs.keys() == {"run1", "run10"}
    assert points(runs["run1"], "train/loss").keys() == {0, 1, 2}


def test_a_deleted_run_is_continued_in_a_new_one(repo: Path, attempt: Attempt) -> None:
    """Which names the one that is gone."""
    backend = opened(repo, attempt)
    backend.close()
    old = backend.memory["aim_run"]
    code = f"from aim.sdk.repo import Repo; assert Repo.from_path({str(repo)!r}).delete_run({old!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    backend = opened(repo, attempt, backend.memory)
    backend.write(attempt.batch(*attempt.rows(1)))
    backend.close()
    [run] = read(repo)
    assert run["params"]["nodetrack"]["continues"] == old
    assert run["hash"] == backend.memory["aim_run"] != old


def test_what_is_sent_again_is_there_once_and_a_step_again_replaces(repo: Path, attempt: Attempt) -> None:
    """Aim has one value for each name, context and step."""
    backend = opened(repo, attempt)
    batch = attempt.batch(*attempt.begin(), *attempt.rows(0, 1))
    backend.write(batch)
    backend.write(batch)
    backend.write(attempt.batch(attempt.row(1, {"train/loss": -1.0})))
    backend.close()
    [run] = read(repo)
    assert points(run, "train/loss") == {0: 1100.5, 1: -1.0}


@pytest.mark.case("C019")
@pytest.mark.case("C058")
def test_a_killed_writer_loses_nothing_and_blocks_nobody(repo: Path, attempt: Attempt) -> None:
    """The lock ends with its process, and what was written is there for the next one."""
    code = f"""
    import os, signal
    from nodetrack.backends.aim import AimBackend, AimConfig
    from nodetrack.testing import Attempt
    attempt = Attempt("run1")
    backend = AimBackend(AimConfig(repo={str(repo)!r}))
    backend.open(attempt.info)
    backend.write(attempt.batch(*attempt.begin(), *attempt.rows(*range(50))))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], timeout=60, check=False
    )
    assert killed.returncode == -9
    backend = opened(repo, attempt)
    backend.write(attempt.batch(*attempt.rows(50)))
    backend.close()
    [run] = read(repo)
    assert points(run, "train/loss").keys() == set(range(51))


def test_delivery_brings_a_journal_to_aim(repo: Path) -> None:
    """Two attempts of two versions, sent twice because the cursor was deleted: each row is there once."""
    run = None
    for number in range(2):
        run = nodetrack.init(project="p", id=run and run.id, mode="offline", version=f"0.{number}.0")
        for step in range(40):
            run.log({"loss": step + number / 2}, step=step)
        run.finish()
    assert run is not None
    for _ in range(2):
        backend = AimBackend(AimConfig(repo=str(repo), batch_rows=25))
        delivery = Delivery(run.folder, "p", {"aim": backend}, follow=False)
        delivery.start()
        assert delivery.join(100)
        assert delivery.statuses()["aim"].delivered == 80
        (run.folder / "cursors" / "aim.json").unlink()
    [shown] = read(repo)
    losses = {context["version"]: columns[0] for _, context, _, columns in shown["metrics"]}
    assert losses == {f"0.{number}.0": [step + number / 2 for step in range(40)] for number in range(2)}
    assert shown["params"]["nodetrack"]["state"] == "finished"


def test_two_processes_cannot_write_one_run(repo: Path, attempt: Attempt) -> None:
    """The second is told at once, by Aim's database, and goes on when the first has ended."""
    first = opened(repo, attempt)
    code = f"""
    import sys
    from nodetrack.backends.aim import AimBackend, AimConfig
    from nodetrack.errors import BackendUnavailableError
    from nodetrack.testing import Attempt
    try:
        AimBackend(AimConfig(repo={str(repo)!r})).open(Attempt("run1").info)
    except BackendUnavailableError as error:
        sys.exit(str(error))
    """
    second = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    refused = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
    assert "cannot be written (RocksIOError" in refused.stderr
    first.close()
    assert subprocess.run(second, timeout=60, check=False).returncode == 0


def test_a_folder_that_cannot_be_written_is_no_reason_to_give_up(repo: Path, attempt: Attempt) -> None:
    """It may be a mount that is not there yet."""
    repo.parent.mkdir()
    repo.write_text("in the way")
    with pytest.raises(BackendUnavailableError, match="cannot be written"):
        opened(repo, attempt)
    repo.unlink()
    opened(repo, attempt).close()


@pytest.mark.case("C058")
def test_a_remote_server_is_refused_in_one_sentence(attempt: Attempt) -> None:
    """Rather than lost without a word: see docs/backends.md."""
    with pytest.raises(BackendRefusedError, match="writes to folders, not to aim://host:53800"):
        AimBackend(AimConfig(repo="aim://me:secret@host:53800")).open(attempt.info)


def test_histograms_and_texts_are_kept_and_the_rest_is_counted(repo: Path, attempt: Attempt) -> None:
    """Aim's bins are equally wide: counts of others are spread over them, and their sum is kept."""
    backend = opened(repo, attempt)
    values = {
        "even": Histogram(counts=[1, 2, 3], edges=[0, 1, 2, 3]).stored(),
        "uneven": Histogram(counts=[4, 4], edges=[0, 1, 4]).stored(),
        "many": Histogram(counts=[1] * 1024).stored(),
        "text": Text("ä | b").stored(),
        "table": {"type": "table", "columns": [], "data": []},
    }
    backend.write(attempt.batch(attempt.row(1, values)))
    backend.close()
    [run] = read(repo)
    histograms = {name: found for name, [found] in run["histograms"]}
    assert histograms["even"] == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    [uneven, edges] = histograms["uneven"]
    assert uneven == pytest.approx([4 + 4 / 3, 8 / 3])
    assert edges == [0, 2, 4]
    assert histograms["many"][0] == [2.0] * 512
    assert run["texts"] == [["text", ["ä | b"]]]
    assert backend.left_out == {"Aim has no place for a table": 1}


def test_a_name_that_changes_its_kind_is_refused_for_good(repo: Path, attempt: Attempt) -> None:
    """Delivery puts that row into quarantine and goes on."""
    backend = opened(repo, attempt)
    backend.write(attempt.batch(attempt.row(1, {"x": 1.0})))
    with pytest.raises(BatchRejectedError, match="'x'"):
        backend.write(attempt.batch(attempt.row(2, {"x": Text("t").stored()})))
    backend.write(attempt.batch(attempt.row(3, {"x": 3.0})))
    backend.close()
    assert points(read(repo)[0], "x") == {1: 1.0, 3: 3.0}


def test_labels_are_those_of_the_newest_attempt(repo: Path) -> None:
    """Attempts are synced in any order, each twice; tags that people give in Aim stay."""
    attempts = {number: Attempt("run1", number, f"0.{number}.0") for number in (3, 1, 4, 2)}
    memory: dict[str, Any] = {}
    for number, attempt in attempts.items():
        begin = attempt.begin()
        fields = {"name": f"name {number}", "notes": f"note {number}", "tags": [f"t{number}"], "group": "g"}
        edited = RunEdited(offset=0, time_ns=attempt.now_ns(), fields=fields)
        best = SummarySet(offset=0, time_ns=attempt.now_ns(), summary={"best": number, "gone": 1})
        gone = SummarySet(offset=0, time_ns=attempt.now_ns(), summary={"gone": None})
        config = ConfigSet(offset=0, time_ns=attempt.now_ns(), config={"n": number, "": 2**64 - 1})
        system = SystemRow(offset=0, names=("system/cpu",), values=[0.5], time_ns=number * 10**9)
        end = AttemptFinished(
            offset=0, time_ns=attempt.now_ns(), state=f"state {number}", exit_code=0, reason=""
        )
        batch = attempt.batch(*begin, edited, best, gone, config, system, end)
        for _ in range(2):
            backend = opened(repo, attempts[4], memory)
            backend.write(batch)
            if number == 3 and "by hand" not in backend._run.tags:
                backend._run.add_tag("by hand")
            backend.close()
            memory = backend.memory
    [run] = read(repo)
    assert (run["name"], run["notes"]) == ("name 4", "note 4")
    assert run["tags"] == ["by hand", "nodetrack:run1", "t4"]
    assert run["params"]["config"] == {"n": 4, " ": str(2**64 - 1)}
    assert run["params"]["summary"] == {"best": 4}
    facts = run["params"]["nodetrack"]
    assert (facts["state"], facts["version"], facts["attempt"]) == ("state 4", "0.4.0", "0004-a004")
    assert points(run, "system/cpu") == dict.fromkeys((1, 2, 3, 4), 0.5)


def test_aim_watches_nothing_by_itself(
    repo: Path, attempt: Attempt, capfd: pytest.CaptureFixture[str]
) -> None:
    """No terminal output, no machine metrics, no environment, command line or packages."""
    backend = opened(repo, attempt)
    print("a secret of the trainer")
    backend.write(attempt.batch(*attempt.begin(), *attempt.rows(0)))
    backend.close()
    [run] = read(repo)
    assert {name for name, *_ in run["metrics"]} == {"train/loss", "train/count"}
    assert run["texts"] == []
    assert set(run["params"]) == {"config", "nodetrack"}
    assert capfd.readouterr().out == "a secret of the trainer\n"
