"""All layers together: which wins, what is said, and where every value came from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, Field

from nodetrack.errors import HparamsError
from nodetrack.hparams.defaults import Hparams
from nodetrack.hparams.explain import Entry, explain_defaults, explain_file, explain_hparams
from nodetrack.hparams.load import load_hparams

WriteFile = Callable[..., Path]


class _Kept(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What is logged while the test runs."""
    messages: list[str] = []
    handler = _Kept(messages)
    logging.getLogger("nodetrack").addHandler(handler)
    yield messages
    logging.getLogger("nodetrack").removeHandler(handler)


def entry(key: str, **arguments: object) -> Entry:
    (found,) = explain_hparams(**arguments).select(key)  # type: ignore[arg-type]  # passed on as given
    return found


# ---- layers --------------------------------------------------------------------------------------------


def test_each_layer_wins_over_those_below(write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def seed(*overrides: str) -> int:
        found = load_hparams(use_local_run_hparams=True, overrides=overrides).seed
        assert isinstance(found, int)
        return found

    write("hparams.json", {"model_size": "1b"})
    write("hparams-local-run.json", {})
    write("1b.json", {})
    assert seed() == 0
    write("hparams.json", {"model_size": "1b", "seed": 1})
    assert seed() == 1
    write("1b.json", {"seed": 2})
    assert seed() == 2
    write("hparams-local-run.json", {"seed": 3})
    assert seed() == 3
    monkeypatch.setenv("NODETRACK_HPARAMS__seed", "4")
    assert seed() == 4
    assert seed("seed=5") == 5
    assert seed("seed=5", "seed=6") == 6


def test_a_value_remembers_every_layer_it_overrode(write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write("hparams.json", '{\n"model_size": "1b",\n"seed": 1}')
    write("1b.json", '{"seed": 2}')
    write("hparams-local-run.json", '\n\n{"seed": 3}')
    monkeypatch.setenv("NODETRACK_HPARAMS__SEED", "4")
    found = entry("seed", use_local_run_hparams=True, overrides=["seed=5"])
    assert (found.value, str(found.origin)) == (5, "override seed=5")
    assert [(setting.value, str(setting.origin)) for setting in found.overridden] == [
        (4, "$NODETRACK_HPARAMS__SEED"),
        (3, "hparams-local-run.json:3"),
        (2, "1b.json:1"),
        (1, "hparams.json:3"),
        (0, "built-in default"),
    ]


def test_the_local_run_file_counts_only_when_asked_for(write: WriteFile) -> None:
    write("hparams.json", {})
    write("hparams-local-run.json", {"seed": 3})
    assert load_hparams().seed == 0


def test_files_are_found_in_the_folder_that_is_named(write: WriteFile, folder: Path) -> None:
    (folder / "inner").mkdir()
    write("inner/hparams.json", {"seed": 8})
    assert load_hparams("inner").seed == 8
    assert load_hparams(folder / "inner").seed == 8


def test_nested_objects_are_namespaces(write: WriteFile) -> None:
    write("hparams.json", {"torchtitan": {"dp_shard": 4}})
    hparams = load_hparams()
    assert hparams.torchtitan.dp_shard == 4
    assert hparams.torchtitan.tp_degree == 1


# ---- the size file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["project", "local", "environment", "override"])
def test_any_layer_may_name_the_size_file(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    size = {"model_size": "1b"}
    write("1b.json", {"hidden_size": 64})
    write("hparams.json", size if layer == "project" else {})
    write("hparams-local-run.json", size if layer == "local" else {})
    if layer == "environment":
        monkeypatch.setenv("NODETRACK_HPARAMS__model_size", "1b")
    hparams = load_hparams(".", True, ["model_size=1b"] if layer == "override" else [])
    assert (hparams.model_size, hparams.hidden_size) == ("1b", 64)


def test_the_size_that_wins_names_the_file_and_the_others_are_not_read(write: WriteFile) -> None:
    write("hparams.json", {"model_size": "1b"})
    write("1b.json", "this is not read")
    write("8b.json", {"hidden_size": 4096})
    assert load_hparams(overrides=["model_size=8b"]).hidden_size == 4096


def test_a_size_without_a_file_is_said_and_is_no_error(write: WriteFile, warnings: list[str]) -> None:
    write("hparams.json", {"model_size": "1B"})
    assert load_hparams(strict=True).model_size == "1B"
    assert warnings == ["hparams.json, line 1: model_size is '1B', but there is no 1B.json."]


@pytest.mark.parametrize("size", ["../1b", "a/b", "", ".hidden", "hparams", "hparams-local-run", "1b\n"])
def test_a_size_that_is_no_plain_name_is_refused(write: WriteFile, size: str) -> None:
    write("hparams.json", {"model_size": size})
    with pytest.raises(HparamsError, match=r"hparams.json, line 1: model_size .* names no size file"):
        load_hparams()


def test_a_size_file_may_repeat_its_size_and_not_change_it(write: WriteFile) -> None:
    write("hparams.json", {"model_size": "1b"})
    write("1b.json", {"model_size": "1b", "seed": 1})
    assert load_hparams().seed == 1
    write("1b.json", {"model_size": "8b"})
    with pytest.raises(HparamsError, match=r"1b.json, line 1: the file of model_size '1b' sets another"):
        load_hparams()


# ---- missing and empty files ---------------------------------------------------------------------------


def test_a_folder_without_a_project_file_is_said_to_have_none(folder: Path, warnings: list[str]) -> None:
    assert load_hparams().seed == 0
    assert warnings == ["hparams.json does not exist; built-in defaults take its place."]
    with pytest.raises(HparamsError, match="does not exist"):
        load_hparams(strict=True)


def test_a_folder_that_does_not_exist_is_an_error(folder: Path) -> None:
    with pytest.raises(HparamsError, match=r"nowhere is not a folder; pass the one that holds hparams.json"):
        load_hparams("nowhere")


def test_a_local_run_file_that_is_asked_for_must_exist(write: WriteFile) -> None:
    write("hparams.json", {})
    with pytest.raises(HparamsError, match=r"hparams-local-run.json does not exist; write it"):
        load_hparams(use_local_run_hparams=True)


@pytest.mark.case("C070")
def test_an_empty_file_is_a_warning_and_strictly_an_error(write: WriteFile, warnings: list[str]) -> None:
    write("hparams.json", "")
    assert load_hparams().seed == 0
    assert warnings == ["hparams.json is empty and read as {}; delete it or write values into it."]
    with pytest.raises(HparamsError, match="is empty"):
        load_hparams(strict=True)


@pytest.mark.case("C069")
def test_a_repeated_key_is_a_warning_and_strictly_an_error(write: WriteFile, warnings: list[str]) -> None:
    write("hparams.json", '{"seed": 1, "seed": 2, "torchtitan": {"dp_shard": 1, "dp_shard": 2}}')
    hparams = load_hparams()
    assert (hparams.seed, hparams.torchtitan.dp_shard) == (2, 2)
    assert [warning.partition(", first")[0] for warning in warnings] == [
        "hparams.json, line 1, column 13: duplicate key 'seed'",
        "hparams.json, line 1, column 54: duplicate key 'torchtitan.dp_shard'",
    ]
    with pytest.raises(HparamsError, match="duplicate key 'seed'"):
        load_hparams(strict=True)


# ---- unknown keys --------------------------------------------------------------------------------------


@pytest.mark.case("C066")
def test_a_mistyped_key_names_the_nearest_known_name_and_the_file(
    write: WriteFile, warnings: list[str]
) -> None:
    write("hparams.json", {})
    write("hparams-local-run.json", '{\n"learning_rte": 1e-3}')
    assert load_hparams(use_local_run_hparams=True).learning_rte == 1e-3
    assert warnings == [
        "hparams-local-run.json, line 2: unknown key 'learning_rte'; did you mean 'learning_rate'?"
    ]


@pytest.mark.case("C066")
def test_strict_raises_all_problems_together_before_anything_starts(write: WriteFile) -> None:
    write("hparams.json", '{\n"learning_rte": 1,\n"sede": 2, "sede": 3}')
    with pytest.raises(HparamsError) as caught:
        load_hparams(overrides=["windws=3"], strict=True)
    for expected in ("learning_rate", "'seed'", "duplicate key 'sede'", "'windows'"):
        assert expected in str(caught.value)
    assert caught.value.path == Path("hparams.json")
    assert caught.value.line == 3


@pytest.mark.case("C066")
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"dp_shard": 2}, "unknown key 'dp_shard'; did you mean 'torchtitan.dp_shard'?"),
        ({"torchtitan": {"seed": 2}}, "unknown key 'torchtitan.seed'; did you mean 'seed'?"),
        (
            {"optimizer": {"learning_rate": 2}},
            "unknown key 'optimizer.learning_rate'; did you mean 'learning_rate'?",
        ),
        ({"Learning_Rate": 2}, "unknown key 'Learning_Rate'; did you mean 'learning_rate'?"),
        ({"torchtitn": {"dp_shard": 2}}, "unknown key 'torchtitn'; did you mean 'torchtitan'?"),
        (
            {"torchtitan": {"dp_shrad": 2}},
            "unknown key 'torchtitan.dp_shrad'; did you mean 'torchtitan.dp_shard'?",
        ),
        ({"zzz": {"a": 1, "b": 2}}, "unknown key 'zzz'; a key of the project's own belongs under \"extra\"."),
        ({"zzz": None}, "unknown key 'zzz'; a key of the project's own belongs under \"extra\"."),
    ],
)
def test_a_key_in_the_wrong_place_is_pointed_to_the_right_one(
    write: WriteFile, warnings: list[str], values: dict[str, object], told: str
) -> None:
    write("hparams.json", values)
    load_hparams()
    assert warnings == [f"hparams.json, line 1: {told}"]


def test_an_unknown_variable_is_named(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    write("hparams.json", {})
    monkeypatch.setenv("NODETRACK_HPARAMS__SEDE", "1")
    load_hparams()
    assert warnings == ["$NODETRACK_HPARAMS__SEDE: unknown key 'SEDE'; did you mean 'seed'?"]


def test_keys_under_extra_are_the_projects_own(write: WriteFile, warnings: list[str]) -> None:
    write("hparams.json", {"extra": {"learning_rte": 1, "deep": {"er": [1, {"a": 2}]}}})
    write("hparams-local-run.json", {"extra": {"deep": {"more": None}}})
    hparams = load_hparams(use_local_run_hparams=True, strict=True)
    assert hparams.extra.to_dict() == {"learning_rte": 1, "deep": {"er": [1, {"a": 2}], "more": None}}
    assert warnings == []
    assert not entry("extra.deep.er").is_declared


def test_a_project_declares_keys_of_its_own_by_subclassing(write: WriteFile, warnings: list[str]) -> None:
    class Mine(Hparams):
        temperature: float = Field(default=1.0, gt=0, description="of sampling")

    write("hparams.json", {"temperature": "0.5"})
    assert load_hparams(defaults=Mine).temperature == 0.5
    assert warnings == ['hparams.json, line 1: temperature is "0.5", read as 0.5.']
    with pytest.raises(HparamsError, match=r"temperature is -1.0, and should be greater than 0"):
        load_hparams(overrides=["temperature=-1"], defaults=Mine)


# ---- types ---------------------------------------------------------------------------------------------


class Small(BaseModel):
    lr: float = 0.1
    bs: int = 8
    flag: bool = False


@pytest.mark.case("C068")
def test_types_follow_the_default_with_a_notice(write: WriteFile, warnings: list[str]) -> None:
    write("hparams.json", '{"lr": "1e-5",\n"bs": 16.0,\n"flag": "false"}')
    assert load_hparams(defaults=Small).to_dict() == {"lr": 1e-5, "bs": 16, "flag": False}
    assert warnings == [
        'hparams.json, line 1: lr is "1e-5", read as 1e-05.',
        "hparams.json, line 2: bs is 16.0, read as 16.",
        'hparams.json, line 3: flag is "false", read as false.',
    ]


@pytest.mark.case("C068")
def test_a_value_of_the_wrong_type_is_an_error_naming_key_file_and_line(write: WriteFile) -> None:
    path = write("hparams.json", '{"lr": 1,\n "bs": 16.5}')
    with pytest.raises(
        HparamsError, match=r"^hparams.json, line 2: bs must be a whole number, not 16.5.$"
    ) as caught:
        load_hparams(defaults=Small)
    assert (caught.value.key, caught.value.path, caught.value.line, caught.value.column) == (
        "bs",
        Path(path.name),
        2,
        2,
    )


@pytest.mark.case("C068")
def test_text_that_a_command_line_cannot_avoid_gets_no_notice(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    write("hparams.json", {})
    monkeypatch.setenv("NODETRACK_HPARAMS__flag", "True")
    hparams = load_hparams(defaults=Small, overrides=["lr=.5", "bs=1e1"])
    assert hparams.to_dict() == {"lr": 0.5, "bs": 10, "flag": True}
    assert warnings == []


def test_a_wrong_value_is_found_even_where_it_is_overridden(write: WriteFile) -> None:
    write("hparams.json", {"seed": "x"})
    with pytest.raises(HparamsError, match="seed must be a whole number"):
        load_hparams(overrides=["seed=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=0", "batch_size is 0, and should be greater than 0"),
        (
            "compression.topk_fraction=1.5",
            "compression.topk_fraction is 1.5, and should be less than or equal to 1",
        ),
        ("torchtitan.activation_checkpoint=some", "should be 'none', 'selective' or 'full'"),
        ("project=", 'project is "", and String should have at least 1 character'),
        ("torchtitan=3", "torchtitan must be an object of dp_replicate, dp_shard"),
        ("extra=3", "extra is 3, and should be a valid dictionary"),
        ("seed.x=3", 'seed must be a whole number, not {"x": 3}'),
        ("betas=0.9", "betas must be a list"),
    ],
)
def test_a_value_that_breaks_its_fields_rule_is_refused(
    write: WriteFile, override: str, message: str
) -> None:
    write("hparams.json", {})
    with pytest.raises(HparamsError) as caught:
        load_hparams(overrides=[override])
    assert str(caught.value).startswith(f"override {override}: ")
    assert message in str(caught.value)


@pytest.mark.case("C067")
def test_null_sets_none_and_stays_visible_whatever_the_type(write: WriteFile) -> None:
    write("hparams.json", {"seed": None, "torchtitan": {"dp_shard": None}, "validator": None})
    hparams = load_hparams()
    assert (hparams.seed, hparams.torchtitan.dp_shard, hparams.validator) == (None, None, None)
    assert hparams.to_dict()["validator"] is None
    assert entry("validator").is_changed


@pytest.mark.case("C067")
def test_a_delete_marker_works_in_every_layer_above_the_defaults(write: WriteFile) -> None:
    write("hparams.json", {"seed": 1, "betas": [0.5, 0.6]})
    write("hparams-local-run.json", {"betas": {"$delete": True}})
    assert load_hparams(".", True).betas == [0.9, 0.95]
    assert load_hparams(".", True, ['seed={"$delete": true}']).seed == 0


@pytest.mark.parametrize(
    "values", [{"seed": {"$delte": True}}, {"extra": {"a": {"$delete": True, "b": 1}}}, {"$x": 1}]
)
def test_a_marker_that_is_none_is_an_error(write: WriteFile, values: dict[str, object]) -> None:
    write("hparams.json", values)
    with pytest.raises(HparamsError, match=r'is no marker; the only one is \{"\$delete": true\}'):
        load_hparams()


# ---- explaining ----------------------------------------------------------------------------------------


def test_values_that_differ_from_the_default_are_known(write: WriteFile) -> None:
    write("hparams.json", {"seed": 5, "windows": 100, "extra": {"mine": 1, "none": None}})
    changed = [found.key for found in explain_hparams().entries if found.is_changed]
    assert changed == ["seed", "extra.mine", "extra.none"]


def test_every_value_has_an_origin_and_the_values_are_those_of_the_namespace(write: WriteFile) -> None:
    write("hparams.json", {"seed": 5, "own": {"a": {}}})
    explained = explain_hparams()
    assert explained.values == load_hparams().to_dict()
    for found in explained.entries:
        node: object = load_hparams()
        for name in found.path:
            assert isinstance(node, SimpleNamespace)
            node = vars(node)[name]
        assert node == found.value or found.value == {}


def test_a_key_or_a_whole_group_can_be_selected(write: WriteFile) -> None:
    write("hparams.json", {"extra": {"a": 1, "ab": 2}})
    assert [found.key for found in explain_hparams().select("extra.a")] == ["extra.a"]
    explained = explain_defaults()
    assert [found.key for found in explained.select("compression")] == [
        "compression.topk_fraction",
        "compression.error_feedback",
    ]
    with pytest.raises(HparamsError, match=r"There is no key 'sede'; did you mean 'seed'\?"):
        explained.select("sede")


def test_a_file_of_any_name_can_be_explained_above_the_defaults(write: WriteFile) -> None:
    path = write("other.json", {"seed": 9})
    (found,) = explain_file(path).select("seed")
    assert (found.value, found.origin.line) == (9, 1)
    with pytest.raises(HparamsError, match="does not exist"):
        explain_file(path.with_name("gone.json"))


def test_two_loads_share_no_list_with_each_other_or_with_the_defaults(write: WriteFile) -> None:
    write("hparams.json", {})
    load_hparams().betas.append(1.0)
    assert load_hparams().betas == [0.9, 0.95]
