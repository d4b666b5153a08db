"""The data sets by name, read from small files of their form; their splits by `split.file` and `split.draws`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir

from gat_pyg.data import Task
from gat_pyg.data.named import published
from gat_pyg.runs.task import read_task
from gat_pyg.runs.unused import check_effects
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.settings import Settings
from gat_pyg.sweeps.messages import sizes
from gat_pyg.tasks.objective import MASKS, SPLITS
from tests.data.test_graph_labels import errica
from tests.data.test_named import citeseer_files
from tests.data.test_ogbg import stored
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


def wikics_file(path: Path) -> None:
    """Write a ring of 60 articles in 3 fields, with 2 splits and one test."""
    part = np.arange(60) * 4 // 60
    masks = {f"{key}_masks": [(part == number).tolist()] * 2 for number, key in enumerate(("train", "val", "stopping"))}
    links = [[(i + 1) % 60] for i in range(60)]
    x, y = np.eye(60).tolist(), (np.arange(60) % 3).tolist()
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"features": x, "labels": y, "links": links, "test_mask": (part == 3).tolist(), **masks})
    )


def actor_files(folder: Path) -> None:
    """Write a ring of 60 actors in 3 classes, each with two words, with 10 splits; each link is in one direction."""
    folder.mkdir(parents=True)
    nodes = [f"{i}\t{i},{(i + 7) % 60}\t{i % 3}" for i in range(60)]
    links = [f"{i}\t{(i + 1) % 60}" for i in range(60)]
    for name, header, lines in (("node_feature_label", "id\tfeature\tlabel", nodes), ("graph_edges", "id\tid", links)):
        (folder / f"out1_{name}.txt").write_text("\n".join([header, *lines, ""]))
    part = np.arange(60) // 12
    for number in range(10):
        masks = {"train_mask": part < 3, "val_mask": part == 3, "test_mask": part == 4}
        np.savez(folder / f"film_split_0.6_0.2_{number}.npz", **masks)


def peptides_files(folder: Path) -> None:
    """Write 4, 2 and 2 rings of 5 atoms with 11 quantities each, as the authors do."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    for name, count in {"train": 4, "val": 2, "test": 2}.items():
        graphs = [
            (
                torch.randint(4, (5, 9), generator=draw),
                torch.randint(3, (5, 3), generator=draw),
                torch.stack([torch.arange(5), torch.arange(5).roll(1)]),
                torch.randn(1, 11, generator=draw),
            )
            for _ in range(count)
        ]
        torch.save(graphs, folder / f"{name}.pt")


def zinc_files(folder: Path) -> None:
    """Write rings of 5 atoms as dense matrices of bonds, of which the indices select 4, 2 and 2."""
    folder.mkdir(parents=True)
    bonds = torch.eye(5, dtype=torch.long).roll(1, 0)
    for name, count in {"train": 4, "val": 2, "test": 2}.items():
        molecules = [
            {
                "atom_type": torch.arange(5) % 3,
                "bond_type": bonds + bonds.t(),
                "logP_SA_cycle_normalized": torch.tensor([number - 0.5]),
            }
            for number in range(count + 1)
        ]
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(molecules))
        (folder / f"{name}.index").write_text(",".join(map(str, range(1, count + 1))) + "\n")


def tu_files(folder: Path) -> None:
    """Write 12 rings of 4 nodes as TU Dortmund does, with node labels for NCI1, and the folds of 12 graphs."""
    name, nodes = folder.name, np.arange(48)
    next_one = nodes // 4 * 4 + (nodes + 1) % 4
    columns = {
        "A": [f"{a + 1}, {b + 1}" for a, b in [*zip(nodes, next_one, strict=True), *zip(next_one, nodes, strict=True)]],
        "graph_indicator": nodes // 4 + 1,
        "graph_labels": np.arange(12) // 4 % (3 if name == "IMDB-MULTI" else 2),
    }
    if name == "NCI1":
        columns["node_labels"] = nodes % 3
    (folder / "raw").mkdir(parents=True)
    for key, values in columns.items():
        (folder / "raw" / f"{name}_{key}.txt").write_text("".join(f"{value}\n" for value in values))
    folds = folder / "folds" / ("CHEMICAL" if name == "NCI1" else "COLLABORATIVE_DEGREE")
    folds.mkdir(parents=True)
    (folds / f"{name}_splits.json").write_text(json.dumps(errica()))


def ogb_files(folder: Path) -> None:
    """Write the raw files of 30 molecules where OGB finds them."""
    stored(folder.name.replace("_", "-"), folder.parents[1])


def graphland_files(folder: Path) -> None:
    """Write a ring of 60 nodes in the tables of GraphLand, with features of each kind; the first target is unknown."""
    folder.mkdir(parents=True)
    draw, N, is_price = np.random.default_rng(0), 60, folder.name == "hm-prices"
    y = draw.normal(size=N) if is_price else np.arange(N) % 2.0
    names = {f"{kind}_features_names": [kind[0]] for kind in ("categorical", "fraction")}
    info = {"numerical_features_names": ["n", "f"], **names, "target_name": "y"}
    (folder / "info.yaml").write_text(json.dumps({**info, "task": "regression" if is_price else "classification"}))
    features = {"n": draw.normal(size=N), "f": draw.random(N), "c": np.arange(N) % 3}
    part = np.arange(N) * 10 // N
    tables = {
        "features": pd.DataFrame(features),
        "targets": pd.DataFrame({"y": [None, *y[1:]]}),
        "split_masks_RL": pd.DataFrame({"train": part < 1, "val": part == 1, "test": part > 1}),
    }
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv")
    edges = pd.DataFrame({"source": range(N), "target": np.roll(range(N), 1)})
    edges.to_csv(folder / "edgelist.csv", index=False)


RING = "60 nodes, 120 edges, 3 node classes; 36 / 12 / 12 nodes"
HETEROPHILOUS = "60 nodes, 120 edges, 2 node classes; 36 / 12 / 12 nodes"
AMAZON, COAUTHOR = "Amazon/{0}/raw/amazon_electronics_{1}.npz", "Coauthor/{0}/raw/ms_academic_{1}.npz"
PLATONOV, MOLECULES = "HeterophilousGraphDataset/{0}/raw/{0}.npz", "150 nodes, 300 edges, 2 {}; 20 / 5 / 5 graphs"
Row = tuple[Callable[[Path], Any], str, str, int, str]
NAMED: dict[str, Row] = {  # function that writes the raw files, their path, sizes, number of splits, metric
    "photo": (shchur_file, AMAZON.format("Photo", "photo"), RING, 1, "accuracy"),
    "computers": (shchur_file, AMAZON.format("Computers", "computers"), RING, 1, "accuracy"),
    "cs": (shchur_file, COAUTHOR.format("CS", "cs"), RING, 1, "accuracy"),
    "physics": (shchur_file, COAUTHOR.format("Physics", "phy"), RING, 1, "accuracy"),
    "chameleon": (platonov_file, "heterophilous/chameleon_filtered.npz", HETEROPHILOUS, 10, "accuracy"),
    "squirrel": (platonov_file, "heterophilous/squirrel_filtered.npz", HETEROPHILOUS, 10, "accuracy"),
    "tolokers": (platonov_file, PLATONOV.format("tolokers"), HETEROPHILOUS, 10, "roc_auc"),
    "minesweeper": (platonov_file, PLATONOV.format("minesweeper"), HETEROPHILOUS, 10, "roc_auc"),
    "questions": (platonov_file, PLATONOV.format("questions"), HETEROPHILOUS, 10, "roc_auc"),
    "roman-empire": (platonov_file, PLATONOV.format("roman_empire"), HETEROPHILOUS, 10, "accuracy"),
    "amazon-ratings": (platonov_file, PLATONOV.format("amazon_ratings"), HETEROPHILOUS, 10, "accuracy"),
    **{
        f"graphland-{name}": (
            *(graphland_files, f"GraphLandDataset/{name}/raw/{name}"),
            *(f"60 nodes, 120 edges, {target}; 5 / 6 / 48 nodes", 1, metric),
        )
        for name, target, metric in (
            ("hm-categories", "2 node classes", "accuracy"),
            ("artnet-exp", "2 node classes", "average_precision"),
            ("hm-prices", "1 node target", "r2"),
        )
    },
    "wikics": (wikics_file, "WikiCS/raw/data.json", RING.replace("36 / 12 / 12", "15 / 30 / 15"), 2, "accuracy"),
    "actor": (actor_files, "Actor/raw", RING, 10, "accuracy"),
    "peptides-struct": (
        *(peptides_files, "LRGBDataset/peptides-struct/raw"),
        *("40 nodes, 40 edges, 11 graph targets; 4 / 2 / 2 graphs", 1, "mae"),
    ),
    "zinc": (zinc_files, "ZINC/raw", "40 nodes, 80 edges, 1 graph target; 4 / 2 / 2 graphs", 1, "mae"),
    "nci1": (tu_files, "TUDataset/NCI1", "48 nodes, 96 edges, 2 graph classes; 6 / 2 / 4 graphs", 3, "accuracy"),
    "imdb-multi": (
        *(tu_files, "TUDataset/IMDB-MULTI"),
        *("48 nodes, 96 edges, 3 graph classes; 6 / 2 / 4 graphs", 3, "accuracy"),
    ),
    "molhiv": (ogb_files, "ogb/ogbg_molhiv", MOLECULES.format("graph classes"), 1, "roc_auc"),
    "molbbbp": (ogb_files, "ogb/ogbg_molbbbp", MOLECULES.format("graph classes"), 1, "roc_auc"),
    "moltox21": (ogb_files, "ogb/ogbg_moltox21", MOLECULES.format("graph labels"), 1, "roc_auc"),
    "citeseer_heart": (
        *(citeseer_files, "."),
        "560 nodes, 763 edges, links; 763 / 44 / 89 links (44 / 89 pairs without one), 15 % of the test's links with "
        "an end that has no training link (4 src and 9 dst)",
        *(1, "mrr"),
    ),
}
NAMES = {"citeseer_heart": "citeseer-heart"}  # in results; of OGB with the prefix of its kind


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated", "ignore:.*keys that are not read", "ignore:n_quantiles", "ignore:.*all columns of the"
)
def test_a_data_set_is_read_by_its_name_with_its_split_and_metric(tmp_path: Path):
    for name, (write, files, expected, splits, metric) in NAMED.items():
        if write is ogb_files and find_spec("ogb") is None:
            continue
        write(tmp_path / files)
        result = task(tmp_path, f"dataset={name}")
        assert result.name == NAMES.get(name, f"ogbg-{name}" if write is ogb_files else name)
        assert (sizes(result), result.num_splits, result.objective.metric.name) == (expected, splits, metric), name


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
        ({"train": [0, 60]}, "train is not an array of node ids, expected integers from 0 to 59"),
        ({"test": [0.5]}, "test is not an array of node ids"),
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
        FileNotFoundError, match=r"split\.file=no\.npz is not a file, expected .* Amazon/Computers/splits/amaz"
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
