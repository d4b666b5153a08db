"""
Accelerate a PyG model
======================

One line makes a built model use this package's layers. The model and the
training are those of PyG's `examples/gat.py`, on a generated graph.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/accelerate.png"

import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from torch_geometric.utils import to_undirected

import gat_pyg

torch.manual_seed(0)

# %%
# 9,996 nodes of 7 classes with noisy features; most neighbours of a node are of
# its class.

N, K = 9_996, 7  # a multiple
y = torch.arange(N) % K
x = F.one_hot(y, 128) + torch.randn(N, 128)
src, step = torch.randint(N, (2, 5 * N))
same = torch.rand(5 * N) < 0.8
dst = torch.where(same, (src + K * step) % N, step)
edge_index = to_undirected(torch.stack([src, dst]))
data = Data(x=x, edge_index=edge_index, y=y, train_mask=torch.rand(N) < 0.1)
print(data)

# %%
# PyG's example.


class GAT(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, heads):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=0.6)
        self.conv2 = GATConv(
            hidden_channels * heads,
            out_channels,
            heads=1,
            concat=False,
            dropout=0.6,
        )

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)


model = GAT(128, 8, K, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()


@torch.no_grad()
def accuracy():
    model.eval()
    correct = model(data.x, data.edge_index).argmax(-1) == data.y
    return 100 * correct[~data.train_mask].float().mean()


def epochs(count):
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        train()
        seconds.append(time.perf_counter() - start)
    return 1000 * torch.tensor(seconds).median()


print(f"PyG's layers: {epochs(10):.0f} ms an epoch, {accuracy():.1f} %")

# %%
# The training goes on with the same parameters and the same optimizer.

print(gat_pyg.accelerate(model))
train()  # the first call compiles the kernels
print(f"accelerated: {epochs(90):.0f} ms an epoch, {accuracy():.1f} %")

# %%
# Undone.

accelerated = accuracy()
print(gat_pyg.restore(model))
assert abs(accuracy() - accelerated) < 0.1
