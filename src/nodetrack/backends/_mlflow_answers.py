"""What an MLflow server, or somebody in front of it, has answered, as far as MLflow's exceptions tell."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from nodetrack.backends._server_words import server_words

if TYPE_CHECKING:
    from collections.abc import Mapping

FAULT: Final = 500
_LONGEST_WORDS: Final = 400
#: In MLflow's messages, where its error code does not tell: the status of an answer that was not its own.
_STATUS: Final = re.compile(r"failed with error code (\d{3})|too many (\d{3}) error responses")
_BODY: Final = re.compile(r"failed with error code .*Response body: '(.*)'", re.DOTALL)


def status_of(error: Exception, meant: int) -> int | None:
    """The HTTP status of an answer; `meant` is that of the exception's error code. None if it is lost: of
    JSON that is not MLflow's, such as a gateway's, MLflow's client keeps the body alone.
    """
    if found := _STATUS.search(str(error)):
        return int(found[1] or found[2])
    body = _json(error)
    is_foreign = meant == FAULT and body and body.get("error_code") != getattr(error, "error_code", None)
    return None if is_foreign else meant


def words_of(error: Exception) -> str:
    """What went wrong, in the words of the server or of the connection: one line, our credentials masked."""
    tried = getattr(error.__context__, "args", None) or (None,)
    answer = _BODY.search(str(error))
    said = _json(error).get("message") or (answer and answer[1]) or getattr(tried[0], "reason", None) or error
    secrets = [os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("PASSWORD", "TOKEN")]
    return server_words(str(said).rstrip().rstrip("."), secrets, longest=_LONGEST_WORDS)


def _json(error: Exception) -> Mapping[str, object]:
    body: Mapping[str, object] | None = getattr(error, "json", None)
    return body or {}
