"""Secrets, masked before anything is written or sent (promise P9).

Two things give a secret away. **Its key**: `api_key`, `hfToken`, `DB-PASSWORD`; keys are read word by word,
so `num_tokens`, `author` and `passwordless` are no hits. **Its shape**, in any string: user and password
in a URL, secret query parameters and `name=value` pairs, authorization headers, private key blocks, and
the tokens of well-known services.

What is masked reads `***`. Nothing given is changed; what is returned is a copy. True, False, None and ""
are never secrets.
"""

from __future__ import annotations

import base64
import binascii
import enum
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple, overload

MASK = "***"
_CYCLE = "<cycle>"
_TOO_DEEP = "<too deep>"
_DEEPEST = 100


# ---------------------------------------------------------------------------------------------------
# Keys


class Secrecy(enum.IntEnum):
    """What a key says about the value under it."""

    NONE = 0
    STRINGS = 1  # `tokens`: numbers are counts or ids, strings may be the real thing
    ALL = 2


_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def _vocabulary(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _vocabulary(
    "auth authorization cookie cookies credential credentials mnemonic mnemonics passphrase passphrases "
    "passwd password passwords privkey pwd secret secrets"
)
# For names written without a break: `dbpassword`, `wandbapikey`.
_SECRET_ENDINGS = tuple(
    _vocabulary(
        "accesskey accesstoken apikey apikeys authkey authtoken clientsecret passphrase passwd password "
        "privatekey refreshtoken secretkey sessionkey sessiontoken"
    )
)
_SECRET_PHRASES = _vocabulary(
    "access-key account-key api-key auth-key deploy-key encryption-key master-key private-key "
    "recovery-phrase secret-key seed-phrase service-key session-key signing-key ssh-key webhook-url"
)

# A word beside `token` that makes it a piece of text, which is what a model trainer mostly means by it…
_TEXT_TOKEN_WORDS = _vocabulary(
    "add audio avg batch begin bos budget class cls count counts dim dir dropout embed embedding embeddings "
    "end eos eot file files first folder forced ids image img index indices kept last len length level limit "
    "logits loss losses mask max mean merging min mixer n new next num number out pad padding path per "
    "position positions prefix prob probs rate ratio sep size skip special start step stop strip sum text "
    "throughput total trained type types unk unused video vocab weight weights"
)
# … and one that makes it a credential again, whatever else the name says.
_CREDENTIAL_TOKEN_WORDS = _vocabulary(
    "access api auth bearer bot github gitlab hf hub huggingface jwt login oauth personal refresh secret "
    "session slack wandb"
)
_WALLET_WORDS = _vocabulary("wallet hotkey coldkey mnemonic")
_SIGNED_URL_WORDS = _vocabulary("key sig signature")


def _words(key: str) -> tuple[str, ...]:
    """`hfToken`, `hf_token`, `HF-TOKEN` and `hf.token2` are all (`hf`, `token`)."""
    return tuple(word.lower() for word in _WORDS.findall(key))


@functools.lru_cache(maxsize=4096)
def secrecy_of(key: str, *, in_wallet: bool = False) -> Secrecy:
    """What the words of a key say about its value.

    `seed` is a random seed, except in the name of a wallet or under one (`in_wallet`): there it is the key.
    """
    words = _words(key)
    if any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words):
        return Secrecy.ALL
    if not _SECRET_PHRASES.isdisjoint(_singular_pairs(words)):
        return Secrecy.ALL
    if "seed" in words and (in_wallet or not _WALLET_WORDS.isdisjoint(words)):
        return Secrecy.ALL
    return _secrecy_of_token(words)


def _singular_pairs(words: tuple[str, ...]) -> list[str]:
    singular = [word.removesuffix("s") if word in {"keys", "phrases", "urls"} else word for word in words]
    return [f"{first}-{second}" for first, second in pairwise(singular)]


def _secrecy_of_token(words: tuple[str, ...]) -> Secrecy:
    if "token" not in words and "tokens" not in words:
        return Secrecy.NONE
    if not _CREDENTIAL_TOKEN_WORDS.isdisjoint(words):
        return Secrecy.ALL
    if not _TEXT_TOKEN_WORDS.isdisjoint(words) or ("token", "id") in pairwise(words):
        return Secrecy.NONE  # `token_id` is a number in a vocabulary, `id_token` lets someone in
    return Secrecy.ALL if "token" in words else Secrecy.STRINGS


# ---------------------------------------------------------------------------------------------------
# Text

# What may repeat has a bound wherever a pattern could start at every place of a long text.
_USER_INFO = re.compile(
    r"""([a-z][a-z0-9+.-]{0,30}://)       # any scheme
    (?: [^\s/?\#"'<>]+                    # what a URL allows before its @
      | [^\s/?\#@:]* : (?!\d{1,5}[/?\#])  # or a password with / ? or # in it, which libraries accept
        [^\s@"'<>]{1,256} )@""",
    re.VERBOSE | re.IGNORECASE,
)
_SCP_USER = re.compile(r"^[^\s/@:]+@(?=[^\s/@:]+:)")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_HEADER = re.compile(
    r"\b((?:proxy-)?authorization|(?:set-)?cookie|x-[\w-]{1,60})(\s*:\s*)([^\r\n\"']+)", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer\s+)(?=[\w.~+/-]*\d|[\w.~+/-]{20})[\w.~+/-]{8,}=*", re.IGNORECASE)
_BASIC = re.compile(r"\b(basic\s+)([A-Za-z0-9+/]{4,}={0,2})", re.IGNORECASE)
_QUOTED_PAIR = re.compile(
    r"""(?P<key_quote>["'])(?P<key>[\w.\- ]{1,80})(?P=key_quote)(?P<colon>\s*:\s*)"""
    r"""(?P<quote>["'])(?P<value>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)"""
)
_ASSIGNMENT = re.compile(
    r"""(?<![\w.])(?P<key>[A-Za-z_][\w.-]{0,80})=(?P<value>"[^"]*"|'[^']*'|[^\s&;,"'<>]+)"""
)
_OPTION = re.compile(r"(?<!\S)(?P<key>--?[A-Za-z][\w-]{0,80})(?P<blank>[ \t]+)(?P<value>[^\s-]\S*)")
_TOKEN_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{20,}                              # Hugging Face
      | gh[opusr]_[A-Za-z0-9]{20,} | github_pat_\w{20,}  # GitHub
      | glpat-[\w-]{16,}                                 # GitLab
      | sk-(?: [A-Za-z0-9]{20,} | (?=[\w-]{0,80}\d)[\w-]{20,} )  # OpenAI, Anthropic
      | [sr]k_(?:live|test)_[A-Za-z0-9]{16,}             # Stripe
      | wandb_v\d_\w{20,}                                # Weights & Biases
      | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])         # AWS
      | AIza[\w-]{35}                                    # Google
      | xox[abeoprs]-[\w-]{10,}                          # Slack
      | npm_[A-Za-z0-9]{36} | pypi-[\w-]{20,}            # registries
      | eyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*              # a JSON web token
    )""",
    re.VERBOSE,
)
_WEBHOOK = re.compile(r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[^\s\"'<>]+")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{32,}")
_OPTION_NAME = re.compile(r"[-+~]*[A-Za-z_][\w./-]*")
_NUMBER = re.compile(r"[+-]?[\d_.,]+(?:[eE][+-]?\d+)?")
_HARMLESS = frozenset(["", "true", "false", "none", "null", "yes", "no", "on", "off", MASK])


def redact_text(text: str) -> str:
    """The text with every secret that its shape gives away masked; the rest stays as it is."""
    folded = text.casefold()
    may_name = _has_any(_SIGNS_OF_A_NAME, folded)
    for shape in _SHAPES:
        if (may_name or not shape.by_name) and _has_any(shape.signs, folded):
            text = shape.pattern.sub(shape.replacement, text)
    return text


def _has_any(signs: tuple[str, ...], folded: str) -> bool:
    for sign in signs:  # noqa: SIM110 - half as dear as any(…), and every line of the console comes by here
        if sign in folded:
            return True
    return False


def without_user_info(url: str) -> str:
    """The URL (or `user@host:path`, as git writes it) without its user and password, other secrets masked."""
    return redact_text(_SCP_USER.sub("", _USER_INFO.sub(r"\1", url)))


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line with the values of secret options masked: `--api-key X`, `--token=X`, `db.pwd=X`."""
    redacted: list[str] = []
    pending = Secrecy.NONE  # of the option whose values come next
    many = False
    for argument in argv:
        is_option = argument.startswith("--") or re.fullmatch(r"-[A-Za-z]", argument) is not None
        if is_option or pending is Secrecy.NONE:
            redacted.append(_redact_argument(argument))
        else:
            redacted.append(_mask_text(argument, pending))
        if is_option:
            pending = Secrecy.NONE if "=" in argument else secrecy_of(argument)
            many = argument.endswith("s")  # `--api-keys A B`
        elif not many:
            pending = Secrecy.NONE
    return redacted


def _redact_argument(argument: str) -> str:
    """One word of a command line; a value may hold blanks and commas here, the shell has split already."""
    key, equals, value = argument.partition("=")
    if equals and _OPTION_NAME.fullmatch(key):
        return f"{key}={_mask_text(value, secrecy_of(key))}"
    return redact_text(argument)


def _mask_text(value: str, secrecy: Secrecy) -> str:
    """A value that is written as text, under a key of this secrecy."""
    bare = value.strip("\"'")
    if secrecy is Secrecy.NONE:
        return redact_text(value)
    if bare.lower() in _HARMLESS or (secrecy is Secrecy.STRINGS and _NUMBER.fullmatch(bare)):
        return value
    return MASK


def _masked_header(match: re.Match[str]) -> str:
    name, colon, value = match.groups()
    return f"{name}{colon}{_mask_text(value, secrecy_of(name))}" if secrecy_of(name) else match[0]


def _masked_basic(match: re.Match[str]) -> str:
    """Mask what decodes to `user:password`, so that "basic training" stays."""
    try:
        is_login = b":" in base64.b64decode(match[2], validate=True)
    except (binascii.Error, ValueError):
        return match[0]
    return f"{match[1]}{MASK}" if is_login else match[0]


def _masked_quoted_pair(match: re.Match[str]) -> str:
    """`"password": "x"`, in JSON or a printed dict."""
    value = match["value"]
    masked = _mask_text(value, secrecy_of(match["key"])) if secrecy_of(match["key"]) else value
    key = f"{match['key_quote']}{match['key']}{match['key_quote']}"
    return f"{key}{match['colon']}{match['quote']}{masked}{match['quote']}"


def _masked_assignment(match: re.Match[str]) -> str:
    """`password=x`, in a URL's query, a connection string or a command."""
    key, value = match["key"], match["value"]
    secrecy = secrecy_of(key)
    if match.string[match.start() - 1 : match.start()] in {"?", "&"}:
        secrecy = secrecy if _SIGNED_URL_WORDS.isdisjoint(_words(key)) else Secrecy.ALL
    return f"{key}={_mask_text(value, secrecy)}" if secrecy else match[0]


def _masked_option(match: re.Match[str]) -> str:
    """`--password x`, in a command that is written as one string."""
    secrecy = secrecy_of(match["key"])
    return f"{match['key']}{match['blank']}{_mask_text(match['value'], secrecy)}" if secrecy else match[0]


class _Shape(NamedTuple):
    """One kind of secret. A text has none of it if it has none of the `signs`, whatever their case.

    Looking for them costs a tenth of looking for the pattern, and most text has none.
    """

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    signs: tuple[str, ...]
    #: Whether it is the name beside it that makes it a secret.
    by_name: bool = False


# One of these is in every name that `secrecy_of` calls a secret, or that a signed URL has.
_SIGNS_OF_A_NAME = (
    *("auth", "cookie", "credential", "key", "mnemonic", "pass", "phrase", "pwd", "secret", "seed", "sig"),
    *("token", "webhook"),
)
# A pattern that ignores case also takes \u017f for s, \u212a for k, and \u0131 and \u0130 for i. Folding
# makes an s and a k of the first two; so there is no i in the signs of such a pattern.
_SHAPES = (
    _Shape(_PRIVATE_KEY, MASK, ("-----begin ",)),
    _Shape(_USER_INFO, rf"\1{MASK}@", ("@",)),
    _Shape(_WEBHOOK, rf"\1{MASK}", ("hooks",)),
    _Shape(_HEADER, _masked_header, ("author", "cook", "x-"), by_name=True),
    _Shape(_BEARER, rf"\1{MASK}", ("bearer",)),
    _Shape(_BASIC, _masked_basic, ("bas",)),
    _Shape(_QUOTED_PAIR, _masked_quoted_pair, ('"', "'"), by_name=True),
    _Shape(_ASSIGNMENT, _masked_assignment, ("=",), by_name=True),
    _Shape(_OPTION, _masked_option, ("-",), by_name=True),
    _Shape(
        _TOKEN_SHAPES,
        MASK,
        (
            *("hf_", "gho_", "ghp_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "sk-", "k_live_"),
            *("k_test_", "wandb_v", "akia", "asia", "aiza", "xox", "npm_", "pypi-", "eyj"),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------
# Structures


@overload
def redact(config: Mapping[str, object], extra_keys: Iterable[str] = ()) -> dict[str, object]: ...
@overload
def redact(config: object, extra_keys: Iterable[str] = ()) -> object: ...
def redact(config: object, extra_keys: Iterable[str] = ()) -> object:
    """A copy of `config` with its secrets masked, deep through dicts, lists, tuples and sets.

    `extra_keys` are further keys to mask, as patterns of the shell (`*_pin`), whatever their case; a pattern
    with a dot is compared with the dotted path. A structure that contains itself is cut with `<cycle>`, one
    deeper than 100 levels with `<too deep>`. Other objects are returned as they are, unless under a secret
    key: turn them into plain values first (`plain`).
    """
    return _Redaction(tuple(pattern.lower() for pattern in extra_keys)).value(config, "", Secrecy.NONE)


class _Redaction:
    """One pass over one structure."""

    def __init__(self, extra_keys: tuple[str, ...]) -> None:
        self._extra_keys = extra_keys
        self._open: set[int] = set()  # the containers that the walk is inside of

    def value(self, value: object, path: str, secrecy: Secrecy) -> object:
        """The copy of a value found at the dotted `path`, under a key of the given secrecy."""
        if value is None or isinstance(value, bool) or (isinstance(value, str) and not value):
            return value
        if secrecy is Secrecy.ALL:
            return MASK
        if isinstance(value, str):
            return self._text(value, path, secrecy)
        if isinstance(value, (bytes, bytearray)):
            return MASK if secrecy else _redact_bytes(bytes(value))
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return self._container(value, path, secrecy)
        return value

    def _text(self, value: str, path: str, secrecy: Secrecy) -> str:
        if secrecy:
            return MASK
        if _HEXADECIMAL.fullmatch(value) and _names_a_private_key(path.rpartition(".")[2]):
            return MASK
        return redact_text(value)

    def _container(
        self,
        value: Mapping[object, object] | list[object] | tuple[object, ...] | set[object] | frozenset[object],
        path: str,
        secrecy: Secrecy,
    ) -> object:
        if id(value) in self._open:
            return _CYCLE
        if len(self._open) >= _DEEPEST:
            return _TOO_DEEP
        self._open.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, path, secrecy)
            return _like(value, [self.value(item, path, secrecy) for item in value])
        finally:
            self._open.remove(id(value))

    def _mapping(self, mapping: Mapping[object, object], path: str, secrecy: Secrecy) -> dict[object, object]:
        named = secrecy_of(str(mapping.get("name", "")))  # {"name": "HF_TOKEN", "value": …}
        copy: dict[object, object] = {}
        for key, value in mapping.items():
            below = f"{path}.{key}" if path else str(key)
            secret = max(secrecy, self._secrecy_of(str(key), below))
            if key == "value":
                secret = max(secret, named)
            copy[redact_text(key) if isinstance(key, str) else key] = self.value(value, below, secret)
        return copy

    def _secrecy_of(self, key: str, path: str) -> Secrecy:
        if any(
            fnmatchcase((path if "." in pattern else key).lower(), pattern) for pattern in self._extra_keys
        ):
            return Secrecy.ALL
        return secrecy_of(key, in_wallet=not _WALLET_WORDS.isdisjoint(_words(path)))


def _names_a_private_key(key: str) -> bool:
    """Whether a long hexadecimal number under `key` is a credential (`wandb.key`) rather than a commit."""
    words = _words(key)
    return "key" in words and "public" not in words


def _redact_bytes(value: bytes) -> bytes:
    return redact_text(value.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _like(original: object, items: list[object]) -> object:
    """The items in a container of the original's kind."""
    if isinstance(original, tuple):
        make: Callable[..., object] | None = getattr(type(original), "_make", None)  # a named tuple
        return make(items) if make is not None else tuple(items)
    if isinstance(original, (set, frozenset)):
        return type(original)(items)
    return items
