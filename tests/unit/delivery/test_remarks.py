"""What is said of backends: one sentence or two, in which nothing is named twice."""

from __future__ import annotations

import pytest

from nodetrack.delivery.remarks import Remarks, refusal
from nodetrack.delivery.spec import Answer


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            Answer("influxdb", "down", "cannot be reached at http://metrics:8086: connection refused"),
            (
                "The backend influxdb cannot be reached at http://metrics:8086: connection refused. "
                "Its rows wait in the journal until it is back."
            ),
        ),
        (
            Answer("influxdb", "down", "HTTP 503"),
            "The backend influxdb cannot be had (HTTP 503): rows wait in the journal until it is back.",
        ),
        (
            Answer("influxdb", "refused", "InfluxDB at http://metrics:8086 refuses to write (401)."),
            "InfluxDB at http://metrics:8086 refuses to write (401). Rows for influxdb wait in the journal.",
        ),
    ],
)
def test_a_backend_that_does_not_take_rows_is_named_once(answer: Answer, sentence: str) -> None:
    said: list[str] = []
    remarks = Remarks(["influxdb"], said.append)
    remarks.take(answer)
    remarks.speak()
    remarks.speak()
    assert said == [sentence]


def test_a_refusal_is_in_the_services_words_and_says_what_to_do() -> None:
    error = refusal({"influxdb": "InfluxDB refuses to write (401)", "wandb": "W&B has no credentials."})
    assert str(error) == (
        "InfluxDB refuses to write (401). W&B has no credentials. "
        "Correct that, or leave influxdb and wandb out of the backends."
    )
    assert error.backend == "influxdb, wandb"


def test_a_backend_that_is_being_opened_after_another_process_let_go_of_it_is_no_news() -> None:
    said: list[str] = []
    remarks = Remarks(["influxdb"], said.append)
    for state in ("waiting", "starting", "ready"):
        remarks.take(Answer("influxdb", state))  # type: ignore[arg-type]  # one of the three
        assert remarks.unsettled == (["influxdb"] if state != "ready" else [])
        remarks.speak()
    assert said == []
