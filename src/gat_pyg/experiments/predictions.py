"""Predictions of a trained run as a table: names, classes with probabilities, quantities in their unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from ..data.rows import read_rows
from ..files import needs, write_whole
from ..tasks.objective import Objective
from ..tasks.preparation import Preparation
from .model_file import load, predict


def predictions(
    run_dir: str | Path, data: Any = None, out: str | Path | None = None, seed: int | Literal["all"] | None = None
) -> Any:
    """Return the predictions of a trained run as a `pandas.DataFrame`, and write them to a file.

    Each row begins with the names of what it is of: those of the user's tables, or its number. Then come the class and
    the probability of each class, the probability of each label, or the quantities in the unit of the training data.

    Args:
        run_dir: the folder of a run.
        data: the path of a file of the form that the run was trained on, several paths, frames, a graph or several;
            None for the files of the run itself.
        out: the file to write: `.csv`, `.parquet`, or `.jsonl` for JSON lines.
        seed: as in `gat_pyg.predict`.

    Raises:
        ImportError: if pandas is not installed.
        ValueError: if `out` is of another kind, and as in `gat_pyg.predict`.
    """
    write = None if out is None else writer(out)
    trained: Any = load(run_dir, seed=seed, predictions=True)
    graphs, ids = read_rows(trained.preparation, data)
    values = predict(run_dir, graphs if len(graphs) > 1 else graphs[0], seed=seed)
    frame = table(values, ids, trained._objective, trained.preparation)
    if write is not None:
        write(frame)
    return frame


def table(values: Tensor, ids: Mapping[str, Sequence[Any]], objective: Objective, preparation: Preparation) -> Any:
    """Return a frame with a row for each row of `values`, named by `ids`."""
    names = preparation.class_names or [str(k) for k in range(objective.out_channels)]
    rows = values.double().cpu().numpy()
    columns: dict[str, Any] = dict(ids) or {objective.item: range(len(rows))}
    if objective.column == "class":
        columns["class"] = np.asarray(names, dtype=object)[rows.argmax(1)]
    rows = rows if rows.ndim == 2 else rows[:, None]
    columns |= dict(zip(names if objective.item != "link" else ["link"], rows.T, strict=True))
    return needs("pandas", "tables").DataFrame(columns)


def writer(out: str | Path) -> Callable[[Any], None]:
    """Return the function that writes a frame to `out`, by its suffix.

    Raises:
        ValueError: for another suffix.
        ImportError: if the package is missing.
    """
    path = Path(out).expanduser()
    writers: dict[str, Callable[[Any, Path], object]] = {
        ".csv": lambda frame, file: frame.to_csv(file, index=False),
        ".parquet": lambda frame, file: frame.to_parquet(file, index=False),
        ".jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True, force_ascii=False),
    }
    if path.suffix not in writers:
        raise ValueError(f"{out} ends in {path.suffix!r}, expected {', '.join(writers)}.")
    needs("pandas", "tables")
    if path.suffix == ".parquet":
        needs("pyarrow", "tables")
    return lambda frame: write_whole(path, lambda file: writers[path.suffix](frame, file))
