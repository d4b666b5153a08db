"""Learning curves: the band by hand, the drawn lines, the errors."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from gat_pyg.report.figures.curves import band_of, curves_figure, curves_of, scores_figure
from gat_pyg.report.tables.general import rows_of
from gat_pyg.runs.groups import Line, gathered
from tests.report.samples import one, report, write_lines


def run(folder: Path, seed: int, text: str | None, method: str = "A") -> Line:
    folder = folder / f"{method}-{seed}"
    folder.mkdir()
    if text is not None:
        (folder / "metrics.csv").write_text(text)
    return Line(one(method, "digits", 80.0, seed, run_dir=str(folder)), "r.jsonl", seed + 1)


def two(folder: Path) -> list[Line]:
    """Two seeds of which one stops earlier, and a third without a file."""
    texts = ("epoch,train_loss,val_accuracy\n1,2,10\n2,1,30\n3,1,50\n", "epoch,val_accuracy\n1,20\n2,60\n", None)
    return [run(folder, seed, text) for seed, text in enumerate(texts)]


def test_the_band_by_hand(tmp_path: Path) -> None:
    files = [Path(line.result.run_dir) / "metrics.csv" for line in two(tmp_path)[:2]]
    band = band_of([curves_of(file)["val_accuracy"] for file in files] + [{}])
    assert band_of([{}, {}]) is None
    assert band is not None and band.runs == 2
    assert [part.tolist() for part in band[:4]] == [[1, 2], [15.0, 45.0], [10.0, 30.0], [20.0, 60.0]]


def test_a_run_has_a_panel_of_losses_and_one_for_each_score(tmp_path: Path) -> None:
    one, *_ = two(tmp_path)
    folder = Path(one.result.run_dir)
    assert [[line.get_ydata().tolist() for line in axes.lines] for axes in curves_figure(folder).axes] == [
        [[2.0, 1.0, 1.0]],
        [[10.0, 30.0, 50.0]],
    ]
    (folder / "result.json").write_text(one.result.to_json())
    losses, scores = curves_figure(folder).axes
    assert losses.lines[-1].get_xdata() == scores.lines[-1].get_xdata() == [one.result.best_epoch] * 2
    assert (losses.get_ylabel(), scores.get_ylabel()) == ("loss", "validation accuracy (%)")
    assert curves_figure(tmp_path).axes[1].lines[0].get_ydata().tolist() == [15.0, 45.0]  # of several seeds
    with pytest.raises(ValueError, match=r"outputs has no metrics.csv with an epoch, expected the folder of a run"):
        curves_figure(tmp_path / "outputs")


def test_the_figure_has_the_band(tmp_path: Path) -> None:
    lines = [*two(tmp_path), run(tmp_path, 0, "epoch,val_accuracy\n1,5\n", "B"), run(tmp_path, 0, None, "C")]
    (axes,) = scores_figure(rows_of(gathered(lines))).axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[15.0, 45.0], [5.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["A, 2 runs", "B, 1 run"]
    assert axes.get_ylabel() == "validation accuracy (%)"
    corners = {tuple(corner) for corner in axes.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(1.0, 10.0), (2.0, 30.0), (1.0, 20.0), (2.0, 60.0)}


def test_many_rows_look_different_and_their_legend_is_below_the_panel(tmp_path: Path) -> None:
    text, names = "epoch,val_accuracy\n1,10\n2,30\n", [f"method {number:02}" for number in range(25)]
    figure = scores_figure(rows_of(gathered([run(tmp_path, 0, text, name) for name in names])))
    (axes,) = figure.axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 25
    figure.draw_without_rendering()
    legend, panel = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y1 < panel.y0 and legend.y0 > 0 and panel.height > 2.4 * figure.dpi  # inches


@pytest.mark.parametrize("text", ["epoch,val_accuracy\n1,x\n", "step,val_accuracy\n1,2\n"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"A-0.metrics.csv cannot be read, expected an epoch and its scores"):
        curves_of(Path(run(tmp_path, 0, text).result.run_dir) / "metrics.csv")


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "out"
    write_lines(path, two(tmp_path))
    assert report([str(path), "--out", str(out), "--curves"]) == 0
    assert "curves.svg" in capsys.readouterr().out
    assert ElementTree.parse(out / "curves.svg").getroot().tag.endswith("svg")
    for seed in range(2):
        (tmp_path / f"A-{seed}" / "metrics.csv").unlink()
    assert report([str(path), "--out", str(tmp_path / "none"), "--curves"]) == 1
    assert "No folder of a run" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
