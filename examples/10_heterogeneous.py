"""
Nodes and edges of several types
================================

PyG's `HeteroConv` has a layer for each type of edge, here this package's. The
graph has authors, papers and venues; an author's field is predicted.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/heterogeneous.png"

import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv

from gat_pyg import GATConv

torch.manual_seed(0)

# %%
# Generated data: a paper's venue is mostly of the field of its authors. The
# features of papers are weak hints, those of authors are noise.

K, AUTHORS, PAPERS, VENUES = 4, 400, 1200, 20
field = torch.randint(K, (AUTHORS,))
author = torch.randint(AUTHORS, (PAPERS,))
off_topic = torch.rand(PAPERS) < 0.2
topic = torch.where(off_topic, torch.randint(K, (PAPERS,)), field[author])
venue = torch.randint(VENUES // K, (PAPERS,)) * K + topic
paper = torch.arange(PAPERS)

data = HeteroData()
data["author"].x = torch.randn(AUTHORS, 8)
data["paper"].x = nn.functional.one_hot(topic, K) + 2 * torch.randn(PAPERS, K)
data["venue"].x = torch.eye(VENUES)
writes = torch.stack([author, paper])
data["author", "writes", "paper"].edge_index = writes
data["paper", "written_by", "author"].edge_index = writes.flip(0)
published = torch.stack([venue, paper])
data["venue", "publishes", "paper"].edge_index = published
data["paper", "published_in", "venue"].edge_index = published.flip(0)
print(data)

# %%
# A layer whose ends have different types takes `(-1, -1)` as its widths and no
# self-loops. Messages from several types are added.


class Network(nn.Module):
    """Two layers of attention over each type of edge."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.layer(), self.layer()
        self.out = nn.Linear(32, K)

    def layer(self) -> HeteroConv:
        options = {"heads": 4, "add_self_loops": False}
        edges = data.edge_types
        return HeteroConv({e: GATConv((-1, -1), 8, **options) for e in edges})

    def forward(self, x, edge_index):
        h = self.first(x, edge_index)
        h = {name: each.relu() for name, each in h.items()}
        return self.out(self.second(h, edge_index)["author"].relu())


model = Network()
with torch.no_grad():
    model(data.x_dict, data.edge_index_dict)  # sets the widths
train = torch.arange(AUTHORS) < 100
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
for _ in range(50):
    out = model(data.x_dict, data.edge_index_dict)
    loss = nn.functional.cross_entropy(out[train], field[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

correct = out.argmax(-1) == field
accuracy = correct[~train].float().mean()
print(f"accuracy on {AUTHORS - 100} other authors: {100 * accuracy:.1f} %")
