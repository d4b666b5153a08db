"""A call leaves its tensors as they were: the same elements and versions, and storages that can be resized."""

from __future__ import annotations

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from gat_pyg import GATConv, GATv2Conv, TransformerConv
from gat_pyg.graph.adjacency import neighbourhoods
from tests.graphs import RANDOM
from tests.processes import python

pytestmark = pytest.mark.usefixtures("float64")  # of three heads of five channels: other tests compile their kernels

LAYERS = [GATConv, GATv2Conv, TransformerConv]
layers = pytest.mark.parametrize("layer", LAYERS)


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory that a tensor consists of."""
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


@pytest.mark.parametrize(
    ("layer", "sparse"),
    [
        *((GATConv, sparse) for sparse in (False, True)),
        *(pytest.param(layer, False, marks=pytest.mark.weekly) for layer in LAYERS[1:]),
    ],
)
def test_nothing_of_a_callers_tensor_is_changed_or_marked(layer: Any, sparse: bool) -> None:
    conv = layer(5, 5, heads=3, edge_dim=3, dropout=0.5, edge_dropout=0.2)
    x = torch.eye(40, 5) + torch.eye(40, 5).roll(1, 1)
    x = x.to_sparse_csr() if sparse else x.requires_grad_()
    edge_attr, edge_weight = torch.randn(300, 3, requires_grad=True), torch.rand(300, requires_grad=True)
    index = RANDOM.index.int()  # the dtype of the structure, which must not share its memory
    passed = [*conv.parameters(), edge_attr, edge_weight, index, *parts(x)]
    before = [(each._version, each.detach().clone()) for each in passed]
    out = conv(x, index, edge_attr, edge_weight=edge_weight)
    out.sum().backward()
    for each, (version, content) in zip(passed, before, strict=True):
        assert each._version == version and torch.equal(each, content)
    for each in [*passed, out, *(each.grad for each in passed if each.grad is not None)]:
        each.untyped_storage().resize_(0)  # an error if it cannot be resized
    with torch.no_grad():
        index = RANDOM.index.int()
        edges = neighbourhoods(index, 40, 40, add_self_loops=True)
        memory = StorageWeakRef(index.untyped_storage())
        del index
        gc.collect()
        assert memory.expired() and edges.num_rows == 340


@layers
def test_memory_of_every_kind(layer: Any, tmp_path: Path) -> None:
    """Shared memory, files, read-only maps, odd addresses, negative bits."""
    conv, x, index = layer(5, 5, heads=3, edge_dim=3), torch.randn(40, 5), RANDOM.index
    edge_attr = torch.randn(300, 3)
    expected = conv(x, index, edge_attr)
    shared = copy.deepcopy(conv).share_memory()
    assert_close(
        shared(x.clone().share_memory_(), index.clone().share_memory_(), edge_attr.clone().share_memory_()), expected
    )
    assert all(each.is_shared() for each in shared.parameters())
    for name, tensor in (("x", x), ("index", index), ("attr", edge_attr)):
        np.save(tmp_path / name, tensor.numpy())
    maps = [torch.from_numpy(np.load(tmp_path / f"{name}.npy", mmap_mode="c")) for name in ("x", "index", "attr")]
    assert torch.equal(conv(*maps), expected)
    file = torch.from_file(str(tmp_path / "attr"), True, 900, dtype=x.dtype).view(300, 3).copy_(edge_attr)
    assert torch.equal(conv(x, index, file), expected)
    odd = torch.frombuffer(bytearray(b"." + edge_attr.numpy().tobytes()), dtype=x.dtype, offset=1).view(300, 3)
    odd_ids = torch.frombuffer(bytearray(b"." + index.numpy().tobytes()), dtype=torch.int64, offset=1).view(2, 300)
    assert torch.equal(conv(x, odd_ids, odd), expected)
    negative = torch.complex(torch.zeros(300, 3), -edge_attr).conj().imag
    assert negative.is_neg() and torch.equal(conv(x, index, negative), expected)


def check_shards(rank: int, world: int, file: str) -> None:
    """Compare sharded layers with whole ones: values, and gradients of x and the parameters, on every process."""
    dist.init_process_group("gloo", store=dist.FileStore(file, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    whole_by = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    for layer in LAYERS:
        torch.manual_seed(0)
        whole = layer(5, 5, heads=3, edge_dim=3)
        inputs = [(torch.randn(40, 5), RANDOM.index.clone(), torch.randn(300, 3)) for _ in range(world)]
        for shard in (partial(fully_shard, mesh=mesh), whole_by):
            sharded = shard(copy.deepcopy(whole))
            whole.zero_grad()
            for process, graph in enumerate(inputs):
                out = whole(*graph)
                (out.square().sum() / world).backward()  # shards average over the processes
                if process == rank:
                    expected = out
            out = sharded(*inputs[rank])
            out.square().sum().backward()
            assert_close(out, expected)
            if isinstance(sharded, FullyShardedDataParallel):
                with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
                    gradients = {name: each.grad for name, each in sharded.module.named_parameters()}
            else:
                gradients = {name: each.grad.full_tensor() for name, each in sharded.named_parameters()}
            for name, each in whole.named_parameters():
                assert_close(gradients[name], each.grad, msg=f"{layer.__name__} {name}")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_sharded_layer_is_the_whole_one(tmp_path: Path) -> None:
    check_shards(0, 1, str(tmp_path / "store"))


@pytest.mark.weekly
def test_a_layer_sharded_by_two_processes_is_the_whole_one(tmp_path: Path) -> None:
    code = f"from tests.attention.test_memory import check_shards; check_shards({{}}, 2, {str(tmp_path / 'store')!r})"
    processes = [python("-c", code.format(rank)) for rank in range(2)]
    for process in processes:
        output = process.communicate(timeout=120)
        assert process.returncode == 0, output
