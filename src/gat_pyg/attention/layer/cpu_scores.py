"""Scores of a layer on few edges: LeakyReLU(s_j + d_i + u_ij), GATv2's and the scaled product, and their gradients."""

from __future__ import annotations

from typing import Any

from ...kernels.cpu.cache import inline, step
from ...kernels.cpu.vector import LANES, lane_sum, leaky, load, pointer, splat
from .cpu_steps import add, dot, put


@step
def additive(rowptr: Any, ends: Any, heads: int, slope: Any, s: Any, d: Any, u: Any, e: Any) -> None:
    """Equation (3): LeakyReLU(s_j + d_i + u_ij), without u if it is None."""
    src, rows = ends
    for i in range(rowptr.size - 1):
        for edge in range(rowptr[i], rowptr[i + 1]):
            for h in range(heads):
                z = s[src[edge] * heads + h] + d[i * heads + h]
                if u is not None:
                    z += u[rows[edge] * heads + h]
                e[edge * heads + h] = z if z > 0 else slope * z


@step
def additive_back(rowptr: Any, ends: Any, heads: int, slope: Any, s: Any, d: Any, u: Any, change: Any, grad_s: Any,
                  grad_d: Any, grad_u: Any) -> None:  # fmt: skip
    """Add the gradients of the terms from that of the scores."""
    src, rows = ends
    for i in range(rowptr.size - 1):
        for edge in range(rowptr[i], rowptr[i + 1]):
            for h in range(heads):
                z, of = s[src[edge] * heads + h] + d[i * heads + h], change[edge * heads + h]
                if u is not None:
                    z += u[rows[edge] * heads + h]
                if not z > 0:
                    of *= slope
                grad_s[src[edge] * heads + h] += of
                grad_d[i * heads + h] += of
                if u is not None:
                    grad_u[rows[edge] * heads + h] += of


@step
def halves(x_: Any, a_: Any, sizes: Any, scores: Any) -> None:
    """<a, x_n> of each head."""
    (heads, channels), x, a = sizes, pointer(x_, 0), pointer(a_, 0)
    for n in range(scores.size // heads):
        for h in range(heads):
            scores[n * heads + h] = dot(x, (n * heads + h) * channels, a, h * channels, channels)


@step
def halves_back(x_: Any, a_: Any, sizes: Any, of: Any, grad_x_: Any, grad_a_: Any) -> None:
    """Add the gradients of `halves`, that of a unless it is empty."""
    (heads, channels), x, a = sizes, pointer(x_, 0), pointer(a_, 0)
    grad_x, grad_a = pointer(grad_x_, 0), pointer(grad_a_, 0)
    for n in range(of.size // heads):
        for h in range(heads):
            here = n * heads + h
            add(grad_x, here * channels, of[here], a, h * channels, channels)
            if grad_a_.size:
                add(grad_a, h * channels, of[here], x, here * channels, channels)


@step
def folded(att: Any, weight: Any, sizes: Any, out: Any) -> None:
    """a W_e of each head, `[H, D]`."""
    (heads, channels), depth = sizes, weight.size // att.size
    out[:] = 0
    for h in range(heads):
        for c in range(h * channels, (h + 1) * channels):
            for k in range(depth):
                out[h * depth + k] += att[c] * weight[c * depth + k]


@step
def folded_back(att: Any, weight: Any, sizes: Any, of: Any, grad_att: Any, grad_weight: Any) -> None:
    """Add the gradients of `folded`, each unless it is empty."""
    (heads, channels), depth = sizes, weight.size // att.size
    for h in range(heads):
        for c in range(h * channels, (h + 1) * channels):
            for k in range(depth):
                if grad_att.size:
                    grad_att[c] += of[h * depth + k] * weight[c * depth + k]
                if grad_weight.size:
                    grad_weight[c * depth + k] += of[h * depth + k] * att[c]


@inline
def _other(of_src: Any, of_edges: Any, j: int, edge: int, count: int) -> Any:
    """A vector of the features of src, and of the edge if there are any."""
    values = load(of_src, j, LANES, count)
    if of_edges is not None:
        values = values + load(of_edges, edge, LANES, count)
    return values


@step
def pair(rowptr: Any, ends: Any, sizes: Any, slope: Any, dst_: Any, key_: Any, of_edges_: Any, att_: Any,
         e: Any) -> None:  # fmt: skip
    """a . LeakyReLU(x_i + x_j + W_e u_ij), or without a the scaled product, <x_i, k_j + W_e u_ij> times `slope`."""
    (heads, channels), (src, rows) = sizes, ends
    dst, key, of_edges, att = pointer(dst_, 0), pointer(key_, 0), pointer(of_edges_, 0), pointer(att_, 0)
    for i in range(rowptr.size - 1):
        for h in range(heads):
            for edge in range(rowptr[i], rowptr[i + 1]):
                part = splat(dst, 0.0, LANES)
                for c in range(h * channels, (h + 1) * channels, LANES):
                    count = (h + 1) * channels - c
                    x_i = load(dst, i * heads * channels + c, LANES, count)
                    j, of_edge = src[edge] * heads * channels + c, rows[edge] * heads * channels + c
                    term = _other(key, of_edges, j, of_edge, count)
                    if att_ is None:
                        part = part + x_i * term
                    else:
                        part = part + load(att, c, LANES, count) * leaky(x_i + term, x_i + term, slope)
                score = lane_sum(part)
                e[edge * heads + h] = slope * score if att_ is None else score


@step
def pair_back(rowptr: Any, ends: Any, sizes: Any, slope: Any, dst_: Any, key_: Any, of_edges_: Any, att_: Any,
              change: Any, grad_dst_: Any, grad_key_: Any, grad_edges_: Any, grad_att_: Any) -> None:  # fmt: skip
    """Add the gradients of what `pair` reads, from that of the scores."""
    (heads, channels), (src, rows) = sizes, ends
    dst, key, of_edges, att = pointer(dst_, 0), pointer(key_, 0), pointer(of_edges_, 0), pointer(att_, 0)
    grad_dst, grad_key = pointer(grad_dst_, 0), pointer(grad_key_, 0)
    grad_edges, grad_att = pointer(grad_edges_, 0), pointer(grad_att_, 0)
    for i in range(rowptr.size - 1):
        for h in range(heads):
            for edge in range(rowptr[i], rowptr[i + 1]):
                for c in range(h * channels, (h + 1) * channels, LANES):
                    count, own, of = (h + 1) * channels - c, i * heads * channels + c, change[edge * heads + h]
                    x_i, j = load(dst, own, LANES, count), src[edge] * heads * channels + c
                    of_edge = rows[edge] * heads * channels + c
                    term = _other(key, of_edges, j, of_edge, count)
                    if att_ is None:
                        of_term = (slope * of) * x_i
                        of_dst = (slope * of) * term
                    else:
                        activated = leaky(x_i + term, x_i + term, slope)
                        put(grad_att, c, load(grad_att, c, LANES, count) + of * activated, count)
                        of_term = leaky(of * load(att, c, LANES, count), x_i + term, slope)
                        of_dst = of_term
                    put(grad_dst, own, load(grad_dst, own, LANES, count) + of_dst, count)
                    put(grad_key, j, load(grad_key, j, LANES, count) + of_term, count)
                    if of_edges_ is not None:
                        put(grad_edges, of_edge, load(grad_edges, of_edge, LANES, count) + of_term, count)
