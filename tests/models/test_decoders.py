"""Link decoders against PyG's and torch's, and their laws."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import InnerProductDecoder

from gat_pyg.models import LinkScores
from gat_pyg.models.decoders import Bilinear, Perceptron, link_decoder
from tests.laws import assert_close

Z = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).double()
PAIRS = torch.tensor([[0, 1, 6, 3, 2], [1, 0, 6, 2, 3]])
SWAPPED = [1, 0, 2, 4, 3]  # the position of each pair with its ends exchanged


def test_the_dot_product_is_pygs() -> None:
    assert_close(link_decoder("dot", 4)(Z, PAIRS), InnerProductDecoder()(Z, PAIRS, sigmoid=False))


def test_bilinear_is_torchs() -> None:
    ours, theirs = Bilinear(4, 3).double(), nn.Bilinear(4, 4, 3).double()
    ours.weight.data, ours.bias.data = theirs.weight.data, theirs.bias.data
    assert_close(ours(Z, PAIRS), theirs(Z[PAIRS[0]], Z[PAIRS[1]]))


@pytest.mark.parametrize("channels", [16, 64, 400])
def test_a_bilinear_form_of_standard_embeddings_starts_with_scores_of_variance_one(channels: int) -> None:
    torch.manual_seed(0)
    z, pairs = torch.randn(2000, channels), torch.arange(2000).view(2, 1000)
    scores = Bilinear(channels, 8)(z, pairs)  # 8 draws of the weights
    assert 0.7 < float(scores.detach().std()) < 1.3


@pytest.mark.parametrize("name", ["dot", "bilinear", "mlp"])
def test_a_decoder_has_one_output_for_each_pair_and_gradients(name: str) -> None:
    decoder, z = link_decoder(name, 4).double(), Z.clone().requires_grad_()
    out = decoder(z, PAIRS)
    assert out.shape == (5,) and decoder(z, PAIRS[:, :0]).shape == (0,)
    out.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in (z, *decoder.parameters()))
    if name != "dot":
        assert link_decoder(name, 4, 2).double()(z, PAIRS).shape == (5, 2)


def test_a_popular_decoder_begins_with_the_popularity_of_the_second_node_and_corrects_it() -> None:
    scores = LinkScores(nn.Identity(), 4, "mlp", popularity=True).double()
    edges = torch.tensor([[0, 1, 2, 3, 4], [6, 6, 6, 5, 5]])  # in-degrees 3 and 2
    pairs = torch.tensor([[0, 1, 2], [6, 5, 4]])
    difference = scores(Z, edges, edge_label_index=pairs).diff()
    assert_close(difference.detach(), torch.tensor([4.0, 3.0, 1.0]).double().log().diff())  # of 1 + k
    for weight in scores.parameters():
        nn.init.normal_(weight)
    z = scores.with_popularity(Z, edges)
    every = scores.decoder.of_all_pairs(z[:3], z[3:])
    ends = torch.cartesian_prod(torch.arange(3), torch.arange(3, 7)).t()
    assert_close(every.flatten(), scores(Z, edges, edge_label_index=ends))
    scores(Z, edges, edge_label_index=ends).sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in scores.parameters())


def test_the_product_is_symmetric_and_concatenation_begins_with_src() -> None:
    symmetric, directed = Perceptron(4, num_layers=3).double(), Perceptron(4, num_layers=1, combine="concat").double()
    assert_close(symmetric(Z, PAIRS), symmetric(Z, PAIRS)[SWAPPED])
    assert_close(directed(Z, PAIRS), directed.lins[0](torch.cat([Z[PAIRS[0]], Z[PAIRS[1]]], 1))[:, 0])


@pytest.mark.parametrize("name", ["dot", "bilinear", "mlp"])
def test_the_scores_of_all_pairs_are_those_of_each(name: str) -> None:
    decoder = link_decoder(name, 4).double()
    for weight in decoder.parameters():
        nn.init.normal_(weight)  # biases too
    src, dst = torch.meshgrid(torch.arange(3), torch.arange(3, 7), indexing="ij")
    each = decoder(Z, torch.stack([src.flatten(), dst.flatten()])).view(3, 4)
    assert_close(decoder.of_all_pairs(Z[:3], Z[3:]), each)  # type: ignore[operator]


def test_a_deep_decoder_adds_its_input_to_hidden_layers_and_ranks_in_full_precision() -> None:
    decoder = Perceptron(4, num_layers=4, residual=True).double()
    first, out = Z[PAIRS[0]] * Z[PAIRS[1]], Z[PAIRS[0]] * Z[PAIRS[1]]
    for lin in decoder.lins[:-1]:
        out = (out @ lin.weight.t() + lin.bias + first).relu()
    assert_close(decoder(Z, PAIRS), (out @ decoder.lins[-1].weight.t() + decoder.lins[-1].bias)[:, 0])
    with torch.autocast("cpu", torch.bfloat16):
        assert decoder.float()(Z.float(), PAIRS).dtype == torch.float32
    assert decoder.to("meta")(Z.float().to("meta"), PAIRS.to("meta")).shape == PAIRS.shape[1:]


def test_errors() -> None:
    with pytest.raises(ValueError, match="there is no link decoder 'cosine', expected dot, bilinear or mlp"):
        link_decoder("cosine", 4)
    with pytest.raises(ValueError, match="the dot product gives one output .* out_channels is 3"):
        link_decoder("dot", 4, 3)
    with pytest.raises(ValueError, match="combine is 'sum'"):
        Perceptron(4, combine="sum")
    with pytest.raises(ValueError, match="num_layers is 0, expected at least 1"):
        Perceptron(4, num_layers=0)
    with pytest.raises(ValueError, match=r"residual is True and the widths of the perceptron are \[4, 8\], expected"):
        Perceptron(4, hidden_channels=8, residual=True)
    with pytest.raises(ValueError, match=r"shape \(5, 2\), expected \(2, L\)\. Did you mean edge_label_index\.t\(\)"):
        link_decoder("dot", 4)(Z, PAIRS.t())
