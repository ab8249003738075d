from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nodetrack.redact as redact_module
from nodetrack.redact import MASK, redact, redact_argv, redact_text, without_user_info

SECRET = "Hunter2-Hunter2"

SECRET_KEYS = [
    *("api_key", "apikey", "apiKey", "API-KEY", "api_keys", "WANDB_API_KEY", "wandbApiKey", "wandbapikey"),
    *("token", "hf_token", "HFToken", "HF_TOKEN", "access_tokens", "tokenSecret", "id_token", "bot_token_2"),
    *("secret", "client_secret", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "session_key", "signing_key"),
    *("password", "db.password", "passwd", "PWD", "dbpassword", "passphrase", "credentials", "credential"),
    *("private_key", "privateKey", "ssh_key", "mnemonic", "hotkey_seed", "coldkey-seed", "seed_phrase"),
    *("authorization", "auth", "proxy_auth", "cookie", "Set-Cookie", "webhook_url"),
]
INNOCENT_KEYS = [
    *(
        "num_tokens",
        "use_cls_token",
        "max_tokens",
        "maxTokens",
        "token_ids",
        "token_id",
        "tokenizer",
        "tokens",
    ),
    *(
        "pad_token_id",
        "tokens_per_second",
        "token_type_ids",
        "seed",
        "data_seed",
        "author",
        "authors",
        "keys",
    ),
    *(
        "key",
        "keyboard",
        "passwordless",
        "secretary",
        "pass",
        "hotkey",
        "public_key",
        "n_heads",
        "monkey_key",
    ),
]


# --- keys


@pytest.mark.case("C065")
def test_the_field_case_masks_what_is_secret_and_nothing_else() -> None:
    config = {
        "api_key": "x",
        "url": "https://u:p@h",
        "num_tokens": 5,
        "use_cls_token": True,
        "wallet": {"hotkey_seed": "s"},
    }

    assert redact(config) == {
        "api_key": MASK,
        "url": "https://***@h",
        "num_tokens": 5,
        "use_cls_token": True,
        "wallet": {"hotkey_seed": MASK},
    }


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_secret_key_masks_whatever_is_under_it(key: str) -> None:
    for value in (SECRET, 1234, [SECRET], {"inner": [1, SECRET]}, SECRET.encode(), object()):
        assert redact({key: value}) == {key: MASK}


@pytest.mark.parametrize("key", SECRET_KEYS)
@pytest.mark.parametrize("value", [None, True, False, ""])
def test_a_switch_or_an_empty_value_is_no_secret(key: str, value: object) -> None:
    """That no password is set, or that `use_auth_token` is on, is what one wants to see in a config."""
    assert redact({key: value}) == {key: value}


@pytest.mark.parametrize("key", INNOCENT_KEYS)
def test_a_number_under_an_innocent_key_stays(key: str) -> None:
    assert redact({key: 5, f"model_{key}": [0.5, {"deep": 7}]}) == {
        key: 5,
        f"model_{key}": [0.5, {"deep": 7}],
    }


@pytest.mark.parametrize(
    "key", ["pad_token", "bos_token", "tokenizer", "hotkey", "stop_tokens", "tokens_path"]
)
def test_text_under_an_innocent_key_stays(key: str) -> None:
    assert redact({key: "<pad>"}) == {key: "<pad>"}


def test_under_plain_tokens_numbers_stay_and_strings_are_masked() -> None:
    assert redact({"tokens": {"bos": 1, "mine": "abc"}}) == {"tokens": {"bos": 1, "mine": MASK}}


def test_a_seed_is_a_secret_only_in_a_wallet() -> None:
    config = {"seed": 42, "wallet": {"name": "w", "seed": "s"}, "hotkey": {"a": {"seed": 7}}}

    assert redact(config) == {
        "seed": 42,
        "wallet": {"name": "w", "seed": MASK},
        "hotkey": {"a": {"seed": MASK}},
    }


def test_a_variable_that_is_written_as_name_and_value_is_read_as_one() -> None:
    environment = [{"name": "HF_TOKEN", "value": "x"}, {"name": "LR", "value": "1"}]

    assert redact({"env": environment}) == {
        "env": [{"name": "HF_TOKEN", "value": MASK}, {"name": "LR", "value": "1"}]
    }


def test_a_long_hexadecimal_number_is_a_secret_only_under_a_key() -> None:
    number = "0123456789abcdef" * 2 + "01234567"
    config = {"wandb": {"key": number}, "commit": number, "public_key": number}

    assert redact(config) == {"wandb": {"key": MASK}, "commit": number, "public_key": number}


def test_further_keys_can_be_given_as_patterns() -> None:
    config = {"door_PIN": 1, "pin": 2, "model": {"name": "m"}, "name": "n"}

    assert redact(config, extra_keys=["*_pin", "model.name"]) == {
        "door_PIN": MASK,
        "pin": 2,
        "model": {"name": MASK},
        "name": "n",
    }


# --- text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://u:p@h", "https://***@h"),
        ("see https://ghost@github.com/o/r and more", "see https://***@github.com/o/r and more"),
        ("postgresql+psycopg://u:p@ss@h:5432/db", "postgresql+psycopg://***@h:5432/db"),
        ("postgresql://u:p/a#s?s@h:5432/db", "postgresql://***@h:5432/db"),
        ("redis://:p@h/0,redis://:q@i/0", "redis://***@h/0,redis://***@i/0"),
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("https://h/x?a=1&token=abc&api_key=d&b=2", "https://h/x?a=1&token=***&api_key=***&b=2"),
        ("https://h/x?X-Amz-Signature=ab&sig=c", "https://h/x?X-Amz-Signature=***&sig=***"),
        ("host=h user=u password='a b' dbname=d", "host=h user=u password=*** dbname=d"),
        ("AccountName=n;AccountKey=abc==;E=1", "AccountName=n;AccountKey=***;E=1"),
        ("python t.py --api-key=a --token b --lr 1", "python t.py --api-key=*** --token *** --lr 1"),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("curl -H 'X-Api-Key: abc' h", "curl -H 'X-Api-Key: ***' h"),
        ("bearer abcd1234efgh", "bearer ***"),
        ("Basic dXNlcjpwYXNz", "Basic ***"),
        ('{"a": 1, "password": "p\\"q", "b": "c"}', '{"a": 1, "password": "***", "b": "c"}'),
        ("{'api_key': 'x', 'n': 'y'}", "{'api_key': '***', 'n': 'y'}"),
        ("my hf_" + "aB3" * 12, "my ***"),
        ("ghp_" + "a1" * 18, MASK),
        ("sk-proj-" + "a1_-" * 10, MASK),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJ", MASK),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/***"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nMII\nx\n-----END RSA PRIVATE KEY-----\nb", "a\n***\nb"),
        ("-----BEGIN PRIVATE KEY-----\ncut off", MASK),
    ],
)
def test_a_secret_is_known_by_its_shape(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact({"note": [text]}) == {"note": [expected]}


@pytest.mark.parametrize(
    "text",
    [
        "https://h:8080/x@y?a=b@c",
        "mail me@example.org",
        "basic training of the bearer of news",
        "sk-learn-something-with-a-long-name",
        "hf_transformers/bert-base",
        "num_tokens=5 lr=1e-3 seed=7 tokens=1e9",
        "https://h/x?page_token_count=3&author=b",
        "use_auth_token=True",
        '{"max_tokens": "5", "tokenizer": "gpt2"}',
        "-----BEGIN PUBLIC KEY-----",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_innocent_text_stays(text: str) -> None:
    assert redact_text(text) == text


def _by_every_pattern(text: str) -> str:
    """The same without a look at the signs."""
    for shape in redact_module._SHAPES:
        text = shape.pattern.sub(shape.replacement, text)
    return text


_NAMES = sorted(
    {
        *SECRET_KEYS,
        *INNOCENT_KEYS,
        *redact_module._SECRET_WORDS,
        *redact_module._SECRET_ENDINGS,
        *redact_module._SECRET_PHRASES,
        *(f"{word}_seed" for word in redact_module._WALLET_WORDS),
        *redact_module._SIGNED_URL_WORDS,
        *("token", "tokens", "Authorization", "proxy-authorization", "Cookie", "Set-Cookie", "X-Api-Key"),
    }
)
_IN_PLACES = [
    "{}=Abc1",
    "h?a=1&{}=Abc1",
    "--{} Abc1",
    "-{}\tAbc1",
    '"{}": "Abc1"',
    "'{}' : 'Abc1'",
    "{}: Abc1",
]
_TOKENS = [
    *("hf_" + "aB3" * 12, *(f"gh{kind}_" + "a1" * 18 for kind in "opusr"), "github_pat_" + "a1" * 18),
    *("glpat-" + "a1" * 10, "sk-" + "a1" * 12, "sk-proj-" + "a1_-" * 10, "wandb_v1_" + "a1" * 12),
    *(f"{kind}k_{mode}_" + "a1" * 9 for kind in "sr" for mode in ("live", "test")),
    *("AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "AIza" + "a1-_x" * 7, "npm_" + "a1" * 18),
    *(f"xox{kind}-" + "a1" * 6 for kind in "abeoprs"),
    *("pypi-" + "a1" * 12, "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJ"),
]
_OTHER_SECRETS = [
    *("https://u:p@h", "ghost@github.com", "redis://:p/a#s@h", "hooks.slack.com/services/T0/B0/xyz"),
    *("discord.com/api/webhooks/1/x", "https://discordapp.com/api/webhooks/1/x", "bearer abcd1234efgh"),
    *("Basic dXNlcjpwYXNz", "BA\u017fIC dXNlcjpwYXNz", "bas\u0131c dXNlcjpwYXNz", "BAS\u0130C dXNlcjpwYXNz"),
    *(
        "x-\u212aey: a",
        "Coo\u212aie: a",
        "author\u0130zation: a",
        "X-Api-\u212aey-secret: a",
        "\u017fecret=a",
    ),
    *(
        "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nx",
    ),
]
_PIECES = [*(place.format(name) for place in _IN_PLACES for name in _NAMES), *_TOKENS, *_OTHER_SECRETS]


@pytest.mark.parametrize("changed", [str, str.upper, str.lower, str.title, str.swapcase])
def test_no_secret_is_passed_over_because_its_sign_is_not_seen(changed: Callable[[str], str]) -> None:
    """Each alone, so that no sign of another one helps it."""
    masked = 0
    for piece in map(changed, _PIECES):
        assert redact_text(piece) == _by_every_pattern(piece)
        masked += redact_text(piece) != piece
    assert masked > 300


_texts = st.text(max_size=30) | st.text(
    st.sampled_from("aceikorstuy_-=:/@'\" \n?&.19*\u017f\u212a\u0130\u0131\u00df"), max_size=40
)


@given(st.lists(_texts | st.sampled_from(_PIECES), max_size=6), st.sampled_from(["", " ", "\n", ";", "***"]))
@settings(max_examples=500, deadline=None)
def test_looking_for_signs_first_changes_nothing(pieces: list[str], between: str) -> None:
    text = between.join(pieces)
    assert redact_text(text) == _by_every_pattern(text)


@pytest.mark.parametrize("unit", ["://a:", "a=", '"a', "x.", "x-", "sk-", "eyJ-", "-----BEGIN ", "bearer "])
def test_hostile_text_is_read_in_reasonable_time(unit: str) -> None:
    """Without the bounds in the patterns this test runs into the suite's time limit."""
    text = unit * 100_000

    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://me:token@example.org/o/r.git", "https://example.org/o/r.git"),
        ("ssh://git@example.org/o/r.git", "ssh://example.org/o/r.git"),
        ("git@example.org:o/r.git", "example.org:o/r.git"),
        ("https://example.org/o/r.git?token=x", "https://example.org/o/r.git?token=***"),
        ("/srv/git/a@b:c.git", "/srv/git/a@b:c.git"),
    ],
)
def test_a_url_can_be_shown_without_its_user(url: str, expected: str) -> None:
    assert without_user_info(url) == expected


# --- command lines


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--api-key", "X", "--lr", "1"], ["--api-key", "***", "--lr", "1"]),
        (["--token=X Y,Z"], ["--token=***"]),
        (["+db.password=X", "model.lr=1"], ["+db.password=***", "model.lr=1"]),
        (["--api-keys", "A", "B", "--lr", "1"], ["--api-keys", "***", "***", "--lr", "1"]),
        (["--token", "X", "train.py"], ["--token", "***", "train.py"]),
        (["--token", "-aX9", "x"], ["--token", "***", "x"]),
        (["--use-auth-token", "--lr", "1"], ["--use-auth-token", "--lr", "1"]),
        (["--max-tokens", "5", "--tokens", "5"], ["--max-tokens", "5", "--tokens", "5"]),
        (["--token", "a=b"], ["--token", "***"]),
        (["--db", "postgresql://u:p@h/db"], ["--db", "postgresql://***@h/db"]),
        (["-c", "login(password='x')"], ["-c", "login(password=***)"]),
        (["-H", "Authorization: Basic abc"], ["-H", "Authorization: ***"]),
        (["https://h/?token=abc"], ["https://h/?token=***"]),
        ([], []),
    ],
)
def test_a_command_line_is_shown_without_its_secrets(argv: list[str], expected: list[str]) -> None:
    assert redact_argv(argv) == expected


# --- structures


class Pair(NamedTuple):
    url: str
    number: int


def test_containers_keep_their_kind_and_order() -> None:
    config = OrderedDict(
        b=("https://u@h", 1),
        a={"x", "https://u@h"},
        c=frozenset([1]),
        d=Pair("https://u@h", 2),
        e=[b"a", b"ab"],
    )

    assert redact(config) == {
        "b": ("https://***@h", 1),
        "a": {"x", "https://***@h"},
        "c": frozenset([1]),
        "d": Pair("https://***@h", 2),
        "e": [b"a", b"ab"],
    }
    assert list(redact(config)) == ["b", "a", "c", "d", "e"]
    assert isinstance(redact(config)["d"], Pair)


def test_any_mapping_is_read_and_keys_that_are_secrets_are_masked() -> None:
    config = MappingProxyType({"https://u:p@h": 1, 3: "x", ("a", 1): b"https://u:p@h"})

    assert redact(config) == {"https://***@h": 1, 3: "x", ("a", 1): b"https://***@h"}


def test_what_is_given_is_not_changed() -> None:
    config = {"api_key": "x", "list": [{"password": "y"}], "set": {"https://u:p@h"}}
    before = copy.deepcopy(config)
    redacted = redact(config)

    assert config == before
    assert redacted["list"] is not config["list"]


def test_a_structure_that_contains_itself_is_cut_and_a_shared_one_is_not() -> None:
    shared = {"password": "x", "n": 1}
    config: dict[str, object] = {"a": shared, "b": [shared]}
    config["self"] = config

    assert redact(config) == {
        "a": {"password": MASK, "n": 1},
        "b": [{"password": MASK, "n": 1}],
        "self": "<cycle>",
    }


def test_a_structure_deeper_than_the_stack_is_cut() -> None:
    config: list[object] = ["https://u:p@h"]
    for _ in range(100_000):
        config = [config]

    assert "<too deep>" in json.dumps(redact(config))


keys = st.one_of(st.sampled_from(["a", "model", "x.y", "seed", "tokens"]), st.text(max_size=8))
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(trees, st.sampled_from(SECRET_KEYS), st.sampled_from(["list", "dict", "both", "plain"]), st.data())
def test_no_secret_that_is_planted_under_a_secret_key_comes_out(
    tree: object, key: str, shape: str, data: st.DataObject
) -> None:
    planted: object = {
        "plain": SECRET,
        "list": [1, SECRET],
        "dict": {"x": SECRET},
        "both": [{"x": [SECRET, tree]}],
    }[shape]
    config = _plant(tree, {key: planted}, data)

    assert SECRET not in json.dumps(redact(config))


def _plant(tree: object, what: object, data: st.DataObject) -> object:
    """The tree with one of its nodes, drawn at random, replaced."""
    if not isinstance(tree, (dict, list)) or not tree or data.draw(st.booleans()):
        return what
    if isinstance(tree, dict):
        chosen = data.draw(st.sampled_from(list(tree)))
        return {**tree, chosen: _plant(tree[chosen], what, data)}
    index = data.draw(st.integers(0, len(tree) - 1))
    return [*tree[:index], _plant(tree[index], what, data), *tree[index + 1 :]]


numbers = st.integers() | st.floats(allow_nan=False)
innocent = st.sampled_from(INNOCENT_KEYS)


@given(
    st.recursive(
        numbers, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(innocent, inner, max_size=4)
    )
)
def test_numbers_under_innocent_keys_are_never_changed(tree: object) -> None:
    config = _without_wallets(tree)

    assert redact(config) == config


def _without_wallets(tree: object) -> object:
    """Below `hotkey` a seed is a secret on purpose."""
    if isinstance(tree, dict):
        return {key: _without_wallets(value) for key, value in tree.items() if key != "hotkey"}
    return [_without_wallets(item) for item in tree] if isinstance(tree, list) else tree


@given(trees)
def test_what_is_redacted_once_stays_as_it_is(tree: object) -> None:
    once = redact(tree)

    assert redact(once) == once
