"""Write the inventories of other projects' documentation, so that the site builds without a network.

They list only the names that our pages refer to, with the page of each: written by hand, not fetched. A link to
another name is a warning, hence an error: add the name here and run `python docs/inventories/write.py`. With a
network, each file can be replaced by the whole one, `objects.inv` at the address in
`docs/conf.py`; the file's format is the same. `nox -s docs -- linkcheck` checks that each page exists.
"""

import zlib
from pathlib import Path

PYTHON = {
    "library/collections.abc.html": [
        f"collections.abc.{name}" for name in ("Callable", "Iterable", "Iterator", "Mapping", "Sequence")
    ],
    "library/abc.html": ["abc.ABC"],
    "library/pathlib.html": ["pathlib.Path"],
}
TORCH = {
    "tensors.html": ["torch.Tensor"],
    "tensor_attributes.html": ["torch.dtype", "torch.device"],
    "generated/{}.html": [
        *("torch.nn.Module", "torch.nn.LSTM", "torch.optim.Adam", "torch.optim.lr_scheduler.LRScheduler"),
    ],
    "generated/torch.nn.parameter.Parameter.html": ["torch.nn.parameter.Parameter"],
    "optim.html": ["torch.optim.Optimizer"],
}
PYG = {
    "generated/{}.html": [
        f"torch_geometric.{name}"
        for name in (
            "data.Data",
            "datasets.Amazon",
            "datasets.Planetoid",
            "explain.algorithm.AttentionExplainer",
            "nn.conv.AGNNConv",
            "nn.conv.GATConv",
            "nn.conv.GATv2Conv",
            "nn.conv.MessagePassing",
            "nn.models.GAT",
            "transforms.BaseTransform",
            "transforms.NormalizeFeatures",
        )
    ],
    "modules/loader.html": [
        f"torch_geometric.loader.{name}" for name in ("DataLoader", "LinkLoader", "NodeLoader", "NeighborLoader")
    ],
    "modules/sampler.html": [
        f"torch_geometric.sampler.{n}"
        for n in ("BaseSampler", "EdgeSamplerInput", "NegativeSampling", "NodeSamplerInput", "SamplerOutput")
    ],
}
LIGHTNING = {
    "api/{}.html": [
        f"lightning.pytorch.{name}"
        for name in (
            "callbacks.Callback",
            "core.LightningDataModule",
            "core.LightningModule",
            "plugins.io.TorchCheckpointIO",
            "trainer.trainer.Trainer",
        )
    ]
}
MATPLOTLIB = {"api/figure_api.html": ["matplotlib.figure.Figure"]}


def write(project: str, version: str, pages: dict[str, list[str]]) -> None:
    """Write `<project>.inv` in Sphinx's format, version 2."""
    lines = [f"{name} py:class 1 {page.format(name)}#$ -" for page, names in pages.items() for name in names]
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: {version}\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    content = head.encode() + zlib.compress("\n".join(sorted(lines)).encode() + b"\n", 9)
    Path(__file__).with_name(f"{project}.inv").write_bytes(content)


if __name__ == "__main__":
    write("python", "3", PYTHON)
    write("torch", "stable", TORCH)
    write("torch_geometric", "stable", PYG)
    write("lightning", "stable", LIGHTNING)
    write("matplotlib", "stable", MATPLOTLIB)
