"""
Your own attention mechanism
============================

A mechanism is a module that maps the features of both ends of each edge to scores `[E, H]`. The layer does
the rest: projection, softmax over each neighbourhood, dropout, aggregation.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch_geometric.utils import degree

import gat_pyg


class Distance(nn.Module):
    """Neighbours at a smaller distance get more attention, at a learnable scale for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads))

    def forward(
        self, x_dst: Tensor, x_src: Tensor, edge_attr: Tensor | None
    ) -> Tensor:
        distance = (x_dst - x_src).square().mean(-1)  # [E, H, C] -> [E, H]
        return -self.scale * distance


torch.manual_seed(0)
x, edge_index = torch.randn(100, 16), torch.randint(100, (2, 400))
conv = gat_pyg.GATConv(16, 8, heads=4, mechanism=Distance(4))
out, (edges, alpha) = conv(x, edge_index, return_attention_weights=True)
print(out.shape, alpha.shape)

# %%
# The coefficients of a node sum to 1 for each head, and the scale gets a gradient.

total = torch.zeros(100, 4).index_add(0, edges[1], alpha)
assert torch.allclose(total, torch.ones(100, 4), atol=1e-5)
out.square().mean().backward()
print(conv.mechanism.scale.grad)

# %%
# Of the neighbours of a node, the closest get the most attention. 1 is a mean.

src, dst = edges
h = conv.lin(x).view(100, 4, 8)
distance = (h[dst] - h[src]).square().mean(-1)[:, 0]  # of the first head
times_uniform = degree(dst)[dst] * alpha[:, 0]
figure = Figure(figsize=(5, 3.5), layout="constrained")
axes = figure.subplots()
axes.scatter(distance.detach(), times_uniform.detach(), s=8)
axes.axhline(1, color="C7", ls="--")
axes.set(xlabel="distance", ylabel="attention, times uniform")
figure

# %%
# Mechanisms with fused kernels are chosen by name.

for mechanism in ("additive", "constant", "dot", "cosine"):
    conv = gat_pyg.GATConv(16, 8, heads=4, mechanism=mechanism)
    count = sum(parameter.numel() for parameter in conv.parameters())
    print(f"{mechanism:>8}: {count} parameters")
