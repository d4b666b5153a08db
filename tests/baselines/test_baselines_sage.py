from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import LSTMAggregation

from gat_pyg.baselines import sage
from gat_pyg.baselines.sage import AGGREGATORS, GraphSAGE, SampledConv, sample
from gat_pyg.data import planted
from gat_pyg.seeds.stack import Stack
from gat_pyg.tasks.nodes import NodeMultiLabels
from tests.graphs import COMPLETE, ISOLATED, SQUARE, STAR_IN, Graph, graph, random
from tests.laws import assert_close, edges_of

SEED = torch.tensor(7)
WIDTH = {"gcn": None, "mean": None, "lstm": 6, "pool": 6}


def layer(aggr: str, in_channels: int = 6, out_channels: int = 4) -> SampledConv:
    torch.manual_seed(0)
    return SampledConv(in_channels, out_channels, aggr, WIDTH[aggr]).double()


def model(aggr: str) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(6, [8, 8], 3, num_neighbors=[5, 3], aggr=aggr, aggr_channels=WIDTH[aggr]).double()


def x_of(graph: Graph) -> Tensor:
    return torch.randn(graph.num_src, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# The draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_every_neighbour_drawn_is_one(graph: Graph):
    drawn = sample(edges_of(graph), 7, SEED)
    assert drawn.shape == (graph.num_dst, 7)
    neighbours = [set(graph.index[0][graph.index[1] == i].tolist()) for i in range(graph.num_dst)]
    for own, found in zip(neighbours, drawn.tolist(), strict=True):
        assert set(found) <= (own or {graph.num_src})


@pytest.mark.parametrize("graph", [STAR_IN, random(40, 40, 300)], ids=str)
def test_draws_are_uniform_and_independent(graph: Graph):
    drawn = sample(edges_of(graph), 40_000, SEED)
    hub = int(graph.index[1].bincount(minlength=graph.num_dst).argmax())
    share = graph.index[0][graph.index[1] == hub].bincount(minlength=graph.num_src).double()  # a repeated edge twice
    expected = (share / share.sum())[share > 0]
    assert expected.numel() > 5
    found = drawn[hub].bincount(minlength=graph.num_src)[share > 0]
    assert chisquare(found.numpy(), (expected * 40_000).numpy()).pvalue > 0.01
    pairs = (drawn[hub].view(2, -1) * torch.tensor([[graph.num_src], [1]])).sum(0).bincount(minlength=graph.num_src**2)
    both = torch.outer(share, share).flatten() / share.sum() ** 2
    assert chisquare(pairs[both > 0].numpy(), (both[both > 0] * 20_000).numpy()).pvalue > 0.01


def test_no_draw_is_past_the_last_neighbour(monkeypatch: pytest.MonkeyPatch):
    most = torch.tensor(1.0 - 2.0**-24)  # the largest number that `uniform` gives
    monkeypatch.setattr(sage, "uniform", lambda seed, *size: most.expand(size))
    degree = torch.arange(1, 3000)
    drawn = sample(edges_of(graph("hubs", list(itertools.zip_longest(range(2999), [], fillvalue=0)), 2999)), 1, SEED)
    assert drawn[0].item() == 2998
    assert ((most * degree).long() == degree - 1).all()


# The layer, beside PyG's --------------------------------------------------------------------------------------------


def of_pyg(own: SampledConv) -> nn.Module:
    given = LSTMAggregation(6, 6) if own.aggr == "lstm" else {"pool": "max"}.get(own.aggr, "mean")
    theirs = SAGEConv(6, 4, given, root_weight=own.aggr != "gcn", project=own.aggr == "pool", bias=False).double()
    theirs.load_state_dict({its_name(name): value for name, value in own.state_dict().items()})
    return theirs


def its_name(name: str) -> str:
    return name.replace("lstm", "aggr_module.lstm")


@pytest.mark.parametrize("aggr", AGGREGATORS)
def test_all_neighbours_drawn_once_are_pygs_layer(aggr: str):
    own, x = layer(aggr), x_of(COMPLETE).requires_grad_()
    src, dst = COMPLETE.index[:, COMPLETE.index[1].argsort(stable=True)]
    others = (src != dst) | torch.tensor(aggr != "gcn")  # of GCN the node itself is not drawn, but there
    out = own(x, src[others].view(5, -1))
    theirs = of_pyg(own)
    expected = theirs(x, torch.stack([src, dst]))
    assert_close(out, expected, aggr)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), [x, *own.parameters()])
    its_parameters = dict(theirs.named_parameters())
    its = [x, *(its_parameters[its_name(name)] for name, _ in own.named_parameters())]
    for grad, expected_grad in zip(grads, torch.autograd.grad((expected * weights).sum(), its), strict=True):
        assert_close(grad, expected_grad, aggr)


@pytest.mark.parametrize("aggr", AGGREGATORS)
def test_draws_of_any_number_are_pygs_layer_on_the_edges_drawn(aggr: str):
    graph = random(40, 40, 300)
    own, x = layer(aggr), x_of(graph)
    drawn = sample(edges_of(graph), 5, SEED)
    known = (drawn < 40).all(1)
    own_too = torch.cat([drawn, torch.arange(40)[:, None]], 1) if aggr == "gcn" else drawn
    edge_index = torch.stack([own_too.flatten(), torch.arange(40).repeat_interleave(own_too.size(1))])
    expected = of_pyg(own)(x, edge_index[:, known[edge_index[1]]])
    assert_close(own(x, drawn)[known], expected[known], aggr)


@pytest.mark.parametrize("aggr", AGGREGATORS)
def test_a_node_without_neighbours_has_zeros_for_them(aggr: str):
    own, x = layer(aggr), x_of(ISOLATED)
    out = own(x, sample(edges_of(ISOLATED), 3, SEED))
    alone = [1, 3, 4, 5]
    if aggr == "gcn":
        expected = own.lin_l(x[alone] / 4)
    elif aggr == "lstm":
        expected = own.lin_l(own.lstm(torch.zeros(3, 4, 6, dtype=x.dtype))[0][-1]) + own.lin_r(x[alone])
    else:
        expected = own.lin_r(x[alone])
    assert_close(out[alone], expected, aggr)


# The model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggr", AGGREGATORS)
@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_the_model_takes_any_graph(aggr: str, graph: Graph):
    out = model(aggr)(x_of(graph), graph.index)
    assert out.shape == (graph.num_src, 3)
    assert out.isfinite().all()


@pytest.mark.parametrize("aggr", AGGREGATORS)
def test_a_row_depends_on_nodes_of_two_hops_alone(aggr: str):
    chain = graph("chain", [(i, i + 1) for i in range(6)], 7)
    net = model(aggr).eval()
    jacobian = torch.autograd.functional.jacobian(lambda x: net(x, chain.index).sum(1), x_of(chain))  # [N, N, F]
    heard = (jacobian != 0).any(2)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    assert torch.equal(heard, (distance >= 0) & (distance <= 2))


def test_the_model_is_its_layers_in_the_papers_order():
    net = model("mean").eval()
    cycle = graph("cycle", [(i, (i + 1) % 5) for i in range(5)], 5)  # one neighbour: every draw is the same
    x = x_of(cycle)
    first, second = (of.lin_l.weight for of in net.convs), (of.lin_r.weight for of in net.convs)
    h = x
    for k, (W_2, W_1) in enumerate(zip(first, second, strict=True)):
        h = h @ W_1.t() + h.roll(1, 0) @ W_2.t()
        h = h.relu() if k == 0 else h / h.norm(dim=1, keepdim=True)
    assert_close(net(x, cycle.index), F.linear(h, net.lin.weight, net.lin.bias))


def test_training_draws_afresh_and_evaluation_as_the_weights_say():
    graph = random(40, 40, 300)
    x, net, other = x_of(graph), model("mean"), model("mean")
    assert not torch.equal(net(x, graph.index), net(x, graph.index))
    state = torch.get_rng_state()
    out = net.eval()(x, graph.index)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net(x, graph.index), out)
    other.seed += 1
    assert not torch.equal(other.eval()(x, graph.index), out)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x, graph.index), out)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # embedding_bag is called for one after the other
@pytest.mark.parametrize("aggr", AGGREGATORS)
def test_trained_models_are_called_as_one(aggr: str):
    graph = random(40, 40, 300)
    x, nets = x_of(graph), [model(aggr).eval(), model(aggr).eval()]
    nets[1].seed += 1
    out = Stack(nets)(x, graph.index)
    assert not torch.equal(out[0], out[1])
    for net, own in zip(nets, out, strict=True):
        assert_close(own, net(x, graph.index))


@pytest.mark.parametrize("aggr", AGGREGATORS)
def test_it_learns(aggr: str):
    data = planted(graphs=1).train[0]
    torch.manual_seed(0)
    net = GraphSAGE(17, [32, 32], 16, [25, 10], aggr, 32 if aggr in ("lstm", "pool") else None)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        loss = NodeMultiLabels(16).loss(net(data.x, data.edge_index), data.y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggr": "max"}, "aggr is 'max', expected one of gcn, mean, lstm, pool"),
        ({"aggr_channels": 8}, "aggr_channels is 8, expected a number for lstm and pool, and only there"),
        ({"aggr": "lstm"}, "aggr_channels is None, expected a number for lstm and pool, and only there"),
        ({"num_neighbors": [25]}, r"num_neighbors is \[25\], expected a number of at least 1 for each of the 2 layers"),
        ({"num_neighbors": [25, 0]}, r"num_neighbors is \[25, 0\], expected a number of at least 1"),
        ({"hidden_channels": [], "num_neighbors": []}, "and at least one layer"),
    ],
)
def test_what_it_refuses(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        GraphSAGE(
            **{"in_channels": 6, "hidden_channels": [8, 8], "out_channels": 3, "num_neighbors": [5, 3], **changes}
        )
