"""The baselines that fit themselves or regularise by the graph."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import get_laplacian, to_dense_adj

from gat_pyg.data import digits, planetoid
from gat_pyg.data.named.raw import data_root
from gat_pyg.paper.methods._regression import fit_logistic
from gat_pyg.paper.methods._walks import Walks, skip_gram_loss
from gat_pyg.paper.methods.deepwalk import DeepWalk
from gat_pyg.paper.methods.ica import ICA
from gat_pyg.paper.methods.lp import LP
from gat_pyg.paper.methods.manireg import ManiReg
from gat_pyg.paper.methods.planetoid import Planetoid
from gat_pyg.paper.methods.semiemb import SemiEmb
from gat_pyg.seeds.stack import Stack
from gat_pyg.settings.conf import VERSION_BASE, config_folder, instantiate
from gat_pyg.tasks.model import Inputs
from tests.graphs import ISOLATED, LOOPS, NO_EDGES, RANDOM, REPEATED, SQUARE, Graph
from tests.laws import assert_close


def two_cliques(size: int = 6) -> Data:
    """Two cliques, a class each, joined by one edge; a node of each is for training and one for validation."""
    own = torch.combinations(torch.arange(size)).t()
    edges = torch.cat([own, own + size, torch.tensor([[0], [size]])], 1)
    y = torch.arange(2).repeat_interleave(size)
    x = torch.eye(2 * size).roll(1, 1)[:, : 2 * size - 2]
    data = Data(torch.cat([x, F.one_hot(y)], 1), torch.cat([edges, edges.flip(0)], 1), y=y)
    for split, place in (("train", 1), ("val", 2)):
        data[f"{split}_mask"] = torch.zeros(2 * size, dtype=torch.bool)
        data[f"{split}_mask"][[place, place + size]] = True
    return data


def predicted(model: nn.Module, data: Data) -> Tensor:
    return Inputs.of(model).call(model, data).detach()


def fitted(model: nn.Module, data: Data, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    model.fit(data)
    return predicted(model, data)


SMALL = {"embedding_dim": 16, "walk_length": 10, "context_size": 2, "batch_size": 16, "lr": 0.1}
STEPS = {"pretrain_steps": 20, "steps": 30}
FITTED = {
    "lp": lambda F, K, N=0: LP(K, N),
    "ica": lambda F, K, N=0: ICA(F, K, N),
    "deepwalk": lambda F, K, N=0: DeepWalk(K, N, embedding_dim=16, context_size=2, walks_per_node=30, lr=0.1),
    "planetoid": lambda F, K, N=0: Planetoid(F, K, N, **SMALL, **STEPS),
    "planetoid-i": lambda F, K, N=0: Planetoid(F, K, N, inductive=True, **SMALL, **STEPS),
}


# What all methods that fit themselves have in common ----------------------------------------------------------------


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_depends_only_on_its_seed_and_the_training_and_validation_labels(name: str):
    """Two cliques get their classes; the state dict holds the fit."""
    data, make = two_cliques(), FITTED[name]
    model, again, other = make(12, 2), make(12, 2), make(12, 2, 12).eval()
    again.load_state_dict(model.state_dict())
    out = fitted(model, data)
    assert out.shape == (12, 2) and (out.argmax(1) == data.y).all()
    other.load_state_dict(model.state_dict())
    assert torch.equal(predicted(other, data), out)
    assert torch.equal(predicted(Stack([model, other])[1], data), out)
    data.y = data.y.masked_fill(~(data.train_mask | data.val_mask), -1)
    assert torch.equal(fitted(again, data), out)
    if name == "planetoid-i":  # by the features alone
        assert_close(model(data.x[3:5]).detach(), out[3:5])
        assert_close(model(data.x.to_sparse_csr()).detach(), out)
    data.y = torch.rand(12, 2).round()
    with pytest.raises(ValueError, match=r"y has shape \(12, 2\), expected \(N,\)"):
        make(12, 2).fit(data)


@pytest.mark.parametrize("name", ["lp", "ica"])
def test_a_class_without_training_nodes_is_never_predicted(name: str):
    assert not (fitted(FITTED[name](12, 3), two_cliques()).argmax(1) == 2).any()


# LP -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [ISOLATED, LOOPS, REPEATED, RANDOM], ids=str)
def test_lp_is_the_solution_of_zhus_linear_system(graph: Graph):
    N = graph.num_src
    both = torch.cat([graph.index, graph.index.flip(0)], 1)
    data = Data(edge_index=both, y=torch.arange(N) % 2, train_mask=torch.arange(N) < 2)
    model = LP(2, normalize=False)
    model.fit(data)
    W = to_dense_adj(both, max_num_nodes=N)[0].double()
    L = W.sum(1).diag() - W
    known, labels = data.train_mask, F.one_hot(data.y, 2).double()
    f = labels.clone()
    f[~known] = -torch.linalg.pinv(L[~known][:, ~known]) @ L[~known][:, known] @ labels[known]
    f[f.sum(1) < 1e-9] = 0.5  # out of reach of the labels
    torch.testing.assert_close(model(None, both).exp().double(), f, atol=1e-5, rtol=0)


def test_lp_gives_each_class_its_share_of_the_unlabelled_mass():
    star = torch.tensor([[0, 1, 0, 2, 0, 3, 3, 4], [1, 0, 2, 0, 3, 0, 4, 3]])
    data = Data(edge_index=star, y=torch.tensor([-1, 0, 0, -1, 1]), train_mask=torch.tensor([0, 1, 1, 0, 1]).bool())
    model = LP(2, normalize=False)
    model.fit(data)
    f = model(None, star).exp()
    torch.testing.assert_close(f[[0, 3]], torch.tensor([[4 / 5, 1 / 5], [2 / 5, 3 / 5]]))
    model.normalize = True
    g = f * torch.tensor([2 / 3 / (6 / 5), 1 / 3 / (4 / 5)])
    torch.testing.assert_close(model(None, star).exp()[[0, 3]], (g / g.sum(1, keepdim=True))[[0, 3]])


# ICA ----------------------------------------------------------------------------------------------------------------


def test_ica_keeps_labels_and_counts_neighbours():
    data = two_cliques()
    model = ICA(12, 2, num_iterations=1)
    fitted(model, data)
    with torch.no_grad():
        first = model.by_features(data.x).log_softmax(1)
        classes = F.one_hot(torch.where(data.train_mask, data.y, first.argmax(1)), 2).float()
        counts = to_dense_adj(data.edge_index)[0].t() @ classes
        expected = first + model.by_links(counts).log_softmax(1)
        torch.testing.assert_close(model(data.x, data.edge_index), expected)


# The regularisers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [NO_EDGES, LOOPS, REPEATED, RANDOM], ids=str)
def test_manireg_is_the_trace_of_the_laplacian(graph: Graph):
    N = graph.num_src
    both = torch.cat([graph.index, graph.index.flip(0)], 1)
    out = torch.randn(N, 3, dtype=torch.double)
    index, weight = get_laplacian(both, dtype=torch.double, num_nodes=N)
    L = to_dense_adj(index, edge_attr=weight, max_num_nodes=N)[0]
    expected = 2 * 0.5 * (out.t() @ L @ out).trace() / max(both.size(1), 1)
    torch.testing.assert_close(ManiReg(4, 3, gamma=0.5).penalty(out, Data(edge_index=both)), expected)


@pytest.mark.parametrize("model", [ManiReg(5, 3), SemiEmb(5, 8, 3)], ids=["manireg", "semiemb"])
def test_a_penalty_has_gradients_and_none_without_edges(model: nn.Module):
    x = torch.randn(6, 5)
    data = Data(x, torch.tensor([[0, 1, 2, 2], [1, 0, 3, 2]]))
    model.penalty(model(x), data).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    data.edge_index = torch.empty(2, 0, dtype=torch.long)
    assert not model.penalty(model(x), data).any()


def test_semiemb_pulls_along_edges_and_pushes_others_a_margin_apart():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
    same, far = torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert float(SemiEmb(3, 8, 2, gamma=2.0, margin=1.5).penalty(same, data)) == pytest.approx(2.0 * 1.5**2)
    torch.manual_seed(0)
    r = torch.randint(2, (2,))
    torch.manual_seed(0)
    apart = [1.5**2 if i == r[i] else 0.0 for i in range(2)]
    penalty = SemiEmb(3, 8, 2, gamma=2.0, margin=1.5).penalty(far, data)
    assert float(penalty) == pytest.approx(2.0 * (25.0 + sum(apart) / 2))


def test_manireg_decays_its_weights_alone():
    model = ManiReg(5, 3)
    assert [id(parameter) for parameter in model.decayed_parameters()] == [id(model.lin.weight)]


# Planetoid ----------------------------------------------------------------------------------------------------------


def test_planetoid_keeps_the_weights_that_did_best_on_validation_nodes(monkeypatch: pytest.MonkeyPatch):
    states, script = [], [5, 9, 9, 2]

    def right(self: Planetoid, data: Data, x: Tensor) -> int:
        states.append({name: value.clone() for name, value in self.state_dict().items()})
        return script[len(states) - 1]

    monkeypatch.setattr(Planetoid, "_right", right)
    model = Planetoid(12, 2, pretrain_steps=2, steps=4, **SMALL)
    model.fit(two_cliques())
    assert len(states) == 4 and not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, states[2][name]) and not torch.equal(value, states[1][name])


# On data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dataset", "floor"),
    [("lp", "digits", 90.0), ("lp", "cora", 66.5), pytest.param("ica", "cora", 72.1, marks=pytest.mark.weekly)],
)
def test_with_the_commands_settings_they_are_as_good_as_published(name: str, dataset: str, floor: float):
    if dataset == "cora" and not (Path(data_root()) / "Planetoid" / "Cora" / "raw").is_dir():
        pytest.skip("there are no files of Cora")
    task = digits() if dataset == "digits" else planetoid(dataset)
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        settings = dict(compose("config", [f"model={name}", f"dataset={dataset}"]).model)
    del settings["method"]
    sizes = {"in_channels": task.num_features} if name == "ica" else {}
    model = instantiate(settings, **sizes, out_channels=task.num_classes, _convert_="all")
    data = task.train[0]
    correct = (fitted(model, data).argmax(1) == data.y)[data.test_mask]
    assert 100 * correct.double().mean() > floor


# Logistic regression --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [2, 3])
def test_the_probabilities_are_scikit_learns(K: int):
    linear_model = pytest.importorskip("sklearn.linear_model")
    torch.manual_seed(0)
    x, y, lin = torch.randn(12, 4), torch.arange(12) % K, nn.Linear(4, K)
    fit_logistic(lin, x, y, strength=10.0)
    oracle = linear_model.LogisticRegression(C=10.0, max_iter=1000).fit(x.numpy(), y.numpy())
    expected = torch.from_numpy(oracle.predict_proba(x.numpy())).float()
    torch.testing.assert_close(lin(x).softmax(1).detach(), expected, atol=1e-5, rtol=0)


def test_a_class_without_examples_is_never_predicted():
    lin = nn.Linear(4, 5)
    x, y = torch.randn(12, 4), torch.tensor([1, 3, 4] * 4)
    fit_logistic(lin, x, y, strength=1.0)
    assert not lin(100 * torch.randn(50, 4)).softmax(1)[:, [0, 2]].any()


def test_the_error_without_scikit_learn_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'gat_pyg\[baselines\]'"):
        fit_logistic(nn.Linear(2, 2), torch.eye(2), torch.arange(2), 1.0)


# Walks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [g for g in SQUARE if g.num_src], ids=str)
def test_walks_follow_edges_and_stay_at_nodes_without_out_edges(graph: Graph):
    steps = set(zip(*graph.index.tolist(), strict=True))
    sources = {src for src, _ in steps}
    for walk in Walks(graph.index, graph.num_src)(torch.arange(graph.num_src).repeat(3), 7).tolist():
        assert all((a, b) in steps or (a == b and a not in sources) for a, b in pairwise(walk))


def test_walks_take_each_edge_equally_often():
    torch.manual_seed(0)
    walks = Walks(torch.tensor([[0, 0, 0, 0], [1, 2, 3, 3]]), 4)(torch.zeros(4000, dtype=torch.long), 2)
    share = walks[:, 1].bincount(minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.25, 0.25, 0.5]), atol=0.03, rtol=0)  # 4 standard deviations


def test_skip_gram_loss_by_hand(monkeypatch: pytest.MonkeyPatch):
    z, c = torch.randn(2, 4, 3, dtype=torch.double)
    walks = torch.tensor([[0, 1, 3], [2, 2, 0]])
    negatives = torch.tensor([3, 0])
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: negatives)
    pairs = [(0, 1), (1, 0), (1, 3), (3, 1), (2, 2), (2, 2), (2, 0), (0, 2)]
    meet = torch.stack([(z[v] @ c[u]).sigmoid().log() for v, u in pairs]).mean()
    miss = torch.stack([(-z[v] @ c[r]).sigmoid().log() for v in walks.flatten() for r in negatives]).mean()
    torch.testing.assert_close(skip_gram_loss(z, c, walks, 1, 5), -meet - 5 * miss)
