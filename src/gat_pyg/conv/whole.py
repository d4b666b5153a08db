"""A layer as one autograd node, from its inputs to its output: the gradient by hand, from the same equations.

A layer has two functions of its input and parameters, `_Inputs`, and their transposes. `_before` maps them to x and the
score of the operation, and to the skip connection; `_after` maps the operation's output to the layer's. A derivative
or a transform of the gradient, which is seldom needed, differentiates these functions and the operation instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.fused import attend
from ..features.linear import is_large, product
from ..graph.edges import Edges
from ..kernels.device import load_kernels
from ..kernels.models import each_cotangent, in_forward_mode


class Plan(NamedTuple):
    """A call of a layer without its tensors."""

    layer: Any
    edges: Edges
    dropout: float


class Grads(dict[str, Tensor]):
    """The gradients of a node's inputs, by name."""

    def __init__(self, inputs: Any, needs: Sequence[bool]) -> None:
        super().__init__()
        self.inputs, self.needs = inputs, dict(zip(inputs._fields, needs, strict=True))
        self.columns: dict[tuple[str, int], Tensor] = {}  # the transposes of the first rows of inputs

    def add(self, name: str, grad: Tensor) -> None:
        """Add a term to the gradient of an input."""
        known = self.get(name)
        self[name] = grad if known is None else known.add_(grad)

    def of_linear(self, grad: Tensor, x: str, weight: str, bias: str = "") -> None:
        """Add the terms of y = x W^T + b from the gradient of the first rows of y, `[N, F']`; the others are names.

        `weight` may name several, separated by spaces, which are stacked in W, as the biases in b.
        """
        values, rows, names, biases = getattr(self.inputs, x), grad.size(0), weight.split(), bias.split()
        weights = [getattr(self.inputs, name) for name in names]
        sizes = [each.size(0) for each in weights]
        if self.needs[x]:
            of_x = product(grad, (weights[0] if len(names) == 1 else torch.cat(weights)).t())
            self.add(x, of_x if rows == values.size(0) else F.pad(of_x, (0, 0, 0, values.size(0) - rows)))
        if any(map(self.needs.get, names)):
            self._add_each(names, self._of_weight(grad, x), sizes)
        if any(map(self.needs.get, biases)):
            self._add_each(biases, grad.sum(0), sizes)

    def _add_each(self, names: Sequence[str], grad: Tensor, sizes: Sequence[int]) -> None:
        for name, part in zip(names, grad.split(sizes) if len(sizes) > 1 else (grad,), strict=True):
            self.add(name, part)

    def _of_weight(self, grad: Tensor, x: str) -> Tensor:
        """Return grad^T x. A large product transposes the narrower operand, and x once for all its products."""
        rows, width = grad.shape
        values = getattr(self.inputs, x)[:rows]
        if values.size(1) > width or not is_large(values, width):
            return product(grad.t(), values.t())
        if (x, rows) not in self.columns:
            self.columns[x, rows] = values.t().contiguous()
        return product(self.columns[x, rows], grad.t()).t().contiguous()


class Whole(torch.autograd.Function):
    """The output of a layer, `[N_dst, H C]` or `[N_dst, C]`, from its inputs and parameters."""

    @classmethod
    def apply(cls, *args: Any) -> Any:  # noqa: D102
        # torch's own inspects the signature of `forward` first, which takes longer than the kernels on a small graph
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @staticmethod
    def forward(ctx: Any, plan: Plan, seed: Tensor | None, edge_weight: Tensor | None, *tensors: Tensor | None) -> Any:
        """Compute the layer, and save what its gradient needs."""
        layer, edges, dropout = plan
        inputs, needs = layer._Inputs(*tensors), ctx.needs_input_grad[2:]
        x, score, res = layer._before(inputs, edges.num_dst)
        kernels = load_kernels(f"attention.{score.kernels}", x.device.type)
        keeps = any(needs) and score.saves_output(x, edges, any(needs[1:]))
        out, *saved = kernels.forward(x, score, edges, edge_weight, dropout, seed, x.dtype, keeps)
        if any(needs):
            if keeps:
                saved.insert(0, out)
            ctx.plan, ctx.kernels, ctx.keeps = plan, kernels, keeps
            ctx.kind, ctx.values, ctx.count = type(score), score.values, len(tensors)
            ctx.save_for_backward(seed, edge_weight, *tensors, x, *score.operands, *saved)
        return layer._after(inputs, out, res, not keeps)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that need one."""
        layer, edges, dropout = ctx.plan
        seed, edge_weight, *tensors = ctx.saved_tensors
        inputs, needs = layer._Inputs(*tensors[: ctx.count]), ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or in_forward_mode():
            with torch.enable_grad():
                # views, at which a gradient ends: an input may depend on another, or be the same tensor
                views = [t.view_as(t) if needed else t for t, needed in zip((edge_weight, *inputs), needs, strict=True)]
                edge_weight, inputs = views[0], layer._Inputs(*views[1:])
                x, score, res = layer._before(inputs, edges.num_dst)
                out = layer._after(inputs, attend(x, score, edges, edge_weight, seed, dropout), res, False)
            wanted = [view for view, needed in zip(views, needs, strict=True) if needed]
            results = torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled(), allow_unused=True)
            each = iter(results)
            return None, None, *(next(each) if needed else None for needed in needs)
        x, *rest = tensors[ctx.count :]
        count = len(ctx.kind.shapes)
        score, saved = ctx.kind.of(rest[:count], ctx.values), rest[count:]
        out = saved.pop(0) if ctx.keeps else None
        grads = Grads(inputs, needs[1:])
        of_out = layer._after_back(inputs, rest[count], grad, grads)
        wanted = [True, needs[0]]
        for name, operand in zip(score.shapes, score.operands, strict=True):
            wanted.append(operand is not None and (name != "edge_attr" or grads.needs[name]))
        of = ctx.kernels.backward(of_out, x, score, edges, edge_weight, dropout, seed, out, saved, wanted)
        layer._before_back(inputs, x, score, of, grads)
        return None, None, of.get("edge_weight"), *map(grads.get, inputs._fields)
