"""The fused operation as torch sees it: gradients, torch.compile, torch.export and torch.func around the kernels.

The kernels are those of `additive` and `pair`, each in `cpu` (Numba) and in `gpu` (Triton). Two autograd functions call
them, the second being the first one's backward; what is asked beyond that, derivatives of derivatives, `segment`
answers. For a compiler, which sees tensors alone and runs nothing while it traces, the same two are operators of
torch's on an edge list. Derivatives in forward mode are `segment`'s too: while one is computed, no kernel runs.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..graph.adjacency import neighbourhoods
from ..graph.edges import Edges, Flow
from ..kernels.device import load_kernels, result_dtype
from ..kernels.models import each_model, in_forward_mode, to_heads, to_models
from ..philox import keep_mask
from . import segment

Kind: TypeAlias = Literal["additive", "pair"]

# The operands of a call, and the axis of each that holds the heads:
#   additive: x [N_src, H, C], score_src [N_src, H], score_dst [N_dst, H], score_edge [E, H]
#   pair:     x [N_src, H, C], x_dst [N_dst, H, C], att [H, C], nothing
# Several models on one graph have one more axis in front of each, and of the seed.
Operands: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
HEADS = {"additive": (1, 1, 1, 1), "pair": (1, 1, 0, 1)}

# A graph: its Edges, or, for a compiler, (num_dst, add_self_loops, flow) beside an edge list.
Graph: TypeAlias = Edges | tuple[int, bool, Flow]


def attend(
    kind: Kind,
    operands: Operands,
    seed: Tensor | None,
    graph: Graph,
    edge_index: Tensor | None,
    negative_slope: float,
    dropout: float,
) -> Tensor:
    """O `[N_dst, H, C]`; the arguments as in `gat_pyg.attention.attend`, with a seed where there is dropout."""
    dtype = result_dtype(*operands)
    if in_forward_mode() and isinstance(graph, Edges):
        return _plain(kind, operands, graph, negative_slope, seed, dropout)
    if operands[0].device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):  # <dO, O> of the unrounded O
        wide = tuple(None if t is None else t.float() for t in operands)
        return attend(kind, wide, seed, graph, edge_index, negative_slope, dropout).to(dtype)  # type: ignore[arg-type]
    # what torch.func maps over does not tell whether a gradient will be asked for
    mapped = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    scored = kind == "additive" and any(t is not None and (t.requires_grad or mapped) for t in operands[1:])
    speed = scored and torch.is_grad_enabled() and keeps_output(operands[0], graph, edge_index)
    if isinstance(graph, Edges):
        out: Tensor = _Attend.apply(*operands, seed, edge_index, graph, kind, negative_slope, dropout, speed)[0]
    else:
        out = _attend_op(*operands, seed, edge_index, *graph, kind, negative_slope, dropout, speed)[0]
    return out


def keeps_output(x: Tensor, graph: Graph, edge_index: Tensor | None) -> bool:
    """Whether the backward pass is given O and O+ ("speed") or finds D by a scratch of [E, H] ("memory").

    The one costs N H C to write and read twice, the other E H and, on a CPU, its exponentials; d edges a row decide.
    A compiler for a CPU is given "speed", so that what it makes serves any N and E.
    """
    if x.device.type == "cpu":
        return not isinstance(graph, Edges) or x.size(2) * x.element_size() * x.size(0) < 32 * graph.num_edges
    num_edges = graph.num_edges if isinstance(graph, Edges) else edge_index.size(1)  # type: ignore[union-attr]
    return x.size(2) * x.element_size() * x.size(0) < 6.7 * num_edges


def is_spent(out: Tensor) -> bool:
    """Whether an output of `attend` may be written over: backward needs no value of it, and nothing is mapped over."""
    node: Any = out.grad_fn
    mapped = torch._C._are_functorch_transforms_active()
    return not mapped and getattr(node, "_forward_cls", None) is _Attend and not node.keeps_output


class _Attend(torch.autograd.Function):
    """`(O, what normalised the softmax, O+, A+)`, of which the last three are for the backward pass."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, graph, kind, negative_slope, dropout, speed = inputs
        ctx.save_for_backward(*tensors, *(output if speed or kind == "pair" else (None, output[1], None, None)))
        ctx.options = (graph, kind, negative_slope, dropout)
        ctx.keeps_output = speed or kind == "pair"
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 11
        if in_forward_mode():
            # what a transform recorded may be called after it has ended
            saved = (None if t is None else torch._C._functorch.unwrap_if_dead(t) for t in ctx.saved_tensors[:6])
            *operands, seed, edge_index = saved
            grads: Any = _plain_backward(grad, operands, seed, edge_index, *ctx.options)
        else:
            # its own derivative, or a transform of it, is seldom asked for
            wrapped = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
            run: Any = _AttendBackward.apply if wrapped else _backward
            grads = run(grad, *ctx.saved_tensors, *ctx.options, ctx.needs_input_grad[3])
        kept = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:4], strict=True)]
        return *kept, *(None,) * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        return each_model(_Attend, info.batch_size, in_dims, args, x=0, edge_index=5)


class _AttendBackward(torch.autograd.Function):
    """The gradients of the operands, `[0]` in place of one that is not there."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, graph, kind, negative_slope, dropout, _ = inputs
        ctx.save_for_backward(*tensors[:7])  # grad, operands, seed, edge_index
        ctx.options = (graph, kind, negative_slope, dropout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, *operands, seed, edge_index = ctx.saved_tensors
        graph, kind, negative_slope, dropout = ctx.options
        there = [at for at, operand in enumerate(operands) if operand is not None]

        def first(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            full = _all_four(there, given)
            grads: Any = _plain_backward(grad, full, seed, edge_index, graph, kind, negative_slope, dropout)
            return tuple(grads[at] for at in there)

        given = [operands[at] for at in there]
        outer = [torch.zeros_like(operands[at]) if grads[at].numel() == 0 else grads[at] for at in there]
        pull: Any = torch.func.vjp(first, grad, *given)[1]
        found = pull(tuple(outer))
        result: list[Tensor | None] = [found[0], *[None] * 15]
        for at, value in zip(there, found[1:], strict=True):
            result[1 + at] = value
        return tuple(result)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        return each_model(_AttendBackward, info.batch_size, in_dims, args, x=1, edge_index=6)


def _all_four(there: list[int], given: tuple[Tensor, ...]) -> list[Any]:
    found = dict(zip(there, given, strict=True))
    return [found.get(at) for at in range(4)]


def _plain_backward(
    grad: Tensor,
    operands: Any,
    seed: Tensor | None,
    edge_index: Tensor | None,
    graph: Graph,
    kind: Kind,
    negative_slope: float,
    dropout: float,
) -> list[Tensor | None]:
    """The gradients of the four operands by `segment`, differentiable any number of times; None of one not there."""
    there = [at for at, operand in enumerate(operands) if operand is not None]

    def plain(*given: Tensor) -> Tensor:
        full = _all_four(there, given)
        return _plain(kind, full, _edges(full[0], graph, edge_index), negative_slope, seed, dropout)

    pull: Any = torch.func.vjp(plain, *(operands[at] for at in there))[1]
    return _all_four(there, pull(grad))


def _plain(
    kind: Kind,
    operands: Any,
    edges: Edges,
    negative_slope: float,
    seed: Tensor | None,
    dropout: float,
) -> Tensor:
    """The same by `segment`, differentiable any number of times."""
    if operands[0].dim() == 4:
        heads = [to_heads(operand, axis) for operand, axis in zip(operands, HEADS[kind], strict=True)]
        made: Any = to_models(_plain(kind, heads, edges, negative_slope, seed, dropout), 1, operands[0].size(0))
        return made  # type: ignore[no-any-return]
    x, first, second, third = operands
    wide = torch.promote_types(result_dtype(*operands), torch.float32)
    keep = None if seed is None else keep_mask(seed, edges.drawn, x.size(1), dropout, wide)
    if kind == "pair":
        e = segment.pair_score(x, first, second, edges, negative_slope)
        out, _ = segment.attend(x, None, None, edges, e, 1.0, keep)
    else:
        out, _ = segment.attend(x, first, second, edges, third, negative_slope, keep)
    return out.to(result_dtype(*operands))


# --- The kernels. ---


def _edges(x: Tensor, graph: Graph, edge_index: Tensor | None) -> Edges:
    if isinstance(graph, Edges):
        return graph
    num_dst, add_self_loops, flow = graph
    assert edge_index is not None
    return neighbourhoods(edge_index, x.size(-3), num_dst, add_self_loops=add_self_loops, flow=flow)[1]


def _forward(
    x: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    seed: Tensor | None,
    edge_index: Tensor | None,
    graph: Graph,
    kind: Kind,
    negative_slope: float,
    dropout: float,
    speed: bool,
) -> tuple[Tensor, ...]:
    edges, kernels = _edges(x, graph, edge_index), load_kernels(f"attention.{kind}", x.device.type)
    dtype = result_dtype(x, first, second, third)
    if kind == "pair":
        found = kernels.forward(x, first, second, edges, negative_slope, dropout, seed, dtype)
    else:
        found = kernels.forward(x, first, second, third, edges, negative_slope, dropout, seed, dtype, speed)
    out, norm, plus, mass = (*found, None, None)[:4]
    *models, _, heads, channels = x.shape
    return (
        out,
        norm,
        norm.new_empty(*models, 0, heads, channels) if plus is None else plus,
        norm.new_empty(*models, 0, heads) if mass is None else mass,
    )


def _backward(
    grad: Tensor,
    x: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    seed: Tensor | None,
    edge_index: Tensor | None,
    out: Tensor | None,
    norm: Tensor,
    plus: Tensor | None,
    mass: Tensor | None,
    graph: Graph,
    kind: Kind,
    negative_slope: float,
    dropout: float,
    edge_grad: bool,
) -> tuple[Tensor, ...]:
    models = x.shape[:-3]
    edges, kernels = _edges(x, graph, edge_index), load_kernels(f"attention.{kind}", x.device.type)
    found: tuple[Tensor | None, ...]
    if kind == "pair":
        found = kernels.backward(grad, x, first, second, edges, negative_slope, dropout, seed, out, norm)
    else:
        found = kernels.backward(
            grad, x, first, second, third, edges, negative_slope, dropout, seed, out, norm, plus, mass, edge_grad
        )
    return tuple(
        grad.new_empty(*models, 0) if g is None or operand is None else g.to(operand.dtype)
        for g, operand in zip((*found, None)[:4], (x, first, second, third), strict=True)
    )


# --- The same as operators. ---


# A call may group a new edge list, which synchronises with the device: it must not become part of a CUDA graph.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("gat_pyg::attend", mutates_args=(), tags=_TAGS)
def _attend_op(
    x: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    seed: Tensor | None,
    edge_index: Tensor,
    num_dst: int,
    add_self_loops: bool,
    flow: str,
    kind: str,
    negative_slope: float,
    dropout: float,
    speed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    graph: Any = (num_dst, add_self_loops, flow)
    found: Any = _forward(x, first, second, third, seed, edge_index, graph, kind, negative_slope, dropout, speed)  # type: ignore[arg-type]
    return found  # type: ignore[no-any-return]


@_attend_op.register_fake
def _(x, first, second, third, seed, edge_index, num_dst, add_self_loops, flow, kind, negative_slope, dropout, speed):  # type: ignore[no-untyped-def]
    dtype = result_dtype(x, first, second, third)
    wide = torch.promote_types(dtype, torch.float32)
    plus = speed and kind == "additive"
    kept = num_dst if plus else 0
    return (
        x.new_empty(num_dst, x.size(1), x.size(2), dtype=dtype),
        x.new_empty(num_dst, x.size(1), *((2,) if x.device.type == "cpu" else ()), dtype=wide),
        x.new_empty(kept, x.size(1), x.size(2), dtype=dtype if plus and x.device.type != "cpu" else wide),
        x.new_empty(kept, x.size(1), dtype=wide),
    )


@torch.library.custom_op("gat_pyg::attend_backward", mutates_args=(), tags=_TAGS)
def _attend_backward_op(
    grad: Tensor,
    x: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
    seed: Tensor | None,
    edge_index: Tensor,
    out: Tensor | None,
    norm: Tensor,
    plus: Tensor | None,
    mass: Tensor | None,
    num_dst: int,
    add_self_loops: bool,
    flow: str,
    kind: str,
    negative_slope: float,
    dropout: float,
    edge_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    graph: Any = (num_dst, add_self_loops, flow)
    found: Any = _backward(
        grad, x, first, second, third, seed, edge_index, out, norm, plus, mass,
        graph, kind, negative_slope, dropout, edge_grad,  # type: ignore[arg-type]
    )  # fmt: skip
    return found  # type: ignore[no-any-return]


@_attend_backward_op.register_fake
def _(grad, x, first, second, third, seed, edge_index, *rest):  # type: ignore[no-untyped-def]
    edge_grad = rest[-1]
    operands = (x, first, second, third if edge_grad else None)
    return tuple(grad.new_empty(0) if t is None else t.new_empty(t.shape) for t in operands)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, seed, edge_index, num_dst, add_self_loops, flow, kind, negative_slope, dropout, speed = inputs
    kept = output if speed or kind == "pair" else (None, output[1], None, None)
    ctx.save_for_backward(*operands, seed, edge_index, *kept)
    ctx.options = (num_dst, add_self_loops, flow, kind, negative_slope, dropout)


def _operator_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attend_backward_op(grad.contiguous(), *ctx.saved_tensors, *ctx.options, ctx.needs_input_grad[3])
    kept = [g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:4], strict=True)]
    return *kept, *(None,) * 9


_attend_op.register_autograd(_operator_backward, setup_context=_keep_for_backward)
