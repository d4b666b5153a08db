"""The data sets by name, read from small files of their form; their splits by `split.file` and `split.draws`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from gat_pyg.data import Task, published
from gat_pyg.experiments.build import read_task
from gat_pyg.experiments.conf import VERSION_BASE, config_folder
from gat_pyg.experiments.messages import sizes
from gat_pyg.experiments.settings import Settings
from gat_pyg.experiments.unused import check_effects
from gat_pyg.tasks.objective import MASKS, SPLITS
from tests.graphs import shchur_file


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        yield


def task(root: Path, *overrides: str) -> Task:
    """The task of a command, all of whose settings have an effect."""
    settings = Settings.parse(compose("config", [f"data_root={root}", *overrides]))
    result = read_task(settings)
    check_effects(settings.replace(passed=frozenset(text.partition("=")[0] for text in overrides)), result)
    return result


def platonov_file(path: Path) -> None:
    """Write a graph as of Platonov et al. (2023): a ring of two classes of 30 nodes, with 10 splits."""
    N, draw = 60, np.random.default_rng(0)
    part = np.stack([draw.permutation(N) * 5 // N for _ in range(10)])  # fifths: 0, 1 and 2 are for training
    masks = {f"{key}s": mask for key, mask in zip(MASKS, (part < 3, part == 3, part == 4), strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    edges = np.stack([np.arange(N), (np.arange(N) + 1) % N], 1)
    x = draw.random((N, 7), np.float32)
    np.savez(path, node_features=x, node_labels=np.arange(N) % 2, edges=edges, **masks)


RING = "60 nodes, 120 edges, 3 classes of nodes; 36 / 12 / 12 nodes"
HETEROPHILOUS = "60 nodes, 120 edges, 2 classes of nodes; 36 / 12 / 12 nodes"
NAMED: dict[str, tuple[Callable[[Path], Any], str, str, int]] = {  # writer, raw files, sizes, splits
    "photo": (shchur_file, "Amazon/Photo/raw/amazon_electronics_photo.npz", RING, 1),
    "computers": (shchur_file, "Amazon/Computers/raw/amazon_electronics_computers.npz", RING, 1),
    "cs": (shchur_file, "Coauthor/CS/raw/ms_academic_cs.npz", RING, 1),
    "physics": (shchur_file, "Coauthor/Physics/raw/ms_academic_phy.npz", RING, 1),
    "chameleon": (platonov_file, "heterophilous/chameleon_filtered.npz", HETEROPHILOUS, 10),
    "squirrel": (platonov_file, "heterophilous/squirrel_filtered.npz", HETEROPHILOUS, 10),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_data_set_is_read_by_its_name_with_its_split(tmp_path: Path):
    for name, (write, files, expected, splits) in NAMED.items():
        write(tmp_path / files)
        result = task(tmp_path, f"dataset={name}")
        assert (result.name, sizes(result), result.num_splits) == (name, expected, splits)


def ids(result: Task) -> list[list[int]]:
    """The nodes of the three splits."""
    return [result.graphs(split)[0][key].nonzero().flatten().tolist() for split, key in zip(SPLITS, MASKS, strict=True)]


def test_draws_are_the_splits_of_their_seeds(tmp_path: Path):
    shchur_file(tmp_path / NAMED["photo"][1])
    for number in (0, 2):
        drawn = task(tmp_path, "dataset=photo", "split.draws=3", "split.seed=5", f"split.split={number}")
        assert drawn.num_splits == 3 and ids(drawn) == ids(task(tmp_path, "dataset=photo", f"split.seed={5 + number}"))
    graph = {
        "x": np.eye(60),
        "y": np.arange(60) % 3,
        "edge_index": np.stack([np.arange(60), np.roll(np.arange(60), 1)]),
    }
    np.savez(tmp_path / "own.npz", **graph)
    own = ["dataset=file", f"dataset.path={tmp_path / 'own.npz'}"]
    drawn = task(tmp_path, *own, "split.draws=3", "split.split=1")
    assert drawn.num_splits == 3 and ids(drawn) == ids(task(tmp_path, *own, "split.seed=1"))
    for others, message in {
        (
            "dataset=photo",
            "split.draws=3",
            "split.split=3",
        ): "split.split is 3, but split.draws is 3: expected a number",
        (
            "dataset=digits",
            "split.draws=3",
        ): "split.draws is 3, but digits has a split of its own. Leave out split.draws",
        ("dataset=mutag", "split.draws=3"): "split.draws is 3, but split.folds is 10. Leave out one of them, by split",
        ("dataset=photo", "split.draws=3", "split.file=a.npz"): "split.draws is 3, but split.file is a.npz. Leave out",
    }.items():
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            task(tmp_path, *others)


def test_a_file_of_a_split_replaces_any_other(tmp_path: Path):
    shchur_file(tmp_path / NAMED["photo"][1])
    platonov_file(tmp_path / NAMED["chameleon"][1])
    order = np.random.default_rng(0).permutation(60)
    expected = [sorted(part.tolist()) for part in np.split(order, [20, 30])]
    splits = dict(zip(("train", "valid", "test"), np.split(order, [20, 30]), strict=True))
    np.savez(tmp_path / "split.npz", **splits)
    for name in ("photo", "chameleon"):
        result = task(tmp_path, f"dataset={name}", "split.file=split.npz")
        assert ids(result) == expected and result.num_splits == 1
    for change, message in (
        ({"train": [0, 60]}, "train is no array of node ids, expected whole numbers from 0 to 59"),
        ({"test": [0.5]}, "test is no array of node ids"),
        ({"val": order[:1]}, f"node {order[0]} is listed twice, expected each node in one split at most"),
        (
            {"test": np.array([None])},
            "cannot be read, expected an .npz file with arrays train, val .or valid. and test",
        ),
    ):
        np.savez(tmp_path / "wrong.npz", **{**splits, **change})
        with pytest.raises(ValueError, match=rf"photo: split\.file=.*wrong\.npz.* ?{message}"):
            task(tmp_path, "dataset=photo", "split.file=wrong.npz")
    with pytest.raises(
        FileNotFoundError, match=r"split\.file=no\.npz is no file, expected .* Amazon/Computers/splits/amaz"
    ):
        task(tmp_path, "dataset=photo", "split.file=no.npz")
    with pytest.raises(ValueError, match=r"split\.file has no effect: digits has a split of its own"):
        task(tmp_path, "dataset=digits", "split.file=split.npz")


def test_a_download_has_the_content_of_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = "Amazon/Photo/splits/amazon-photo_split.npz"
    urls = []

    def download(url: str, folder: str, log: bool) -> str:
        urls.append(url)
        path = Path(folder) / url.rpartition("/")[2]
        path.write_bytes(b"content")
        return str(path)

    monkeypatch.setattr(published, "download_url", download)
    with pytest.raises(
        FileNotFoundError, match=r"not downloaded: the SHA-256 of https.* is ed7002b439e9.*, expected 0609"
    ):
        published.split_file(file, tmp_path)
    assert not any(tmp_path.iterdir())
    monkeypatch.setitem(published.SPLIT_FILES, file, "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73")
    assert published.split_file(file, tmp_path).read_bytes() == b"content"
    assert urls == [f"{published.SPLITS_URL}/amazon-photo_split.npz"] * 2
