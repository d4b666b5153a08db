"""Sphinx configuration of the documentation, which `nox -s docs` builds."""

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "src"), str(DOCS)]
import all_settings  # noqa: E402
import recorded  # noqa: E402

import gat_pyg  # noqa: E402

project = "gat_pyg"
author = copyright = "The gat_pyg maintainers"
version = release = gat_pyg.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
# The examples that are run, by the environment variable GALLERY: those that take seconds, all, or none.
EXAMPLES = {"quick": r"/(?!03|04|06)\d\d_", "all": r"/\d\d_", "0": "$^"}
warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")  # of Lightning
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("recorded.save_figure",),
    "ignore_repr_types": r"Figure|Generator|IncompatibleKeys|ONNXProgram",  # shown as a picture, or of no interest
    "remove_config_comments": True,
    "filename_pattern": EXAMPLES[os.environ.get("GALLERY", "quick")],
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 3600,
    "write_computation_times": False,
    "abort_on_example_error": True,
}
exclude_patterns = ["_build", "generated"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),  # single backticks in a docstring: a link where the name is known, otherwise code
    ("py:class", r"(gat_pyg\.)?.*\._\w+(\.\w+)?"),  # private base classes, and those of private modules
    ("py:class", r"gat_pyg\.(conv\.base\.AttentionConv|seeds\.module\.StackOfSeeds)"),  # bases of documented classes
    (
        "py:class",
        r"Kind|Number|Panels|(gat_pyg\.trained\.uncertainty\.)?Rows|Scale|Seed|Split|Weights|dataclasses\.InitVar",
    ),  # aliases, and what the inventory of Python lacks
    ("py:class", r"(collections\.abc\.)?Mapping\[\w+"),  # of dataclasses' fields, which Sphinx cuts at the comma
    # without documentation
    ("py:class", r"torch\.utils\.data\.dataloader\.DataLoader|torch_geometric\.nn\.conv\.gine?_conv\.\w+"),
    ("py:class", r"(torch_geometric\.explain\.\w+\.)?(Explained|Explainer|Explanation|ModelConfig)"),
    ("py:class", r"Flow|torch_sparse\.tensor\.SparseTensor|torch_geometric\.typing\.SparseTensor|torch\.fx\..*"),
]
default_role = "py:obj"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3

autodoc_default_options = {"exclude-members": "edge_updater, propagate"}  # PyG adds them when a layer is made
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_use_rtype = False

# Only names listed in inventories/write.py are known: the build needs no network.
ADDRESSES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "torch_geometric": "https://pytorch-geometric.readthedocs.io/en/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/2.3.3/",  # the last release with one page for each class
    "matplotlib": "https://matplotlib.org/stable/",
}
intersphinx_mapping = {name: (address, f"inventories/{name}.inv") for name, address in ADDRESSES.items()}
# The name that a type has at run time -> the name under which its project documents it.
DOCUMENTED = {
    "Data": "torch_geometric.data.Data",
    "Figure": "matplotlib.figure.Figure",
    "Path": "pathlib.Path",
    "Tensor": "torch.Tensor",
    "nn.Module": "torch.nn.Module",
    "lightning.fabric.plugins.io.torch_io.TorchCheckpointIO": "lightning.pytorch.plugins.io.TorchCheckpointIO",
    "lightning.pytorch.callbacks.callback.Callback": "lightning.pytorch.callbacks.Callback",
    "lightning.pytorch.core.datamodule.LightningDataModule": "lightning.pytorch.core.LightningDataModule",
    "lightning.pytorch.core.module.LightningModule": "lightning.pytorch.core.LightningModule",
    "torch_geometric.nn.GATConv": "torch_geometric.nn.conv.GATConv",
    "torch_geometric.nn.GATv2Conv": "torch_geometric.nn.conv.GATv2Conv",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.modules.rnn.LSTM": "torch.nn.LSTM",
    "torch.optim.adam.Adam": "torch.optim.Adam",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch_geometric.data.data.Data": "torch_geometric.data.Data",
    "torch_geometric.loader.dataloader.DataLoader": "torch_geometric.loader.DataLoader",
    "torch_geometric.loader.link_loader.LinkLoader": "torch_geometric.loader.LinkLoader",
    "torch_geometric.loader.node_loader.NodeLoader": "torch_geometric.loader.NodeLoader",
    "torch_geometric.sampler.base.BaseSampler": "torch_geometric.sampler.BaseSampler",
    "torch_geometric.sampler.base.EdgeSamplerInput": "torch_geometric.sampler.EdgeSamplerInput",
    "torch_geometric.sampler.base.NegativeSampling": "torch_geometric.sampler.NegativeSampling",
    "torch_geometric.sampler.base.NodeSamplerInput": "torch_geometric.sampler.NodeSamplerInput",
    "torch_geometric.sampler.base.SamplerOutput": "torch_geometric.sampler.SamplerOutput",
    "torch_geometric.transforms.base_transform.BaseTransform": "torch_geometric.transforms.BaseTransform",
}

html_theme = "furo"
html_title = "gat_pyg"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "
linkcheck_anchors = False  # pages made by JavaScript have none


def use_documented_name(app: Sphinx, env: Any, node: nodes.Element, child: nodes.TextElement) -> None:
    """Give a reference that was not found the name that its project documents, before the inventories are searched."""
    node["reftarget"] = DOCUMENTED.get(node["reftarget"], node["reftarget"])


def escape(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep |N_i| in a docstring from being a substitution, and a property's words before a colon a type."""
    lines[:] = [re.sub(r"(?<![`\\])\|(\w+)\|", r"\\|\1\\|", line) for line in lines]
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ")
    lines[:] = [re.sub(r"(: )([A-Z]\.)$", r"\1\\\2", line) for line in lines]  # "C." is not the item of a list


def write_math(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without JavaScript and without a network."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(re.sub(r"\\[bB]igg?(?=\\)", "", node.astext()), display=display))
    raise nodes.SkipNode


def write_settings(app: Sphinx) -> None:
    """Write the content of the page All settings."""
    (DOCS / "generated" / "settings.md").write_text(all_settings.page(), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register what this file defines."""
    app.connect("builder-inited", lambda app: recorded.write())
    app.connect("builder-inited", write_settings)
    app.connect("missing-reference", use_documented_name, priority=400)
    app.connect("autodoc-process-docstring", escape, priority=400)  # before napoleon
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
