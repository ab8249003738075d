"""`BackendContract`: what delivery relies on, as tests that any backend can be put through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import msgspec
from pydantic import SecretStr

from nodetrack.backends.base import Backend
from nodetrack.backends.factory import backend_class, build_backend, kind_of, parse_backends
from nodetrack.errors import BackendRefusedError, BatchRejectedError, SettingsError
from nodetrack.records import Event
from nodetrack.testing.batches import PNG, Attempt
from nodetrack.testing.subject import ContractSubject
from nodetrack.values import Histogram, Image, Table, Text

if TYPE_CHECKING:
    import pytest

_SECRET: Final = "correct-horse-battery-staple"


class BackendContract(ContractSubject):
    """Subclass it with a name that pytest collects (`TestMine`); see the module."""

    # -- the config and the class -------------------------------------------------------------------

    def test_the_kind_is_a_literal_and_registered(self, tmp_path: Path) -> None:
        """`{"kind": "<its name>"}` finds the class, in another process too."""
        config = self.config(tmp_path)
        kind = type(config).model_fields["kind"]
        assert get_origin(kind.annotation) is Literal, "kind has to be a Literal"
        assert get_args(kind.annotation) == (kind.default,), "kind has to be a Literal of its default alone"
        assert type(build_backend(config)) is backend_class(kind.default)
        assert backend_class(kind.default).config_class is type(config)

    def test_importing_the_backend_does_not_import_its_sdk(self, tmp_path: Path) -> None:
        """A trainer parses the config; the SDK is for the delivery process."""
        backend = build_backend(self.config(tmp_path))
        if backend.sdk is None:
            _skip("it needs no SDK")
        else:
            code = f"import sys, {type(backend).__module__}; print({backend.sdk.module!r} in sys.modules)"
            assert _python(code) == "False", f"{type(backend).__module__} imports {backend.sdk.module}"

    def test_an_unknown_option_is_named_in_one_sentence(self, tmp_path: Path) -> None:
        """A misspelt option fails where it is written, not hours later."""
        written = {**self.config(tmp_path).public(), "no_such_option": 1}
        error = _failure_of(lambda: parse_backends([written]))
        assert isinstance(error, SettingsError), f"an unknown option was answered by {error!r}"
        assert "no_such_option" in str(error)
        assert "\n" not in str(error)

    def test_no_secret_is_in_what_is_kept_on_disk(self, tmp_path: Path) -> None:
        """`destination` and `public` go into files; `public` is enough to make the config again."""
        plain = self.config(tmp_path)
        secret = [
            name for name, field in type(plain).model_fields.items() if "SecretStr" in str(field.annotation)
        ]
        config = plain.model_copy(update={name: SecretStr(_SECRET) for name in secret})
        assert _SECRET not in json.dumps([config.destination(), config.public(), repr(config)])
        assert config.destination() == plain.destination()
        assert parse_backends([config.public()])[kind_of(config)].destination() == plain.destination()

    def test_forward_env_gives_texts_and_only_what_variables_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a launched job needs is known without starting one."""
        cls = type(build_backend(self.config(tmp_path)))
        for name in cls.variables:
            monkeypatch.setenv(name, f"value of {name}")
        forwarded = cls.forward_env()
        assert set(forwarded) == set(cls.variables)
        assert all(isinstance(value, str) for value in forwarded.values())
        for name in cls.variables:
            monkeypatch.delenv(name)
        assert set(cls.forward_env()) <= set(cls.variables)

    # -- opening ------------------------------------------------------------------------------------

    def test_a_service_that_refuses_is_told_from_one_that_is_away(self, tmp_path: Path) -> None:
        """Only BackendRefusedError makes `init` raise."""
        config = self.refused_config(tmp_path)
        if config is None:
            _skip("no refused_config")
        else:
            error = _failure_of_open(build_backend(config))
            assert isinstance(error, BackendRefusedError), f"open raised {error!r}"
            assert str(error)

    def test_a_service_that_is_away_is_no_reason_to_give_up(self, tmp_path: Path) -> None:
        """Whatever `open` raises then, it is tried again."""
        config = self.unreachable_config(tmp_path)
        if config is None:
            _skip("no unreachable_config")
        else:
            error = _failure_of_open(build_backend(config))
            assert error is not None, "open came back as if the service were there"
            assert not isinstance(error, BackendRefusedError | BatchRejectedError), f"open raised {error!r}"

    def test_close_is_harmless_at_any_time(self, tmp_path: Path) -> None:
        """Before `open`, and twice after it."""
        backend = build_backend(self.config(tmp_path))
        backend.close()
        backend.open(Attempt(_run_id()).info)
        assert backend.url is None or isinstance(backend.url, str)
        backend.close()
        backend.close()

    # -- what arrives -------------------------------------------------------------------------------

    def test_every_value_arrives_at_its_step(self, tmp_path: Path) -> None:
        """With its version and attempt, as far as the service has a place for them."""
        attempt = Attempt(_run_id())
        self.deliver(tmp_path, [attempt.batch(*attempt.begin(), *attempt.rows(0, 1, 2, 10))])

    def test_close_and_open_again_goes_on(self, tmp_path: Path) -> None:
        """As after a restart of the delivery process, between two batches."""
        attempt = Attempt(_run_id())
        batches = [attempt.batch(*attempt.begin(), *attempt.rows(0, 1)), attempt.batch(*attempt.rows(2, 3))]
        batches.append(attempt.batch(*attempt.rows(4, 5)))
        self.deliver(tmp_path, batches, reopen=True)

    def test_two_versions_in_two_attempts(self, tmp_path: Path) -> None:
        """Each row is under the version that logged it."""
        run = _run_id()
        old, new = Attempt(run, 1, "0.1.0"), Attempt(run, 2, "main")
        batches = [each.batch(*each.begin(), *each.rows(0, 1, 2)) for each in (old, new)]
        self.deliver(tmp_path, batches, reopen=True)

    def test_a_batch_that_is_sent_again_loses_nothing(self, tmp_path: Path) -> None:
        """A crash between the send and the cursor: it comes again, to a new process, with the old memory."""
        attempt = Attempt(_run_id())
        batches = [attempt.batch(*attempt.begin(), *attempt.rows(0, 1)), attempt.batch(*attempt.rows(2, 3))]
        self.deliver(tmp_path, batches, repeat=True)

    def test_a_batch_that_is_sent_again_may_be_cut_differently(self, tmp_path: Path) -> None:
        """The second time with what was logged since."""
        attempt = Attempt(_run_id())
        whole = attempt.batch(*attempt.begin(), *attempt.rows(0, 1, 2, 3, 4))
        part = msgspec.structs.replace(whole, records=whole.records[:5])
        with self.opened(tmp_path, attempt.info) as backend:
            backend.write(part)
        with self.opened(tmp_path, attempt.info) as backend:
            self.write(backend, whole)
        self.check(tmp_path, [whole], repeated=[part])

    def test_attempts_in_any_order_each_twice(self, tmp_path: Path) -> None:
        """Offline attempts are synced as they are found."""
        run = _run_id()
        attempts = {number: Attempt(run, number, f"0.{number}.0") for number in (3, 1, 4, 2)}
        batches = [
            each.batch(*each.begin(), *each.rows(number, number + 1)) for number, each in attempts.items()
        ]
        self.deliver(tmp_path, batches, newest=attempts[4].info, repeat=True)

    def test_steps_may_go_down_repeat_and_jump(self, tmp_path: Path) -> None:
        """No value is dropped for its step."""
        attempt = Attempt(_run_id())
        steps = attempt.rows(0, 1, 2, 1, 1, 5, 10**15, 3, -4, 10**15 + 1)
        self.deliver(tmp_path, [attempt.batch(*attempt.begin(), *steps), attempt.batch(*attempt.rows(2, 7))])

    def test_several_calls_at_one_step(self, tmp_path: Path) -> None:
        """Some in the same batch, some in the next."""
        attempt = Attempt(_run_id())
        one = [attempt.row(5, {"a": 1.0}), attempt.row(5, {"b": 2.0, "c": 3}), attempt.row(6, {"a": 4.0})]
        batches = [attempt.batch(*attempt.begin(), *one), attempt.batch(attempt.row(6, {"b": 5.0}))]
        self.deliver(tmp_path, batches)

    def test_going_back(self, tmp_path: Path) -> None:
        """A `rewind` event, then the same steps again."""
        attempt = Attempt(_run_id())
        back = Event(offset=0, time_ns=attempt.now_ns(), name="rewind", data={"step": 1})
        batches = [attempt.batch(*attempt.begin(), *attempt.rows(0, 1, 2, 3)), attempt.batch(back)]
        self.deliver(tmp_path, [*batches, attempt.batch(*attempt.rows(2, 3, 4))])

    def test_numbers_that_are_not_finite(self, tmp_path: Path) -> None:
        """They are what one looks for when a training breaks: kept, or at least counted."""
        attempt = Attempt(_run_id())
        values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1.5}
        batches = [attempt.batch(*attempt.begin(), attempt.row(0, {"a": 0.5}), attempt.row(1, values))]
        left_out = self.deliver(tmp_path, batches)
        assert self.keeps_nonfinite or not self.readable or left_out >= 3, "dropped without being counted"

    def test_numbers_at_the_limits(self, tmp_path: Path) -> None:
        """Whole and broken numbers of one metric, large, small and negative."""
        attempt = Attempt(_run_id())
        numbers = (0, 1, -1, 2.5, 1e-30, -1e30, 123456789, 2**62, 3)
        rows = [attempt.row(step, {"x": number}) for step, number in enumerate(numbers)]
        self.deliver(tmp_path, [attempt.batch(*attempt.begin(), *rows[:4]), attempt.batch(*rows[4:])])

    def test_names_survive(self, tmp_path: Path) -> None:
        """Any text is a name, and no two of them are mixed up."""
        attempt = Attempt(_run_id())
        names = {name: index + 0.5 for index, name in enumerate(self.strange_names)}
        self.deliver(
            tmp_path, [attempt.batch(*attempt.begin(), attempt.row(1, names), attempt.row(2, names))]
        )

    def test_contexts_are_told_apart(self, tmp_path: Path) -> None:
        """The same metric at the same step, in training and in validation."""
        attempt = Attempt(_run_id())
        contexts: list[dict[str, str]] = [
            {},
            {"stage": "train"},
            {"stage": "val"},
            {"stage": "val", "split": "x"},
        ]
        rows = [attempt.row(1, {"loss": float(number)}, context) for number, context in enumerate(contexts)]
        self.deliver(tmp_path, [attempt.batch(*attempt.begin(), *rows)])

    def test_typed_values_are_kept_or_counted(self, tmp_path: Path) -> None:
        """Never lost without a word."""
        attempt = Attempt(_run_id())
        typed = {
            "with edges": Histogram(counts=[1, 2, 3], edges=[0, 0.5, 1, 2]).stored(),
            "without edges": Histogram(counts=[1, 2]).stored(),
            "text": Text("a | b\n<script>ä</script>").stored(),
            "image": Image(PNG, caption="red").stored(),
            "table": Table(["a", "b|c"], [[1, "x|y"], [None, True]]).stored(),
        }
        rows = [attempt.row(1, {**typed, "loss": 0.5}), attempt.row(2, {"loss": 0.25})]
        left_out = self.deliver(tmp_path, [attempt.batch(*attempt.begin(), *rows)])
        not_kept = sum(value["type"] not in self.kept_types for value in typed.values())
        assert left_out >= not_kept or not self.readable, (
            f"{not_kept} values are not kept, {left_out} counted"
        )

    def test_every_kind_of_record_is_taken(self, tmp_path: Path) -> None:
        """Twice, and with rows around it: a backend passes over what it has no place for."""
        attempt = Attempt(_run_id())
        first = attempt.batch(*attempt.begin(), *attempt.rows(0, 1), *attempt.every_kind())
        second = attempt.batch(*attempt.every_kind(), *attempt.rows(2), attempt.end())
        self.deliver(tmp_path, [first, second])

    def test_a_batch_without_rows(self, tmp_path: Path) -> None:
        """Nothing but an end, and nothing at all."""
        attempt = Attempt(_run_id())
        batches = [
            attempt.batch(*attempt.begin(), *attempt.rows(0)),
            attempt.batch(),
            attempt.batch(attempt.end()),
        ]
        self.deliver(tmp_path, batches, reopen=True)

    def test_two_processes_of_one_attempt(self, tmp_path: Path) -> None:
        """A forked child logs the same metrics at the same steps and times; both are kept."""
        run = _run_id()
        parent, child = Attempt(run), Attempt(run, writer=2)
        child.started_ns = parent.started_ns
        rows = [msgspec.structs.replace(row, values=[-1.5, -2]) for row in parent.rows(0, 1, 2)]
        batches = [parent.batch(*parent.begin(), *parent.rows(0, 1, 2)), child.batch(*rows)]
        batches.append(parent.batch(*parent.rows(3)))
        self.deliver(tmp_path, batches, repeat=True)

    def test_a_large_batch(self, tmp_path: Path) -> None:
        """As it comes when a service was away for long."""
        attempt = Attempt(_run_id())
        rows = [
            attempt.row(step, {"a": step + 0.5, "b": step, "c/d": -float(step)})
            for step in range(self.large_batch_rows)
        ]
        self.deliver(tmp_path, [attempt.batch(*attempt.begin(), *rows)])

    def test_a_failure_loses_and_repeats_nothing(self, tmp_path: Path) -> None:
        """A batch that could not be written is written later, once the backend has been opened anew."""
        away = self.unavailable(tmp_path)
        if away is None:
            _skip("no unavailable")
            return
        attempt = Attempt(_run_id())
        batches = [attempt.batch(*attempt.begin(), *attempt.rows(0, 1)), attempt.batch(*attempt.rows(2, 3))]
        with self.opened(tmp_path, attempt.info) as backend:
            self.write(backend, batches[0])
            memory = json.dumps(backend.memory)
            with away:
                error = _failure_of(lambda: backend.write(batches[1]))
            assert error is not None, "write came back as if the service had taken the batch"
            assert not isinstance(error, BatchRejectedError), f"a failure that may pass: {error!r}"
            backend.memory = json.loads(memory)
            backend.close()
            backend.open(attempt.info)
            self.write(backend, batches[1])
        self.check(tmp_path, batches, repeated=batches[1:])


def _run_id() -> str:
    return f"contract{uuid.uuid4().hex[:8]}"


def _failure_of(call: Callable[[], object]) -> Exception | None:
    """What a call of a backend raised."""
    try:
        call()
    except Exception as error:  # whatever an SDK raises is what the caller wants to know
        return error
    return None


def _failure_of_open(backend: Backend[Any]) -> Exception | None:
    error = _failure_of(lambda: backend.open(Attempt(_run_id()).info))
    backend.close()
    return error


def _python(code: str) -> str:
    """What the code prints in a fresh interpreter that finds the same packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _skip(reason: str) -> None:
    import pytest

    pytest.skip(reason)
