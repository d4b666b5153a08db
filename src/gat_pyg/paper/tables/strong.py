"""The strongest networks on each data set beside the best results that others have published."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ...report.tables.cells import NONE, Row, Table, difference_cell, ours_cell, p_cell, spread
from ...report.tables.general import Column, text_of
from ...runs.groups import Gathered, Key, Runs
from ...runs.significance import t_test_of
from ...settings.hashing import flattened, learnt
from ...settings.names import dataset_name
from ...settings.settings import Settings
from ...sweeps.grid import cells_of
from ..published import STRONG, Printed, published
from .scores import paper_cell

SHOWN = (  # settings
    *(f"model.{name}" for name in ("num_layers", "hidden_channels", "heads", "norm", "dropout")),
    *(f"training.{name}" for name in ("lr", "weight_decay", "max_epochs")),
)


def split_of(settings: Settings) -> str:
    """Return the kind of the splits of a protocol: "given", "file", "random" or "folds"."""
    split = settings.split
    kinds = {"file": split.file, "folds": split.folds, "random": split.draws}
    return next((kind for kind, value in kinds.items() if value is not None), "given")


def strong_table(runs: Gathered) -> Table:
    """Return the table of the cells of `experiment=strong` that have runs, with the published numbers beside.

    Raises:
        ValueError: if no cell has runs.
    """
    found = {one.setting: (key, one) for key, its in runs.items() for one in its}
    cells = [(cell, *found[cell.hash]) for cell in cells_of("strong") if cell.hash in found]
    if not cells:
        raise ValueError("No line has the settings of a row of experiment=strong. Leave out --preset strong.")
    return Table.of(
        "strong",
        "The strongest networks, test scores, mean ± standard deviation (runs).",
        [_row(*cell) for cell in cells],
        (
            "Settings were chosen on validation scores, or are published ones. Published is the best number known "
            "here (runs), of a network with attention if there is one. The difference and p, of Welch's t-test "
            "from the means and deviations of both, are given where the splits are of the same kind: given with "
            "the data, one in a file, or drawn at random; a published number may be of fewer. Seconds are of one "
            "run's training, or its share of one with others; MiB is the peak of the process, which may train "
            "several runs as one.",
            *_sources({dataset_name(cell.dataset.values): None for cell, *_ in cells}),
        ),
    )


def _row(settings: Settings, key: Key, runs: Runs) -> Row:
    results = [line.result for line in runs.lines]
    splits, seeds = ({getattr(result, name) for result in results} for name in ("split", "seed"))
    peaks = [result.peak_mib for result in results if result.peak_mib is not None]
    kind = split_of(settings)
    paper = _published(dataset_name(settings.dataset.values), kind)
    same = paper if paper is not None and paper.split == kind else None
    p = math.nan if same is None else t_test_of(runs.values, same.mean, same.std, int(same.runs or 0))
    return {
        "Data set": " ".join(Column(key.dataset, key.metric).heads),
        "splits": kind,
        "splits × seeds": f"{len(splits)} × {len(seeds)}",
        "validation": spread(runs.val, math.nan, key.metric),
        "here": ours_cell(runs, key.metric),
        "published": paper_cell(paper, key.metric),
        "difference": difference_cell(runs, same, key.metric),
        "p": p_cell(p),
        "seconds a run": f"{runs.seconds:.1f}",
        "MiB": f"{max(peaks):,.0f}" if peaks else NONE,
        "settings": text_of(SHOWN, learnt(flattened(settings.to_dict()))),
    }


def _published(dataset: str, kind: str) -> Printed | None:
    """Return the best published number of splits of this kind; else the best of any."""
    its = [(key, one) for key, one in published().items() if key[0] == STRONG and key[2] == dataset]
    if not its:
        return None
    return max((one for _, one in its), key=lambda one: (one.split == kind, one.mean))


def _sources(datasets: Mapping[str, None]) -> Iterator[str]:
    """Yield a note with the sources of the published numbers of each data set."""
    for dataset in datasets:
        its = [(row, one) for (table, row, data), one in published().items() if (table, data) == (STRONG, dataset)]
        texts = [f"{row} {one.mean:g} ± {one.std:g}, {one.source}" for row, one in its]
        if texts:
            yield f"{dataset}: {'. '.join(texts)}."
