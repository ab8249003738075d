"""The tensorboard backend's files, read with TensorBoard's own reader; what happens to them on bad days."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.data_compat import migrate_value
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray

from nodetrack.backends._tensorboard_events import framed
from nodetrack.backends.base import Batch
from nodetrack.backends.factory import parse_backends
from nodetrack.backends.tensorboard import TensorboardBackend, TensorboardConfig
from nodetrack.errors import BackendRefusedError
from nodetrack.records import Event, JsonValue, StoredValue, SystemRow
from nodetrack.testing import Attempt
from nodetrack.values import Histogram, Image, Table, Text

ALL = dict.fromkeys(("scalars", "histograms", "images", "tensors", "compressedHistograms", "audio"), 0)


@pytest.fixture
def attempt() -> Attempt:
    return Attempt("r")


def deliver(
    folder: Path, *batches: Batch, memory: Mapping[str, JsonValue] | None = None
) -> TensorboardBackend:
    """What a fresh delivery process does; the backend afterwards."""
    backend = TensorboardBackend(TensorboardConfig(log_dir=folder))
    backend.memory = dict(memory or {})
    backend.open(batches[0].run)
    for batch in batches:
        backend.write(batch)
    backend.close()
    return backend


def event_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*tfevents*"))


def the_file(folder: Path) -> Path:
    [file] = [file for file in event_files(folder) if file.parent.name != "system"]
    return file


def read(folder: Path) -> EventAccumulator:
    """All that TensorBoard's reader shows of the one folder with events."""
    return EventAccumulator(str(the_file(folder).parent), size_guidance=ALL).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def raw_steps(file: Path, tag: str) -> list[int]:
    """The steps of a tag as they stand in the file, whatever a reader makes of them."""
    events = LegacyEventFileLoader(str(file)).Load()
    return [event.step for event in events for value in event.summary.value if value.tag == tag]


def text_at(folder: Path, tag: str) -> str:
    [event] = read(folder).Tensors(tag)
    return make_ndarray(event.tensor_proto).item().decode()


# -- the bytes ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.sampled_from([1, 7, 100]), st.integers(0, 2**32))
def test_records_are_framed_as_tensorboards_own_writer_frames_them(
    records: list[bytes], times: int, seed: int
) -> None:
    """Few or many of one length, whose checksums are taken together."""
    noise = np.random.default_rng(seed)
    records = [*records, *(noise.bytes(33) for _ in range(times)), *records * times]
    official = io.BytesIO()
    writer = RecordWriter(official)
    for record in records:
        writer.write(record)
    assert framed(records) == official.getvalue()


def test_neither_tensorflow_nor_torch_is_imported(tmp_path: Path) -> None:
    """In a process that opens the backend and writes with it."""
    code = f"""
import sys
from pathlib import Path
from nodetrack.testing import Attempt
from nodetrack.backends.tensorboard import TensorboardBackend, TensorboardConfig
attempt = Attempt("r")
backend = TensorboardBackend(TensorboardConfig(log_dir=Path({str(tmp_path)!r})))
backend.open(attempt.info)
backend.write(attempt.batch(*attempt.begin(), *attempt.rows(1), *attempt.every_kind(), attempt.end()))
print([name for name in ("tensorflow", "torch") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


# -- what is shown --------------------------------------------------------------------------------------


def test_a_value_is_there_under_its_version_and_under_latest_at_the_time_of_the_call(
    tmp_path: Path, attempt: Attempt
) -> None:
    row = attempt.row(7, {"loss": 0.5}, {"stage": "train"})
    deliver(tmp_path, attempt.batch(row))
    for tag in ("v0.1.0/train/loss", "latest/train/loss"):
        [event] = read(tmp_path).Scalars(tag)
        assert (event.step, event.value, event.wall_time) == (7, 0.5, pytest.approx(row.time_ns / 1e9))


def test_a_rewind_purges_what_readers_show_and_the_file_keeps_it(tmp_path: Path, attempt: Attempt) -> None:
    back = Event(offset=0, time_ns=attempt.now_ns(), name="rewind", data={"step": 1})
    deliver(tmp_path, attempt.batch(*attempt.begin(), *attempt.rows(0, 1, 2, 3), back, *attempt.rows(2, 3)))
    assert [step for step, _ in scalars(tmp_path, "latest/train/loss")] == [0, 1, 2, 3]
    assert raw_steps(the_file(tmp_path), "latest/train/loss") == [0, 1, 2, 3, 2, 3]


def test_a_rewind_to_the_last_step_that_there_is_costs_nothing(tmp_path: Path, attempt: Attempt) -> None:
    back = Event(offset=0, time_ns=attempt.now_ns(), name="rewind", data={"step": 2**63 - 1})
    deliver(tmp_path, attempt.batch(*attempt.begin(), *attempt.rows(0, 1), back, *attempt.rows(2)))
    assert [step for step, _ in scalars(tmp_path, "latest/train/loss")] == [0, 1, 2]


def test_going_back_to_the_first_step_keeps_config_and_hyper_parameters(
    tmp_path: Path, attempt: Attempt
) -> None:
    back = Event(offset=0, time_ns=attempt.now_ns(), name="rewind", data={"step": -1})
    deliver(tmp_path, attempt.batch(*attempt.begin(), *attempt.rows(0, 1), back, *attempt.rows(0)))
    assert [step for step, _ in scalars(tmp_path, "latest/train/loss")] == [0]
    assert "learning_rate" in text_at(tmp_path, "run/config")
    assert len(read(tmp_path).Tensors(hparams_metadata.SESSION_START_INFO_TAG)) == 1


def test_a_later_attempt_says_where_it_begins_for_who_merges_the_folders(tmp_path: Path) -> None:
    """As with writers that put restarts into one folder: what is beyond its first step is superseded."""
    first, second = Attempt("r", 1), Attempt("r", 2)
    deliver(tmp_path, first.batch(*first.rows(0, 1, 2, 3)), second.batch(*second.rows(2, 3)))
    merged = tmp_path / "merged"
    merged.mkdir()
    for number, file in enumerate(event_files(tmp_path)):
        shutil.copy(file, merged / f"events.out.tfevents.{number}")
    shown = EventAccumulator(str(merged), size_guidance=ALL).Reload().Scalars("v0.1.0/train/count")
    assert [(event.step, event.value) for event in shown] == [(0, 1100), (1, 1101), (2, 2100), (3, 2101)]


@pytest.mark.parametrize("edges", [None, [-1.0, 0.0, 2.5, 3.0, 10.0]])
def test_a_histogram_comes_back_with_its_edges(
    tmp_path: Path, attempt: Attempt, edges: list[float] | None
) -> None:
    """As the Histograms tab sees it: TensorBoard leaves out empty bins at both ends."""
    value = Histogram(counts=[0, 4, 0, 1], edges=edges).stored()
    deliver(tmp_path, attempt.batch(attempt.row(3, {"h": value})))
    [found] = [
        make_ndarray(migrate_value(value).tensor).tolist()
        for event in LegacyEventFileLoader(str(the_file(tmp_path))).Load()
        for value in event.summary.value
        if value.tag == "v0.1.0/h"
    ]
    low, middle, high, end = (edges or [0.0, 1.0, 2.0, 3.0, 4.0])[1:]
    assert found == [[low, middle, 4], [middle, high, 0], [high, end, 1]]


def test_text_tables_and_images_are_shown(tmp_path: Path, attempt: Attempt) -> None:
    from PIL import Image as Pillow

    picture = Image(Pillow.new("RGB", (5, 3), "red")).stored()
    table = Table(["a", "b|c"], [[1, "x\ny"], [None, "|"]]).stored()
    values = {"sample": Text("# Hi\n*ä*").stored(), "table": table, "image": picture, "loss": 1.5}
    backend = deliver(tmp_path, attempt.batch(attempt.row(3, values)))
    assert text_at(tmp_path, "latest/sample") == "# Hi\n*ä*"
    assert text_at(tmp_path, "v0.1.0/table") == "| a | b\\|c |\n| --- | --- |\n| 1 | x y |\n| None | \\| |"
    [image] = read(tmp_path).Images("v0.1.0/image")
    assert (image.width, image.height, image.encoded_image_string) == (5, 3, picture["data"])
    assert scalars(tmp_path, "latest/loss") == [(3, 1.5)]
    assert backend.left_out == {}


def test_what_cannot_be_shown_is_counted_and_the_rest_of_the_row_is_there(
    tmp_path: Path, attempt: Attempt
) -> None:
    broken: StoredValue = {"type": "image", "format": "png", "data": b"\x89PNG", "caption": None}
    beyond: StoredValue = {"type": "hologram"}
    observed = Histogram([1.0, float("nan"), 2.0], bins=2).stored()
    values = {"a": 1e300, "b": -1e39, "c": broken, "d": beyond, "e": 0.5, "f": observed}
    backend = deliver(tmp_path, attempt.batch(attempt.row(3, values)))
    assert scalars(tmp_path, "v0.1.0/e") == [(3, 0.5)]
    assert backend.left_out == {
        "number beyond the range of 32 bits": 2,
        "image that cannot be decoded": 1,
        "hologram": 1,
        "observations of a histogram that are not finite": 1,
    }


def test_the_config_is_text_and_hyper_parameters_with_the_version_among_them(
    tmp_path: Path, attempt: Attempt
) -> None:
    deliver(tmp_path, attempt.batch(*attempt.begin(), *attempt.rows(0), *attempt.every_kind(), attempt.end()))
    reader = read(tmp_path)
    start, end = (
        reader.SummaryMetadata(tag).plugin_data.content
        for tag in (hparams_metadata.SESSION_START_INFO_TAG, hparams_metadata.SESSION_END_INFO_TAG)
    )
    info = hparams_metadata.parse_session_start_info_plugin_data(start)
    assert info.group_name == "r/0001-a001"
    assert info.hparams["version"].string_value == "0.1.0"
    assert info.hparams["learning_rate"].number_value == 0.1
    assert info.hparams["model.layers"].string_value == "[1, 2]"
    assert hparams_metadata.parse_session_end_info_plugin_data(end).end_time_secs > info.start_time_secs
    assert '"process"' in text_at(tmp_path, "run/attempt")
    assert '"best": 0.1' in text_at(tmp_path, "run/summary")
    assert '"text": "is NaN"' in text_at(tmp_path, "run/alert")
    assert '"state": "finished"' in text_at(tmp_path, "run/end")


def test_samples_of_the_machine_have_a_folder_of_their_own(tmp_path: Path, attempt: Attempt) -> None:
    """Their steps are seconds: going back in the training's steps must not purge them."""
    time_ns = attempt.started_ns + 90 * 10**9
    sample = SystemRow(offset=0, names=("system/cpu_ratio",), values=[0.5], time_ns=time_ns)
    deliver(tmp_path, attempt.batch(*attempt.rows(0), sample))
    folder = tmp_path / "contract" / "miner-7-r" / "0001-a001" / "system"
    [event] = EventAccumulator(str(folder), size_guidance=ALL).Reload().Scalars("system/cpu_ratio")
    assert (event.step, event.value) == (90, 0.5)


def test_what_the_delivery_process_adds_for_the_node_is_in_the_nodes_own_file(
    tmp_path: Path, attempt: Attempt
) -> None:
    """The end of a killed node, and no folder of a forked child that never was."""
    sample = SystemRow(offset=0, names=("system/x",), values=[0.5], time_ns=attempt.now_ns())
    begun = attempt.batch(*attempt.begin(), *attempt.rows(0))
    end = msgspec.structs.replace(attempt.batch(sample, attempt.end()), segment=2, companion=True)
    deliver(tmp_path, begun, end)
    own, system = sorted(file.parent.relative_to(tmp_path) for file in event_files(tmp_path))
    assert (str(own), system) == ("contract/miner-7-r/0001-a001", own / "system")
    assert '"state": "finished"' in text_at(tmp_path, "run/end")
    deliver(tmp_path, begun, end)  # the memory was lost: from the beginning, over what is there
    assert len(event_files(tmp_path)) == 2


def test_a_file_that_was_begun_under_the_runs_id_alone_is_gone_on_with(
    tmp_path: Path, attempt: Attempt
) -> None:
    memory = deliver(tmp_path, attempt.batch(*attempt.begin(), *attempt.rows(0, 1))).memory
    (tmp_path / "contract" / "miner-7-r").rename(tmp_path / "contract" / "r")
    following = Attempt("r", 2)
    deliver(tmp_path, attempt.batch(*attempt.rows(2)), following.batch(*following.rows(3)), memory=memory)
    old, new = event_files(tmp_path / "contract" / "r"), event_files(tmp_path / "contract" / "miner-7-r")
    assert [raw_steps(file, "latest/train/loss") for file in (*old, *new)] == [[0, 1, 2], [3]]


# -- bad days -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 1, 11, 40, 10_000])
def test_what_stands_behind_the_last_acknowledged_byte_is_written_again_and_not_twice(
    tmp_path: Path, attempt: Attempt, written: int
) -> None:
    """A crash after `written` bytes of a batch; the next process has the memory from before it."""
    first, second = attempt.batch(*attempt.begin(), *attempt.rows(0, 1)), attempt.batch(*attempt.rows(2, 3))
    memory = deliver(tmp_path, first).memory
    file = the_file(tmp_path)
    acknowledged = file.read_bytes()
    deliver(tmp_path, second, memory=memory)
    whole = file.read_bytes()
    file.write_bytes((whole + whole)[: len(acknowledged) + written])
    deliver(tmp_path, second, memory=memory)
    assert file.read_bytes() == whole


def test_a_running_reader_goes_on_over_a_batch_that_is_written_again(
    tmp_path: Path, attempt: Attempt
) -> None:
    """It has read the batch that was not acknowledged; the same bytes come again in its place, and more."""
    first, second = attempt.batch(*attempt.begin(), *attempt.rows(0, 1)), attempt.batch(*attempt.rows(2, 3))
    memory = deliver(tmp_path, first).memory
    deliver(tmp_path, second, memory=memory)
    reader = read(tmp_path)
    longer = msgspec.structs.replace(second, records=[*second.records, *attempt.rows(4)])
    deliver(tmp_path, longer, memory=memory)
    assert [event.step for event in reader.Reload().Scalars("latest/train/loss")] == [0, 1, 2, 3, 4]


def test_a_run_that_is_sent_from_its_beginning_is_there_once(tmp_path: Path, attempt: Attempt) -> None:
    """The cursor was lost, and the memory with it."""
    batches = [attempt.batch(*attempt.begin(), *attempt.rows(0, 1)), attempt.batch(*attempt.rows(2))]
    deliver(tmp_path, *batches)
    before = the_file(tmp_path).read_bytes()
    deliver(tmp_path, *batches)
    assert the_file(tmp_path).read_bytes() == before


def test_what_the_journal_no_longer_has_is_kept_when_the_cursor_is_lost(
    tmp_path: Path, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """Segment 1 was delivered and removed: its rows are in the old file alone."""
    deliver(tmp_path, attempt.batch(*attempt.rows(0, 1)))
    later = msgspec.structs.replace(attempt.batch(*attempt.rows(2, 3)), segment=2)
    deliver(tmp_path, later)
    steps = [raw_steps(file, "latest/train/loss") for file in event_files(tmp_path)]
    assert sorted(steps) == [[0, 1], [2, 3]]
    assert "is kept in" in caplog.text


@pytest.mark.case("C025")
def test_a_folder_that_is_deleted_is_made_again_with_one_warning(
    tmp_path: Path, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    backend = TensorboardBackend(TensorboardConfig(log_dir=tmp_path / "events"))
    backend.open(attempt.info)
    backend.write(attempt.batch(*attempt.begin(), *attempt.rows(0, 1)))
    shutil.rmtree(tmp_path / "events")
    caplog.set_level(logging.WARNING)
    backend.write(attempt.batch(*attempt.rows(2)))
    backend.write(attempt.batch(*attempt.rows(3)))
    assert [step for step, _ in scalars(tmp_path, "v0.1.0/train/loss")] == [2, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "begun anew" in caplog.text


def test_a_file_that_was_cut_short_is_kept_and_a_new_one_begun(
    tmp_path: Path, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a torn record nobody would read anything."""
    backend = deliver(tmp_path, attempt.batch(*attempt.begin(), *attempt.rows(0, 1)))
    file = the_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    deliver(tmp_path, attempt.batch(*attempt.rows(2)), memory=backend.memory)
    steps = [raw_steps(file, "latest/train/loss") for file in event_files(tmp_path)]
    assert sorted(steps) == [[0], [2]]
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_is_refused_and_named(tmp_path: Path, attempt: Attempt) -> None:
    (tmp_path / "file").touch()
    backend = TensorboardBackend(TensorboardConfig(log_dir=tmp_path / "file" / "events"))
    with pytest.raises(
        BackendRefusedError, match=r"file/events/contract/miner-7-r cannot be made \(Not a directory\)"
    ):
        backend.open(attempt.info)


# -- options --------------------------------------------------------------------------------------------


def test_the_folder_is_the_same_from_wherever_it_is_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nodetrack sync` goes on with `public()`, in another working folder."""
    monkeypatch.chdir(tmp_path)
    named, by_default = (
        parse_backends([{"kind": "tensorboard", **options}])["tensorboard"]
        for options in ({"log_dir": "logs"}, {})
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for config, folder in ((named, "logs"), (by_default, "tensorboard")):
        assert json.loads(json.dumps(config.public()))["log_dir"] == str(tmp_path / folder)
        again = parse_backends([config.public()])["tensorboard"]
        assert again.destination() == config.destination() == str(tmp_path / folder)


def test_names_that_are_no_folder_names_stay_inside(tmp_path: Path, attempt: Attempt) -> None:
    batch = attempt.batch(*attempt.rows(0))
    deliver(tmp_path / "events", msgspec.structs.replace(batch, run=_with(attempt, project="../../up")))
    long = _with(attempt, role="x" * 200, uid="../ü")
    deliver(tmp_path / "events", msgspec.structs.replace(batch, run=long))
    assert event_files(tmp_path) == event_files(tmp_path / "events")
    assert len(event_files(tmp_path)) == 2


def _with(attempt: Attempt, **fields: str) -> object:
    return msgspec.structs.replace(attempt.info, **fields)


def test_a_working_folder_that_was_removed_is_told_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert TensorboardConfig().log_dir == tmp_path / "gone" / "tensorboard"
