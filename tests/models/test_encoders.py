"""Encoders against a sum of torch's embeddings and OGB's, and models on encoded features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gat_pyg.models import GAT
from gat_pyg.models.encoders import Encoded, Encoder, num_categories
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
    for unknown in (-1, 2, 100, 0.5, -0.5):
        assert_close(encoder(torch.tensor([[unknown, 0]])), known)


def test_categories_are_counted_over_all_graphs() -> None:
    ints = [torch.tensor([[3, 0]]), torch.empty(0, 2, dtype=torch.long), torch.tensor([[0, 7]])]
    assert num_categories(ints) == [4, 8]
    assert num_categories([torch.tensor([[1.0, -1.0, 0.5]]), torch.tensor([[0.0, 2.0, 3.0]])]) == [2, 0, 0]
    with pytest.raises(ValueError, match="there is no row of features"):
        num_categories([torch.empty(0, 2)])


def test_a_count_is_no_category() -> None:
    ids, few, counts = torch.arange(3000), torch.arange(3000) % 3, torch.arange(3000) * 11
    assert num_categories([torch.stack([ids, few], 1)]) == [3000, 3]
    assert num_categories([torch.tensor([[999, 1], [7, 0]])]) == [1000, 2]  # as an atomic number, of few atoms
    message = "column 1 of edge_attr holds 3,000 different whole numbers up to 32,989, .* give their logarithm"
    for columns in (torch.stack([few, counts], 1), torch.stack([few, counts], 1).double()):
        with pytest.raises(ValueError, match=message):
            num_categories(columns.split(1000), "edge_attr")


def test_a_model_on_encoded_features_is_the_model_on_them() -> None:
    model = Encoded(GAT(8, [4], 3, [2, 1], edge_dim=8), 8, [5, 0], [3])
    x = torch.stack([torch.arange(40) % 5, torch.randn(40)], 1)
    edge_attr = (torch.arange(RANDOM.index.size(1)) % 3)[:, None]
    expected = model.model(model.encoder(x), RANDOM.index, model.edge_encoder(edge_attr))
    out = model(x, RANDOM.index, edge_attr)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    perceptron = Encoded(nn.Linear(8, 3), 8, [5, 0])
    assert perceptron(x).shape == (40, 3) and not perceptron.supports_edge_attr


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"categories is \[\], expected for each column"):
        Encoder([], 4)
    with pytest.raises(ValueError, match=r"shape \(3, 2\), expected \(N, 1\)"):
        Encoder([4], 4)(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"shape \(5, 2, 2\), expected \(N, 2\)"):  # whose nodes are no columns
        Encoder([4, 4], 4)(torch.zeros(5, 2, 2))
