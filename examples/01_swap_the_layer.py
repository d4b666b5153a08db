"""
Swap the layer in a model
=========================

PyG's `GATConv` and this package's take the same arguments and state dict, and compute the same.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/swap_the_layer.png"

import time

import torch
import torch_geometric.nn as pyg

import gat_pyg

torch.manual_seed(0)
N, E = 20_000, 200_000
x, edge_index = torch.randn(N, 128), torch.randint(N, (2, E))

theirs = pyg.GATConv(128, 16, heads=8)
ours = gat_pyg.GATConv(128, 16, heads=8)
ours.load_state_dict(theirs.state_dict())

# %%
# Outputs and gradients differ by rounding only.

largest = (ours(x, edge_index) - theirs(x, edge_index)).abs().max().item()
print(f"largest difference of the outputs: {largest:.1e}")
assert largest < 1e-5

# %%
# Forward and backward, in milliseconds. The first call compiles the kernels and keeps them on disk.


def milliseconds(conv: torch.nn.Module) -> float:
    start = time.perf_counter()
    conv(x, edge_index).sum().backward()
    return 1000 * (time.perf_counter() - start)


for name, conv in (("torch_geometric", theirs), ("gat_pyg", ours)):
    milliseconds(conv)
    print(f"{name:>15}: {min(milliseconds(conv) for _ in range(5)):6.1f} ms")

# %%
# A built model takes these layers by `accelerate`, in place.

model = pyg.GAT(128, 64, num_layers=2, out_channels=7, heads=8)
print(gat_pyg.accelerate(model))
assert all(isinstance(conv, gat_pyg.GATConv) for conv in model.convs)
