"""What a server says, made fit to be shown: it may repeat what we sent, and that includes our token."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from nodetrack.redact import MASK, redact_text


def server_words(text: str, secrets: Iterable[str | None], *, longest: int) -> str:
    """The text on one line, without these secrets and without any that its shape gives away."""
    # Cut last: of a secret that is cut in two, one half would be left.
    words = " ".join(redact_text(without_secrets(text, secrets)).split())
    return words if len(words) <= longest else f"{words[:longest]}…"


def without_secrets(text: str, secrets: Iterable[str | None]) -> str:
    """The text with each of these secrets masked, also as a URL would hold it."""
    for secret in secrets:
        for written in (secret, quote(secret, safe="")) if secret else ():
            text = text.replace(written, MASK)
    return text
