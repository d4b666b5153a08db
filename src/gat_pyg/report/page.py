"""The attention of a trained model as one HTML file to look around in, which needs nothing else and no network."""

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

from ..files import write_whole
from .attended import UNKNOWN, Attended, places

SCALE = 65535  # the root of a coefficient is a 16-bit integer, 65535 for 1: right to 0.2 % even where it is 1/5000


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

    One can zoom, pan, choose layer and head, show the strongest edges only, and point at a node for its class, its
    prediction and what it attends to. Strong means large in times uniform, |N_i| alpha_ij: a large coefficient alone
    may only mean few neighbours. The file holds its data; a browser opens it from disk.

    Args:
        model, data, class_names, label, layout, seed: as of `attention_figure`.
        path: the HTML file to write.
        title: what it is headed; the model's class where not given.

    Returns:
        The path.

    Raises:
        ImportError: where scikit-learn is missing and no layout is given.
        ValueError: if an argument does not fit the model or the graph.

    Cost: about 6 MB for Pubmed's 44,324 edges and 16 heads: 3 bytes for each edge, each way and each head.
    """
    seen = Attended.of(model, data, class_names, label)
    place = places(seen, layout, seed)
    content = _content(seen, place, title or f"The attention of a trained {type(model).__name__}")
    text = json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")  # nothing in it ends the script
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = template.replace("{{title}}", escape(content["title"])).replace("{{content}}", text)
    write_whole(path, lambda beside: beside.write_text(page, encoding="utf-8"))
    return Path(path)


def _content(seen: Attended, place: Tensor, title: str) -> dict[str, Any]:
    """The data of the page: arrays as base64, little-endian, each edge list once."""
    place = place * torch.tensor([1.0, -1.0])  # a screen's second axis points down
    low, high = place.min(0).values, place.max(0).values
    span = float((high - low).max()) or 1.0
    lists: list[Tensor] = []
    layers = []
    for layer, (edge_index, alpha) in enumerate(seen.layers, start=1):
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
                "caption": seen.describe(layer - 1),
            }
        )
    return {
        "title": title,
        "classes": seen.class_names,
        "colours": seen.colours,
        "unknown": UNKNOWN,
        "place": _text((place - (low + high) / 2) / span, "<f4"),  # [N, 2], the longer side from -1/2 to 1/2
        "y": _text(seen.y, "<i2"),
        "prediction": _text(seen.prediction, "<i2"),
        "lists": [_text(edge_index, "<i4") for edge_index in lists],  # [2, E]
        "layers": layers,  # alpha: [H, E], the roots of the coefficients
    }


def _text(values: Tensor, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values.numpy().astype(dtype)).tobytes()).decode()
