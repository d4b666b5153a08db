"""A layer on few edges of a CPU: one autograd node, and one call of a kernel each way, with its linear maps.

A layer names its parameters in the order of the kernels, `_PARAMETERS`. Of the last three, `_few_options` returns the
slope or scale and which of the three scores it is, True for one and None for the others; or None, if the kernels do not
compute the layer. Such a call, and a derivative of a gradient, takes the way of many edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..features.linear import autocast_dtype
from ..graph.adjacency import _dropout_ids
from ..graph.edges import Edges
from ..graph.memory import memory
from ..graph.remembered import get_result
from ..kernels.device import load_kernels, missing_reason
from ..kernels.models import each_cotangent, in_forward_mode
from ..philox import draw_seed, drops
from .autograd_node import KINDS, Node, Plan, differentiated, parameters_of
from .loops import features_with_loops, is_sum

FEW = 1 << 21  # products of one number, about a millisecond, below which one thread computes a layer
PRODUCTS = 1 << 24  # the same of two numbers, in a linear map
_DTYPES = torch.float32, torch.float64


class Call(NamedTuple):
    """A call of a layer without its tensors."""

    layer: Any
    kernels: Any
    seed: Tensor | None
    dropout: float
    width: int  # of the output
    counts: tuple[int, ...]  # N_src, N_dst, the edges as passed, the added loops or -1, the edges, and of the output
    numbers: tuple[int, ...]  # of elements of the tensors
    regions: tuple[int, ...]  # and of what is saved
    arguments: tuple[Any, ...]  # of the kernels, before the tensors

    def edges(self, graph: Tensor) -> Edges:
        """The neighbourhoods of a graph that the kernel has grouped, as many edges need them."""
        num_src, num_dst, size, loops, count, _ = self.counts
        rowptr, (src, rows) = graph[: num_dst + 1], graph[num_dst + 1 :].view(2, -1)[:, :count]
        index = graph.new_zeros(2, size + max(loops, 0))  # a loop of the graph's own, which is replaced, is (0, 0)
        index[0, rows], index[1, rows] = src, torch.repeat_interleave(rowptr.diff())
        index = index[:, :size]
        return Edges.from_index(index, num_src, num_dst) if loops < 0 else Edges.with_loops(index, num_src, num_dst)


class FewNode(Node):
    """The output of a layer, `[N_dst, H C]` or `[N_dst, C]`, from its inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, graph: Tensor, *tensors: Tensor | None) -> Tensor:
        """Compute the layer, and save what its gradient needs."""
        x: Any = tensors[0]
        out, saved = x.new_empty(call.counts[1], call.width), x.new_empty(sum(call.regions))
        places = graph.data_ptr(), call.numbers, _addresses(tensors), call.regions, saved.data_ptr()
        call.kernels.forward(*call.arguments, *places, out.data_ptr())
        if any(ctx.needs_input_grad):
            ctx.call = call
            ctx.save_for_backward(graph, saved, *tensors)
        return out

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that need one."""
        (graph, saved, *tensors), call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[2:]
        plain = type(grad) is Tensor and not torch.is_grad_enabled() and not in_forward_mode()
        if not plain or torch._C._are_functorch_transforms_active():
            return None, None, *_by_many(call, graph, tensors, needs, grad)
        grad, work = grad.resolve_neg().contiguous(), grad.new_zeros(sum(call.regions))
        grads = [torch.empty_like(each) if needed else None for each, needed in zip(tensors, needs, strict=True)]
        places = graph.data_ptr(), call.numbers, _addresses(tensors), call.regions, saved.data_ptr()
        call.kernels.backward(*call.arguments, *places, grad.data_ptr(), work.data_ptr(), _addresses(grads))
        return None, None, *grads


def _addresses(tensors: Any) -> tuple[int, ...]:
    """Return the address of each tensor, 0 for None."""
    return tuple([0 if each is None else each.data_ptr() for each in tensors])


def _by_many(call: Call, graph: Tensor, tensors: list[Any], needs: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients, by the way of many edges, which can be differentiated."""
    layer, edges, (num_src, num_dst, size, loops, *_) = call.layer, call.edges(graph), call.counts

    def compute(views: list[Any]) -> Tensor:
        x, x_dst, edge_attr, *parameters = views
        if loops >= 0 and edge_attr is not None:
            edge_attr = features_with_loops(layer, edges.index[:, :size], edge_attr, num_src, num_dst, edges)
        plan = Plan(layer, edges, call.dropout)
        return plan.compute(call.seed, [None, x, x_dst, edge_attr, *parameters])

    return differentiated(compute, tensors, needs, grad)


def run_few(layer: Any, x: Any, edge_index: Any, edge_attr: Tensor | None) -> Tensor | None:
    """Return the output of a layer; None if the kernels for few edges do not compute the call."""
    ends = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x,)
    if not _is_plain(layer, ends, edge_index, edge_attr) or layer._needs_messages(x, edge_index, edge_attr, False):
        return None
    parameters = parameters_of(layer)
    if parameters is None or (edge_attr is not None and not _maps_edges(layer)):
        return None
    options: Any = layer._few_options(*parameters[9:])
    if options is None:
        return None
    dtype = autocast_dtype(ends[0])
    widens = dtype is not None  # to float32, rounded at the end
    ends = [_in_order(end, widens) for end in ends]
    src, end, dst = ends[0], ends[-1], ends[1] if len(ends) == 2 else None
    size, num_src, num_dst = edge_index.size(1), src.size(0), end.size(0)
    sizes = int(layer.heads), int(layer.out_channels)  # NumPy's integers are compiled for, each kind of them
    if edge_attr is not None:
        edge_attr = _in_order(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr, widens)
        edge_attr = edge_attr.clone() if layer.add_self_loops else edge_attr  # the caller may write to its own
    row, in_edge = sizes[0] * sizes[1], 0 if edge_attr is None else edge_attr.size(1)
    width, kernels = row if layer.concat else sizes[1], load_kernels("attention.layer", "cpu")
    in_dst = (src if parameters[4] is None else end).size(1)  # one map of both ends
    tensors = [src, dst, edge_attr, *parameters]
    numbers = kernels.numbers(num_src, num_dst, size, row, width, (src.size(1), in_dst, in_edge))
    fitting = [t is None or _fits(t, number, src.dtype) for t, number in zip(tensors, numbers, strict=True)]
    if not all(fitting) or src.dtype not in _DTYPES:
        return None

    loops = min(num_src, num_dst) if layer.add_self_loops else -1
    graph = edge_index.new_empty(num_dst + 1 + 2 * (size + max(loops, 0)))
    memories, index = (memory(torch.int64), memory(src.dtype)), edge_index.contiguous()
    count = kernels.group(memories[0], index.data_ptr(), size, num_src, num_dst, loops, graph.data_ptr())
    dropout, seed, drop = layer.dropout if layer.training else 0.0, None, None
    if count < 0 or isinstance(dropout, Tensor):
        return None
    if drops(dropout):
        if count < size + max(loops, 0) or get_result(_dropout_ids, edge_index) is not None:
            return None  # the mask is not that of the rows
        seed = draw_seed(edge_index.device, dropout)
        drop = kernels.drop_of(seed, dropout)
    counts = num_src, num_dst, size, loops, count, num_dst * width
    slope, *scores = options
    kind = *scores, None if edge_attr is None else True, drop
    has_dst = dst is not None or tensors[7] is not None
    regions = kernels.regions(counts, sizes, in_edge, has_dst, layer.concat, kind)
    arguments = memories, counts, sizes, float(slope), bool(layer.concat), layer.fill_value == "mean", *kind
    call = Call(layer, kernels, seed, dropout, width, counts, numbers, regions, arguments)
    out: Tensor = FewNode.apply(call, graph, *tensors)
    return out if dtype is None or parameters[9] is not None else out.to(dtype)  # a vector's scores are float32


def _in_order(tensor: Tensor, widens: bool) -> Tensor:
    """Return a tensor whose elements lie in order in memory, and a narrow one in float32 if `widens`."""
    tensor = tensor.float() if widens and tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    return tensor.resolve_neg().contiguous() if tensor.layout == torch.strided else tensor


def _is_plain(layer: Any, ends: Any, edge_index: Any, edge_attr: Any) -> bool:
    """Return True for a call with plain tensors and few edges, which nothing but a forward pass and autograd sees."""
    width = layer.heads * layer.out_channels
    return (
        type(edge_index) is Tensor
        and all([type(end) in KINDS and end.dim() == 2 and 0 < end.numel() * width < PRODUCTS for end in ends])  # noqa: C419
        and (edge_attr is None or (type(edge_attr) in KINDS and edge_attr.dim() in (1, 2)))
        and edge_index.dtype == torch.int64
        and edge_index.layout == torch.strided
        and edge_index.is_cpu
        and not torch.compiler.is_compiling()
        and edge_index.dim() == 2
        and edge_index.size(0) == 2
        and 0 < edge_index.size(1) * width < FEW
        and layer.flow == "source_to_target"
        and layer.explain is not True
        and not (layer.training and layer.edge_dropout > 0.0)
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # which may change what is saved
        and missing_reason("cpu") is None
    )


def _fits(tensor: Tensor, number: int, dtype: torch.dtype) -> bool:
    """Return True for a tensor of so many elements that lie in order in memory."""
    return (
        type(tensor) in KINDS
        and tensor.dtype == dtype
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.numel() == number
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.data_ptr() != 0 or not number)
    )


def _maps_edges(layer: Any) -> bool:
    """Return True if a layer has a map of the features of edges, and loops without any, or with their sum or mean."""
    return layer.lin_edge is not None and (not layer.add_self_loops or is_sum(layer.fill_value))
