"""The attention of a trained model as an interactive, self-contained HTML file."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ...files import write_whole
from .attended import UNKNOWN, Attended
from .positions import checked, tsne

SCALE = 65535  # the square root of a coefficient is stored in 16 bits: within 0.2 % even for a coefficient of 1/5000


def attention_page(
    model: nn.Module,
    data: Data,
    path: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    label: int | None = None,
    title: str | None = None,
    layout: Tensor | None = None,
    seed: int = 0,
) -> Path:
    """Write a page that shows every layer's and head's attention on a graph, drawn as `attention_figure` draws it.

    The reader can zoom, pan, select a layer and a head, filter for the strongest edges, and point at a node to see its
    class, its prediction and its attention. Strength is measured in times uniform, |N_i| alpha_ij, since a coefficient
    may be large only because there are few neighbours. The file includes its data; a browser opens it from disk.

    Args:
        model, data, class_names, label, layout, seed: as in `attention_figure`.
        path: the HTML file to write.
        title: the heading, by default with the model's class.

    Returns:
        The path.

    Raises:
        ImportError: if scikit-learn is missing and there is no layout.
        ValueError: if an argument does not fit the model or the graph.

    Cost: 3 bytes per edge, direction and head; about 6 MB for Pubmed's 44,324 edges and 16 heads.
    """
    attended = Attended.of(model, data, class_names, label)
    place = tsne(attended.features, seed) if layout is None else checked(layout, attended.num_nodes)
    content = _content(attended, place, title or f"The attention of a trained {type(model).__name__}")
    text = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")  # so that no text closes the script element
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = template.replace("{{title}}", escape(content["title"])).replace("{{content}}", text)
    write_whole(path, lambda beside: beside.write_text(page, encoding="utf-8"))
    return Path(path)


def _content(attended: Attended, place: Tensor, title: str) -> dict[str, Any]:
    """Return the data of the page: arrays as base64, little-endian, each edge list once."""
    place = place * torch.tensor([1.0, -1.0])  # a screen's second axis points down
    low, high = place.min(0).values, place.max(0).values
    span = float((high - low).max()) or 1.0
    lists: list[Tensor] = []
    layers = []
    for layer, (edge_index, alpha) in enumerate(attended.layers, start=1):
        least, most = alpha.aminmax() if alpha.numel() else (alpha.new_zeros(()), alpha.new_ones(()))
        if not (least >= 0 and most <= 1.001):  # a softmax that was rounded
            raise ValueError(
                f"The coefficients of layer {layer} lie between {least:.3g} and {most:.3g}, expected 0 to 1: a page "
                "shows shares of attention. Let the model return them after its softmax."
            )
        known = next((n for n, found in enumerate(lists) if torch.equal(found, edge_index)), len(lists))
        lists += [edge_index] if known == len(lists) else []
        layers.append(
            {
                "list": known,
                "heads": alpha.size(1),
                "alpha": _text((alpha.t().clamp(max=1).sqrt() * SCALE).round(), "<u2"),
                "caption": attended.describe(layer - 1),
            }
        )
    return {
        "title": title,
        "classes": attended.class_names,
        "colours": attended.colours,
        "unknown": UNKNOWN,
        "place": _text((place - (low + high) / 2) / span, "<f4"),  # [N, 2], the longer side from -1/2 to 1/2
        "y": _text(attended.y, "<i2"),
        "prediction": _text(attended.prediction, "<i2"),
        "lists": [_text(edge_index, "<i4") for edge_index in lists],  # [2, E]
        "layers": layers,  # alpha: [H, E], the roots of the coefficients
    }


def _text(values: Tensor, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values.clone().numpy().astype(dtype)).tobytes()).decode()
