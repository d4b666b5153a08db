"""Labels of edges: losses by hand, the forms of the data, the split, embeddings of nodes, and the command."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch, Data

from gat_pyg.data import from_dataset, from_file
from gat_pyg.models import GAT, LinkScores
from gat_pyg.models.attention import attention_of
from gat_pyg.models.decoders import Perceptron
from gat_pyg.report.figures.graphs import graph_figure
from gat_pyg.report.figures.nodes import attention_figure, neighbourhood_figure
from gat_pyg.tasks.edges import EdgeLabels, EdgeMultiLabels
from gat_pyg.tasks.targets import EdgeTargets
from gat_pyg.trained.predict import predict
from gat_pyg.training import Inductive, TaskData, Transductive
from tests.commands import result_of
from tests.objectives import labelled_edges, quantities_of_edges


def edges(E: int = 200, N: int = 30, **others: Any) -> Data:
    """A graph of E edges, each in one direction, and features whose sign determines the labels below."""
    draw = torch.Generator().manual_seed(0)
    x, pairs = torch.randn(N, 4, generator=draw), torch.triu_indices(N, N, 1)
    return Data(x, pairs[:, torch.randperm(pairs.size(1), generator=draw)[:E]], **others)


def many(**others: Any) -> list[Data]:
    """Graphs of 6 to 13 nodes and 12 edges, with features of the edges."""
    draw, graphs = torch.Generator().manual_seed(0), []
    for N in range(6, 14):
        data = Data(torch.randn(N, 4, generator=draw), torch.randint(N, (2, 12), generator=draw), **others)
        graphs.append(data.update({"edge_attr": torch.randn(12, 3, generator=draw)}))
    return graphs


def equal(data: Data) -> Tensor:
    """1 for an edge whose two ends have the same sign, else 0."""
    src, dst = data.edge_index
    return ((data.x[src, 0] > 0) == (data.x[dst, 0] > 0)).long()


@pytest.mark.parametrize("make", [labelled_edges, quantities_of_edges])
def test_loss_gradient_and_score_are_those_by_hand(make):
    task, objective = make(), make().objective
    data = task.train[0]
    torch.manual_seed(0)
    model = LinkScores(GAT(6, [4], 5, [2, 1]), 5, "bilinear", out_channels=3)
    module = Transductive(model, objective)
    loss, _ = module._loss(data)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]

    def by_hand(mask: Tensor) -> tuple[Tensor, Tensor]:
        z, (src, dst) = model.model(data.x, data.edge_index), data.edge_index[:, mask]
        out = [z[i] @ model.decoder.weight @ z[j] + model.decoder.bias for i, j in zip(src, dst, strict=True)]
        return torch.stack(out), data.y[mask]

    model.zero_grad()
    out, y = by_hand(data.train_mask)
    if make is labelled_edges:
        expected = F.cross_entropy(out, y)
    else:
        known, wide = ~y.isnan(), y.double()
        mean = wide.nanmean(0)
        std = (wide - mean).square().nanmean(0).sqrt()
        expected = (out - ((wide - mean) / std).float())[known].square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)

    out, y = by_hand(data.test_mask)
    score = objective.score(module._counts(data, "test").detach())
    if make is labelled_edges:
        assert score == pytest.approx(100 * float((out.argmax(1) == y).double().mean()))
    else:
        error = out.detach() - (y.double() - mean) / std
        assert score == pytest.approx(float(error.square().nanmean(0).sqrt().mean()), rel=1e-5)


def test_labels_of_pairs_and_of_the_edges_themselves_are_read():
    data = edges()
    y = equal(data)
    own = from_dataset(edges(y=y), "own", val=20, test=30)
    assert own.objective == EdgeLabels(2) and torch.equal(own.train[0].edge_label_index, data.edge_index)
    assert [int(own.train[0][f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [150, 20, 30]
    pairs = torch.tensor([[0, 5, 9, 1], [3, 3, 0, 1]])
    masks = {f"{split}_mask": torch.arange(4) == i for i, split in enumerate(("train", "val", "test"))}
    labelled = {"edge_label_index": pairs, "edge_label": torch.tensor([1, 1, 0, 1]), **masks}
    task = from_dataset(edges(**labelled), "own")
    assert isinstance(task.objective, EdgeLabels) and torch.equal(task.train[0].edge_label_index, pairs)
    assert task.labels("test").tolist() == [0]
    nodes = edges(**{key: value for key, value in labelled.items() if key not in masks}, y=torch.arange(30) % 2)
    assert from_dataset(nodes, "own", per_class=2, val=5, test=5).objective.item == "node"  # y comes first
    assert from_dataset(nodes, "own", val=1, test=1, task="edge_classification").labels("train").numel() == 2


@pytest.mark.parametrize(
    ("y", "task", "expected"),
    [
        (torch.rand, None, EdgeTargets(1)),
        (lambda E: torch.rand(E, 3), None, EdgeTargets(3)),
        (lambda E: torch.rand(E, 3).round(), None, EdgeMultiLabels(3)),
        (lambda E: torch.arange(E) % 4, None, EdgeLabels(4)),
        (lambda E: torch.arange(E) % 4, "edge_regression", EdgeTargets(1)),
        (lambda E: (torch.arange(E) % 4).float()[:, None], "edge_classification", EdgeLabels(4)),
    ],
)
def test_the_labels_of_one_or_many_graphs_show_the_task_unless_it_is_named(y, task, expected):
    for name in ("y", "edge_label"):
        for data, sizes in ((edges(**{name: y(200)}), [150, 20, 30]), (many(**{name: y(12)}), [48, 24, 24])):
            val, test = (20, 30) if isinstance(data, Data) else (2, 2)
            result = from_dataset(data, "own", val=val, test=test, task=task)
            assert (type(result.objective), result.num_classes) == (type(expected), expected.out_channels)
            assert [len(result.labels(split)) for split in ("train", "val", "test")] == sizes


def test_both_directions_of_a_link_are_in_one_split():
    data = edges()
    both = torch.cat([data.edge_index, data.edge_index.flip(0)], 1).unique(dim=1)
    graph = from_dataset(Data(data.x, both, y=torch.rand(both.size(1))), "own", val=20, test=30).train[0]
    parts = [graph.edge_label_index[:, graph[f"{split}_mask"]] for split in ("train", "val", "test")]
    links = [{tuple(sorted(pair)) for pair in part.t().tolist()} for part in parts]
    assert [len(part) for part in links[1:]] == [20, 30] and sum(part.size(1) for part in parts) == both.size(1)
    assert not links[0] & links[1] and not links[0] & links[2] and not links[1] & links[2]


ONES = torch.ones(200).long()
BROKEN: dict[str, dict[str, Any]] = {
    r"edge_label is of shape \(7,\), expected \(200,\) or \(200, K\)": {"edge_label": ONES[:7]},
    r"edge_label is of shape \(200, 1, 1\), expected": {"edge_label": ONES[:, None, None]},
    r"edge_label is a list, expected": {"edge_label": [1] * 200},
    r"edge_label is of shape \(200,\), expected \(3,\)": {"edge_label": ONES, "edge_label_index": ONES[:6].view(2, 3)},
    r"edge_label_index: edge_index holds 99": {
        "edge_label": ONES[:2] - 1,
        "edge_label_index": torch.tensor([[0, 1], [99, 2]]),
    },
    r"edge_label_index: edge_index is torch.float32": {"edge_label": ONES[:2], "edge_label_index": torch.rand(2, 2)},
    r"y is missing": {"task": "edge_regression"},
    r"y holds 0.5..., expected whole numbers": {"edge_label": ONES / 2, "task": "edge_classification"},
    r"test_mask needs 1000 links, but only": {"edge_label": ONES, "val": 5, "test": 1000},
    r"mask is torch.bool of shape \(7,\), expected a bool, 0 or 1 for each of the 200 edges": {
        "edge_label": ONES,
        "train_mask": torch.ones(7).bool(),
    },
}


@pytest.mark.parametrize("message", BROKEN)
def test_labels_that_fit_no_task_are_errors(message: str):
    values = dict(BROKEN[message])
    options = {key: values.pop(key) for key in ("task", "val", "test") if key in values}
    with pytest.raises(ValueError, match=message):
        from_dataset(edges(**values), "own", **options)


def test_labels_of_some_graphs_and_rows_of_nodes_are_errors():
    graphs = many(edge_label=torch.arange(12) % 2)
    del graphs[3].edge_label
    with pytest.raises(ValueError, match="own, graph 3 has no edge_label, but others have. Give it to all of them"):
        from_dataset(graphs, "own", val=2, test=2)
    graphs[3].edge_label = torch.arange(5)
    with pytest.raises(ValueError, match=r"own, graph 3: edge_label is of shape \(5,\), expected \(12,\)"):
        from_dataset(graphs, "own", val=2, test=2)
    task = labelled_edges()
    with pytest.raises(ValueError, match=r"returns \(30, 3\), expected \(90, 3\): a row for each edge.*LinkScores"):
        task.objective.rows(torch.zeros(30, 3), task.train[0], "train")


def test_batches_of_edges_have_each_edge_once():
    task = labelled_edges()
    data = task.train[0]
    steps = [task.objective.example(batch, "train") for batch in TaskData(task, num_links=8).train_dataloader()]
    assert [step.y.numel() for step in steps] == [8, 8, 8, 6]
    seen = torch.cat([torch.cat([step.edge_label_index, step.y[None]]) for step in steps], 1).unique(dim=1)
    expected = torch.cat([data.edge_index, data.y[None]])[:, data.train_mask].unique(dim=1)
    assert torch.equal(seen, expected)


def run(tmp_path: Path, data: Data, *settings: str) -> Any:
    arrays = {key: value.numpy() for key, value in data.to_dict().items()}
    np.savez(tmp_path / "own.npz", **arrays)
    path = ["dataset=file", f"dataset.path={tmp_path}/own.npz", "split.val=20", "split.test=30"]
    return result_of(tmp_path / "o", *path, *settings)


def test_the_command_embeds_the_nodes_of_a_graph_without_features(tmp_path: Path):
    data = edges()
    data.y = data.x[data.edge_index[0], 0] * 5 + 20  # in its own unit
    features, data.x = data.x, None
    result = run(tmp_path, data, "training.max_epochs=2", "+model.encoder=8", "+model.decoder=bilinear")
    task = from_file(tmp_path / "own.npz", val=20, test=30)
    assert task.train[0].x.tolist() == [[float(node)] for node in range(len(features))]
    graph = task.train[0]
    out = predict(result.run_dir, Data(graph.x, graph.edge_index))[graph.test_mask]
    assert result.metric == "rmse"
    error = (out - graph.y[graph.test_mask]).square().mean().sqrt()
    assert result.value == pytest.approx(float(error), rel=1e-3)


def test_a_graph_without_features_has_the_ids_of_its_nodes():
    for graph in (Data(edge_index=torch.tensor([[0], [1]]), y=torch.arange(8) % 2), Data(num_nodes=8)):
        graph.edge_index = torch.tensor([[0], [1]])
        graph.y = torch.arange(8) % 2
        assert torch.equal(from_dataset(graph, "own", per_class=1, val=2, test=2).train[0].x[:, 0], torch.arange(8.0))
    with pytest.raises(ValueError, match="x is missing"):
        from_dataset([graph, graph], "own", val=1, test=1)


# Many graphs ----------------------------------------------------------------------------------------------------------


def test_labels_of_graphs_and_of_nodes_are_not_of_edges_unless_the_task_is_named():
    data = edges(E=30, y=torch.arange(30) % 2)  # as many edges as nodes
    assert from_dataset(data, "own", per_class=2, val=5, test=5).objective.item == "node"
    assert from_dataset(data, "own", val=5, test=5, task="edge_classification").objective.item == "edge"
    one_edge = [Data(torch.rand(3, 2), torch.tensor([[0], [i % 3]]), y=torch.tensor([i % 2])) for i in range(8)]
    assert from_dataset(one_edge, "own", val=2, test=2).objective.item == "graph"
    rings = [Data(torch.rand(4, 2), torch.stack([torch.arange(4), torch.arange(4).roll(1)])) for _ in range(8)]
    nodes = [data.update({"y": torch.arange(4) % 2}) for data in rings]
    assert from_dataset(nodes, "own", val=2, test=2).objective.item == "node"
    assert from_dataset(nodes, "own", val=2, test=2, task="edge_classification").objective.item == "edge"


@pytest.mark.parametrize("task", ["edge_classification", "edge_regression"])
def test_edges_of_many_graphs_are_those_of_their_union_with_masks(task: str):
    """Loss and gradient of the training graphs, and the test's score, with features and unknown labels."""
    graphs = many()
    for number, data in enumerate(graphs):
        data.edge_label = data.x[data.edge_index[0], 0] + data.edge_attr[:, 0]
        data.edge_label = data.edge_label if task == "edge_regression" else (data.edge_label > 0).float()
        data.edge_label[number] = float("nan")
    alone = from_dataset(graphs, "own", val=2, test=2, task=task)
    parts = [*alone.train, *alone.val, *alone.test]
    union = Batch.from_data_list(parts)
    of = union.batch[union.edge_label_index[0]]  # the graph of each edge
    masks = {"train_mask": of < 4, "val_mask": (of >= 4) & (of < 6), "test_mask": of >= 6}
    label = union.y[:, 0] if task == "edge_regression" else union.y
    known = label == label if task == "edge_regression" else label >= 0
    masks = {key: mask & known for key, mask in masks.items()}
    data = Data(union.x, union.edge_index, union.edge_attr, edge_label=label, **masks)
    together = from_dataset(data, "own", task=task)

    results = []
    for made, kind in ((alone, Inductive), (together, Transductive)):
        torch.manual_seed(0)
        model = LinkScores(
            GAT(4, [4], 5, [2, 1], edge_dim=3), 5, out_channels=made.num_classes, combine="concat", edge_dim=3
        )
        module = kind(model, made.objective)
        (batch,) = TaskData(made, batch_size=4).train_dataloader()
        loss, sums = module._loss(batch)
        loss.backward()
        (test,) = TaskData(made, batch_size=2).test_dataloader()
        score = made.objective.score(module._counts(test, "test").detach())
        results.append([loss.detach(), sums, score, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert results[0][1][1] == 4 * 12 - sum(bool((~k).any()) for k in known.view(8, 12)[:4])


# Features of labelled edges -------------------------------------------------------------------------------------------


def test_the_perceptron_reads_the_features_of_the_edges():
    torch.manual_seed(0)
    z, pairs, features = torch.randn(5, 4), torch.tensor([[0, 1], [1, 4]]), torch.randn(2, 3)
    decoder = Perceptron(4, 2, combine="concat", edge_dim=3)
    first, second = decoder.lins
    src, dst = pairs
    expected = second(first(torch.cat([z[src], z[dst], features], 1)).relu())
    torch.testing.assert_close(decoder(z, pairs, features), expected)
    model = LinkScores(torch.nn.Identity(), 4, out_channels=2, combine="concat", edge_dim=3)
    model.decoder = decoder
    torch.testing.assert_close(model(z, edge_label_index=pairs, edge_label_attr=features), expected)
    with pytest.raises(ValueError, match=r"edge_label_attr is missing, expected \(2, 3\), the features of each pair"):
        model(z, edge_label_index=pairs)
    with pytest.raises(ValueError, match=r"edge_label_attr is of shape \(2, 2\), expected \(2, 3\)"):
        decoder(z, pairs, features[:, :2])
    with pytest.raises(ValueError, match=r"edge_label_attr is of shape \(2, 3\), expected none: edge_dim is None"):
        Perceptron(4)(z, pairs, features)
    for name in ("dot", "bilinear"):
        with pytest.raises(ValueError, match=f"the decoder '{name}' takes no features of the pairs, but edge_dim is"):
            LinkScores(torch.nn.Identity(), 4, name, edge_dim=3)
    plain = LinkScores(torch.nn.Identity(), 4, "dot")  # reads none, so it takes all
    assert torch.equal(plain(z, edge_label_index=pairs, edge_label_attr=features), plain(z, edge_label_index=pairs))


def test_features_of_the_pairs_are_those_of_the_edges_unless_there_are_other_pairs():
    features = torch.rand(200, 2)
    labelled = from_dataset(
        edges(y=torch.arange(200) % 2, edge_attr=features), "own", val=20, test=30, task="edge_classification"
    )
    assert torch.equal(labelled.train[0].edge_label_attr, features)
    step = labelled.objective.example(labelled.train[0], "val")
    assert torch.equal(step.edge_label_attr, features[labelled.train[0].val_mask])
    data = edges(5, edge_attr=torch.zeros(5, 2), edge_label_attr=torch.ones(5, 2))
    labelled.objective.complete(data)
    assert bool((data.edge_label_attr == 1).all())
    pairs = {"edge_label_index": torch.randint(30, (2, 60)), "edge_label": torch.arange(60) % 2}
    assert "edge_label_attr" not in from_dataset(edges(edge_attr=features, **pairs), "own", val=9, test=9).train[0]
    nodes = from_dataset(edges(y=torch.arange(30) % 2, edge_attr=features), "own", per_class=2, val=5, test=5)
    assert "edge_label_attr" not in nodes.train[0]
    broken = labelled.train[0].clone()
    broken.edge_label_attr = features[:7]
    with pytest.raises(ValueError, match=r"own: edge_label_attr has shape \(7, 2\), expected \(200, D\)"):
        labelled.objective.check(broken, "own")


@pytest.mark.parametrize("encoder", [pytest.param([], marks=pytest.mark.weekly), ["+model.encoder=8"]])
def test_the_command_learns_labels_that_only_the_edges_show(encoder: list[str], tmp_path: Path):
    data = edges(E=400)
    data.edge_attr = (torch.arange(400) % 3)[:, None].float()
    data.edge_label = (data.edge_attr[:, 0] == 1).long()
    quick = ["training.max_epochs=30", "training.lr=0.1", "model.dropout=0", "training.weight_decay=0", *encoder]
    result = run(tmp_path, data, *quick)
    assert result.metric == "accuracy" and result.value > 90
    whole = predict(result.run_dir, data)  # of all edges
    mask = from_file(tmp_path / "own.npz", val=20, test=30).train[0].test_mask
    right = (whole[mask].argmax(1) == data.edge_label[mask]).double().mean()
    assert result.value == pytest.approx(100 * float(right), abs=1e-3)
    other = Data(data.x, data.edge_index, data.edge_attr, edge_label_index=data.edge_index[:, :9].flip(1))
    with pytest.raises(ValueError, match=r"edge_label_attr is missing, expected \(9, "):
        predict(result.run_dir, other)
    other.edge_label_attr = data.edge_attr[:9].flip(0)
    torch.testing.assert_close(predict(result.run_dir, other), whole[:9].flip(0))
    off = run(tmp_path, data, *quick, "+model.decoder={decoder: mlp, edge_dim: null}")
    assert off.value < 90 and off.parameters < result.parameters


def test_the_attention_of_such_models_has_figures_or_an_error(tmp_path: Path):
    data = many(y=torch.arange(12) % 2)[0]
    model = LinkScores(GAT(4, [4], 5, [2, 1], edge_dim=3), 5, out_channels=2, edge_dim=3)
    attention = attention_of(model, data)
    for (edge_index, alpha), (expected_index, expected) in zip(attention, attention_of(model.model, data), strict=True):
        assert torch.equal(edge_index, expected_index) and torch.equal(alpha, expected)
    layout = torch.rand(data.num_nodes, 2)
    assert graph_figure(model, data, layout=layout).axes
    for figure in (attention_figure, neighbourhood_figure):
        with pytest.raises(ValueError, match="LinkScores predicts pairs of nodes, expected a model with a class for"):
            figure(model, data, tmp_path / "figure")
    assert not [*tmp_path.iterdir()]
