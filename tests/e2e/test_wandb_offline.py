"""`initialize_wandb` with the real wandb, offline: what its own file and our journal hold afterwards."""

from __future__ import annotations

import ast
import json

import pytest

from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.views import all_rows

pytest.importorskip("wandb")


def without_wandbs_own(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if not name.startswith("_")}


def test_a_row_has_both_names_and_the_step_in_wandb_and_is_journalled_once(node) -> None:
    node.run("""
        run = start()
        run.log({"loss": 0.5, "train/acc": 1}, step=7)
        run.finish()
    """)
    [row] = node.wandb_rows()
    assert without_wandbs_own(row) == {
        "v0.1.0/loss": 0.5,
        "latest/loss": 0.5,
        "v0.1.0/train/acc": 1,
        "latest/train/acc": 1,
        "v0.1.0/step": 7,
        "latest/step": 7,
    }
    assert row["_step"] == 7
    [journalled] = node.journal_rows()
    assert (journalled.step, journalled.version, journalled.values) == (
        7,
        "0.1.0",
        {"loss": 0.5, "train/acc": 1},
    )


@pytest.mark.case("C018")
def test_every_way_to_call_log_works_and_the_users_own_step_survives(node) -> None:
    node.run("""
        run = start()
        run.log({"step": 3, "x": 1}, None)
        run.log({"x": 1}, 5)
        run.log({"x": 2}, step=None, commit=False)
        run.log({"y": 2}, None, True, True)
        wandb.log({"x": 3}, step=9, commit=True)
        wandb.run.log({"x": 4})
        run.finish()
    """)
    rows = [without_wandbs_own(row) for row in node.wandb_rows()]
    assert rows == [
        {"v0.1.0/step": 3, "latest/step": 3, "v0.1.0/x": 1, "latest/x": 1, "nodetrack/step": 0},
        {"v0.1.0/x": 1, "latest/x": 1, "v0.1.0/step": 5, "latest/step": 5},
        {"v0.1.0/x": 2, "latest/x": 2, "v0.1.0/y": 2, "latest/y": 2, "v0.1.0/step": 1, "latest/step": 1},
        {"v0.1.0/x": 3, "latest/x": 3, "v0.1.0/step": 9, "latest/step": 9},
        {"v0.1.0/x": 4, "latest/x": 4, "v0.1.0/step": 2, "latest/step": 2},
    ]
    assert [(row.step, row.values) for row in node.journal_rows()] == [
        (0, {"step": 3, "x": 1}),
        (5, {"x": 1}),
        (1, {"x": 2}),
        (1, {"y": 2}),
        (9, {"x": 3}),
        (2, {"x": 4}),
    ]


@pytest.mark.case("C013")
def test_no_row_is_lost_to_a_step_that_was_too_high(node) -> None:
    printed = node.run("""
        run = start()
        run.log({"a": 1}, step=10**6)
        for step in range(1, 101):
            run.log({"a": 2}, step=step)
        print(run.nodetrack_run.health().out_of_order)
        run.finish()
    """)
    assert printed.split() == ["100"]
    rows = node.wandb_rows()
    assert [row["v0.1.0/step"] for row in rows] == [10**6, *range(1, 101)]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers))
    assert len(node.journal_rows()) == 101


def test_several_calls_at_one_step_are_one_row_unless_one_would_overwrite_another(node) -> None:
    node.run("""
        run = start()
        run.log({"step": 3, "a": 1}, step=5)
        run.log({"b": 2}, step=5)
        run.log({"a": 9}, step=5)
        run.log({"c": 1}, step=6)
        run.finish()
    """)
    merged, again, after = [without_wandbs_own(row) for row in node.wandb_rows()]
    assert merged == {
        "v0.1.0/step": 3, "latest/step": 3, "nodetrack/step": 5,
        "v0.1.0/a": 1, "latest/a": 1, "v0.1.0/b": 2, "latest/b": 2,
    }  # fmt: skip
    assert again == {"v0.1.0/a": 9, "latest/a": 9, "v0.1.0/step": 5, "latest/step": 5}
    assert after == {"v0.1.0/c": 1, "latest/c": 1, "v0.1.0/step": 6, "latest/step": 6}


def test_odd_steps_and_values_cost_no_row(node) -> None:
    node.run("""
        run = start()
        for step in (-5, 2**70, 3.7, float("nan"), "four", 2**62):
            run.log({"a": 1}, step=step)
        odd = {"nan": float("nan"), "inf": float("-inf"), "odd": object(), "": 5, "nested": {"x": 1}}
        run.log({"good": 1, **odd})
        run.log({"h": nodetrack.Histogram([1.0, 2.0, 2.0], bins=2), "t": nodetrack.Text("words"), "good": 2})
        run.finish()
    """)
    rows = node.wandb_rows()
    assert [row["latest/a"] for row in rows[:6]] == [1] * 6
    odd, typed = rows[6:]
    assert (odd["latest/good"], odd["latest/nested/x"]) == (1, 1)
    assert (odd["latest/inf"], odd["latest/nan"]) == (float("-inf"), pytest.approx(float("nan"), nan_ok=True))
    assert "latest/odd" not in odd
    assert typed["latest/t"] == "words"
    assert typed["latest/h/values"] == [1.0, 2.0]
    assert len(node.journal_rows()) == 8


@pytest.mark.case("C004")
def test_a_restart_under_new_code_continues_the_run_and_appends_its_version(node) -> None:
    def start(version: str) -> list[object]:
        code = """
            run = start(version="VERSION", tags=["mine"])
            versions = run.config["version_history"], run.config["current_version"]
            print([run.id, run.name, list(run.tags), *versions, run.nodetrack_run.step])
            run.log({"loss": 1.0})
            run.finish()
        """
        return ast.literal_eval(node.run(code.replace("VERSION", version)))

    first, second, third = start("0.1.0"), start("0.1.1"), start("0.1.1")
    run_id = node.id_file.read_text()
    assert first == [run_id, "miner-3", ["mine", "v0.1.0"], ["0.1.0"], "0.1.0", 0]
    assert second == [run_id, "miner-3", ["mine", "v0.1.0", "v0.1.1"], ["0.1.0", "0.1.1"], "0.1.1", 1]
    assert third == [*second[:-1], 2]
    rows = node.wandb_rows()
    assert [row["latest/loss"] for row in rows] == [1.0] * 3
    assert [row.get("v0.1.0/step", row.get("v0.1.1/step")) for row in rows] == [0, 1, 2]
    assert [row.step for row in node.journal_rows()] == [0, 1, 2]


def test_a_node_with_a_file_of_old_keeps_its_run(node) -> None:
    node.id_file.parent.mkdir()
    node.id_file.write_text("abc12345\n")
    printed = node.run("run = start(); print('ID', run.id, run.nodetrack_run.id); run.finish()")
    assert "ID abc12345 abc12345" in printed
    assert node.id_file.read_text() == "abc12345\n", "offline nobody can say that the run exists"


def test_a_killed_node_comes_back_to_its_run_and_its_step(node) -> None:
    killed = node.run(
        """
        run = start()
        for step in range(50):
            run.log({"loss": 1.0})
        print(run.id, flush=True)
        os.kill(os.getpid(), 9)
        """,
        check=False,
    )
    printed = node.run(
        "run = start(); print(run.id, run.nodetrack_run.step); run.log({'loss': 2.0}); run.finish()"
    )
    assert printed.split() == [killed.strip(), "50"]
    assert [row.step for row in node.journal_rows()] == [*range(51)]
    assert node.wandb_rows()[-1]["v0.1.0/step"] == 50


@pytest.mark.case("C065")
def test_secrets_in_the_config_reach_neither_wandb_nor_the_journal(node) -> None:
    node.run("""
        CONFIG.update(api_key="hunter2-secret", num_tokens=512, url="https://me:hunter2-secret@example.org/")
        run = start()
        assert run.config["num_tokens"] == 512
        run.log({"a": 1})
        run.finish()
    """)
    files = [path for path in node.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    assert not [path for path in files if b"hunter2-secret" in path.read_bytes()]


def test_our_names_have_our_step_as_their_axis(node) -> None:
    """`latest/…` runs through all versions; a resumed run has forgotten the axes of its earlier ones."""
    node.run("run = start(); run.log({'a': 1}); run.finish()")
    node.run("run = start(version='0.2.0'); run.log({'a': 1}); run.finish()")
    metrics = [
        record.metric for record in node.wandb_records() if record.WhichOneof("record_type") == "metric"
    ]
    axes = [(metric.glob_name, metric.step_metric) for metric in metrics if metric.glob_name]
    first = [("v0.1.0/*", "v0.1.0/step"), ("latest/*", "latest/step")]
    assert axes == [*first, first[0], ("v0.2.0/*", "v0.2.0/step"), first[1]]


def test_the_run_is_what_was_asked_for(node) -> None:
    node.run("run = start(notes='why'); run.finish()")
    [run] = [record.run for record in node.wandb_records() if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name, run.run_group, run.job_type, run.notes) == (
        "demo", "miner-3", "miners", "training", "why",
    )  # fmt: skip
    assert list(run.tags) == ["v0.1.0"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["project"] == "demo"


@pytest.mark.parametrize(
    ("ending", "state", "exit_code"),
    [
        ("run.finish()", "finished", 0),
        ("wandb.finish(exit_code=3)", "crashed", 3),
        ("pass", "finished", 0),
        ("with run: run.log({'b': 1})", "finished", 0),
        ("with run: raise ValueError('boom')", "crashed", 1),
        ("raise ValueError('boom')", "crashed", 1),
        ("sys.exit(3)", "crashed", 3),
    ],
)
def test_the_journal_ends_with_wandbs_run(node, ending: str, state: str, exit_code: int) -> None:
    node.run(f"run = start(); run.log({{'a': 1}})\n{ending}", check=False)
    finish = node.journal.attempts[-1].finish_record()
    assert finish is not None
    assert (finish.state, finish.exit_code) == (state, exit_code)
    lock = node.id_file.with_suffix(".lock")
    assert not lock.exists()


def test_logging_after_the_end_is_the_callers_mistake(node) -> None:
    node.run("""
        from nodetrack.errors import RunFinishedError
        run = start()
        run.finish()
        try:
            run.log({"a": 1})
        except RunFinishedError:
            sys.exit(0)
        sys.exit("nothing was raised")
    """)


def test_a_second_process_of_the_node_is_refused(node) -> None:
    printed = node.run("""
        import subprocess
        from nodetrack.errors import IdentityInUseError
        if "SECOND" in os.environ:
            try:
                start()
            except IdentityInUseError as error:
                print(f"refused because of {error.pid}")
            sys.exit()
        run = start()
        again = subprocess.run([sys.executable, "-c", sys.orig_argv[2]], env={**os.environ, "SECOND": "1"},
                               capture_output=True, text=True)
        assert f"refused because of {os.getpid()}" in again.stdout, again
        assert start() is run
        run.log({"a": 1})
        run.finish()
    """)
    assert "open in this process already" in printed
    assert len(node.wandb_rows()) == 1


def test_a_second_process_may_have_a_run_of_its_own(node) -> None:
    node.run("""
        import subprocess
        if "SECOND" in os.environ:
            run = start(on_conflict="new")
            run.log({"b": 1})
            run.finish()
            sys.exit()
        run = start()
        second = {**os.environ, "SECOND": "1"}
        subprocess.run([sys.executable, "-c", sys.orig_argv[2]], env=second, check=True)
        run.log({"a": 1})
        print(run.id)
        assert open("wandb/wandb_run_id_miner-3.txt").read() == run.id
        run.finish()
    """)
    first, second = sorted(
        TrackingFolder(node.folder / ".nodetrack").runs("demo"), key=lambda run: "a" in names(run)
    )
    assert (names(first), names(second)) == ({"b"}, {"a"})


def names(run: RunFolder) -> set[str]:
    return {name for row in all_rows(run) for name in row.values}


def test_other_ranks_have_the_surface_and_write_nothing(node) -> None:
    node.environment["RANK"] = "1"
    node.run("""
        run = start()
        run.log({"a": 1}, 5)
        wandb.log({"a": 1})
        run.summary["best"] = 1
        run.config.update({"b": 2})
        assert run.nodetrack_run.disabled
        run.finish()
    """)
    assert not (node.folder / ".nodetrack").exists()
    assert not node.id_file.exists()


def test_a_forked_child_logs_to_the_journal_and_spoils_nothing(node) -> None:
    """W&B's row number is shared with the parent: rows of a child would silently replace the parent's."""
    node.run("""
        run = start()
        run.log({"a": 1}, step=1)
        child = os.fork()
        if child == 0:
            run.log({"b": 2}, step=9)
            run.log({"b": 2}, step=10)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        run.log({"a": 2}, step=2)
        run.finish()
    """)
    assert [row["latest/a"] for row in node.wandb_rows()] == [1, 2]
    assert sorted(row.step for row in node.journal_rows()) == [1, 2, 9, 10]


def test_threads_lose_nothing(node) -> None:
    node.run("""
        import threading
        run = start()
        threads = [threading.Thread(target=lambda: [run.log({"a": 1}) for _ in range(100)]) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        run.finish()
    """)
    assert [row["v0.1.0/step"] for row in node.wandb_rows()] == [*range(800)]
    assert len(node.journal_rows()) == 800


def test_a_wandb_that_breaks_while_training_costs_training_nothing(node) -> None:
    """Its process is killed, as the kernel does when memory runs out."""
    printed = node.run("""
        import psutil
        run = start()
        run.log({"a": 1})
        children = psutil.Process().children(recursive=True)
        core = [child for child in children if "wandb" in " ".join(child.cmdline())]
        assert core
        for process in core: process.kill()
        psutil.wait_procs(core)
        for _ in range(20):
            run.log({"a": 2})
        run.finish()
        print("trained to the end")
    """)
    assert "trained to the end" in printed
    assert printed.count("LOG W&B did not get a row") == 1
    assert len(node.journal_rows()) == 21
