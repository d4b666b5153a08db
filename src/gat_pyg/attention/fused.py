"""The fused operation as torch sees it: gradients, torch.compile, torch.export and torch.func around the kernels.

Each score names the folder of its kernels, for a CPU (Numba) and for CUDA (Triton). Two autograd functions call them,
the second being the first one's backward; derivatives of derivatives and forward mode are left to `segment`. A compiler
sees tensors alone and runs nothing while it traces: for it the same two are torch operators on an edge list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from ..graph.adjacency import EdgeList
from ..graph.edges import Edges
from ..graph.memory import converted
from ..graph.remembered import NOT_OVER_THE_GRAPH
from ..kernels.device import has_gpu_kernels, load_kernels, result_dtype
from ..kernels.models import (
    each_cotangent,
    each_model,
    in_forward_mode,
    in_front,
    save_arguments,
    saved_arguments,
    to_heads,
    to_models,
)
from ..philox import draw_kept, draw_mask
from . import segment
from .score import SCORES, Operation, Score


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the operation without its tensors."""

    score: type[Score]
    values: tuple[float, ...]  # of the score's options
    edges: Edges
    saves_output: bool
    needs: tuple[bool, ...] = ()  # x, the edges' weights and the operands: those that need a gradient

    def kernels(self, x: Tensor) -> Any:
        return load_kernels(f"attention.{self.score.kernels}", x.device.type)


def attend(operation: Operation) -> Tensor:
    """Return O `[N_dst, H, C]`."""
    x, score, edges, edge_weight, seed, dropout = operation
    call = _Call(type(score), score.values, edges, _saves_output(operation))
    if in_forward_mode():
        return _by_segments(call, seed, dropout, x, edge_weight, *score.operands)
    return _Attend.apply(call, seed, dropout, x, edge_weight, *score.operands)[0]  # type: ignore[no-any-return]


def _saves_output(operation: Operation) -> bool:
    """Return True if the backward pass reads O; an operand that is vmapped does not show that it needs a gradient."""
    score = operation.score
    mapped = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    scored = any(operand is not None and (operand.requires_grad or mapped) for operand in score.operands)
    return torch.is_grad_enabled() and score.saves_output(operation.x, operation.edges, scored)


def _saved(saves_output: bool, results: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what the backward pass reads of the results of `_forward`: not O, or not the rounded one."""
    return results if saves_output and results[0].dtype == results[1].dtype else results[1:]


def group(edges: EdgeList, num_src: int) -> Edges:
    """Return the neighbourhoods of an edge list, without the edges that edge dropout drops."""
    whole = edges.group(num_src)
    return whole if edges.drop_seed is None else drop_edges(whole, edges.drop_seed, edges.drop)


def drop_edges(edges: Edges, seed: Tensor, p: float) -> Edges:
    """Return the edges without those that edge dropout drops, which are never self-loops; the rows stay."""
    src, dst = edges.index
    keep = draw_kept(seed, edges.dropout_edges, 1, p).squeeze(1)
    return edges.subset(keep | (src == dst))


def is_spent(out: Tensor) -> bool:
    """Return True if an output of `attend` may be overwritten: no backward pass or active transform reads it."""
    if torch._C._are_functorch_transforms_active():
        return False
    node: Any = out.grad_fn
    return not torch.is_grad_enabled() or (getattr(node, "_forward_cls", None) is _Attend and not node.saves_output)


class _Attend(torch.autograd.Function):
    """`(O, ...)`: the output, and what the kernels save for the backward pass, see `_forward`."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        # torch's own inspects the signature of `forward` first, which takes longer than the kernels on a small graph
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]

    @staticmethod
    def forward(call: _Call, seed: Tensor | None, p: Any, *operands: Tensor) -> tuple[Tensor, ...]:
        return _forward(call, seed, p, *operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *arguments = inputs
        saved = _saved(ctx.call.saves_output, output)
        ctx.saves_output = len(saved) == len(output)
        save_arguments(ctx, *arguments, *saved)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        if grad is None:
            return None, None, None, *(None for _ in needs)
        call = replace(ctx.call, needs=needs)
        if in_forward_mode():
            # this may run after the functorch transform that recorded it has ended
            arguments = saved_arguments(ctx)[: 2 + len(needs)]
            arguments = [torch._C._functorch.unwrap_if_dead(t) if isinstance(t, Tensor) else t for t in arguments]
            grads: Any = _backward_by_segments(call, grad, *arguments)
        else:
            # its own derivative, or a transform of it, is seldom needed
            wrapped = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
            run: Any = _AttendBackward.apply if wrapped else _backward
            grads = run(call, grad, *saved_arguments(ctx))
        return None, None, None, *(g if needed else None for g, needed in zip(grads, needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        return each_model(_Attend, info.batch_size, in_dims, args, x=3)


class _AttendBackward(torch.autograd.Function):
    """The gradients of x and the operands, `[0]` for one that is None or needs none."""

    @staticmethod
    def forward(call: _Call, grad: Tensor, seed: Tensor | None, p: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _backward(call, grad, seed, p, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *arguments = inputs
        save_arguments(ctx, *arguments[: 3 + len(ctx.call.needs)])  # grad, seed, p, x and the operands
        ctx.unused = len(arguments) - 3 - len(ctx.call.needs)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, seed, p, *operands = saved_arguments(ctx)

        def first(grad: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            return tuple(_present(_backward_by_segments(ctx.call, grad, seed, p, *_spread(values, operands))))

        outer = [
            torch.zeros_like(x) if g.numel() == 0 else g for x, g in zip(operands, grads, strict=True) if x is not None
        ]
        pull: Any = torch.func.vjp(first, grad, *_present(operands))[1]
        of_grad, *of_values = pull(tuple(outer))
        return None, of_grad, None, None, *_spread(of_values, operands), *(None for _ in range(ctx.unused))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        return each_model(_AttendBackward, info.batch_size, in_dims, args, x=4)


def _present(operands: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the operands that are not None."""
    return [operand for operand in operands if operand is not None]


def _spread(values: Sequence[Tensor], operands: Sequence[Any]) -> list[Any]:
    """Return the values in the places of the operands that are not None: the inverse of `_present`."""
    each = iter(values)
    return [None if operand is None else next(each) for operand in operands]


def _backward_by_segments(
    call: _Call, grad: Tensor, seed: Tensor | None, p: float | Tensor, *operands: Tensor | None
) -> list[Any]:
    """The gradients of x and the operands by `segment`, differentiable any number of times; None stays None."""

    def forward(*values: Tensor) -> Tensor:
        return _by_segments(call, seed, p, *_spread(values, operands))

    pull: Any = torch.func.vjp(forward, *_present(operands))[1]
    return _spread(pull(grad), operands)


def _by_segments(
    call: _Call, seed: Tensor | None, p: Any, x: Tensor, edge_weight: Tensor | None, *operands: Tensor | None
) -> Tensor:
    """The output by `segment`, differentiable any number of times."""
    if x.dim() == 4:
        arguments = seed, p, x, edge_weight, *operands
        each: Any = ([t[model] if isinstance(t, Tensor) else t for t in arguments] for model in range(x.size(0)))
        return torch.stack([_by_segments(call, *model) for model in each])
    score, dtype = call.score.of(operands, call.values), result_dtype(x, edge_weight, *operands)
    factor = segment.factors(call.edges, edge_weight, seed, x.size(1), p, dtype)
    return segment.attend(x, score, call.edges, factor)[0].to(dtype)


# --- The kernels. ---


def _forward(
    call: _Call, seed: Tensor | None, p: Any, x: Tensor, edge_weight: Tensor | None, *operands: Tensor | None
) -> tuple[Tensor, ...]:
    """Return O, the same in float32 where the backward pass reads it and O is narrower, log-sum-exp and others."""
    score, dtype = call.score.of(operands, call.values), result_dtype(x, edge_weight, *operands)
    wide = torch.promote_types(dtype, torch.float32) if call.saves_output else dtype
    operation = Operation(x, score, call.edges, edge_weight, seed, p)
    results = call.kernels(x).forward(operation, wide, call.saves_output)
    return tuple(results) if wide == dtype else (converted(results[0], dtype), *results)


def _backward(
    call: _Call, grad: Tensor, seed: Tensor | None, p: Any, x: Tensor, edge_weight: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    count = len(call.score.shapes)
    score, saved = call.score.of(tensors[:count], call.values), tensors[count:]
    out, saved = (saved[0], saved[1:]) if call.saves_output else (None, saved)
    operation = Operation(x, score, call.edges, edge_weight, seed, p)
    grads = call.kernels(x).backward(operation, grad, out, saved, call.needs)
    names = "x", "edge_weight", *call.score.shapes
    return tuple(
        grad.new_empty(*x.shape[:-3], 0)
        if grads.get(name) is None or operand is None or not needed
        else converted(grads[name], operand.dtype)
        for name, operand, needed in zip(names, (x, edge_weight, *score.operands), call.needs, strict=True)
    )


# --- The same as operators, whose tensors are x, the edges' weights and the operands, those that are not None. ---


# A call may group a new edge list, which synchronises with the device. A CUDA graph, as of mode="reduce-overhead",
# would also keep the neighbourhoods of its capture when torch copies the edges of another call into the same memory.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def attend_for_compiler(operation: Operation, keeps: bool) -> list[Tensor]:
    """Return O, what the backward pass reads, and, if `keeps`, k_ij `[R, H]`, -1 for rows without an edge."""
    x, score, edges, edge_weight, seed, dropout = operation
    saves_output, operands = _saves_output(operation), (x, edge_weight, *score.operands)
    present, tensors = [operand is not None for operand in operands], _present(operands)
    p, number = (dropout, 0.0) if isinstance(dropout, Tensor) else (None, dropout)
    numbers, name = [number, *score.values], type(score).__name__
    return _attend_op(tensors, present, seed, p, *edges[:4], name, numbers, saves_output, *edges[4:], keeps)  # type: ignore[no-any-return]


# p is that of dropout where it is a tensor, else it is the first of the numbers, before the score's options.
# A compiled package of torch passes an empty list as None, so that the seed is no list.
_ARGUMENTS = (
    "bool[] present, Tensor? seed, Tensor? p, Tensor edge_index, SymInt num_dst, bool add_self_loops, str flow, "
    "str score, float[] numbers, bool saves_output, Tensor? drop_seed, float drop"
)


def _unpack(tensors: list[Tensor], present: list[bool], seed: Any, p: Any, *arguments: Any) -> tuple[_Call, list[Any]]:
    """Return the call, and its arguments: the seed, p, x, the edges' weights and all operands."""
    edge_index, num_dst, add_self_loops, flow, score, numbers, saves_output, *drop = arguments
    edges = group(EdgeList(edge_index, num_dst, add_self_loops, flow, *drop), tensors[0].size(-3))
    call = _Call(SCORES[score], tuple(numbers[1:]), edges, saves_output)
    return call, [seed, numbers[0] if p is None else p, *_spread(tensors, [there or None for there in present])]


@torch.library.custom_op(
    "gat_pyg::attend", mutates_args=(), tags=_TAGS, schema=f"(Tensor[] tensors, {_ARGUMENTS}, bool keeps) -> Tensor[]"
)
def _attend_op(tensors: list[Tensor], *arguments: Any) -> list[Tensor]:
    *shared, keeps = arguments
    call, operands = _unpack(tensors, *shared)
    results = list(_forward(call, *operands))
    return [*results, _keep(call, *operands[:3])] if keeps else results


def _keep(call: _Call, seed: Tensor | None, p: float | Tensor, x: Tensor) -> Tensor:
    """Return k_ij `[R, H]` in the caller's order, -1 for rows without an edge."""
    edges, heads, dtype = call.edges, x.size(-2), torch.promote_types(x.dtype, torch.float32)
    kept = x.new_ones(*x.shape[:-3], edges.num_rows, heads, dtype=dtype)
    if seed is not None:
        kept = draw_mask(seed, edges.dropout_edges, heads * seed.numel(), p, dtype)
        kept = to_models(kept, 1, seed.numel()).contiguous() if x.dim() == 4 else kept
    is_edge = edges.ungroup(kept.new_ones(edges.num_edges, 1, dtype=torch.bool))
    return kept.masked_fill_(~is_edge, -1.0)


@_attend_op.register_fake
def _(tensors, present, seed, p, edge_index, num_dst, loops, flow, score, numbers, saves_output, *rest):  # type: ignore[no-untyped-def]
    x = tensors[0]
    sizes = {"N_dst": num_dst, "H": x.size(-2), "C": x.size(-1), "stats": 2}
    wide, models = torch.promote_types(result_dtype(*tensors), torch.float32), x.shape[:-3]

    def new(*shape: str, dtype: torch.dtype = wide) -> Tensor:
        return _laid_out(x, x.new_empty([*models, *(sizes[letter] for letter in shape)], dtype=dtype))

    narrow = result_dtype(*tensors)
    outs = [new("N_dst", "H", "C", dtype=dtype) for dtype in dict.fromkeys((narrow, wide if saves_output else narrow))]
    log_sum_exp = new("N_dst", "H") if has_gpu_kernels(x) else new("N_dst", "stats", "H")
    others = [new(*shape) for shape in (SCORES[score].saved if saves_output else ())]
    if rest[-1]:  # keeps
        num_rows = edge_index.size(1) + (torch.sym_min(x.size(-3), num_dst) if loops else 0)
        wide = torch.promote_types(x.dtype, torch.float32)
        others.append(x.new_empty(*models, num_rows, x.size(-2), dtype=wide))
    return [*outs, log_sum_exp, *others]


def _laid_out(x: Tensor, result: Tensor) -> Tensor:
    """Return a fake result `[..., rows, H, ...]` with the strides of the real one.

    The kernels for a GPU compute the heads of all models of a stack side by side.
    """
    is_stack = x.dim() == 4 and has_gpu_kernels(x)
    return to_models(to_heads(result, 1), 1, x.size(0)) if is_stack else result


@torch.library.custom_op(
    "gat_pyg::attend_backward",
    mutates_args=(),
    tags=_TAGS,
    schema=f"(Tensor grad, Tensor[] tensors, Tensor[] saved, bool[] needs, {_ARGUMENTS}) -> Tensor[]",
)
def _attend_backward_op(
    grad: Tensor, tensors: list[Tensor], saved: list[Tensor], needs: list[bool], present: list[bool], *arguments: Any
) -> list[Tensor]:
    (call, operands), wanted = _unpack(tensors, present, *arguments), iter(needs)
    call = replace(call, needs=tuple(there and next(wanted) for there in present))
    grads = [g for g, there in zip(_backward(call, grad, *operands, *saved), present, strict=True) if there]
    # an operator's results share no memory, as the gradients of keys and values side by side do
    return grads if tensors[0].dim() == 4 else [g.contiguous() for g in grads]


@_attend_backward_op.register_fake
def _(grad, tensors, saved, needs, present, seed, p, index, num_dst, loops, flow, score, *rest):  # type: ignore[no-untyped-def]
    x, grads = tensors[0], []
    none = grad.new_empty(*x.shape[:-3], 0, dtype=result_dtype(*tensors))
    shapes = {"x": ("N_src", "H", "C"), "edge_weight": ("E", "H"), **SCORES[score].shapes}
    of_present = [shape for shape, there in zip(shapes.values(), present, strict=True) if there]
    for operand, shape, needed in zip(tensors, of_present, needs, strict=True):
        result = operand.new_empty(operand.shape) if needed else none.clone()
        grads.append(_laid_out(x, result) if needed and shape[1] == "H" else result)
    return grads


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, present, seed, p, edge_index, *rest, saves_output, drop_seed, drop, keeps = inputs
    saved = _saved(saves_output, output[: len(output) - keeps])
    ctx.count = len(tensors)
    ctx.save_for_backward(drop_seed, edge_index, seed, p, *tensors, *saved)
    ctx.present, ctx.rest, ctx.drop = present, (*rest, saves_output), drop


def _operator_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    drop_seed, edge_index, seed, p, *others = ctx.saved_tensors
    tensors, saved = others[: ctx.count], others[ctx.count :]
    needs = ctx.needs_input_grad[0]
    results = _attend_backward_op(
        grads[0].contiguous(), tensors, saved, needs, ctx.present, seed, p, edge_index, *ctx.rest, drop_seed, ctx.drop
    )
    of_tensors = [g if needed else None for g, needed in zip(results, needs, strict=True)]
    return of_tensors, *(None for _ in range(13))


_attend_op.register_autograd(_operator_backward, setup_context=_save_for_backward)


@_attend_op.register_vmap
def _(info, in_dims, tensors, present, seed, p, edge_index, *rest):  # type: ignore[no-untyped-def]
    *plain, drop_seed, drop, keeps = rest
    dims, _, seed_dim, p_dim, graph_dim, *_ = in_dims
    drop_dim = in_dims[-3]
    if graph_dim is not None:
        raise NotImplementedError(NOT_OVER_THE_GRAPH)
    if tensors[0].dim() - (dims[0] is not None) == 4:
        raise NotImplementedError("a compiler maps over one axis of models or features, and there are two.")
    tensors = [in_front(t, dim, info.batch_size) for t, dim in zip(tensors, dims, strict=True)]
    seed, p = in_front(seed, seed_dim, info.batch_size), in_front(p, p_dim, info.batch_size)
    drop_seed = drop_seed if drop_dim is None else drop_seed.select(drop_dim, 0)  # one draw for all
    results = _attend_op(tensors, present, seed, p, edge_index, *plain, drop_seed, drop, keeps)
    return results, [0] * len(results)
