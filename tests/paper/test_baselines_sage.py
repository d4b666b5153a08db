"""GraphSAGE: the draws of neighbours, and its layers against PyG's on the drawn edges."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import LSTMAggregation

from gat_pyg.paper.methods import sage
from gat_pyg.paper.methods.sage import AGGREGATORS, GraphSAGE, SampledConv, sample
from gat_pyg.seeds.stack import Stack
from tests.graphs import EMPTY, ISOLATED, NO_EDGES, RANDOM, SQUARE, STAR_IN, Graph, graph
from tests.laws import assert_close, edges_of

SEED = torch.tensor(7)
WIDTH = {"gcn": None, "mean": None, "lstm": 6, "pool": 6}
every = pytest.mark.parametrize("aggr", AGGREGATORS)


def layer_of(aggr: str) -> SampledConv:
    torch.manual_seed(0)
    return SampledConv(6, 4, aggr, WIDTH[aggr]).double()


def model_of(aggr: str) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(6, [8, 8], 3, num_neighbors=[5, 3], aggr=aggr, aggr_channels=WIDTH[aggr]).double()


def x_of(graph: Graph) -> Tensor:
    return torch.randn(graph.num_src, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("graph", SQUARE, ids=str)
def test_only_neighbours_are_drawn(graph: Graph):
    drawn = sample(edges_of(graph), 7, SEED)
    assert drawn.shape == (graph.num_dst, 7)
    for i, row in enumerate(drawn.tolist()):
        neighbours = set(graph.index[0][graph.index[1] == i].tolist())
        assert set(row) <= (neighbours or {graph.num_src})


@pytest.mark.parametrize("graph", [STAR_IN, RANDOM], ids=str)
def test_draws_are_uniform_and_independent(graph: Graph):
    drawn = sample(edges_of(graph), 40_000, SEED)
    hub = int(graph.index[1].bincount(minlength=graph.num_dst).argmax())
    share = graph.index[0][graph.index[1] == hub].bincount(minlength=graph.num_src).double()  # a repeated edge twice
    expected = (share / share.sum())[share > 0]
    counts = drawn[hub].bincount(minlength=graph.num_src)[share > 0]
    assert chisquare(counts.numpy(), (expected * 40_000).numpy()).pvalue > 0.01
    pairs = (drawn[hub].view(2, -1) * torch.tensor([[graph.num_src], [1]])).sum(0).bincount(minlength=graph.num_src**2)
    both = torch.outer(share, share).flatten() / share.sum() ** 2
    assert chisquare(pairs[both > 0].numpy(), (both[both > 0] * 20_000).numpy()).pvalue > 0.01


def test_the_largest_draw_is_the_last_neighbour(monkeypatch: pytest.MonkeyPatch):
    largest = torch.tensor(1.0 - 2.0**-24)  # the largest number that `uniform` returns
    monkeypatch.setattr(sage, "uniform", lambda seed, *size: largest.expand(size))
    degree = torch.arange(1, 3000)
    star = graph("star", list(itertools.zip_longest(range(2999), [], fillvalue=0)), 2999)
    assert sample(edges_of(star), 1, SEED)[0].item() == 2998
    assert ((largest * degree).long() == degree - 1).all()


@every
def test_a_layer_and_its_gradients_are_pygs_on_the_drawn_edges(aggr: str):
    def their_name(name: str) -> str:
        return name.replace("lstm", "aggr_module.lstm")

    own, x = layer_of(aggr), x_of(RANDOM).requires_grad_()
    aggregation = LSTMAggregation(6, 6) if aggr == "lstm" else {"pool": "max"}.get(aggr, "mean")
    theirs = SAGEConv(6, 4, aggregation, root_weight=aggr != "gcn", project=aggr == "pool", bias=False).double()
    theirs.load_state_dict({their_name(name): value for name, value in own.state_dict().items()})
    drawn = sample(edges_of(RANDOM), 5, SEED)
    has_neighbours = (drawn < 40).all(1)
    src = torch.cat([drawn, torch.arange(40)[:, None]], 1) if aggr == "gcn" else drawn  # gcn includes the node
    edge_index = torch.stack([src.flatten(), torch.arange(40).repeat_interleave(src.size(1))])
    out, expected = own(x, drawn), theirs(x, edge_index[:, has_neighbours[edge_index[1]]])
    assert_close(out[has_neighbours], expected[has_neighbours], aggr)
    weights = torch.randn_like(out) * has_neighbours[:, None]
    parameters = dict(theirs.named_parameters())
    variables = [x, *own.parameters()], [x, *(parameters[their_name(name)] for name, _ in own.named_parameters())]
    ours, others = (
        torch.autograd.grad((result * weights).sum(), names)
        for result, names in zip((out, expected), variables, strict=True)
    )
    for grad, other in zip(ours, others, strict=True):
        assert_close(grad, other, aggr)


@every
def test_a_node_without_neighbours_aggregates_zeros(aggr: str):
    own, x = layer_of(aggr), x_of(ISOLATED)
    out = own(x, sample(edges_of(ISOLATED), 3, SEED))
    alone = [1, 3, 4, 5]
    if aggr == "gcn":
        expected = own.lin_l(x[alone] / 4)
    elif aggr == "lstm":
        expected = own.lin_l(own.lstm(torch.zeros(3, 4, 6, dtype=x.dtype))[0][-1]) + own.lin_r(x[alone])
    else:
        expected = own.lin_r(x[alone])
    assert_close(out[alone], expected, aggr)
    for empty in (EMPTY, NO_EDGES):
        out = model_of(aggr)(x_of(empty), empty.index)
        assert out.shape == (empty.num_src, 3) and out.isfinite().all()


@every
def test_a_row_depends_on_nodes_at_most_two_hops_away(aggr: str):
    chain = graph("chain", [(i, i + 1) for i in range(6)], 7)
    model = model_of(aggr).eval()
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x, chain.index).sum(1), x_of(chain))  # [N, N, F]
    distance = torch.arange(7)[:, None] - torch.arange(7)
    assert torch.equal((jacobian != 0).any(2), (distance >= 0) & (distance <= 2))


def test_the_model_is_its_layers_in_the_papers_order():
    model = model_of("mean").eval()
    cycle = graph("cycle", [(i, (i + 1) % 5) for i in range(5)], 5)  # one neighbour: every draw is the same
    h = x = x_of(cycle)
    for k, conv in enumerate(model.convs):
        h = conv.lin_r(h) + conv.lin_l(h.roll(1, 0))
        h = h.relu() if k == 0 else h / h.norm(dim=1, keepdim=True)
    assert_close(model(x, cycle.index), F.linear(h, model.lin.weight, model.lin.bias))


def test_training_draws_afresh_and_evaluation_by_the_seed_in_the_state_dict():
    x, model, other = x_of(RANDOM), model_of("mean"), model_of("mean")
    assert not torch.equal(model(x, RANDOM.index), model(x, RANDOM.index))
    state = torch.get_rng_state()
    out = model.eval()(x, RANDOM.index)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(x, RANDOM.index), out)
    other.seed += 1
    assert not torch.equal(other.eval()(x, RANDOM.index), out)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x, RANDOM.index), out)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # embedding_bag is called for one after the other
@every
def test_a_stack_is_its_models(aggr: str):
    x = x_of(RANDOM)
    models: list[nn.Module] = [model_of(aggr).eval(), model_of(aggr).eval()]
    models[1].seed += 1
    out = Stack(models)(x, RANDOM.index)
    assert not torch.equal(out[0], out[1])
    assert_close(out, torch.stack([model(x, RANDOM.index) for model in models]))


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
def test_errors(changes: dict[str, object], message: str):
    sizes = {"in_channels": 6, "hidden_channels": [8, 8], "out_channels": 3, "num_neighbors": [5, 3]}
    with pytest.raises(ValueError, match=message):
        GraphSAGE(**{**sizes, **changes})
