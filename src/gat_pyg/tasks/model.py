"""The interface of a model: the arguments of its forward, and the optional members that a training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ..graph.layers import arguments
from .objective import Objective
from .preparation import Preparation


class Members(NamedTuple):
    """The optional members of a model, with defaults for those that it lacks."""

    num_hops: int | None = None  # a row of the output depends only on nodes at most that many hops away
    out_channels: int | None = None
    supports_edge_attr: bool = True  # False if the forward takes `edge_attr`, but the layers do not
    supports_sparse_features: bool = False  # x may be a torch.sparse CSR matrix
    decayed_parameters: Callable[[], Iterable[nn.Parameter]] | None = None  # None: all
    penalty: Callable[[Tensor, Data], Tensor] | None = None  # a term of the loss
    fit: Callable[[Data], None] | None = None  # fits the model in one call, without epochs
    inference: Callable[..., Tensor] | None = None  # computes the output layer by layer from a loader
    preparation: Preparation | None = None  # of a trained run, as is the objective
    objective: Objective | None = None

    @property
    def has_loss(self) -> bool:
        """True if the model has its own loss over nodes."""
        return self.penalty is not None or self.fit is not None


def members(model: nn.Module) -> Members:
    """Return the optional members of a model; any module may lack all of them.

    Example:
        >>> members(nn.Linear(5, 2)).num_hops is None
        True
    """
    names = [name for name in Members._fields if hasattr(model, name)]
    if isinstance(uncompiled(model), BasicGNN):  # whose method accepts only PyG's own loader
        names.remove("inference")
    return Members(**{name: getattr(model, name) for name in names})


@dataclass(frozen=True)
class Inputs:
    """The names of the arguments that a model takes, read from the signature of its forward once.

    A model is called `model(x, edge_index)`, or `model(x)` if its forward has no `edge_index`; the other arguments that
    it takes are passed by name.

    Example:
        >>> import torch
        >>> linear = nn.Linear(5, 2)
        >>> Inputs.of(linear).call(linear, Data(torch.ones(3, 5), torch.tensor([[0], [1]]))).shape
        torch.Size([3, 2])
    """

    names: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Inputs:
        """Return the inputs of a model, without `edge_attr` if it does not support edge features."""
        names = arguments(uncompiled(model))
        return cls(names if members(model).supports_edge_attr else names - {"edge_attr"})

    def call(self, model: Callable[..., Tensor], data: Data, per_hop: bool = False) -> Tensor:
        """Call a model on a graph or a batch, with the fields that it takes.

        Args:
            model: the model, or a function with the same arguments.
            data: `edge_attr` and the pairs `edge_label_index` and `edge_label_attr` are passed where they are known;
                `batch` and `batch_size` for a batch of graphs.
            per_hop: if true, pass the numbers of nodes and edges per hop of a sampled batch or a receptive field.
        """
        keys = self.names & {"edge_attr", "edge_label_index", "edge_label_attr"}
        options: dict[str, Any] = {key: data[key] for key in keys if key in data}
        if isinstance(data, Batch):
            options |= {"batch": data.batch, "batch_size": data.num_graphs}
        if per_hop:
            options["num_sampled_nodes_per_hop"] = data.num_sampled_nodes
            options["num_sampled_edges_per_hop"] = data.num_sampled_edges
        return self.select(model, data.x, data.edge_index, **options)

    def select(self, model: Callable[..., Tensor], x: Tensor, edge_index: Any = None, **options: Any) -> Tensor:
        """Call a model with the arguments that it takes, except for those that are None."""
        options = {key: value for key, value in options.items() if key in self.names and value is not None}
        return model(x, *([edge_index] if "edge_index" in self.names else []), **options)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside the result of `torch.compile(model)`; another model is returned unchanged."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def is_compiled(model: nn.Module) -> bool:
    """Return True if `torch.compile(model)` or `model.compile()` was called."""
    return uncompiled(model) is not model or model._compiled_call_impl is not None


def takes_sparse(model: nn.Module) -> bool:
    """Return True if a model accepts x as a torch.sparse CSR matrix; compiled models do not."""
    return members(model).supports_sparse_features and not is_compiled(model)
