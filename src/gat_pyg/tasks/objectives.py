"""All objectives: recognised by labels, and built from the description in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .edges import EdgeLabels, EdgeMultiLabels
from .graphs import GraphLabels, GraphMultiLabels
from .links import LinkLabels
from .metrics import METRICS
from .nodes import NodeLabels, NodeMultiLabels
from .objective import Objective
from .targets import EdgeTargets, GraphTargets, NodeTargets

OBJECTIVES: tuple[type[Objective], ...] = (  # order within an item: the first that recognises the labels
    *(NodeTargets, NodeMultiLabels, NodeLabels),
    *(EdgeTargets, EdgeMultiLabels, EdgeLabels),
    *(GraphTargets, GraphMultiLabels, GraphLabels),
    LinkLabels,
)
TASKS = tuple(dict.fromkeys(f"{kind.item}_{kind.goal}" for kind in OBJECTIVES))


def objective_for(y: Sequence[Tensor], item: str, goal: str | None) -> type[Objective]:
    """Return the class that recognises the labels of graphs, of those with this item and goal (None: any).

    Example:
        >>> import torch
        >>> objective_for([torch.tensor([0.5, 1.5])], "node", None).__name__
        'NodeTargets'
    """
    possible = [kind for kind in OBJECTIVES if kind.item == item and goal in (None, kind.goal)]
    return next((kind for kind in possible if kind.recognises(y)), possible[-1])


def objective_from(description: Mapping[str, Any]) -> Objective | None:
    """Return the objective with this `to_dict`; None if its class is another package's.

    Raises:
        KeyError, TypeError: if the description has another form.
    """
    arguments: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in description.items()
    }
    name = arguments.pop("objective")
    if "metric" in arguments:
        arguments["metric"] = METRICS[arguments["metric"]]
    return next((kind(**arguments) for kind in OBJECTIVES if kind.__name__ == name), None)
