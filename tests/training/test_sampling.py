"""Neighbours drawn in plain torch: every set of them as often as any other, and PyG's batches of them."""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import k_hop_subgraph

from gat_pyg import GAT
from gat_pyg.graph.edges import Edges
from gat_pyg.runs.result import read
from gat_pyg.training.loading import TaskData
from gat_pyg.training.neighbours import TorchSampler, draw
from tests.graphs import SQUARE, Graph, random
from tests.laws import assert_close
from tests.models.test_models import BLOCKS
from tests.processes import python
from tests.training.loaders import one_graph


def sampled(graph: Graph, seeds: list[int], num_neighbors: list[int]) -> object:
    sampler = TorchSampler(graph.index, graph.num_dst, num_neighbors)
    return sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor(seeds, dtype=torch.long)))


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_every_set_of_neighbours_is_as_likely(num: int):
    torch.manual_seed(0)
    rowptr = torch.tensor([0, 2, 7])  # the second node has five
    place, whose = draw(rowptr, torch.ones(20_000, dtype=torch.long), num)
    assert torch.equal(whose, torch.arange(20_000).repeat_interleave(num))
    drawn = [tuple(sorted(some)) for some in place.view(-1, num).tolist()]
    sets = list(itertools.combinations(range(2, 7), num))
    assert set(drawn) == set(sets)
    assert chisquare([drawn.count(some) for some in sets]).pvalue > 0.001


@pytest.mark.parametrize("graph", SQUARE, ids=str)
@pytest.mark.parametrize("num", [0, 1, 2, 5, -1])
def test_in_edges_are_drawn_once_and_as_many_as_there_are(graph: Graph, num: int):
    edges = Edges.from_index(graph.index, graph.num_dst, graph.num_dst)
    nodes = torch.arange(graph.num_dst).flip(0)
    place, whose = draw(edges.rowptr, nodes, num)
    assert place.unique().numel() == place.numel()
    assert torch.equal(edges.dst[place].long(), nodes[whose])
    degree = edges.rowptr.diff()[nodes]
    assert torch.equal(whose.bincount(minlength=graph.num_dst), degree if num < 0 else degree.clamp(max=num))


@pytest.mark.parametrize("graph", SQUARE, ids=str)
@pytest.mark.parametrize("num_neighbors", [[-1, -1], [2, 1], [0, 3], [3, 3, 3]])
def test_a_batch_is_edges_of_the_graph_hop_by_hop(graph: Graph, num_neighbors: list[int]):
    seeds = list(range(0, graph.num_dst, 2))
    out = sampled(graph, seeds, num_neighbors)
    ordered = Edges.from_index(graph.index, graph.num_dst, graph.num_dst)
    assert torch.equal(out.node[out.row], ordered.src[out.edge].long())
    assert torch.equal(out.node[out.col], ordered.dst[out.edge].long())
    assert out.node[: len(seeds)].tolist() == seeds and out.node.unique().numel() == out.node.numel()
    nodes, edges = [0, *itertools.accumulate(out.num_sampled_nodes)], [0, *itertools.accumulate(out.num_sampled_edges)]
    for hop in range(len(num_neighbors)):
        row, col = out.row[edges[hop] : edges[hop + 1]], out.col[edges[hop] : edges[hop + 1]]
        assert ((col >= nodes[hop]) & (col < nodes[hop + 1])).all() and (row < nodes[hop + 2]).all()
    again = sampled(graph, seeds, [-1] * len(num_neighbors))  # what an earlier batch noted is gone
    if num_neighbors == [-1, -1]:
        near, *_ = k_hop_subgraph(seeds, 2, graph.index, num_nodes=graph.num_dst) if seeds else (torch.tensor([]),)
        assert sorted(again.node.tolist()) == near.tolist() and torch.equal(again.edge, out.edge)


@pytest.mark.sparse
@pytest.mark.skipif(not (WITH_PYG_LIB or WITH_TORCH_SPARSE), reason="PyG's own sampler needs pyg-lib or torch_sparse")
def test_a_loader_gives_what_pygs_gives():
    graph = random(60, 60, 400)
    data = Data(torch.randn(60, 3), graph.index, edge_attr=torch.arange(400.0), y=torch.arange(60))
    options = {"input_nodes": torch.arange(5, 25), "batch_size": 6}
    ours = list(NodeLoader(data, TorchSampler(graph.index, 60, [-1, -1]), **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = list(NeighborLoader(data, [-1, -1], **options))
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one.batch_size == other.batch_size and set(other.keys()) <= set(one.keys())
        assert torch.equal(one.input_id, other.input_id)
        assert torch.equal(one.n_id[: one.batch_size], other.n_id[: other.batch_size])
        assert sorted(one.n_id.tolist()) == sorted(other.n_id.tolist())
        if WITH_PYG_LIB:
            assert one.num_sampled_nodes == other.num_sampled_nodes and one.num_sampled_edges == other.num_sampled_edges
        assert sorted(one.edge_attr.tolist()) == sorted(other.edge_attr.tolist())
        assert torch.equal(one.edge_attr.long(), one.e_id) and torch.equal(one.y, one.n_id)
        assert torch.equal(graph.index[:, one.e_id], one.n_id[one.edge_index])


@pytest.mark.parametrize("num_neighbors", [[], [3, -2]])
def test_bad_numbers_of_neighbours_are_errors(num_neighbors: list[int]):
    with pytest.raises(ValueError, match="expected a number for each hop, or -1 for all neighbours"):
        TorchSampler(torch.zeros(2, 0, dtype=torch.long), 3, num_neighbors)


# One layer after the other ------------------------------------------------------------------------------------------

DEEP: dict[str, Any] = {"hidden_channels": 2, "heads": 2, "num_layers": 3, "residual": "identity"}
MODELS: dict[str, dict[str, Any]] = {
    "GAT": {},
    "skips": {"hidden_channels": [4, 8], "heads": [2, 1, 2], "residual": [False, True, True]},
    "authors' form": {"reproduction": True},
    "edge features": {"edge_dim": 1},
    "GATv2's": {"mechanism": "gatv2"},
    "jumps": {**DEEP, "jk": "cat", "norm": "batch"},
    "maximum": {**DEEP, "jk": "max"},
    "last": {**DEEP, "conv": "gatv2", "jk": "last"},
    "blocks": {
        **DEEP,
        **BLOCKS,
        "conv": "transformer",
        "norm": "batch",
        "symmetric_norm": True,
        "initial_residual": 0.5,
    },
    "embeddings": {**DEEP, "out_channels": None, "norm": "batch", "norm_first": True, "symmetric_norm": True},
}


@pytest.mark.parametrize("how", MODELS)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_layer_by_layer_gives_what_the_whole_graph_gives(how: str, batch_size: int):
    torch.manual_seed(0)
    graph = random(40, 40, 300)
    data = Data(torch.randn(40, 6), graph.index, edge_attr=torch.randn(300, 1) if how == "edge features" else None)
    options = {"out_channels": 3, "hidden_channels": [4], "heads": [2, 1], "dropout": 0.6, **MODELS[how]}
    model, data = (
        GAT(6, **options).double(),
        data.apply(lambda each: each.double() if each.is_floating_point() else each),
    )
    for _ in range(3):
        model(data.x, data.edge_index, data.edge_attr)  # running means of the batch norm
    model.eval()
    loader = NodeLoader(data, TorchSampler(graph.index, 40, [-1]), batch_size=batch_size, shuffle=True)
    assert_close(model.inference(loader), model(data.x, data.edge_index, data.edge_attr))


class Peak(TorchDispatchMode):
    """The peak memory of the tensors that torch's operations read or return, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.now = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.bytes = max(self.bytes, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return out

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def test_layer_by_layer_takes_no_more_memory_for_more_layers():
    graph = random(4000, 4000, 12_000)
    data = Data(torch.randn(4000, 64), graph.index)
    loader = NodeLoader(data, TorchSampler(graph.index, 4000, [-1]), batch_size=100)
    peaks = []
    for layers in (1, 2, 4):
        with Peak() as peak:
            GAT(64, [32] * (layers - 1), 64, [2] * (layers - 1) + [1]).eval().inference(loader)
        peaks.append(peak.bytes / data.x.nbytes)
    assert peaks[0] < 3 and max(peaks) < 4  # x, the outputs of a layer and of the one before, and a batch
    assert max(peaks[1:]) < 1.05 * min(peaks[1:])


def test_loaders_and_models_unfit_for_inference_by_layers_are_errors():
    graph = random(40, 40, 300)
    data, model = Data(torch.randn(40, 6), graph.index), GAT(6, [4], 3, [2, 1])
    sampler = TorchSampler(graph.index, 40, [-1])
    with pytest.raises(ValueError, match=r"in training mode, in which dropout is active\. Call model.eval\(\) first"):
        model.inference(NodeLoader(data, sampler, batch_size=8))
    with pytest.raises(ValueError, match="The loader has 5 of 40 nodes. Leave out its input_nodes"):
        model.eval().inference(NodeLoader(data, sampler, torch.arange(5), batch_size=8))
    with pytest.raises(ValueError, match="more than one hop"):
        model.inference(NodeLoader(data, TorchSampler(graph.index, 40, [-1, -1]), batch_size=8))


# Seeds --------------------------------------------------------------------------------------------------------------


def test_an_epoch_has_each_seed_once_in_an_order_of_its_own():
    task = one_graph()
    data = TaskData(task, batch_size=7, num_neighbors=[2, 2])
    loader, orders = data.train_dataloader(), []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        orders.append([node for batch in loader for node in batch.n_id[: batch.batch_size].tolist()])
        assert sorted(orders[-1]) == list(range(0, 60, 3))
    assert orders[0] != orders[1] != orders[2]
    val = [node for batch in data.val_dataloader() for node in batch.n_id[: batch.batch_size].tolist()]
    assert sorted(val) == list(range(1, 60, 3))


SMALL_MEMORY = """
import re, resource, sys
from pathlib import Path
import gat_pyg.run
used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + {room}, used + {room}))
try:
    bytearray({features})
except MemoryError:
    sys.argv = ["gat-pyg", "dataset=file", "dataset.path=big", "loader=neighbor", "training.max_epochs=1"]
    sys.argv += ["split.per_class=20", "split.val=500", "split.test=1000"]
else:
    sys.exit("there is room for the features")
gat_pyg.run.main()
"""


@pytest.mark.weekly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the memory as Linux counts it")
def test_features_that_exceed_the_memory_stay_on_disk(tmp_path: Path):
    N, F, room = 50_000, 4000, 500 * 2**20  # 763 MiB of features; torch's own buffers need some hundred
    folder = tmp_path / "big"
    folder.mkdir()
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.float32, shape=(N, F))  # a file of holes
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, N)
    x[np.arange(0, N, 100), y[::100]] = 1.0
    np.save(folder / "y.npy", y)
    np.save(folder / "edge_index.npy", generator.integers(0, N, (2, 2 * N)))
    del x
    code = SMALL_MEMORY.format(room=room, features=4 * N * F)
    process = python("-c", code, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    (result,) = read(tmp_path / "outputs" / "results.jsonl")
    assert result.epochs == 1


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import sampling

    small = ["--nodes=3000", "--edges=20000", "--batches=2", "--rounds=1", f"--out={tmp_path}/it.json"]
    assert sampling.main(small) == 0
    record = json.loads((tmp_path / "it.json").read_text())
    assert record["wrong"] == [] and {row["sampler"] for row in record["rows"]} >= {"ours"}


def test_the_benchmark_of_inference_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import inference

    for way in inference.WAYS:
        assert inference.main(["--way", way, "--nodes=300", "--edges=2000", "--layers=2", "--batch-size=50"]) == 0
        assert json.loads(capsys.readouterr().out)["off"] <= inference.NEAR
