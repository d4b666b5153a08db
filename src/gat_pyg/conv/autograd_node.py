"""A layer as one autograd node, from its inputs to its output: the gradient by hand, from the same equations.

The node computes the layer's own methods, `_project`, `_score` and `_finish`, with its tensors in place of the
layer's parameters, see `Plan.bound`; `_after_back` and `_before_back` are their transposes. A derivative or a transform
of the gradient, which is seldom needed, differentiates these methods and the operation instead. Under autocast, the
linear maps and their transposes compute in its dtype, as torch's do, and autocast is off for the rest.
"""

import functools
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ..attention.fused import attend
from ..attention.score import Operation, widened
from ..features.linear import is_affine, is_large, product
from ..graph.edges import Edges
from ..graph.memory import converted
from ..kernels.device import load_kernels, result_dtype
from ..kernels.models import each_cotangent, in_forward_mode

INPUTS = "x", "x_dst", "edge_attr"  # of a node, before the parameters of the layer
KINDS = Tensor, Parameter


class Affine(NamedTuple):
    """x W^T + b of tensors, in place of a `Linear`; computed in `dtype`, that of autocast, unless it is None."""

    weight: Tensor
    bias: Tensor | None = None
    dtype: torch.dtype | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, F]` to `[N, F']`."""
        return product(*(rounded(t, self.dtype) for t in (x, self.weight, self.bias)))


def rounded(tensor: Any, dtype: torch.dtype | None) -> Any:
    """Return an operand of a product in a dtype, that of autocast; as it is, if the dtype or the operand is None."""
    return tensor if dtype is None or tensor is None else tensor.to(dtype)


def without_autocast(device: str) -> Any:
    """Return a context manager that disables autocast on a type of device."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def side_by_side(x: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """Return two linear maps of x, by one product if they are `Affine` and both or neither has a bias."""
    if type(first) is not Affine or (first.bias is None) != (second.bias is None):
        return first(x), second(x)
    bias = None if first.bias is None else torch.cat([first.bias, second.bias])
    both = Affine(torch.cat([first.weight, second.weight]), bias, first.dtype)
    return both(x).chunk(2, 1)  # type: ignore[return-value]


class Plan(NamedTuple):
    """A call of a layer without its tensors."""

    layer: Any
    edges: Edges
    dropout: float
    dtype: torch.dtype | None = None  # autocast's, for the linear maps; None without autocast

    def bound(self, tensors: Sequence[Any]) -> Any:
        """Return a copy of the layer with tensors in place of its parameters, and `Affine` in place of `Linear`."""
        values = dict(zip((*INPUTS, *self.layer._PARAMETERS), tensors, strict=True))
        layer: Any = object.__new__(equations(self.layer.__class__))
        attributes = vars(layer)
        attributes.update(vars(self.layer))
        attributes.update(values)
        for name, _, parts in slots(self.layer._PARAMETERS):
            if parts and values[f"{name}.weight"] is not None:
                attributes[name] = Affine(values[f"{name}.weight"], values.get(f"{name}.bias"), self.dtype)
        return layer

    def compute(self, seed: Tensor | None, tensors: Sequence[Any]) -> Tensor:
        """Compute the call by torch's operations and `attend`, which autograd differentiates; w is the first tensor."""
        edge_weight, layer = tensors[0], self.bound(tensors[1:])
        x, score, res = _describe(layer, self.edges.num_dst)
        out = attend(Operation(x, score, self.edges, edge_weight, seed, self.dropout))
        return finished(layer, out, x, score, res, False)


def differentiated(compute: Any, tensors: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor) -> list[Any]:
    """Return the gradients of `compute(tensors)`, None for those that nothing needs, so that they have some too."""
    with torch.enable_grad():
        # views, at which a gradient ends: an input may depend on another, or be the same tensor
        views: list[Any] = [
            t if t is None or not needed else t.view_as(t) for t, needed in zip(tensors, needs, strict=True)
        ]
        out = compute(views)
    wanted = [view for view, needed in zip(views, needs, strict=True) if needed]
    results = iter(torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled(), allow_unused=True))
    return [next(results) if needed else None for needed in needs]


@functools.lru_cache
def slots(names: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Return the places of linear maps, with 2 for a weight and a bias or 1 for a weight, and of vectors, with 0."""
    places = {name.removesuffix(".weight"): at for at, name in enumerate(names) if name and not name.endswith(".bias")}
    return [(name, at, (f"{name}.weight" in names) + (f"{name}.bias" in names)) for name, at in places.items()]


def parameters_of(layer: Any) -> list[Any] | None:
    """Return the parameters of a layer in the order of `_PARAMETERS`; None if a call depends on more."""
    if (
        layer.backend not in ("auto", "fused")
        or layer.mechanism is not None
        or _hides_an_option(layer.__class__)
        or (vars(layer).get("share_weights") and layer.lin_l is not layer.lin_r)
        or torch._C._are_functorch_transforms_active()
        or in_forward_mode()
    ):
        return None
    names, modules, vectors = layer._PARAMETERS, layer._modules, layer._parameters
    tensors = [None] * len(names)
    for name, at, parts in slots(names):
        value = modules[name] if name in modules else vectors[name] if name in vectors else getattr(layer, name)
        if not parts:
            tensors[at] = value
        elif value is not None or name in modules:
            if not is_affine(value) or not value._parameters.keys() >= {"weight", "bias"}:
                return None
            weight, bias = value._parameters["weight"], value._parameters["bias"]
            if weight.size(0) != value.out_channels or (parts == 1 and bias is not None):
                return None
            tensors[at : at + parts] = (weight, bias)[:parts]
    return tensors


@functools.lru_cache
def _hides_an_option(kind: type) -> bool:
    """Return True if a subclass of a layer replaces an option of the layer by a class attribute, such as a property."""
    layer = equations(kind)
    options = inspect.signature(layer.__init__).parameters
    return any(not options.keys().isdisjoint(vars(each)) for each in kind.__mro__[: kind.__mro__.index(layer)])


@functools.lru_cache
def equations(kind: type) -> Any:
    """Return the class of this package that a layer's class is or derives from: without what hides its attributes."""
    return next(each for each in kind.__mro__ if "_PARAMETERS" in vars(each))


def _describe(layer: Any, num_dst: int) -> tuple[Tensor, Any, Tensor | None]:
    """Return x and the score of the operation, and the skip connection, of a bound layer."""
    x = layer.x if layer.x_dst is None else (layer.x, layer.x_dst)
    ends, res = layer._project(x, (layer.x.size(0), num_dst))
    return ends[0], layer._score(x, ends, layer.edge_attr), res


def finished(layer: Any, out: Tensor, x: Tensor, score: Any, res: Tensor | None, spent: bool) -> Tensor:
    """Return a layer's output from the operation's, in the dtype of x if edge features are attended to.

    Autocast does not round edge features, so the operation's output may be wider than x.
    """
    result: Tensor = layer._finish(out, res, spent)
    return result if score.edge_values is None else result.to(x.dtype)


class Grads(dict[str, Tensor]):
    """The gradients of a node's tensors, by name, in float32 or wider; products are computed in `dtype`, if any."""

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor | None],
        needs: Sequence[bool],
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.tensors: dict[str, Any] = dict(zip(names, tensors, strict=True))
        self.needs = dict(zip(names, needs, strict=True))
        self.end = "x" if self.tensors.get("x_dst") is None else "x_dst"  # the name of the features of dst
        self.columns: dict[tuple[str, int], Tensor] = {}  # the transposes of the first rows of inputs

    def add(self, name: str, grad: Tensor) -> None:
        """Add a term to the gradient of an input."""
        known = self.get(name)
        self[name] = widened(grad) if known is None else known.add_(grad)

    def of_linear(self, grad: Tensor, x: str, maps: str) -> None:
        """Add the terms of y = x W^T + b from the gradient of the first rows of y, `[N, F']`; the others are names.

        `maps` may name several, separated by spaces, of the same width, whose W and b are stacked.
        """
        values, rows, names, grad = self.tensors[x], grad.size(0), maps.split(), rounded(grad, self.dtype)
        if self.needs[x]:
            weights = [rounded(self.tensors[f"{name}.weight"], self.dtype) for name in names]
            weight, known = weights[0] if len(names) == 1 else torch.cat(weights), self.get(x)
            if known is not None and known.dtype == grad.dtype and not is_large(grad, weight.size(1)):
                known[:rows].addmm_(grad, weight)
            else:
                of_x = product(grad, weight.t())
                self.add(x, of_x if rows == values.size(0) else F.pad(of_x, (0, 0, 0, values.size(0) - rows)))
        for kind in ("weight", "bias"):
            parameters = [f"{name}.{kind}" for name in names]
            if any(map(self.needs.get, parameters)):
                terms = self._of_weight(grad, x) if kind == "weight" else grad.sum(0)
                parts = terms.chunk(len(names)) if len(names) > 1 else (terms,)
                for name, term in zip(parameters, parts, strict=True):
                    if self.needs[name]:
                        self.add(name, term)

    def _of_weight(self, grad: Tensor, x: str) -> Tensor:
        """Return grad^T x. A large product transposes the narrower operand, and x once for all its products."""
        rows, width = grad.shape
        values = rounded(self.tensors[x][:rows], self.dtype)
        if values.size(1) > width or not is_large(values, width):
            return product(grad.t(), values.t())
        if (x, rows) not in self.columns:
            self.columns[x, rows] = values.t().contiguous()
        return product(self.columns[x, rows], grad.t()).t().contiguous()


class Node(torch.autograd.Function):
    """An autograd function that takes its tensors by position."""

    @classmethod
    def apply(cls, *args: Any) -> Any:  # noqa: D102
        # torch's own inspects the signature of `forward` first, which takes longer than the kernels on a small graph
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class LayerNode(Node):
    """The output of a layer, `[N_dst, H C]` or `[N_dst, C]`, from its inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, seed: Tensor | None, edge_weight: Tensor | None, *tensors: Tensor | None) -> Any:
        """Compute the layer, and save what its gradient needs."""
        with without_autocast(plan.edges.src.device.type):
            needs = ctx.needs_input_grad[2:]
            layer, (_, edges, dropout, _) = plan.bound(tensors), plan
            x, score, res = _describe(layer, edges.num_dst)
            kernels = load_kernels(f"attention.{score.kernels}", x.device.type)
            keeps = any(needs) and score.saves_output(x, edges, any(needs[1:]))
            dtype = result_dtype(x, edge_weight, *score.operands)
            wide = torch.promote_types(dtype, torch.float32) if keeps else dtype
            call = Operation(x, score, edges, edge_weight, seed, dropout)
            out, *saved = kernels.forward(call, wide, keeps)
            if any(needs):
                if keeps:
                    saved.insert(0, out)
                ctx.plan, ctx.kernels, ctx.keeps = plan, kernels, keeps
                ctx.kind, ctx.values = type(score), score.values
                ctx.save_for_backward(seed, edge_weight, *tensors, x, *score.operands, *saved)
            return finished(layer, converted(out, dtype), x, score, res, not keeps or wide != dtype)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that need one."""
        with without_autocast(grad.device.type):
            layer, edges, dropout, dtype = ctx.plan
            names = *INPUTS, *layer._PARAMETERS
            seed, edge_weight, *rest = ctx.saved_tensors
            tensors, rest, needs = rest[: len(names)], rest[len(names) :], ctx.needs_input_grad[2:]
            if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or in_forward_mode():
                compute = functools.partial(ctx.plan.compute, seed)
                return None, None, *differentiated(compute, (edge_weight, *tensors), needs, grad)
            grads = Grads(names, tensors, needs[1:], dtype)
            layer = ctx.plan.bound(tensors)
            x, *rest = rest
            count = len(ctx.kind.shapes)
            score, saved = ctx.kind.of(rest[:count], ctx.values), rest[count:]
            out = saved.pop(0) if ctx.keeps else None
            of_out = layer._after_back(rest[count], grad, grads)
            wanted = [True, needs[0]]
            for name, operand in zip(score.shapes, score.operands, strict=True):
                wanted.append(operand is not None and (name != "edge_attr" or grads.needs[name]))
            call = Operation(x, score, edges, edge_weight, seed, dropout)
            of = ctx.kernels.backward(call, of_out, out, saved, wanted)
            if of.get("lin_edge") is not None:
                grads["lin_edge.weight"] = of["lin_edge"].view_as(layer.lin_edge.weight)
                grads["edge_attr"] = of.get("edge_attr")
            layer._before_back(x, of, grads)
            return None, None, of.get("edge_weight"), *map(grads.get, names)
