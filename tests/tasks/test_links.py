"""Link prediction: metrics against brute force and OGB's formulas, splits that leak, negatives, training."""

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected, negative_sampling
from torch_geometric.utils.random import erdos_renyi_graph

from gat_pyg.data import Task, links
from gat_pyg.models import GAT, LinkScores
from gat_pyg.sweeps.messages import sizes
from gat_pyg.tasks import negatives
from gat_pyg.tasks.links import LinkLabels, hits, mrr
from gat_pyg.tasks.metrics import RANKED
from gat_pyg.tasks.negatives import NonLinks, two_sides
from gat_pyg.training import Optimisation, PaperStopping, Resumable, TaskData, Transductive
from tests.training.loaders import pytestmark, trainer  # noqa: F401 (marks of this file)


def scores(seed: int) -> tuple[Tensor, Tensor]:
    """Scores of 1 to 40 links and 1 to 40 other pairs, with ties and beyond the range of float32's sigmoid."""
    draw = np.random.default_rng(seed)
    pos, neg = (draw.integers(-9, 9, draw.integers(1, 41)) * 10.0 ** (seed % 3) for _ in range(2))
    return torch.tensor(pos + 1.0).float(), torch.tensor(neg).float()


@pytest.mark.parametrize("seed", range(21))
def test_scores_of_random_rankings_are_those_of_scikit_learn_and_of_brute_force(seed: int) -> None:
    pos, neg = scores(seed)
    out, y = torch.cat([pos, neg]), torch.tensor([1] * len(pos) + [0] * len(neg))
    assert RANKED["roc_auc"](out, y) == pytest.approx(roc_auc_score(y, out), abs=1e-6)
    assert RANKED["average_precision"](out, y) == pytest.approx(average_precision_score(y, out), abs=1e-6)

    for k in (1, 3, 20):  # OGB: above the k-th negative; 1 if there are fewer
        bar = sorted(neg.tolist(), reverse=True)[k - 1] if len(neg) >= k else float("-inf")
        assert hits(pos, neg, k) == pytest.approx(sum(p > bar for p in pos.tolist()) / len(pos))

    ranks = [1 + int((neg > p).sum() + (neg >= p).sum()) / 2 for p in pos]
    assert mrr(pos, neg) == pytest.approx(np.mean(1 / np.array(ranks)))


def communities(directed: bool = False) -> Data:
    """Two groups of 20 nodes, each densely linked, and features that do not show them."""
    torch.manual_seed(0)
    one, two = erdos_renyi_graph(20, 0.4, directed), erdos_renyi_graph(20, 0.4, directed) + 20
    return Data(torch.randn(40, 6), torch.cat([one, two, one[:, :5], torch.tensor([[3], [3]])], 1))


def pairs(index: Tensor) -> set[tuple[int, int]]:
    return {(int(src), int(dst)) for src, dst in index.t()}


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("disjoint", [0.0, 0.3])
def test_links_partition_the_graph(directed: bool, disjoint: float) -> None:
    graph = communities(directed)
    task = links(graph, val=0.1, test=0.2, disjoint=disjoint, seed=3)
    data, all_links = task.train[0], pairs(graph.edge_index) - {(3, 3)}
    chosen = {key: pairs(data.edge_label_index[:, data[f"{key}_mask"] & (data.y == 1)]) for key in ("val", "test")}
    if not directed:
        assert is_undirected(data.edge_index)
        chosen = {key: results | {(dst, src) for src, dst in results} for key, results in chosen.items()}
    train = pairs(data.edge_label_index[:, data.train_mask])
    both = train if directed else train | {(dst, src) for src, dst in train}
    parts = [*chosen.values(), pairs(data.edge_index), *([both] if disjoint else [])]
    assert sum(map(len, parts)) == len(all_links) and set().union(*parts) == all_links
    assert len(both & pairs(data.edge_index)) == (0 if disjoint else len(both))
    assert not pairs(data.edge_label_index[:, data.y == 0]) & all_links


def test_a_seed_determines_the_split_and_leaves_the_generators_alone() -> None:
    graph = communities()
    state = torch.get_rng_state()
    first, again, other = (links(graph, seed=seed).train[0].edge_label_index for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("disjoint", [0.0, 0.3])
def test_negatives_are_new_in_each_draw_and_no_training_link(disjoint: float) -> None:
    task = links(communities(), disjoint=disjoint)
    data = task.train[0]
    positive = data.edge_label_index[:, data.train_mask]
    known = pairs(data.edge_index) | pairs(positive) | pairs(positive.flip(0))
    drawn = []
    for _ in range(20):
        step = task.objective.example(data, "train")
        n = int(data.train_mask.sum())
        assert torch.equal(step.edge_label_index[:, :n], positive) and step.y.tolist() == [1] * n + [0] * n
        drawn.append(pairs(step.edge_label_index[:, n:]))
        assert not drawn[-1] & known and all(src != dst for src, dst in drawn[-1])
    assert all(one != other for one, other in pairwise(drawn))


@pytest.mark.parametrize("dense", [10_000, 0])  # a mask of all pairs, or the sorted links
def test_negatives_are_those_of_pyg_in_the_same_state_of_the_generator(
    dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(negatives, "DENSE", dense)
    compared = 0
    for seed in range(100):
        draw = torch.Generator().manual_seed(seed)
        N, num = (int(torch.randint(2, 30, (), generator=draw)) for _ in range(2))
        known = torch.randint(N, (2, int(torch.randint(N * N, (), generator=draw))), generator=draw)
        if int((known[0] != known[1]).sum()) >= N * (N - 1):
            continue
        random.seed(seed)
        expected = [negative_sampling(known, N, num) for _ in range(2)]
        random.seed(seed)
        links = NonLinks(known, N)
        assert all(torch.equal(links.draw(num), pairs) for pairs in expected)
        compared += 1
    assert compared > 80


@pytest.mark.parametrize("dense", [10_000, 0])
def test_a_graph_with_most_of_all_links_has_negatives(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negatives, "DENSE", dense)
    everything = torch.cartesian_prod(torch.arange(5), torch.arange(5)).t()
    known = everything[:, 3:].repeat(1, 2)  # all but (0, 0), (0, 1) and (0, 2), twice
    assert negative_sampling(known, 5, 2).numel() == 0
    assert pairs(NonLinks(known, 5).draw(2)) == {(0, 1), (0, 2)}
    assert NonLinks(everything, 5).draw(2).shape == (2, 0)
    assert NonLinks(known[:, :0], 1).draw(2).shape == NonLinks(known, 5).draw(0).shape == (2, 0)


@pytest.mark.filterwarnings("ignore:There are not enough negative edges")
def test_a_graph_of_all_links_says_so() -> None:
    everything = torch.cartesian_prod(torch.arange(12), torch.arange(12)).t()
    with pytest.raises(ValueError, match="dense: val_mask has links alone: nearly all pairs of the 12 nodes are links"):
        links(Data(torch.eye(12), everything), "dense")


def test_the_known_links_are_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Tensor] = []

    class Counted(NonLinks):
        def __init__(self, known: Tensor, num_nodes: int, sides: Tensor | None) -> None:
            built.append(known)
            super().__init__(known, num_nodes, sides)

    monkeypatch.setattr(negatives, "NonLinks", Counted)
    task = links(communities())
    data = task.train[0]
    for _ in range(3):
        task.objective.example(data, "train")
    assert len(built) == 1
    data.train_mask[data.train_mask.nonzero()[0]] = False  # one link less
    task.objective.example(data, "train")
    assert len(built) == 2 and built[1].size(1) == built[0].size(1) - 2


GRID = torch.arange(36).view(6, 6)
SIDED: dict[str, tuple[list[list[int]] | Tensor, int, list[int] | None]] = {
    "ids of one side below those of the other": ([[0, 0, 1], [2, 3, 3]], 5, [0, 0, 1, 1, -1]),
    "in both directions": ([[0, 0, 1, 2, 3, 3], [2, 3, 3, 0, 0, 1]], 4, [0, 0, 1, 1]),
    "two components": ([[0, 1, 4, 5], [3, 2, 0, 1]], 6, [0, 0, 1, 1, 1, 1]),
    "mixed ids": (torch.cartesian_prod(torch.arange(0, 30, 2), torch.arange(1, 30, 2)).t()[:, 9:], 30, [0, 1] * 15),
    "a tree": ([[0, 1, 1, 2], [1, 2, 3, 4]], 5, None),
    "a grid": (torch.cat([torch.stack([g[:-1], g[1:]]).reshape(2, -1) for g in (GRID, GRID.t())], 1), 36, None),
    "a triangle": ([[0, 1, 2], [1, 2, 0]], 3, None),
    "a loop": ([[0, 0, 1, 1], [2, 3, 3, 1]], 4, None),
    "all links of two sides": ([[0, 0, 1, 1], [2, 3, 2, 3]], 4, None),
    "none": (torch.empty(2, 0), 3, None),
}


@pytest.mark.parametrize("case", SIDED)
def test_sides_are_those_of_a_bipartite_graph_and_of_no_tree_or_grid(case: str) -> None:
    edges, N, expected = SIDED[case]
    sides = two_sides(torch.as_tensor(edges).long(), N)
    assert (sides is None) if expected is None else torch.equal(sides, torch.as_tensor(expected))


@pytest.mark.parametrize("form", ["both directions", "to users", "mixed ids"])
@pytest.mark.parametrize(("dense", "kind"), [(10_000, "auto"), (0, "source"), (10_000, "any")])
def test_negatives_of_users_and_items_join_a_user_of_a_link_and_an_item(
    form: str, dense: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(negatives, "DENSE", dense)
    users, items, draw = 30, 40, torch.Generator().manual_seed(0)
    chosen = torch.randperm(users * items, generator=draw)[:250]
    edges = torch.stack([chosen // items, users + chosen % items])
    if form == "mixed ids":
        edges = torch.randperm(users + items, generator=draw)[edges]
    is_user = torch.zeros(users + items).bool().index_fill_(0, edges[0], True)
    directed = form == "to users"
    edges = edges.flip(0) if directed else torch.cat([edges, edges.flip(0)], 1)
    task = links(Data(torch.randn(users + items, 6), edges), val=0.2, test=0.2, negatives=kind)
    data, known = task.train[0], pairs(edges)
    steps = [task.objective.example(data, split) for split in ("train", "train", "val", "test")]
    for step in steps:
        src, dst = step.edge_label_index
        assert (is_user[src] != is_user[dst]).all() and int((step.y == 0).sum()) == int((step.y == 1).sum())
        assert not directed or is_user[dst].all()
        ranked = torch.where(is_user[src] != directed, src, dst)  # links begin at the nodes of one side
        of_links, of_others = (ranked[step.y == label].sort().values for label in (1, 0))
        assert torch.equal(of_links, of_others) == (kind != "any")
    drawn = [pairs(step.edge_label_index[:, step.y == 0]) for step in steps]
    assert drawn[0] != drawn[1] and not (drawn[2] & drawn[3]) and not (drawn[2] | drawn[3]) & known
    train = pairs(data.edge_label_index[:, data.train_mask]) | pairs(data.edge_index)
    assert len(drawn[2]) == int((steps[2].y == 0).sum())  # each once
    assert not drawn[0] & (train | {(dst, src) for src, dst in train})
    assert "links between the 30 and 40 nodes of a bipartite graph" in sizes(task) or form != "both directions"

    one_side = data.clone()
    one_side.edge_label_index[:, (data.test_mask & (data.y == 0)).nonzero()[0]] = is_user.nonzero()[:2]
    with pytest.warns(UserWarning, match="1 of 100 pairs without a link in val_mask and test_mask join two"):
        Task("own", [one_side], [one_side], [one_side], 6, LinkLabels(4))


def leak(data: Data, split: str, reverse: bool = False) -> None:
    link = data.edge_label_index[:, data[f"{split}_mask"] & (data.y == 1)][:, :1]
    data.edge_index = torch.cat([data.edge_index, link.flip(0) if reverse else link], 1)


def leak_by_training(data: Data) -> None:
    number = data.edge_index.size(1)
    first, second = ((data[f"{key}_mask"] & (data.y == 1)).nonzero()[0] for key in ("train", "test"))
    data.edge_label_index[:, first] = data.edge_label_index[:, second].flip(0)
    assert data.edge_index.size(1) == number


def linked_negative_reversed(data: Data) -> None:
    data.edge_label_index[:, (data.test_mask & (data.y == 0)).nonzero()[0]] = data.edge_label_index[
        :, (data.val_mask & (data.y == 1)).nonzero()[0]
    ].flip(0)


def repeat(data: Data) -> None:
    data.edge_label_index[:, data.test_mask.nonzero()[0]] = data.edge_label_index[:, data.val_mask.nonzero()[0]]


def linked_negative(data: Data) -> None:
    data.edge_label_index[:, (data.test_mask & (data.y == 0)).nonzero()[0]] = data.edge_index[:, :1]


BROKEN: dict[str, Callable[[Data], object]] = {
    "1 links of val_mask are message-passing edges": lambda data: leak(data, "val"),
    "1 links of test_mask are message-passing edges": lambda data: leak(data, "test"),
    "1 of 7 links of val_mask are .* in the other direction, so": lambda data: leak(data, "val", reverse=True),
    "1 of 15 links of test_mask are .* in the other direction, so": lambda data: leak(data, "test", reverse=True),
    "1 of 15 links of test_mask are .* links of another split in the other": leak_by_training,
    "1 pairs with y = 0 are links, expected none": linked_negative_reversed,
    "1 links of edge_label_index are repeated": repeat,
    "1 pairs with y = 0 are links": linked_negative,
    "edge_label_index: edge_index holds 99": lambda data: data.edge_label_index[0].fill_(99),
    "edge_label_index is missing": lambda data: data.pop("edge_label_index"),
    "y is torch.int64": lambda data: data.y.fill_(2),
    "val_mask has only links or only pairs": lambda data: data.val_mask.logical_and_(data.y == 1),
    "train_mask has pairs with y = 0": lambda data: data.y.index_fill_(0, data.train_mask.nonzero()[:1, 0], 0),
    "overlap in": lambda data: data.val_mask.logical_or_(data.test_mask),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_split_is_an_error(message: str) -> None:
    data = links(communities()).train[0].clone()
    BROKEN[message](data)
    with pytest.raises(ValueError, match=message):
        Task("broken", [data], [data], [data], 6, LinkLabels(4))


def test_reverse_links_are_counted_in_a_warning_unless_most_edges_have_none() -> None:
    one_way = torch.triu_indices(12, 12, 1)[:, ::2]
    data = links(Data(torch.randn(12, 6), one_way), val=4, test=5).train[0].clone()
    for number in range(5):
        test = data.edge_label_index[:, data.test_mask & (data.y == 1)]
        data.edge_index = torch.cat([data.edge_index, test[:, number : number + 1].flip(0)], 1)
        if number == 1:
            Task("directed", [data], [data], [data], 6, LinkLabels(4))  # two of five may be chance
    with pytest.warns(UserWarning, match="broken: 5 of 5 links of test_mask are .* make the graph undirected"):
        Task("broken", [data], [data], [data], 6, LinkLabels(4))
    almost = torch.cat([one_way, one_way[:, 1:].flip(0)], 1)
    with pytest.warns(
        UserWarning, match="links: [45] of [45] links of (val|test)_mask are .* make the graph undirected"
    ):
        links(Data(torch.randn(12, 6), almost), val=4, test=5)


def test_links_of_a_graph_without_features_have_the_ids_of_the_nodes() -> None:
    graph = communities()
    task = links(Data(edge_index=graph.edge_index, num_nodes=41))
    assert torch.equal(task.train[0].x[:, 0], torch.arange(41.0))


def test_unknown_scores_and_several_graphs_are_errors() -> None:
    with pytest.raises(ValueError, match="ranked_by is 'auc', expected one of roc_auc"):
        LinkLabels(4, "auc")
    with pytest.raises(ValueError, match="there are several"):
        links([communities(), communities()])


def encoder() -> GAT:
    return GAT(6, [8], 8, heads=[2, 1], dropout=0.0)


@pytest.mark.parametrize("make", [encoder, lambda: LinkScores(encoder(), 8, "mlp")], ids=["inner product", "mlp"])
def test_training_finds_the_communities_and_moves_every_parameter(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    task, model = links(communities(), channels=8, val=0.1, test=0.2), make()
    before = [parameter.clone() for parameter in model.parameters()]
    module = Transductive(model, task.objective, Optimisation(lr=0.02))
    callbacks = [PaperStopping(100, "accuracy"), Resumable(None, seed=5)]
    trainer(*callbacks, epochs=30).fit(module, datamodule=TaskData(task))
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    data = task.objective.example(task.test[0], "test")
    with torch.no_grad():
        out, y = task.objective.rows(module.eval()(data), data, "test")
    result = task.objective.metrics({"test": task.objective.statistics(out, y).tolist()})
    assert result["test_roc_auc"] == pytest.approx(roc_auc_score(y, out), abs=1e-6)
    assert result["test_average_precision"] == pytest.approx(average_precision_score(y, out), abs=1e-6)
    assert result["test_roc_auc"] > 0.65
