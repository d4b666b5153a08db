"""
Export
======

An exported model consists of plain operators: neither this package nor PyG is needed where it runs.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/export.png"

import tempfile
from pathlib import Path

import torch

import gat_pyg

torch.manual_seed(0)
model = gat_pyg.GAT(16, [8], 3, heads=[4, 1]).eval()
x, edge_index = torch.randn(10, 16), torch.randint(10, (2, 30))

# %%
# A `.pt2` file that takes graphs of any size.

N, E = torch.export.Dim("N", min=2), torch.export.Dim("E", min=2)
program = torch.export.export(
    model, (x, edge_index), dynamic_shapes=({0: N}, {1: E})
)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "model.pt2")
    torch.export.save(program, path)
    print(f"{path.stat().st_size / 1024:.0f} KiB")
    loaded = torch.export.load(path).module()

# %%
# The loaded model on a larger graph, beside the original.

x, edge_index = torch.randn(500, 16), torch.randint(500, (2, 4000))
difference = (loaded(x, edge_index) - model(x, edge_index)).abs().max().item()
print(f"largest difference: {difference:.1e}")
assert difference < 1e-5
