"""The data preparation of a run: dimensions, class names, transforms and the range of the features."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch_geometric.transforms
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import BaseTransform

from .checks import check_finite
from .encodings import Encoding, GraphColumns, LaplacianPE, RandomWalkPE
from .node_ids import node_ids, num_nodes
from .objective import Objective

NORMALIZE = {"_target_": "torch_geometric.transforms.NormalizeFeatures"}
UNDIRECTED = {"_target_": "torch_geometric.transforms.ToUndirected"}
SAMPLE = 10_000  # evenly spaced rows from which the range is computed, since features may exceed the memory
SLACK = 1.1  # the factor by which a typical row of other data may be outside the range


class Standardize(BaseTransform):  # type: ignore[misc]
    """Subtract a mean `[F]` from the features and divide them by a standard deviation `[F]`, in float64.

    Example:
        >>> Standardize([1.0, 2.0], [1.0, 4.0])(Data(x=torch.tensor([[3.0, 6.0]]))).x
        tensor([[2., 1.]])
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        self.mean = torch.as_tensor(mean, dtype=torch.float64)
        self.std = torch.as_tensor(std, dtype=torch.float64)

    def forward(self, data: Data) -> Data:
        """Standardise the features, in torch's default dtype."""
        x = data.x
        if x.size(-1) == self.mean.numel():
            data.x = ((x.double() - self.mean.to(x.device)) / self.std.to(x.device)).to(torch.get_default_dtype())
        return data

    def describe(self) -> dict[str, Any]:
        """Return the class's name and arguments as plain data; `build_transform` is the inverse."""
        return {"_target_": f"{__name__}.Standardize", "mean": self.mean.tolist(), "std": self.std.tolist()}


_KINDS = (Standardize, Encoding, RandomWalkPE, LaplacianPE, GraphColumns)
OURS = {f"{kind.__module__}.{kind.__name__}": kind for kind in _KINDS}


@dataclass(frozen=True)
class Preparation(BaseTransform):  # type: ignore[misc]
    """The data preparation of a trained run, as a PyG transform.

    `gat_pyg.load(run).preparation(data)` and `Planetoid(root, "Cora", transform=model.preparation)` prepare data as
    they come from their source. Features that are already prepared do not change: a typical row is in the range
    `row_sum`, and after another preparation it would not be. Edges are always transformed.

    If the run has encodings, they are appended as the last P of the F columns, unless x has all F columns already.

    The caller's `data` does not change. The result has dense features `[N, F]`, and `edge_attr` `[E, D]`, in torch's
    default dtype. Of a `Batch`, each graph is transformed on its own, as in training.

    Example:
        >>> preparation = Preparation(2, None, transforms=(NORMALIZE,))
        >>> preparation(Data(x=torch.tensor([[1.0, 3.0], [2.0, 0.0]]))).x
        tensor([[0.2500, 0.7500],
                [1.0000, 0.0000]])
    """

    in_channels: int  # F
    edge_dim: int | None  # D, or None without edge features
    class_names: tuple[str, ...] | None = None
    transforms: tuple[Mapping[str, Any], ...] = ()  # each class's name and arguments, in order of application
    row_sum: tuple[float, float] | None = None  # 1 % and 99 % quantiles of the training rows' absolute sums
    num_nodes: int | None = None  # N, if the only feature is the id of a node
    encoding: Mapping[str, Any] | None = None  # the name of the class, an `Encoding`, and its arguments
    source: Mapping[str, Any] | None = None  # how files of the data are read: see `gat_pyg.data.rows.read_rows`
    num_labels: int = 0  # the number of further columns of x with known labels: `Objective.num_labels`

    @property
    def num_encodings(self) -> int:
        """P, the number of the last columns of x that are encodings."""
        return 0 if self.encoding is None else len(self.encoding["mean"])

    @property
    def num_features(self) -> int:
        """The number of columns of x without encodings."""
        return self.in_channels - self.num_encodings

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preparation:
        """Return the preparation with the fields of `to_dict`.

        Raises:
            TypeError: if a field is missing or unknown.
        """
        arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**arguments)

    def forward(self, data: Data) -> Data:
        """Prepare a graph; one without x gets the ids of its nodes, if the run learnt embeddings of them.

        Raises:
            ValueError: if `data` is not a `Data` with `x`, its dimensions differ from those of the run, a feature is
                NaN or infinite, or a transform is not one of `torch_geometric.transforms`.
        """
        if not isinstance(data, Data):
            hint = " Use its to_homogeneous()." if hasattr(data, "to_homogeneous") else ""
            raise ValueError(
                f"data is a {type(data).__name__}, expected a torch_geometric.data.Data with x [N, "
                f"{self.num_features}].{hint}"
            )
        if self.num_nodes is not None and data.x is None:
            if (N := num_nodes(data)) > self.num_nodes:
                raise ValueError(
                    f"data has {N} nodes, but the run learnt embeddings of {self.num_nodes} nodes, expected no others."
                )
            data.x = node_ids(self.num_nodes)
        if not isinstance(data.x, Tensor):
            raise ValueError(f"data has no x, expected a torch_geometric.data.Data with x [N, {self.num_features}].")
        transforms = [build_transform(transform) for transform in self.transforms]
        if data.x.layout != torch.strided:
            data.x = data.x.to_dense()
        whole = data.x if data.x.dim() == 2 and data.x.size(1) == self.in_channels else None  # has its encodings
        if whole is not None:
            data.x = whole[:, : self.num_features]
        x, fitted = data.x, self.fits(data.x)
        data = _transformed_graphs(data, transforms) if transforms else data
        has_its_nodes = len(x) == len(data.x)
        if (
            fitted
            and has_its_nodes
            and data.x is not x
            and (not self.fits(data.x) or torch.allclose(x.float(), data.x.float()))
        ):
            data.x = x  # already prepared: standardising again would change it, normalising would round it
        data.x = data.x.to(torch.get_default_dtype())
        self._check_width(data.x, self.num_features)
        if whole is not None and has_its_nodes:
            data.x = torch.cat([data.x, whole[:, self.num_features :].to(data.x.dtype)], 1)
        elif self.encoding is not None:
            data = _transformed_graphs(data, [build_transform(self.encoding)])
        self._check_edge_attr(data)
        edge_attr = None if self.edge_dim is None else data.edge_attr
        check_finite(data.x, edge_attr, "data", data.get("batch"))
        if self.num_nodes is not None:
            ids = data.x[:, 0]
            unknown = ids[(ids < 0) | (ids >= self.num_nodes) | (ids != ids.round())]
            if unknown.numel():
                raise ValueError(
                    f"x has the node {unknown[0].item():g}, but the run learnt embeddings of {self.num_nodes} nodes, "
                    f"expected ids from 0 to {self.num_nodes - 1}."
                )
        return data

    def _check_edge_attr(self, data: Data) -> None:
        if self.edge_dim is None:
            return
        shape, E = None if data.edge_attr is None else tuple(data.edge_attr.shape), data.num_edges
        if shape != (E, self.edge_dim) and (shape, self.edge_dim) != ((E,), 1):
            raise ValueError(
                f"edge_attr is {'missing' if shape is None else f'of shape {shape}'}, expected (E, {self.edge_dim}) as "
                f"in the data that the run was trained on, with E = {E}."
            )
        data.edge_attr = data.edge_attr.to(torch.get_default_dtype()).view(-1, self.edge_dim)

    def check_width(self, x: Tensor) -> None:
        """Raise ValueError unless x has the run's number of features, with encodings if it has some."""
        if x.dim() == 2 and self.num_encodings and x.size(1) == self.num_features:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (N, {self.in_channels}), with {self.num_encodings} columns of "
                "the run's encoding, which gat_pyg.predict(run_dir, data) and model.preparation(data) append."
            )
        if x.dim() == 2 and self.num_labels and x.size(1) == self.in_channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (N, {self.in_channels + self.num_labels}), with columns of "
                "known labels, which gat_pyg.predict(run_dir, data) and model.objective.with_labels(data, mask) append."
            )
        self._check_width(x, self.in_channels + self.num_labels)

    def _check_width(self, x: Tensor, width: int) -> None:
        if x.dim() != 2 or x.size(1) != width:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected (N, {width}) as in the data that the run was trained on. Use "
                "the same features in the same order."
            )

    def fits(self, x: Tensor) -> bool:
        """Return True if x has the run's number of features, and a typical row is in the range of the run's rows."""
        return x.dim() == 2 and x.size(1) in (self.num_features, self.in_channels) and self.difference(x) is None

    def difference(self, x: Tensor) -> str | None:
        """Return a description of how a typical row of x differs from the run's training data, or None."""
        sums = row_sums([x], self.num_features)
        if self.row_sum is None or not sums.numel():
            return None
        (low, high), typical = self.row_sum, float(sums.median())
        if low / SLACK <= typical <= high * SLACK:
            return None
        span = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
        return f"a row of x has the absolute sum {typical:.3g} (median), but those of the run's training data {span}"


def _transformed_graphs(data: Data, transforms: Sequence[BaseTransform]) -> Data:
    """Apply transforms to each graph of a batch on its own: some, such as those of degrees, read the whole graph."""
    if not isinstance(data, Batch) and ("batch" in data or "ptr" in data):
        raise ValueError(
            "data is a Data with the graphs of a batch, but the run's transforms are of single graphs. Pass a list of "
            "graphs, or Batch.from_data_list(graphs)."
        )
    graphs = data.to_data_list() if isinstance(data, Batch) else [data]
    for transform in transforms:
        graphs = [transform(graph) for graph in graphs]
    return Batch.from_data_list(graphs) if isinstance(data, Batch) else graphs[0]


def build_transform(description: Mapping[str, Any]) -> BaseTransform:
    """Build a transform, one of PyG's or of ours, from the name of its class and its arguments.

    Nothing is imported, and no other class is built.

    Raises:
        ValueError: if the class is not one of these, or rejects the arguments.

    Example:
        >>> build_transform({"_target_": "torch_geometric.transforms.Constant", "value": 2.0})
        Constant(value=2.0)
    """
    target = str(description.get("_target_"))
    home, _, name = target.rpartition(".")
    kind: object = None
    if target in OURS:
        kind = OURS[target]
    elif f"{home}.".startswith("torch_geometric.transforms."):
        kind = getattr(torch_geometric.transforms, name, None)
    if not isinstance(kind, type) or not issubclass(kind, BaseTransform):
        raise ValueError(
            f"The run's data were prepared by {target}, expected a class of torch_geometric.transforms; other classes "
            "are not built by name. Apply it yourself, and call the model: gat_pyg.load(run_dir)."
        )
    arguments = {key: _argument(value) for key, value in description.items() if key != "_target_"}
    try:
        return kind(**arguments)
    except Exception as error:
        raise ValueError(
            f"The run's data were prepared by {target}(**{arguments}), which this version cannot build: {error}. "
            "Apply it yourself, and call the model: gat_pyg.load(run_dir)."
        ) from error


def _argument(value: Any) -> Any:
    """Return an argument of a transform, in which inner transforms have been built."""
    if isinstance(value, Mapping) and "_target_" in value:
        return build_transform(value)
    return [_argument(element) for element in value] if isinstance(value, (list, tuple)) else value


def row_sums(features: Sequence[Tensor], num_features: int | None = None) -> Tensor:
    """Return the absolute sums of the rows of several x that are not zero, dense or CSR; of large ones, of a sample.

    Only the first `num_features` columns count.

    Example:
        >>> row_sums([torch.tensor([[3.0, -4.0], [0.0, 0.0]])])
        tensor([7.])
    """
    step, sums = max(1, sum(map(len, features)) // SAMPLE), []
    for x in features:
        if x.layout == torch.sparse_csr:
            values = x.values().float().abs() * (x.col_indices() < (num_features or x.size(1)))
            sums.append(torch.segment_reduce(values, "sum", offsets=x.crow_indices().long()))
        else:
            sums.append(x[::step, :num_features].float().norm(p=1, dim=1))  # without a copy of the absolute values
    result = torch.cat(sums)
    return result[result > 0]


def row_range(features: Sequence[Tensor]) -> tuple[float, float] | None:
    """Return the 1 % and 99 % quantiles of the rows' absolute sums over all graphs, or None if all rows are zero."""
    sums = row_sums(features).double()
    if not sums.numel():
        return None
    low, high = sums.quantile(sums.new_tensor([0.01, 0.99])).tolist()
    return low, high


def attach(model: nn.Module, preparation: Preparation | None, objective: Objective | None = None) -> None:
    """Set `model.preparation` and `model.objective`, and check the features in each call of the model.

    The check is a forward pre-hook: of the width each time, and of the range of the features in the first call. It does
    not run in compiled, traced, captured and `torch.func`-transformed code, where values cannot be read. A model that
    returns standardised targets warns of that at exports.
    """
    for name, value in (("preparation", preparation), ("objective", objective), ("_is_checked", False)):
        object.__setattr__(model, name, value)
    if _check not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check, with_kwargs=True)


def check_now(model: nn.Module, x: Tensor) -> None:
    """Check the features of a whole graph now, before a first call of the model on a part of it.

    A few nodes may differ from the training data where the graph does not.
    """
    _check(model, (x,), {})


def _check(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    x: Any = args[0] if args else kwargs.get("x")
    preparation: Preparation | None = model.preparation
    if preparation is None:
        return
    if getattr(model.objective, "goal", None) == "regression" and _is_exported():
        warnings.warn(
            "The network returns standardised targets, and so will the exported one. Export "
            "gat_pyg.load(run_dir, predictions=True), which returns them in the unit of the training data.",
            stacklevel=2,
        )
    if type(x) not in (Tensor, nn.Parameter) or x.layout not in (torch.strided, torch.sparse_csr) or _is_traced(x):
        return
    preparation.check_width(x)
    if model._is_checked:
        return
    object.__setattr__(model, "_is_checked", True)
    with torch.no_grad():
        difference = preparation.difference(x)
    if difference is not None:
        names = [str(transform["_target_"]).rpartition(".")[2] for transform in preparation.transforms]
        warnings.warn(
            f"The features have changed since the training, or are prepared differently: {difference}. "
            + (
                f"The run's data were prepared by {', '.join(names)}, which gat_pyg.predict(run_dir, data) and "
                "model.preparation(data) apply."
                if names
                else "The run's data were not transformed after they were read."
            )
            + " If they have changed, as in a growing series, predictions extrapolate; model.change=true suits it.",
            stacklevel=2,
        )


def _is_exported() -> bool:
    is_exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return is_exporting or torch.jit.is_tracing()


def _is_traced(x: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
