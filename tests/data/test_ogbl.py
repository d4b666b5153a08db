"""OGB's links to predict, a small set in its layout: the split, negatives, batches of links and Hits@20."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from gat_pyg.data import ogbl
from gat_pyg.tasks.links import _keys
from gat_pyg.trained.predict import predict
from gat_pyg.training import TaskData, batching
from gat_pyg.training.epoch_seeds import seed_draws, seed_epoch
from tests.commands import result_of
from tests.data.test_ogbn import table

pytestmark = pytest.mark.skipif(find_spec("ogb") is None, reason="ogb is not installed")
N, SIZES = 40, {"train": (100, 0), "valid": (30, 25), "test": (30, 27)}  # links and negatives


def stored(root: Path) -> dict[str, dict[str, Tensor]]:
    """The raw files of a graph of 40 nodes, as ogb's archive has them; returns the split."""
    folder = root / "ogb" / "ogbl_ddi"
    (folder / "raw").mkdir(parents=True)
    (folder / "split" / "target").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").touch()
    pairs = torch.triu_indices(N, N, 1).t()
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    sizes = [size for sizes in SIZES.values() for size in sizes]
    edges = iter(pairs[: sum(sizes)].split(sizes))
    split = {part: {"edge": next(edges), "edge_neg": next(edges)} for part in SIZES}
    del split["train"]["edge_neg"]
    for part, values in split.items():  # as ogb saves them: pickled arrays of numpy
        torch.save({key: value.numpy() for key, value in values.items()}, folder / "split" / "target" / f"{part}.pt")
    table(folder / "raw" / "edge.csv.gz", split["train"]["edge"].numpy())
    table(folder / "raw" / "num-node-list.csv.gz", np.array([[N]]))
    table(folder / "raw" / "num-edge-list.csv.gz", np.array([[SIZES["train"][0]]]))
    return split


def test_the_split_is_ogbs_and_messages_pass_over_training_links_only(tmp_path: Path) -> None:
    split, data = stored(tmp_path), ogbl("ogbl-ddi", tmp_path).train[0]
    for part, mask in (("train", data.train_mask), ("valid", data.val_mask), ("test", data.test_mask)):
        pairs, y = data.edge_label_index[:, mask].t(), data.y[mask]
        assert torch.equal(pairs[y == 1], split[part]["edge"])
        assert torch.equal(pairs[y == 0], split[part].get("edge_neg", pairs[:0]))
    train = split["train"]["edge"].t()
    both = _keys(data, torch.cat([train, train.flip(0)], 1))
    assert torch.equal(_keys(data, data.edge_index).sort().values, both.sort().values)
    assert data.x.tolist() == [[float(node)] for node in range(N)]


@pytest.mark.parametrize("num_links", [10, 33, 100, 1000])
def test_batches_have_each_link_once_an_epoch_and_as_many_negatives(
    num_links: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path)
    task = ogbl("ogbl-ddi", tmp_path)
    graph = task.train[0]
    train = graph.edge_label_index[:, graph.train_mask]
    known = _keys(graph, torch.cat([graph.edge_index, train, train.flip(0)], 1))

    def steps(epoch: int, rank: int = 0, world: int = 1) -> list[Data]:
        monkeypatch.setattr(batching, "_place", lambda trainer: (rank, world))
        batches = TaskData(task, num_links=num_links).train_dataloader()
        batches.sampler.set_epoch(epoch)
        seed_draws(7, epoch)
        return [task.objective.example(batch, "train") for batch in batches]

    orders = []
    for epoch in (0, 1):
        alone, positives = steps(epoch), []
        for step in alone:
            assert step.edge_index is graph.edge_index  # the whole graph, with what is cached for it
            pairs, P = _keys(step, step.edge_label_index), int(step.y.sum())
            assert not step.y[P:].any() and num_links >= P
            assert len(pairs) == 2 * P or P < 9  # PyG tries three times to draw them
            assert not torch.isin(pairs[P:], known).any()
            positives += pairs[:P].tolist()
        orders.append(positives)
        for one, *parts in zip(alone, *(steps(epoch, rank, 3) for rank in range(3)), strict=True):
            for rank, part in enumerate(parts):  # the same pairs over three processes
                assert torch.equal(part.edge_label_index, one.edge_label_index[:, rank::3])
                assert torch.equal(part.y, one.y[rank::3])
        assert len(alone) == -(-100 // num_links)
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(_keys(graph, train).tolist())
    assert orders[0] != orders[1]


def test_the_negatives_of_rank_0_are_those_of_its_seeded_epoch() -> None:
    seed_epoch(7, 0, 3)
    state = random.getstate()
    seed_epoch(7, 1, 3)
    assert random.getstate() != state
    seed_draws(7, 3)
    assert random.getstate() == state


def test_the_command_scores_as_ogbs_evaluator(tmp_path: Path) -> None:
    from ogb.linkproppred import Evaluator

    stored(tmp_path)
    few = [
        "loader.batch_size=40",
        "training.max_epochs=3",
        "model.hidden_channels=[4]",
        "model.heads=[2,1]",
        "model.encoder={channels:8,init:orthogonal}",
    ]
    result = result_of(tmp_path / "o", "dataset=ogbl-ddi", "recipe=papers", f"data_root={tmp_path}", *few)
    data = ogbl("ogbl-ddi", tmp_path).train[0]
    out, y = predict(result.run_dir, data)[data.test_mask].logit(), data.y[data.test_mask]
    expected = Evaluator("ogbl-ddi").eval({"y_pred_pos": out[y == 1], "y_pred_neg": out[y == 0]})["hits@20"]
    assert result.metric == "hits@20" and result.value == pytest.approx(expected, abs=1e-5)


def test_ids_without_an_encoder_and_unknown_names_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path)
    with pytest.raises(SystemExit):
        result_of(tmp_path / "o", "dataset=ogbl-ddi", "model.encoder=null", f"data_root={tmp_path}")
    assert "has no features but the ids of its nodes, for learnt embeddings. Give" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'ogbg-molbace' is unknown: expected the name of a data set with links"):
        ogbl("ogbg-molbace", tmp_path)
