"""Encoders against a sum of torch's embeddings and OGB's, and models on encoded features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gat_pyg.models import GAT
from gat_pyg.models.encoders import Encoded, Encoder, columns_of, num_categories
from tests.graphs import RANDOM
from tests.laws import assert_close


def test_it_is_the_sum_of_an_embedding_for_each_column_and_a_linear_map() -> None:
    encoder = Encoder([4, 0, 3, 0], 5).double()
    first, second = encoder.embedding.split([4, 3])
    x = torch.stack([torch.arange(4), torch.randn(4), torch.tensor([2, 0, 1, 2]), torch.randn(4)], 1).double()
    expected = first[x[:, 0].long()] + second[x[:, 2].long()] + encoder.lin(x[:, [1, 3]])
    assert_close(encoder(x), expected)
    encoder(x).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in encoder.parameters())
    for rows in Encoder([9, 3], 5, "orthogonal").embedding.detach().double().split([9, 3]):
        product = rows.t() @ rows if len(rows) > 5 else rows @ rows.t()
        assert_close(product.float(), torch.eye(len(product)))


@pytest.mark.parametrize("kind", ["Atom", "Bond"])
@pytest.mark.filterwarnings("ignore")
def test_it_is_ogbs_encoder(kind: str) -> None:
    ogb = pytest.importorskip("ogb.graphproppred.mol_encoder")
    theirs: nn.Module = getattr(ogb, f"{kind}Encoder")(8)
    (embeddings,) = theirs.children()
    sizes = [embedding.num_embeddings for embedding in embeddings]  # type: ignore[union-attr]
    ours = Encoder(sizes, 8)
    ours.embedding.data = torch.cat([embedding.weight for embedding in embeddings]).detach()  # type: ignore[union-attr]
    x = torch.stack([torch.randint(size, (50,)) for size in sizes], 1)
    assert_close(ours(x), theirs(x))


def test_an_unknown_category_adds_nothing() -> None:
    encoder = Encoder([2, 3], 4)
    known = encoder(torch.tensor([[1, 0]])) - encoder.embedding[1]
    plain = Encoder([2, 3, [1.0, 2.0]], None)  # without parameters: the quantity, then columns of 0 and 1
    for unknown in (-1, 2, 100, 0.5, -0.5):
        assert_close(encoder(torch.tensor([[unknown, 0]])), known)
        assert plain(torch.tensor([[unknown, 2, 5.0], [1, unknown + 3, 1.0]])).tolist() == [
            [2, 0, 0, 0, 1],
            [0, 1, 0, 0, unknown == -1],
        ]
    assert plain.out_channels == 5 and not [*plain.parameters()]
    x = torch.tensor([[1.0, 2.0, 5.0]])
    assert plain(x) is plain(x) and plain(x)[0, 0] == 2  # computed once
    x[0, 2] = 3.0
    assert plain(x)[0, 0] == 1
    exported = torch.export.export(plain, (x,), strict=False)
    assert torch.equal(exported.module()(x), plain(x))
    plain(x.requires_grad_()).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0, 0, 0.5]]


def test_categories_are_counted_over_all_graphs() -> None:
    ints = [torch.tensor([[3, 0]]), torch.empty(0, 2, dtype=torch.long), torch.tensor([[0, 7]])]
    assert num_categories(ints) == [4, 8]
    assert num_categories([torch.tensor([[1.0, -1.0, 0.5]]), torch.tensor([[0.0, 2.0, 3.0]])]) == [2, 0, 0]
    with pytest.raises(ValueError, match="there is no row of features"):
        num_categories([torch.empty(0, 2)])


def test_a_count_is_a_quantity_which_is_standardised() -> None:
    ids, few, counts = torch.arange(3000), torch.arange(3000) % 3, torch.arange(3000) % 101
    assert num_categories([ids[:, None]]) == [3000]  # of nodes
    assert num_categories([torch.stack([ids, few, counts, 11 * few], 1)]) == [0, 3, 0, 23]
    assert num_categories([torch.tensor([[999, 1], [7, 0]])]) == [1000, 2]  # as an atomic number, of few atoms
    assert num_categories([torch.tensor([[1000], [7]])]) == [0]
    x = torch.stack([1000 * torch.randn(50) + 7, few[:50], torch.full((50,), 0.5)], 1)
    columns = columns_of([x, x[:3]], [x[:9], x[20:]])
    rows = torch.cat([x[:9], x[20:]])[:, 0].double()
    mean, std = rows.mean().item(), rows.std(correction=0).item()
    assert columns == [pytest.approx([mean, std], rel=1e-6), 3, [0.5, 1.0]]
    encoder, plain = Encoder(columns, 4), Encoder([0, 3, 0], 4)
    plain.load_state_dict(encoder.state_dict())
    scaled = torch.stack([(x[:, 0] - mean) / std, x[:, 1], x[:, 2] - 0.5], 1)
    assert_close(encoder(x), plain(scaled))
    with pytest.raises(ValueError, match="or for a continuous column 0, or its mean and standard deviation"):
        Encoder([[1.0, 0.0]], 4)


def test_a_model_on_encoded_features_is_the_model_on_them() -> None:
    model = Encoded(GAT(8, [4], 3, [2, 1], edge_dim=8), 8, [5, 0], [3])
    x = torch.stack([torch.arange(40) % 5, torch.randn(40)], 1)
    edge_attr = (torch.arange(RANDOM.index.size(1)) % 3)[:, None]
    expected = model.model(model.encoder(x), RANDOM.index, model.edge_encoder(edge_attr))
    out = model(x, RANDOM.index, edge_attr)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    plain = Encoded(GAT(8, [4], 3, [2, 1], edge_dim=3), 8, [5, 0], [3], learn_edges=False)
    one_hot = nn.functional.one_hot(edge_attr[:, 0], 3).float()
    assert torch.equal(plain(x, RANDOM.index, edge_attr), plain.model(plain.encoder(x), RANDOM.index, one_hot))
    perceptron = Encoded(nn.Linear(8, 3), 8, [5, 0])
    assert perceptron(x).shape == (40, 3) and not perceptron.supports_edge_attr


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"categories is \[\], expected for each column"):
        Encoder([], 4)
    with pytest.raises(ValueError, match=r"init is 'eye', expected one of xavier_uniform, normal, orthogonal"):
        Encoder([4], 4, "eye")
    with pytest.raises(ValueError, match=r"shape \(3, 2\), expected \(N, 1\)"):
        Encoder([4], 4)(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"shape \(5, 2, 2\), expected \(N, 2\)"):  # whose nodes are no columns
        Encoder([4, 4], 4)(torch.zeros(5, 2, 2))
