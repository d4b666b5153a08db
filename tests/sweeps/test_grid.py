"""Tables of methods, all splits and all folds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from gat_pyg.report.tables.general import rows_of
from gat_pyg.runs.groups import gathered
from gat_pyg.runs.groups import lines_of as report_lines
from gat_pyg.runs.result import read
from tests.commands import STACKED, Command, graph_of, many_graphs, outside

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

TABLE = ("methods=[mlp,'gat model.heads=[2,1]']", "datasets=[digits,planted]", "runs=2", "training.max_epochs=2")


def lines_of(path: str = "outputs/results.jsonl") -> list[tuple[str, str, int, float]]:
    return sorted((one.method, one.dataset, one.seed, one.value) for one in read(path))


def test_a_table_is_every_method_on_every_data_set_and_nothing_is_done_twice(command: Command):
    output = command(*TABLE)
    assert "All 4 cells are done, in outputs/table" in output
    cells = {path.name for path in Path("outputs/table").iterdir()}
    assert cells == {"digits_mlp", "digits_gat_2-1", "planted_mlp", "planted_gat_2-1"}
    lines = lines_of()
    assert [line[:3] for line in lines] == [
        (method, data, seed) for method in ("GAT", "MLP") for data in ("digits", "planted") for seed in (0, 1)
    ]
    selected = OmegaConf.load("outputs/table/planted_gat_2-1/config.yaml")
    assert (selected.model.heads, selected.training.batch_size) == ([2, 1], 2)  # the table's, and planted's own
    command(*TABLE)
    assert lines_of() == lines
    command(*TABLE, "runs=3")  # a third seed for each
    assert len(lines_of()) == 12 and set(lines) < set(lines_of())


def test_a_setting_may_be_for_one_of_the_data_sets_of_a_table(command: Command):
    quick = ("methods=mlp", "training.max_epochs=1", "training.batch_size=2")
    command(*quick, "datasets=[digits,planted]")
    assert len(read("outputs/results.jsonl")) == 2
    assert "training.batch_size has no effect: digits is one graph" in command(
        *quick, "datasets=digits", "outputs=one", fails=True
    )
    command(*quick[:2], "datasets=digits", "outputs=one")  # the failed cell is not in the way
    assert len(read("one/results.jsonl")) == 1


def test_a_cell_of_a_file_is_named_after_it(command: Command):
    np.savez("mine.npz", **graph_of(np.arange(60) % 3))
    split = ("split.per_class=5", "split.val=10", "split.test=10")
    command("methods=mlp", "datasets=file", "dataset.path=mine.npz", *split, "training.max_epochs=1")
    assert "from_file has no argument dataset.pth" in command(
        "methods=mlp", "datasets=file", "dataset.pth=mine.npz", "dataset.path=mine.npz", fails=True
    )
    assert [path.name for path in Path("outputs/table").iterdir()] == ["mine_mlp"]


def test_methods_of_a_table_keep_its_settings(command: Command):
    quick = ("datasets=digits", "runs=1", "training.max_epochs=1")
    command("experiment=table2", "methods=[chebyshev,gat]", *quick)
    assert {line[0] for line in lines_of()} == {"Chebyshev (K = 2)", "Chebyshev (K = 3)", "GAT"}
    (gat,) = (OmegaConf.load(path) for path in Path("outputs/table2").glob("digits_gat_*/config.yaml"))
    assert (gat.model.reproduction, gat.training.criterion) == (True, "loss")
    datasets = "datasets=['digits runs=2','digits training.lr=0.1']"
    command("experiment=table2", "methods=[const_gat,'gat model.heads=[2,1]']", datasets, *quick[1:], "outputs=others")
    cells = {"digits_const_gat", "digits_gat_2-1", "digits_const_gat_0.1", "digits_gat_0.1_2-1"}
    assert {path.name for path in Path("others/table2").iterdir()} == cells
    rates = [OmegaConf.load(path).training.lr for path in Path("others/table2").glob("*_0.1*/config.yaml")]
    assert rates == [0.1, 0.1]


def test_a_cell_that_fails_leaves_the_others(command: Command):
    output = command("methods=[mlp,'gat model.heads=[2]']", *TABLE[1:], fails=True)
    assert output.count("heads has 1 entry, expected 2") == 1 and "planted_gat_2 failed: as above" in output
    assert "2 of 4 cells failed: digits_gat_2, planted_gat_2" in output
    assert f"[{'.' * 20}] 0 of 8 runs, 0 of 4 cells, 0 min; digits_mlp begins" in output
    assert f"[{'#' * 5}{'.' * 15}] 2 of 8 runs, 1 of 4 cells, 0 min, about 0 min left; digits_gat_2 begins" in output
    assert f"[{'#' * 10}{'.' * 10}] 4 of 8 runs, 2 of 4 cells" in output
    assert [line[:2] for line in lines_of()] == [("MLP", "digits")] * 2 + [("MLP", "planted")] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("datasets=digits",), r"methods is None, expected a list such as methods=\[gat,gcn\]"),
        (("methods=gat", "datasets=[]"), r"datasets is \[\], expected null or a list such as \[cora,citeseer\]"),
        (("methods=gat", "datasets=digits", "model=mlp"), "model=mlp is for a single run. In a table, use methods="),
        (("methods=gat", "datasets=digits", "runs=0"), "runs is 0, expected a whole number, at least 1"),
        (("methods=forest", "datasets=digits"), "model=forest is unknown. Known are: .*gat"),
        (("methods=[gat,'gat runs=2']", "datasets=digits"), r"Two methods have the same cell digits_gat\."),
        (("methods=gat", "datasets=digits", "trainer=ddp_cpu"), "The runs of a table use one process each."),
        (("split.split=1",), r"split\.split is 1, but digits has one split\. Leave out split\.split"),
        (("split.split=all",), r"digits has one split, expected several for split\.split=all"),
        (("split.fold=all",), r"digits has one split, .* or split\.folds=\.\.\. for graphs"),
        (("split.split=every",), "split.split is 'every', expected all or a whole number, at least 0"),
        (("split.folds=2",), "split.folds is 2, expected null or a whole number, at least 3, or the path of a file"),
        (("protocol=errica",), r"protocol=errica is for tables\. Add methods="),
        (("protocol=errica", "methods=mlp", "datasets=digits"), "digits has one split, expected several"),
        (("split.split=all", "trainer=ddp_cpu"), "The runs of a table use one process each"),
    ],
)
def test_impossible_tables_and_splits_are_refused(command: Command, arguments: tuple[str, ...], message: str):
    assert re.search(message, command(*arguments, fails=True))
    assert not Path("outputs").exists()


def test_a_cell_is_not_finished_with_other_settings(command: Command):
    cell = ("methods=mlp", "datasets=digits", "training.max_epochs=1")
    command(*cell)
    output = command(*cell, "training.lr=0.7", fails=True)
    assert "digits_mlp was started with other settings: training.lr was" in output and "is 0.7" in output


def masked(splits: int = 3) -> tuple[str, ...]:
    """A graph with several given splits, and the settings that train on it quickly."""
    draw = np.random.default_rng(0)
    part = np.stack([draw.permutation(60) % 3 for _ in range(splits)], 1)
    masks = {f"{name}_mask": part == number for number, name in enumerate(("train", "val", "test"))}
    edges = draw.integers(0, 60, (2, 200))
    np.savez("mine.npz", x=draw.random((60, 4)), y=draw.integers(0, 2, 60), edge_index=edges, **masks)
    return "dataset=file", "dataset.path=mine.npz", "training.max_epochs=3", "model=mlp"


def test_all_splits_are_the_single_splits_and_nothing_is_trained_twice(command: Command, passes: list[list[int]]):
    settings = masked(splits=2)
    output = command(*settings, "split.split=all", "runs=2")
    assert passes == [[0, 1]] * 2  # one training for each split
    for split in range(2):
        command(*settings, f"split.split={split}", "runs=2", "outputs=single")
    lines, single = read("outputs/results.jsonl"), read("single/results.jsonl")
    assert [(one.split, one.seed, one.value) for one in lines] == [(one.split, one.seed, one.value) for one in single]
    assert len({one.config_hash for one in (*lines, *single)}) == 1 and len({one.value for one in lines}) > 1
    values = [one.value for one in single]
    assert f"test accuracy {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} % over 2 splits and 2 seeds" in output
    before = Path("outputs/results.jsonl").read_bytes()
    output = command(*settings, "split.split=all", "runs=2")
    assert "epochs" not in output and Path("outputs/results.jsonl").read_bytes() == before
    del passes[:]
    output = command("-m", *settings, "split.split=all", "runs=2", "training.lr=0.02,0.003,0.05", STACKED)
    assert passes == [[0, 1, 0, 1]] * 2 and "3 settings of mine, the best first by validation accuracy" in output
    assert len(list(Path("outputs").glob("mine_mlp_*"))) == 3  # beside the first
    (runs,) = gathered(report_lines("single/results.jsonl")).values()
    assert runs[0].mean == pytest.approx(np.mean(values)) and len(runs[0].values) == 4
    rows = rows_of(gathered(report_lines("outputs/results.jsonl")))
    assert set(rows) == {"MLP (lr 0.003)", "MLP (lr 0.02)", "MLP (lr 0.05)"}


def test_all_folds_in_a_table_have_a_row_for_each_method(command: Command):
    settings = [f"++{setting}" for setting in many_graphs()]
    output = command("methods=[mlp,gin]", "datasets=file", "split.fold=all", *settings)
    assert "All 6 cells are done" in output and "many, GIN: test" in output and "over 3 splits and 1 seed\n" in output
    assert {path.name for path in Path("outputs/table").iterdir()} == {
        f"many_{model}_fold-{fold}" for model in ("mlp", "gin") for fold in range(3)
    }
    rows = rows_of(gathered(report_lines("outputs/results.jsonl")))
    assert {label: [len(one.values) for one in its.values()] for label, its in rows.items()} == {"MLP": [3], "GIN": [3]}


def test_erricas_protocol_reports_the_candidate_with_the_best_validation_score_on_each_fold(
    command: Command, passes: list[list[int]]
):
    methods = "methods=['mlp model.hidden_channels=2','mlp model.hidden_channels=2 training.lr=0.05',gin]"
    table = ("protocol=errica", methods, "datasets=file", "runs=2", *(f"++{setting}" for setting in many_graphs()))
    output = command(*table)
    candidates, lines = read("outputs/errica/candidates.jsonl"), read("outputs/results.jsonl")
    assert [one.seed for one in candidates] == [0] * 9
    assert passes == [[0, 0]] * 3 + [[1, 2]] * 6  # the candidates of one shape, then the seeds of the chosen ones
    assert len(lines) == 12 and {one.seed for one in lines} == {1, 2}
    for one in lines:
        its = [other for other in candidates if (other.row, other.split) == (one.row, one.split)]
        best = max(other.val for other in its)
        first = next(other for other in its if other.val == best)
        chosen, expected = (OmegaConf.load(Path(path) / "config.yaml") for path in (one.run_dir, first.run_dir))
        assert {**chosen.model, "study": None} == {**expected.model, "study": None}
        assert chosen.training == expected.training
    for name in ("MLP", "GIN"):
        scores = np.array([one.value for one in lines if one.row == name]).reshape(3, 2).mean(1)
        spread = f"{scores.mean():.1f} ± {scores.std(ddof=1):.1f}"
        assert f"many, {name}, Errica's protocol: test accuracy {spread} % over 3 splits, the mean of 2 seeds" in output
        ((one,),) = (its for key, its in gathered(report_lines("outputs/results.jsonl")).items() if key.row == name)
        assert one.values == pytest.approx(scores) and one.std == pytest.approx(scores.std(ddof=1))
    before = Path("outputs/results.jsonl").read_bytes()
    assert "epochs" not in command(*table) and Path("outputs/results.jsonl").read_bytes() == before
    shutil.rmtree("outputs/errica/many_mlp_fold-1/seed-2")
    assert command(*table).count("\nseed ") + 1 == 2  # the lines of this cell's two seeds


@pytest.mark.kernels
def test_a_table_killed_twice_and_filled_by_two_is_the_table(command: Command):
    table = ("methods=[mlp,'mlp model.hidden_channels=9']", "datasets=digits", "runs=3", "vectorize=off")
    table += ("training.max_epochs=10", "checkpoint_every=0", "trainer.accelerator=cpu")
    command(*table, "outputs=whole")

    for done in (1, 3):  # killed when so many lines are there
        writers = [outside(*table), outside(*table)]
        while not Path("outputs/results.jsonl").is_file() or len(lines_of()) < done:
            assert all(writer.poll() in (None, 0) for writer in writers)
            time.sleep(0.005)
        for writer in writers:
            os.killpg(writer.pid, signal.SIGKILL)
            writer.communicate()
    writers = [outside(*table), outside(*table)]
    for writer in writers:
        _, error = writer.communicate(timeout=120)
        assert writer.returncode == 0, error
    assert lines_of() == lines_of("whole/results.jsonl") and len(lines_of()) == 6
