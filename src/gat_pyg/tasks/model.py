"""The interface of a model: the arguments of its forward, and the optional members that a training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

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
    inner_inputs: Inputs | None = None  # arguments that `**options` passes to the model inside
    preparation: Preparation | None = None  # set by load(run_dir), as is the objective
    objective: Objective | None = None
    returns_predictions: bool = False  # True if the output is that of `objective.predictions`

    @property
    def has_loss(self) -> bool:
        """True if the model has its own loss over nodes."""
        return self.penalty is not None or self.fit is not None


METHODS = "decayed_parameters", "penalty", "fit", "inference"  # ignored where they are not callable


def members(model: nn.Module) -> Members:
    """Return the optional members of a model; any module may lack all of them.

    Example:
        >>> members(nn.Linear(5, 2)).num_hops is None
        True
    """
    fields = {name: getattr(model, name) for name in Members._fields if hasattr(model, name)}
    fields = {name: value for name, value in fields.items() if name not in METHODS or callable(value)}
    inner = uncompiled(model)
    layers: Any = inner.convs if isinstance(inner, BasicGNN) else [inner]
    if all(getattr(layer, "edge_dim", layer) is None for layer in layers):  # some of PyG's fail if they get any
        fields["supports_edge_attr"] = False
    if isinstance(inner, BasicGNN):
        fields.pop("inference", None)  # it accepts only PyG's own loader
    return Members(**fields)


POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
FIELDS = ("edge_attr", "edge_label_index", "edge_label_attr", "graph_attr")  # of a graph that are passed by name
BY_NAME = (*FIELDS, "batch", "batch_size")  # arguments that are no edges


@dataclass(frozen=True)
class Inputs:
    """The names of the arguments that a model takes, read from the signature of its forward once.

    A model is called `model(x, edge_index)`, whatever the name of the second argument; or `model(x)` if its forward has
    neither `edge_index` nor another second argument without a default; or `model(data)` if its only argument is `data`,
    `batch` or `graph`. The other arguments that it takes are passed by name.

    Example:
        >>> linear = nn.Linear(5, 2)
        >>> Inputs.of(linear).call(linear, Data(torch.ones(3, 5), torch.tensor([[0], [1]]))).shape
        torch.Size([3, 2])
    """

    names: frozenset[str]
    needs_batch: bool = False  # `batch` has no default

    @classmethod
    def of(cls, model: nn.Module) -> Inputs:
        """Return the inputs of a model, without `edge_attr` if it does not support edge features.

        A model around another one may pass others on as `**options`: those of its member `inner_inputs`. A
        wrapper of torch, such as `DataParallel` or `AveragedModel`, has the inputs of its module.
        """
        forward, inner = signature(uncompiled(model).forward).parameters, members(model).inner_inputs
        if hasattr(model, "module") and not forward.keys().isdisjoint({"args", "inputs"}):
            return cls.of(cast(nn.Module, model.module))
        if len(forward) == 1 and forward.keys() <= {"data", "batch", "graph"}:
            return cls(frozenset({"data"}))
        second = [*forward.values()][1:2]
        has_edges = any(p.default is p.empty and p.kind in POSITIONAL and p.name not in BY_NAME for p in second)
        names, batch = frozenset(forward) | ({"edge_index"} if has_edges else set()), forward.get("batch")
        names = names if inner is None else names | inner.names
        needs_batch = batch is not None and batch.default is Parameter.empty
        return cls(names if members(model).supports_edge_attr else names - {"edge_attr"}, needs_batch)

    def call(self, model: Callable[..., Tensor], data: Data, per_hop: bool = False) -> Tensor:
        """Call a model on a graph or a batch, with the fields that it takes.

        Args:
            model: the model, or a function with the same arguments.
            data: `edge_attr`, `graph_attr` and the pairs `edge_label_index` and `edge_label_attr` are passed where they
                are known; `batch` and `batch_size` for a batch of graphs (`graph_of_nodes`).
            per_hop: if true, pass the numbers of nodes and edges per hop of a sampled batch or a receptive field.
        """
        if self.takes_data:
            return model(data)
        keys = self.names & {*FIELDS}
        options: dict[str, Any] = {key: data[key] for key in keys if key in data}
        if (graphs := graph_of_nodes(data)) is not None:
            options["batch"], options["batch_size"] = graphs
        if per_hop:
            options["num_sampled_nodes_per_hop"] = data.num_sampled_nodes
            options["num_sampled_edges_per_hop"] = data.num_sampled_edges
        return self.select(model, data.x, data.edge_index, **options)

    def select(self, model: Callable[..., Tensor], x: Tensor, edge_index: Any = None, **options: Any) -> Tensor:
        """Call a model with the arguments that it takes, except for those that are None.

        If `batch` has no default, a graph on its own gets zeros.
        """
        options = {key: value for key, value in options.items() if value is not None}
        if self.takes_data:
            return model(Data(x, edge_index, **options))
        if self.needs_batch and "batch" not in options:
            options |= {"batch": torch.zeros(x.size(-2), dtype=torch.long, device=x.device), "batch_size": 1}
        options = {key: value for key, value in options.items() if key in self.names}
        return model(x, *([edge_index] if "edge_index" in self.names else []), **options)

    @property
    def takes_data(self) -> bool:
        """True if the model is called with the graph, `model(data)`."""
        return self.names == {"data"}


def graph_of_nodes(data: Data) -> tuple[Tensor, int] | None:
    """Return the graph of each node `[N]` and the number of graphs, or None for a graph on its own.

    Several graphs are a `Batch`, or a `Data` with `batch` `[N]` or with `ptr` `[G + 1]`, the first node of each graph.

    Example:
        >>> graph_of_nodes(Data(torch.ones(3, 5), ptr=torch.tensor([0, 1, 3])))
        (tensor([0, 1, 1]), 2)
    """
    if isinstance(data, Batch):
        return data.batch, data.num_graphs
    batch, ptr = data.get("batch"), data.get("ptr")
    if ptr is not None:
        count = ptr.numel() - 1
        batch = torch.arange(count, device=ptr.device).repeat_interleave(ptr.diff()) if batch is None else batch
        return batch, count
    return None if batch is None else (batch, int(batch.max()) + 1 if batch.numel() else 0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: the model in eval mode; afterwards, each of its modules is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
