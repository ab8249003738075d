"""`hparams.tokenizer` and `hparams.model_config`, with the real transformers and a tokenizer made on disk."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from nodetrack.errors import HparamsError, MissingExtraError
from nodetrack.hparams.namespace import Namespace, create_namespace

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "intermediate_size": 128,
    "sequence_length": 32,
    "activation_function": "gelu",
    "vocab_size": 256,
    "tokenizer_name_or_path": None,
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of seven words, saved as any other is."""
    pytest.importorskip("transformers", exc_type=ImportError)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[PAD]", "a", "node", "keeps", "its", "journal"]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def hparams(tokenizer_folder: Path) -> Namespace:
    return create_namespace({**SIZES, "tokenizer_name_or_path": str(tokenizer_folder)})


def test_the_tokenizer_is_loaded_from_its_folder_and_kept(hparams: Namespace) -> None:
    tokenizer = hparams.tokenizer
    assert tokenizer("a node keeps its journal")["input_ids"] == [2, 3, 4, 5, 6]
    assert hparams.tokenizer is tokenizer


def test_the_model_config_is_built_from_the_values() -> None:
    from transformers import LlamaConfig

    config = create_namespace(SIZES).model_config
    assert isinstance(config, LlamaConfig)
    built = {
        name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size")
    }
    assert built == {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 4)
    assert (config.max_position_embeddings, config.hidden_act, config.vocab_size) == (32, "gelu", 256)


def test_a_vocabulary_size_of_none_follows_the_tokenizer(hparams: Namespace) -> None:
    hparams.vocab_size = None
    assert hparams.model_config.vocab_size == 7


def test_a_vocabulary_larger_than_the_tokenizers_is_kept_and_a_smaller_one_refused(
    hparams: Namespace,
) -> None:
    hparams.vocab_size = 16
    assert hparams.model_config.vocab_size == 16
    hparams.vocab_size = 6
    with pytest.raises(HparamsError, match="vocab_size is 6, but the tokenizer has 7 tokens"):
        _ = hparams.model_config


def test_the_model_config_is_kept_until_a_value_it_was_built_from_changes() -> None:
    hparams = create_namespace({**SIZES, "seed": 1})
    config = hparams.model_config
    hparams.seed = 2
    assert hparams.model_config is config
    hparams.num_hidden_layers = 3
    assert hparams.model_config.num_hidden_layers == 3


def test_what_was_built_is_no_part_of_comparing_printing_copying_or_to_dict(hparams: Namespace) -> None:
    untouched = create_namespace(hparams.to_dict())
    _ = hparams.tokenizer, hparams.model_config
    assert hparams == untouched
    assert repr(hparams) == repr(untouched)
    assert hparams.to_dict() == untouched.to_dict()
    assert pickle.dumps(hparams) == pickle.dumps(untouched)
    assert copy.deepcopy(hparams)._cache() == copy.copy(hparams)._cache() == {}


def test_neither_exists_on_a_namespace_without_the_values() -> None:
    namespace = create_namespace({"torchtitan": {"dp_shard": 1}})
    assert not hasattr(namespace.torchtitan, "tokenizer")
    assert not hasattr(namespace, "model_config")


def test_without_a_name_the_tokenizer_says_what_to_set() -> None:
    with pytest.raises(HparamsError, match="needs tokenizer_name_or_path; set it") as caught:
        _ = create_namespace(SIZES).tokenizer
    assert caught.value.key == "tokenizer_name_or_path"


def test_a_model_without_vocabulary_says_what_to_set() -> None:
    with pytest.raises(HparamsError, match="needs vocab_size or tokenizer_name_or_path"):
        _ = create_namespace({**SIZES, "vocab_size": None}).model_config


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    hparams = create_namespace({**SIZES, "tokenizer_name_or_path": str(tmp_path)})
    with pytest.raises(HparamsError, match=f"No tokenizer could be loaded from '{tmp_path}'"):
        _ = hparams.tokenizer


def test_values_that_make_no_model_are_an_error_of_ours() -> None:
    with pytest.raises(HparamsError, match=r"make no LlamaConfig: .*not a multiple"):
        _ = create_namespace({**SIZES, "hidden_size": 66}).model_config


@pytest.mark.parametrize("name", ["tokenizer", "model_config"])
def test_without_transformers_the_message_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    hparams = create_namespace({**SIZES, "tokenizer_name_or_path": "x"})
    with pytest.raises(
        MissingExtraError, match=rf"hparams.{name} needs transformers.*nodetrack\[transformers\]"
    ):
        getattr(hparams, name)


def test_a_node_that_touches_neither_imports_no_transformers(tmp_path: Path) -> None:
    """In a process of its own, because this one has imported transformers already."""
    (tmp_path / "hparams.json").write_text('{"tokenizer_name_or_path": "no/such-tokenizer"}')
    program = (
        "import sys; from nodetrack.hparams.load import load_hparams; hparams = load_hparams(sys.argv[1]);"
        "repr(hparams), hparams.to_dict(), hparams == hparams;"
        "print(sorted({'transformers', 'tokenizers', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
