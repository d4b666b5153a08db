"""How a model learns: the transductive and the inductive setup, the paper's stopping rule, exact resume."""

from __future__ import annotations

import copy
import csv
import inspect
import io
import math
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.typing import SparseTensor

from .attention.dropout import first_seeds, keyed
from .batches import is_compiled, is_drawn, is_sampled
from .data import Split, near
from .edges import ids_state
from .ranks import BEAT, Beats, say
from .results import add, differing, write_whole

Criterion = Literal["both", "accuracy", "loss"]
SCORES = ("accuracy", "micro_f1")  # in percent, a fraction; a run has one of them


# The two setups -----------------------------------------------------------------------------------------------------


class NodeClassifier(LightningModule):
    """What both setups share: the call of the model, loss and score over nodes, and Adam with L2.

    ``model`` is any module called ``model(x, edge_index)``, ``model(x, edge_index, edge_attr=...)`` where it takes edge
    features and the graph has some, or ``model(x)`` where it takes no edges. It gives logits [N, K].

    With whole-numbered ``y`` [N] the loss is the cross-entropy and the score the accuracy in percent. With float ``y``
    [N, K] of 0 and 1 the loss is the sigmoid cross-entropy averaged over the labels, then the nodes, and the score
    micro-F1 (2 TP / (2 TP + FP + FN), positive where the logit is above 0). Unknown labels, -1 or NaN, count in
    neither.
    Validation and test pool their sums over all graphs and all processes before they divide.

    ``weight_decay`` is the paper's L2 on all variables, biases too: exactly ``Adam(weight_decay=...)``. It acts on the
    model's ``decayed_parameters()`` alone where it has such; its ``penalty(out, data)`` is added to the training loss.
    Logs ``train_loss``, ``val_loss`` and ``val_accuracy`` or ``val_micro_f1``, and the like for the test.
    """

    def __init__(self, model: nn.Module, lr: float = 0.005, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.weight_decay = weight_decay
        self._look_at(model)
        self._sums: dict[str, Tensor] = {}  # per split, since the last time they were told

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """The rows of the logits [N, K], and of ``data.y``, that ``split`` is about."""
        raise NotImplementedError

    def forward(self, data: Data) -> Tensor:
        """The logits [N, K] of a graph's nodes."""
        return self._given(self.model, data)

    def _look_at(self, model: nn.Module) -> None:
        """Find out what the model takes."""
        takes = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        self._takes_edges = "edge_index" in takes
        self._takes_edge_attr = "edge_attr" in takes and bool(getattr(model, "supports_edge_attr", True))
        self._takes_hops = {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"} <= takes.keys()
        self._num_hops: int | None = getattr(model, "num_hops", None)
        self._penalty: Callable[[Tensor, Data], Tensor] | None = getattr(model, "penalty", None)

    def _given(self, model: Callable[..., Tensor], data: Data) -> Tensor:
        """What the model gives for what it takes of the data."""
        if not self._takes_edges:
            return model(data.x)
        options: dict[str, Any] = {}
        if self._takes_edge_attr and data.edge_attr is not None:
            options["edge_attr"] = data.edge_attr
        return model(data.x, data.edge_index, **options, **self._hops(data))

    def _hops(self, data: Data) -> dict[str, Any]:
        """The numbers of nodes and edges per hop, where the model is to know them."""
        return {}

    def _seen(self, data: Data, split: Split) -> Data:
        """The part of the graph that ``split`` needs."""
        return data

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        """The loss of a batch of graphs; over several processes so scaled that DDP's mean is that of all graphs."""
        loss, sums = self._loss(data)
        self._add("train", sums)
        return self._weighed(loss, sums[..., 1]) if self._shared() else loss

    def _weighed(self, loss: Tensor, size: Tensor) -> Tensor:
        """The mean over ``size`` labels, of n such in all W processes together, times W size / n."""
        n = size.clone()
        torch.distributed.all_reduce(n)
        return loss * (self.trainer.world_size * size / n.clamp(min=1))

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and what the epoch adds up: (loss, known)."""
        data = self._seen(data, "train")
        out = self(data)
        loss, sums = train_sums(*self.labelled(out, data, "train"))
        return (loss if self._penalty is None else loss + self._penalty(out, data)), sums

    def validation_step(self, data: Data, batch_idx: int) -> None:
        """Add a batch to the sums of the validation."""
        self._add("val", self._counts(data, "val"))

    def test_step(self, data: Data, batch_idx: int) -> None:
        """Add a batch to the sums of the test."""
        self._add("test", self._counts(data, "test"))

    def _counts(self, data: Data, split: Split) -> Tensor:
        """What a pooled score needs of a batch."""
        data = self._seen(data, split)
        return node_sums(*self.labelled(self(data), data, split))

    def on_validation_epoch_end(self) -> None:
        """Turn the sums into ``train_loss``, ``val_loss`` and the score."""
        metrics = self._metrics("train", "val")
        if self.trainer.state.fn != "fit":
            self._log(metrics)
        elif not self.trainer.sanity_checking:
            self._tell(metrics)

    def on_test_epoch_end(self) -> None:
        """Turn the sums into ``test_loss`` and the score."""
        self._log(self._metrics("test"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, with L2 on all variables or on those that the model names."""
        decayed = getattr(self.model, "decayed_parameters", self.parameters)
        groups = [{"params": list(decayed())}]
        if others := [own for own in self.parameters() if all(own is not one for one in groups[0]["params"])]:
            groups.append({"params": others, "weight_decay": 0.0})  # type: ignore[dict-item]
        return torch.optim.Adam(groups, lr=self.lr, weight_decay=self.weight_decay)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError when the checkpoint is of a model of other shapes, or lacks the state of a callback."""
        if different := differing(self.state_dict(), checkpoint["state_dict"]):
            raise ValueError(
                f"The checkpoint does not fit this model: {different}. Resume with the settings that the run was "
                "started with (config.yaml beside the checkpoint), or start anew without ckpt_path."
            )
        if self._trainer is not None and self.trainer.state.fn == "fit":
            _check_states(self.trainer.callbacks, checkpoint.get("callbacks"))  # type: ignore[attr-defined]
        if self._trainer is not None:  # Lightning does so after loading, which would round float64 to float32
            self.trainer.precision_plugin.convert_module(self)

    def _log(self, metrics: dict[str, float]) -> None:
        """Log what all processes have alike, as it is: a mean over them would round."""
        self.log_dict(metrics, batch_size=1, sync_dist=True, reduce_fx="max")

    def _tell(self, metrics: dict[str, float]) -> None:
        """What ``self.log_dict`` does with an epoch's metrics, at a tenth of its time: 0.1 ms."""
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics({**metrics, "epoch": self.current_epoch}, step=self.global_step)
            logger.save()

    def _shared(self) -> bool:
        return self.trainer.world_size > 1

    def _add(self, split: str, sums: Tensor) -> None:
        self._sums[split] = self._sums[split] + sums if split in self._sums else sums

    def _metrics(self, *splits: str) -> dict[str, float]:
        """What is told of some splits since the last call."""
        return metrics_of(self._pooled(*splits))

    def _pooled(self, *splits: str) -> dict[str, Any]:
        """The sums of some splits since the last call, over all processes, as lists."""
        sums = {split: self._sums.pop(split) for split in splits if split in self._sums}
        if self._shared():
            sums = {split: self.trainer.strategy.reduce(values, reduce_op="sum") for split, values in sums.items()}
        return {split: values.tolist() for split, values in sums.items()}


class Transductive(NodeClassifier):
    """One graph whose masks say which nodes are for training, validation and test; one step is the whole graph.

    A model that tells ``num_hops``, how far away nodes may be that a row of its output depends on, is given only what
    the labelled nodes of a split see; with ``num_sampled_nodes_per_hop`` and ``num_sampled_edges_per_hop``, as PyG's
    models have them, each of its layers leaves out what no later one looks at. Loss, gradients and scores are those of
    the whole graph.

    With ``cuda_graphs="auto"``, a training step's forward and backward and a validation are captured on a GPU as CUDA
    graphs in the second epoch and then replayed, with the same results: a small graph of nodes leaves a GPU waiting for
    Python otherwise. Python code inside the step, hooks included, does not run in a replay. The step is captured again
    after a tensor of the graph was replaced or written to, a parameter or buffer was replaced, frozen or unfrozen, or a
    module changed between training and evaluation; other attributes, such as ``model.dropout``, are not watched.
    Steps are not captured with several processes, mixed precision, gradient accumulation, a compiled model, a subclass
    with its own ``training_step`` or ``backward``, over a million edges, or a graph that holds other than dense or CSR
    tensors. ``True`` is for any number of edges and raises ValueError where the trainer or the model rules it out. A
    step that makes the host wait for the GPU cannot be captured: a warning says why and training continues without.

    >>> import gat_pyg.data, lightning, torch_geometric.nn
    >>> task = gat_pyg.data.digits()
    >>> module = Transductive(torch_geometric.nn.GCN(64, 16, 2, 10), lr=0.005, weight_decay=5e-4)
    >>> lightning.Trainer(callbacks=[PaperStopping()]).fit(module, datamodule=TaskData(task))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.005,
        weight_decay: float = 0.0,
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(model, lr, weight_decay)
        self.cuda_graphs = cuda_graphs
        self._parts: dict[Split, tuple[list[Tensor], list[tuple[int, int]], Data]] = {}  # what is seen, and of what
        self._captured: dict[Split, _Repeated] = {}
        self._grads: Sequence[Tensor | None] | None = None  # of the last training step, where it was a replay
        self._refused = False  # once a capture has failed, none is tried again in this fit
        self._key: Tensor | None = None  # the epoch's key and the first seeds that follow from it

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """The rows under the mask of ``split``; of a batch of seed nodes, those."""
        if is_sampled(data):
            return out[: data.batch_size], data.y[: data.batch_size]
        rows = rows_of(data[f"{split}_mask"])
        return out.index_select(-2, rows), data.y.index_select(0, rows)

    def _seen(self, data: Data, split: Split) -> Data:
        """What the labelled nodes see, where that is less than ``SEEN`` of the work; found once."""
        if is_drawn(data) or "part" in data:
            return data
        mask = data[f"{split}_mask"]
        given = [value for value in (data.x, data.edge_index, data.edge_attr, data.y, mask) if value is not None]
        if self._num_hops is None or self._penalty is not None or is_compiled(self.model):
            return data
        if any(type(value) is not Tensor or value.requires_grad or value.is_inference() for value in given):
            return data
        state = [(id(value), value._version) for value in given]
        _, known, part = self._parts.get(split, ([], [], data))
        if state != known:
            with torch.inference_mode(False), torch.no_grad():
                part = near(data, rows_of(mask), self._num_hops)
            part = part if _is_less(part, data) else data
            self._parts[split] = given, state, part  # an id is that of a tensor for as long as it lives
        return part

    def _hops(self, data: Data) -> dict[str, Any]:
        """The numbers per hop of what ``_seen`` gave: of another's batch, rows and masks would not fit."""
        ours = any(data is part and data.x is not given[0] for given, _, part in self._parts.values())
        if not self._takes_hops or not (ours or (is_sampled(data) and "num_sampled_edges" in data)):
            return {}
        return {
            "num_sampled_nodes_per_hop": data.num_sampled_nodes,
            "num_sampled_edges_per_hop": data.num_sampled_edges,
        }

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Let the dropout of gat_pyg's layers depend on the seed and the epoch alone; ``Resumable`` says both.

        Then it is the same in a process of its own, in a stack of many seeds, and replayed as a CUDA graph. Of several
        steps in an epoch each would drop the same, so batches of nodes draw from torch's generator.
        """
        self._hold(torch.tensor(key_of(seed, epoch)))

    def _hold(self, key: Tensor) -> None:
        key = first_seeds(key)
        if self._key is None or (self._key.shape, self._key.device) != (key.shape, self.device):
            self._key = key.to(self.device)
        else:
            self._key.copy_(key)  # where a CUDA graph reads it

    def forward(self, data: Data) -> Tensor:
        """The logits [N, K] of the graph's nodes, or of those of this process's part."""
        with data.part.joined(self.model, data.edge_index) if "part" in data else nullcontext():
            if self._key is None or not self.training or is_drawn(data):
                return super().forward(data)
            return self._drawn(self.model, data, self._key)

    def _drawn(self, model: Callable[..., Tensor], data: Data, key: Tensor) -> Tensor:
        with keyed(key):
            return self._given(model, data)

    def setup(self, stage: str) -> None:
        """Reset the state of an earlier fit; raise ValueError if ``cuda_graphs=True`` is impossible here."""
        if stage == "fit":
            self._forget()
            if self.cuda_graphs is True and (why := self._why_not_captured()):
                raise ValueError(f"cuda_graphs is true, but {why}. Use cuda_graphs=auto or false.")

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        """The loss of the graph; where a CUDA graph is replayed, the gradients come with it."""

        def step() -> tuple[Tensor, ...]:
            loss, sums = self._loss(data)
            return loss.detach(), sums, *torch.autograd.grad(loss, self._learnt(), allow_unused=True)

        if (captured := self._capture("train", data, step)) is None:
            self._grads = None
            return super().training_step(data, batch_idx)
        loss, sums, *self._grads = captured()
        self._add("train", sums.clone())
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagation, or the gradients that the CUDA graph has left."""
        if self._grads is None:
            super().backward(loss, *args, **kwargs)
            return
        for parameter, grad in zip(self._learnt(), self._grads, strict=True):
            parameter.grad = grad

    def validation_step(self, data: Data | NodeLoader, batch_idx: int) -> None:
        """Add the graph, whole or in batches, to the sums of the validation."""

        def step() -> tuple[Tensor, ...]:
            return (self._counts(data, "val"),)

        fitting = self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
        if fitting and (captured := self._capture("val", data, step)) is not None:
            self._add("val", captured()[0].clone())
        else:
            super().validation_step(data, batch_idx)

    def _counts(self, data: Data | NodeLoader, split: Split) -> Tensor:
        """What a pooled score needs of the graph: whole or, of a loader of all its nodes, one layer after the other."""
        if not isinstance(data, NodeLoader):
            return super()._counts(data, split)
        whole: Data = data.data
        layer_by_layer = getattr(self.model, "inference", None)
        if layer_by_layer is None or isinstance(self.model, BasicGNN):  # PyG's takes no loader but its own
            moved = self.trainer.strategy.batch_to_device(copy.copy(whole), self.device)
            return super()._counts(moved, split)
        out, rows = layer_by_layer(data), rows_of(whole[f"{split}_mask"])
        return node_sums(out[rows], whole.y[rows]).to(self.device)

    def on_train_end(self) -> None:
        """Let go of the CUDA graphs, of what was seen and of the last epoch's key: what comes has its own chance."""
        self._forget()

    def _forget(self) -> None:
        self._captured.clear()
        self._parts.clear()
        self._key = self._grads = None
        self._refused = False

    def _capture(
        self, split: Split, data: Data | NodeLoader, step: Callable[[], tuple[Tensor, ...]]
    ) -> Captured | None:
        """Return the step's CUDA graph, captured as soon as the step repeats, or None where it runs without one."""
        if self.cuda_graphs is False or self._refused or isinstance(data, NodeLoader) or is_drawn(data):
            return None
        if self._why_not_captured() or (tensors := _plain_tensors(data)) is None:
            return None
        if self.cuda_graphs == "auto" and data.num_edges > SMALL:
            return None
        own = [*self.parameters(), *self.buffers(), *([] if self._key is None else [self._key])]
        state: list[Any] = [(id(value), *ids_state(*_parts_of(value))) for value in tensors]
        state += [(id(value), value.data_ptr(), value.shape, value.requires_grad) for value in own]
        state += [module.training for module in self.modules()]
        known = self._captured.get(split)
        if known is None or known.data is not data or known.state != state:
            self._captured[split] = _Repeated(data, state, [*tensors, *own])
            return None
        if known.captured is None:
            try:
                known.captured = Captured(step, list(self.buffers()))
                known.held.append(self._parts.get(split))
            except Exception as error:  # whatever the driver, or an operation that cannot be captured, may raise
                self._refused = True
                rank_zero_warn(
                    f"The {split} step cannot be captured as a CUDA graph: {_reason(error)}. Training continues "
                    "without capturing, with the same results. Pass cuda_graphs=False (training.cuda_graphs=false in "
                    "the command) to silence this warning."
                )
        return known.captured

    def _why_not_captured(self) -> str | None:
        trainer = self.trainer
        if trainer.strategy.root_device.type != "cuda":
            return f"the device is a {trainer.strategy.root_device.type}"
        if trainer.world_size > 1:
            return f"there are {trainer.world_size} processes"
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            return f"the strategy is {type(trainer.strategy).__name__}, which communicates in the step"
        if trainer.accumulate_grad_batches > 1:
            return "gradients are accumulated over several steps"
        if not str(trainer.precision).endswith("-true"):
            return f"precision is {trainer.precision}, whose casts and scales are not captured"
        if is_compiled(self.model):
            return "the model is compiled"
        for name in ("training_step", "backward"):
            if getattr(type(self), name) is not getattr(Transductive, name):
                return f"{type(self).__name__} has its own {name}, which a replay would skip"
        return None

    def _learnt(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


@dataclass
class _Repeated:
    """A step on a graph, what it reads, and its CUDA graph once it has been captured."""

    data: Data
    state: list[Any]
    held: list[Any]  # so that ids stay those of these tensors, and a replay reads no freed memory
    captured: Captured | None = None


def _plain_tensors(data: Data) -> list[Tensor] | None:
    """Return the tensors of a graph, or None if it holds any whose changes torch does not count."""
    values = [value for _, value in data if isinstance(value, (Tensor, SparseTensor))]
    seen = (type(value) is Tensor and value.layout in _LAYOUTS and not value.is_inference() for value in values)
    return values if all(seen) else None


_LAYOUTS = (torch.strided, torch.sparse_csr)


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in whose memory a tensor is."""
    if tensor.layout == torch.strided:
        return (tensor,)
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def _reason(error: Exception) -> str:
    """Return the first line of an error and where it was raised."""
    first = error.__context__ or error  # the end of a failed capture raises an error of its own
    message, *_ = f"{type(first).__name__}: {first}".splitlines()
    *_, frame = traceback.extract_tb(first.__traceback__)
    return f"{message} (in {frame.name}, {frame.filename}:{frame.lineno})"


SEEN = 0.75  # of the rows and edges of all layers; where more are seen, the copy of the features is not worth it


def _is_less(part: Data, data: Data) -> bool:
    """Whether the layers of a model go through less than ``SEEN`` of a graph's rows and edges, the last hop first."""
    nodes, edges = part.num_sampled_nodes, part.num_sampled_edges
    layers = range(len(edges), 0, -1)
    work = sum(sum(nodes[: hop + 1]) + sum(edges[:hop]) for hop in layers) or sum(nodes)
    whole = (data.x.size(0) + data.edge_index.size(1)) * len(layers) or data.x.size(0)
    return bool(work < SEEN * whole)


SMALL = 1_000_000  # edges; with more, launching kernels takes little of the time, and the memory is worth more


class Inductive(NodeClassifier):
    """Graphs of their own for training, validation and test; a step is a batch of whole graphs."""

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """All rows: a batch belongs to one split as a whole."""
        return out, data.y


def rows_of(mask: Tensor) -> Tensor:
    """The rows under a mask, found once as long as it lives: ``out[mask]`` makes a GPU wait in each step.

    >>> rows_of(torch.tensor([True, False, True]))
    tensor([0, 2])
    """
    if mask.is_inference():  # has no version to watch
        return mask.nonzero().squeeze(1)
    if _ROWS.get(mask, (None,))[0] != mask._version:
        with torch.inference_mode(False):
            _ROWS[mask] = mask._version, mask.nonzero().squeeze(1)
    rows: Tensor = _ROWS[mask][1]
    return rows


_ROWS = WeakTensorKeyDictionary()


class Captured:
    """A computation as a CUDA graph: captured once, then replayed by a single launch.

    ``compute`` takes all its inputs from the same memory every time and gives tensors; ``results`` hold what the last
    replay gave. Chance comes from the device's default generator as it does without a graph, so that seeding it before
    a replay gives the numbers that it would give there. The generator is left as it was, and so is what ``compute``
    changes beside its results, the ``buffers``.

    Raises what the driver or an operation that cannot be captured raises, such as one that makes the host wait for the
    GPU, and RuntimeError where ``compute`` draws random numbers on the CPU. The device is then usable as before.
    """

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]], buffers: Sequence[Tensor] = ()) -> None:
        self.graph = torch.cuda.CUDAGraph()
        before, held = torch.cuda.get_rng_state(), [buffer.clone() for buffer in buffers]
        try:
            self._warm_up(compute)
            with torch.cuda.stream(torch.cuda.current_stream()):  # torch.cuda.graph restores it only where it succeeds
                self.results = self._capture(compute)
        finally:
            torch.cuda.set_rng_state(before)
            for buffer, was in zip(buffers, held, strict=True):
                buffer.copy_(was)

    def _warm_up(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        """Call it twice to build and compile everything, then once more, raising if the host waits for the GPU."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), _no_draws():
                compute()
                compute()
                with _no_sync():
                    compute()
        finally:
            current.wait_stream(stream)

    def _capture(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                return compute()
        except BaseException:
            # Before torch 2.13, the allocator and the default generator stay in the failed capture: empty_cache() and
            # the next random numbers would raise. The generator leaves it when another capture succeeds.
            with suppress(RuntimeError):  # from torch 2.13 on: the allocator has left it
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
            raise

    def __call__(self) -> tuple[Tensor, ...]:
        """Replay it."""
        self.graph.replay()
        return self.results


@contextmanager
def _no_draws() -> Iterator[None]:
    """Restore the CPU's generators. Raise RuntimeError where one was used, since a replay would not use it again."""
    before = _generators()
    try:
        yield
        if pickle.dumps(_generators()) != pickle.dumps(before):
            raise RuntimeError(
                "the step draws random numbers on the CPU, which a replay would not repeat; draw them on the GPU "
                "(device=x.device)"
            )
    finally:
        words, python, numpy = before
        torch.set_rng_state(torch.from_numpy(words))
        random.setstate(python)
        np.random.set_state(numpy)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()


@contextmanager
def _no_sync() -> Iterator[None]:
    """Raise RuntimeError from operations that make the host wait for the GPU. torch recognises most of them."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_mode("error")
    try:
        yield
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


def train_sums(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and what the epoch adds up: (loss, known)."""
    loss, size = node_loss(out, y), known(y).sum()
    wide = torch.promote_types(loss.dtype, torch.float32)  # bfloat16 counts to 256
    return loss, torch.stack([loss.detach().to(wide) * size, size.to(wide)])


def node_loss(out: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy where ``y`` is [N] int64, sigmoid cross-entropy where it is [N, K] float; unknown labels left out.

    The mean is over the known labels, so that K labels of N nodes, all known, are averaged over labels, then nodes.
    A batch without any known label gives 0, not NaN.

    >>> node_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, float("nan")]]))
    tensor(0.6931)
    """
    if y.is_floating_point():
        weight = known(y).to(out.dtype)
        true = y.nan_to_num().to(torch.promote_types(out.dtype, y.dtype))  # else torch rounds float64 logits to float32
        loss = F.binary_cross_entropy_with_logits(out, true, weight=weight, reduction="sum")
    else:
        loss = F.cross_entropy(out, y, ignore_index=-1, reduction="sum")
    return loss / known(y).sum().clamp(min=1) if reduction == "mean" else loss


def known(y: Tensor) -> Tensor:
    """Which labels are known: [N, K] where ``y`` is float, [N] where it is whole-numbered."""
    return ~y.isnan() if y.is_floating_point() else y >= 0


def node_sums(out: Tensor, y: Tensor) -> Tensor:
    """What a pooled score needs: (loss, known, correct), or (loss, known, TP, FP, FN) with many labels per node."""
    wide = torch.float32 if out.device.type == "mps" else torch.float64  # counts are whole up to 2^24 and 2^53
    loss = node_loss(out, y, reduction="sum").to(wide)
    if y.is_floating_point():
        positive, true = out > 0, y == 1
        counts = [known(y).sum(), (positive & true).sum(), (positive & (y == 0)).sum(), (~positive & true).sum()]
    else:
        counts = [known(y).sum(), (out.argmax(-1) == y).sum()]
    return torch.stack([loss, *(count.to(wide) for count in counts)])


def score_of(sums: Sequence[float]) -> tuple[float, float, str]:
    """The loss, the score and the score's name from the sums of ``node_sums``.

    >>> score_of([1.0, 4.0, 3.0])
    (0.25, 75.0, 'accuracy')
    >>> score_of([1.0, 4.0, 1.0, 1.0, 1.0])
    (0.25, 0.5, 'micro_f1')
    """
    loss, size, right = sums[0], max(sums[1], 1.0), sums[2]
    if len(sums) == 3:
        return loss / size, 100.0 * right / size, "accuracy"
    return loss / size, 2 * right / max(2 * right + sums[3] + sums[4], 1.0), "micro_f1"


def majority_score(y: Tensor) -> float:
    """Return the best score of a prediction that is the same for all nodes: the majority class's share, in percent.

    With many labels per node it is the micro-F1 of predicting the most frequent labels, as many of them as score best.

    >>> majority_score(torch.tensor([0, 1, 1, -1, 1]))
    75.0
    >>> majority_score(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))  # both labels: TP = 3, FP = 1
    0.8571428571428571
    """
    if not y.is_floating_point():
        counts = y[known(y)].bincount()
        return 100.0 * int(counts.max()) / int(counts.sum())
    positive, size = (y == 1).sum(0).double(), known(y).sum(0).double()
    order = (positive / size.clamp(min=1)).argsort(descending=True)
    scores = 2 * positive[order].cumsum(0) / (size[order].cumsum(0) + positive.sum()).clamp(min=1)
    return float(scores.max())


def metrics_of(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What is told of an epoch, from the sums of each split; in float32, as Lightning keeps it.

    >>> metrics_of({"train": [1.0, 4.0], "val": [1.0, 4.0, 3.0]})
    {'train_loss': 0.25, 'val_loss': 0.25, 'val_accuracy': 75.0}
    """
    metrics = {}
    for split, values in sums.items():
        if split == "train":
            metrics["train_loss"] = values[0] / max(values[1], 1.0)
        else:
            metrics[f"{split}_loss"], score, name = score_of(values)
            metrics[f"{split}_{name}"] = score
    return {name: float(np.float32(value)) for name, value in metrics.items()}


# When to stop -------------------------------------------------------------------------------------------------------


class PaperStopping(Callback):
    """The stopping rule of the paper's code: patience on the validation score and loss, ties count.

    After each validation, with ``criterion="both"``::

        if score >= best_score or loss <= best_loss:
            if both: keep these weights
            raise both bests; wait = 0
        else:
            wait += 1; stop at wait == patience

    With ``"accuracy"`` (the score, whichever it is) or ``"loss"`` only that one is looked at, and a new best or a tie
    keeps the weights. At the end of the fit the module has the weights kept last, in ``best_epoch`` (counted from 1).

    It reads what the module logged as ``val_loss`` and as ``score``, by default ``val_accuracy`` or ``val_micro_f1``.
    The weights are kept in memory, on the device; they and all else of its state are in Lightning's checkpoints.
    An epoch whose loss or score is not finite improves nothing. If the model's parameters are not finite either, which
    no later step can mend, training stops at once.

    Raises ValueError for a patience below 1 or an unknown criterion.

    >>> rule = PaperStopping(patience=2)
    >>> [rule.update(score, loss) for score, loss in [(70.0, 1.0), (71.0, 1.1), (70.0, 0.9)]]
    [True, False, False]
    >>> rule.best_score, rule.best_loss, rule.wait
    (71.0, 0.9, 0)
    """

    def __init__(self, patience: int = 100, criterion: Criterion = "both", score: str | None = None) -> None:
        if patience < 1:
            raise ValueError(f"patience is {patience}, expected at least 1 epoch.")
        if criterion not in get_args(Criterion):
            raise ValueError(f"criterion is {criterion!r}, expected one of {', '.join(get_args(Criterion))}.")
        self.patience = patience
        self.criterion = criterion
        self.score = score
        self.epoch = 0  # validations so far
        self.wait = 0
        self.best_score = float("-inf")
        self.best_loss = float("inf")
        self.best_epoch = 0  # whose weights are kept; 0: none yet
        self.kept_score = float("nan")
        self.kept_loss = float("nan")
        self.weights: dict[str, Tensor] = {}

    def update(self, score: float, loss: float) -> bool:
        """Take in one epoch; True when its weights are those to keep."""
        self.epoch += 1
        finite = math.isfinite(score) and math.isfinite(loss)
        by_score, by_loss = finite and score >= self.best_score, finite and loss <= self.best_loss
        better = {"both": by_score or by_loss, "accuracy": by_score, "loss": by_loss}[self.criterion]
        keep = by_score and by_loss if self.criterion == "both" else better
        if better:
            self.best_score = max(self.best_score, score)
            self.best_loss = min(self.best_loss, loss)
            self.wait = 0
        else:
            self.wait += 1
        if keep:
            self.best_epoch, self.kept_score, self.kept_loss = self.epoch, score, loss
        return keep

    def stop_diverged(self, parameters: Iterable[Tensor], run: str = "Training") -> None:
        """End the patience if the last epoch's parameters are not finite."""
        if all(bool(value.isfinite().all()) for value in parameters):
            return
        self.wait = self.patience
        if self.best_epoch:
            rank_zero_warn(
                f"{run} diverged: its weights are not finite after epoch {self.epoch}. It stops with the weights of "
                f"epoch {self.best_epoch}. A smaller lr may help."
            )

    @property
    def left(self) -> int:
        """How many epochs without improvement are left before the stop."""
        return self.patience - self.wait

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the rule to what the validation logged."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = trainer.callback_metrics
        name = self.score or next((f"val_{score}" for score in SCORES if f"val_{score}" in metrics), "val_accuracy")
        if name not in metrics or "val_loss" not in metrics:
            logged = ", ".join(metrics) or "nothing"
            raise ValueError(f"PaperStopping needs val_loss and {name}, but the module logged {logged}.")
        score, loss = float(metrics[name]), float(metrics["val_loss"])
        if self.update(score, loss):
            self._keep(pl_module)
        elif not math.isfinite(loss):
            self.stop_diverged(parameter for parameter in pl_module.parameters() if parameter.requires_grad)
        if self.left <= 0:
            trainer.should_stop = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring kept weights to the device, and stop at once when a resumed run had come to its end."""
        self.weights = {key: value.to(pl_module.device) for key, value in self.weights.items()}
        if self.left <= 0:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights kept last back into the module."""
        if self.weights:
            pl_module.load_state_dict(self.weights, strict=False)
        elif self.epoch:
            rank_zero_warn(
                f"None of {self.epoch} epochs was kept, since the validation loss or score was not finite in any. The "
                "weights are those of the last epoch. A smaller lr may help."
            )

    @torch.no_grad()
    def _keep(self, module: LightningModule) -> None:
        state = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
        if self.weights.keys() != state.keys():
            self.weights = {key: value.clone() for key, value in state.items()}
        else:
            for key, value in state.items():
                self.weights[key].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """All of the rule's state, for the checkpoint."""
        return {key: getattr(self, key) for key in _RULE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        for key in _RULE:
            setattr(self, key, state_dict[key])


def _check_states(callbacks: Sequence[Callback], states: Any) -> None:
    """Raise ValueError where a checkpoint lacks what a fit goes on from: Lightning would begin such a callback anew."""
    for callback in callbacks:
        if not isinstance(callback, (PaperStopping, Resumable)):
            continue
        name, keys = callback.state_key, callback.state_dict().keys()
        state = states.get(name) if isinstance(states, dict) else None
        if not isinstance(state, dict) or not keys <= state.keys():
            raise ValueError(
                f"The checkpoint has no state of {name}, expected {', '.join(keys)} under callbacks.{name}, as this "
                "package's runs write them. Resume from the last.ckpt of a run, or start anew without ckpt_path."
            )


_RULE = ("epoch", "wait", "best_score", "best_loss", "best_epoch", "kept_score", "kept_loss", "weights")


# Resume -------------------------------------------------------------------------------------------------------------


class Resumable(Callback):
    """Makes a run that was killed at any moment end like one that was not: ``trainer.fit(..., ckpt_path=path)``.

    Before each epoch all sources of chance (torch on all devices, numpy, Python) are seeded from ``seed``, the
    process's rank and the epoch's number, so that an epoch's dropout does not depend on how one came to it. After
    an epoch the checkpoint at ``path`` is replaced in one step if ``every`` seconds have gone by since the last one; a
    write that takes long is made less often, so that writing stays below a twentieth of the time. What a kill costs is
    the epochs since then, which are redone. ``every=0`` writes after each epoch, ``path=None`` never.

    SIGINT (Ctrl-C) and SIGTERM wait for the end of the epoch: its checkpoint is written, and SystemExit(128 + signal)
    raised. A second SIGINT does not wait. With ``path=None``, or in another thread than the first, they are left alone.

    Needs data whose order does not come from the global generator: ``TaskData``, or a graph as a whole.
    """

    def __init__(self, path: str | Path | None, seed: int = 0, every: float = 30.0) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed}, expected a number from 0 to 2^32 - 1.")
        self.path = path
        self.seed = seed
        self.every = every
        self._before = 0.0  # seconds of training before this process
        self._start = self._due = float("inf")
        self._end: float | None = None
        self._status: int | None = None  # to exit with after this epoch, as a signal asked
        self._signals = ExitStack()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        now = time.perf_counter() if self._end is None else self._end
        return self._before + max(now - self._start, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and take the signals."""
        self._start, self._end = time.perf_counter(), None
        self._due = self._start + self.every
        self._status = None
        if self.path is not None:
            self._signals.enter_context(handled(self._wait))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the epoch."""
        seed_epoch(self.seed, trainer.global_rank, trainer.current_epoch, pl_module.device.type)
        if isinstance(pl_module, Transductive):
            pl_module.begin_epoch(self.seed, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the checkpoint if it is due, and exit if that was asked, of any of the processes."""
        due, status = self._asked(trainer, time.perf_counter() >= self._due)
        if (due or status) and self.path is not None:
            start = time.perf_counter()
            trainer.save_checkpoint(self.path)
            now = time.perf_counter()
            self._due = now + (self.every and max(self.every, 20 * (now - start)))
        if status:
            raise SystemExit(status)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, and give the signals back."""
        self._end = time.perf_counter()
        self._signals.close()
        if status := self._asked(trainer)[1]:  # it came after the last epoch
            raise SystemExit(status)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._signals.close()

    def _asked(self, trainer: Trainer, due: bool = False) -> tuple[bool, int]:
        """Return whether a checkpoint is due, and the status to exit with or 0: the same in all processes."""
        asked = int(due), self._status or 0
        if trainer.world_size > 1:
            ours = torch.tensor(asked, device=trainer.strategy.root_device)
            asked = cast(tuple[int, int], trainer.strategy.reduce(ours, reduce_op="max").tolist())
        return bool(asked[0]), asked[1]

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._status is not None:
            raise SystemExit(128 + number)
        self._status = 128 + number
        if number == signal.SIGINT:
            with suppress(RuntimeError):  # in the middle of another line
                say("\nEnding after this epoch; Ctrl-C again does not wait.")

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far, for the checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's seconds."""
        self._before = state_dict["seconds"]


class Watch(Callback):
    """Names a process that is lost among several, and ends the others: see ``gat_pyg.ranks``.

    Training, validation and test are each watched from their setup to their teardown. ``lost`` are the ranks that were
    silent as an error ended one of them. With one process it does nothing.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self._beats: Beats | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to tell and to look."""
        if trainer.world_size > 1:
            first, host = trainer.global_rank == 0, os.environ.get("MASTER_ADDR", "localhost")
            beats = Beats(host, 0, 0, trainer.world_size) if first else None
            port = trainer.strategy.broadcast(beats.port if beats else 0)
            for thread in threading.enumerate():  # Lightning's own kills the first process before it can say a word
                if thread.name == "child-process-observer":
                    thread._run = lambda: True  # type: ignore[attr-defined]
            self._beats = beats or Beats(host, port, trainer.global_rank, trainer.world_size)
            launcher = trainer.strategy.launcher

            def forward(number: int, frame: FrameType | None) -> None:
                if launcher is not None:
                    launcher.kill(number)

            # Lightning's own calls a collective inside the handler, and hangs unless all processes do so at one moment
            trainer._signal_connector._sigterm_notifier_fn = forward  # type: ignore[assignment]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """No longer tell or look: all have come to the end."""
        if self._beats is not None:
            self._beats.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Find out who is lost, where it may be that."""
        if self._beats is not None:
            if isinstance(exception, RuntimeError):  # as those of torch.distributed are
                time.sleep(4 * BEAT)
                self.lost = self._beats.lost(3 * BEAT)
            self._beats.stop()


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` have SIGINT and SIGTERM, but for what is ignored; a thread other than the first cannot."""
    first = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if first}
    before = {number: own for number, own in before.items() if own not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def seed_epoch(seed: int, rank: int, epoch: int, device: str = "cpu") -> None:
    """Seed torch (the CPU and the type of ``device``), numpy and Python for one epoch: 50 us on a CPU."""
    words = np.random.SeedSequence([seed, rank, epoch]).generate_state(3)
    if device == "cpu":
        torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed notes a stack for the GPUs: 1 ms
    else:
        torch.manual_seed(int(words[0]))
    np.random.seed(words[1])
    random.seed(int(words[2]))


def key_of(seed: int, epoch: int) -> int:
    """What the masks of an epoch follow from: 63 bits that seed and epoch decide, in 8 us."""
    *_, low, high = map(int, np.random.SeedSequence([seed, 0, epoch]).generate_state(5))
    return low | (high & 0x7FFFFFFF) << 32


class SafeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are never half written and never run code: a plugin for ``Trainer(plugins=[...])``.

    Raises ValueError when a file is truncated, is no checkpoint of a training, or would run code on load.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write beside ``path``, then put the file there in one step."""

        def write(beside: Path) -> None:
            with beside.open("wb") as file:  # of a path of its own torch does not say why it cannot write
                torch.save(checkpoint, file)

        write_whole(path, write)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read tensors and plain values only, on the CPU, whatever the caller would allow."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no checkpoint {path}. Give the path of one, or leave out ckpt_path.")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if asked := re.search(r"GLOBAL ([\w.]+)", str(error)):
                raise ValueError(
                    f"{path} would run code on load: it asks for {asked[1]}. Nothing of it was run. Expected "
                    "tensors and plain values, as this package's runs write them. Do not trust the file."
                ) from error
            raise ValueError(f"{path} {_BROKEN}") from error
        except Exception as error:  # torch raises whatever the bytes of a broken file lead to
            raise ValueError(f"{path} {_BROKEN}") from error
        if not isinstance(found, dict) or not {"state_dict", "loops", "optimizer_states"} <= found.keys():
            raise ValueError(f"{path} is no checkpoint of a training: expected the last.ckpt of a run.")
        return found


_BROKEN = "cannot be read: it is truncated or no checkpoint. Take an older copy, or start anew without ckpt_path."


class MetricsFile(Callback):
    """One line of ``metrics.csv`` per epoch: the epoch, counted from 1, and everything that was logged.

    Whole lines are appended about once a second, and before each checkpoint, so that a checkpoint never knows of an
    epoch that the file lacks. A resumed run cuts off the lines that it will write again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows = 0
        self._columns: list[str] = []
        self._buffer = io.StringIO()
        self._flushed = float("-inf")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the lines that the checkpoint knows of."""
        if not trainer.is_global_zero or not self.path.is_file():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)[: self._rows + 1]
        if self._rows == 0 or len(lines) < self._rows + 1:
            lines = []  # a run from the start, or a checkpoint from elsewhere
        self._columns = next(csv.reader([lines[0].decode()]), []) if lines else []
        write_whole(self.path, lambda beside: beside.write_bytes(b"".join(lines)))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the epoch's line."""
        if trainer.is_global_zero:
            self.add(trainer.current_epoch + 1, {key: float(value) for key, value in trainer.callback_metrics.items()})

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Add an epoch's line."""
        self._rows += 1
        writer = csv.writer(self._buffer, lineterminator="\n")
        if not self._columns:
            self._columns = ["epoch", *sorted(values)]
            writer.writerow(self._columns)
        row = {"epoch": epoch, **values}
        writer.writerow([f"{row[column]:.7g}" if column in row else "" for column in self._columns])
        if time.monotonic() - self._flushed > 1.0:
            self._flush()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the lines that the checkpoint will know of."""
        self._flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last lines."""
        self._flush()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what there is; where that cannot be, the error that came first is the one to tell."""
        with suppress(OSError):
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if text := self._buffer.getvalue():
            with self.path.open("ab", buffering=0) as file:
                add(file.fileno(), text.encode(), self.path)
            self._buffer = io.StringIO()

    def state_dict(self) -> dict[str, Any]:
        """How many lines there are, for the checkpoint."""
        return {"rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind a checkpoint's lines."""
        self._rows = state_dict["rows"]


# What one sees meanwhile --------------------------------------------------------------------------------------------


class Progress(Callback):
    """One line that tells epoch, loss, validation score and the patience left.

    On a terminal it is rewritten a few times a second; elsewhere a new line comes every ``every`` seconds.
    """

    def __init__(self, title: str, every: float = 10.0) -> None:
        self.title = title
        self._live = sys.stderr.isatty()
        self._period = 0.2 if self._live else every
        self._next = 0.0
        self._speed: tuple[float, int] = (0.0, 0)
        self._shown: Mapping[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._next = now = time.monotonic()  # the first epoch is told at once
        self._speed = now, trainer.current_epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Tell how far a long epoch has come."""
        if trainer.num_training_batches > 1 and trainer.is_global_zero and time.monotonic() >= self._next:
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._show(trainer, f" batch {batch}/{trainer.num_training_batches}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell how an epoch went."""
        if not trainer.is_global_zero:
            return
        due = time.monotonic() >= self._next
        if due or trainer.num_training_batches > 1:  # then a batch of the next epoch may be the next to tell
            self._shown = dict(trainer.callback_metrics)
        if due:
            self._show(trainer, "")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear the line."""
        if self._live and trainer.is_global_zero:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def parts(self, trainer: Trainer, batch: str) -> list[str]:
        """What the line tells."""
        parts = [f"{self.title}: epoch {trainer.current_epoch + 1}{batch}"]
        if "train_loss" in self._shown:
            parts.append(f"loss {self._shown['train_loss']:.4f}")
        scores = [(name, self._shown.get(f"val_{name}")) for name in SCORES]
        parts += [f"val {told(name, float(score))}" for name, score in scores if score is not None]
        for rule in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(rule, PaperStopping):
                full = -(-10 * rule.left // rule.patience)
                parts.append(f"patience left [{'#' * full}{'.' * (10 - full)}] {rule.left}/{rule.patience}")
        return parts

    def seconds_per_epoch(self, trainer: Trainer) -> float | None:
        """How long an epoch took since the start, or None in the first."""
        start, first = self._speed
        return (time.monotonic() - start) / (trainer.current_epoch - first) if trainer.current_epoch > first else None

    def _show(self, trainer: Trainer, batch: str) -> None:
        parts = self.parts(trainer, batch)
        if (seconds := self.seconds_per_epoch(trainer)) is not None:
            parts.append(f"{_seconds(seconds)} per epoch")
        text = ", ".join(parts)
        print(f"\r\x1b[K{text}" if self._live else text, end="" if self._live else "\n", file=sys.stderr, flush=True)
        self._next = time.monotonic() + self._period


def told(name: str, score: float) -> str:
    """A score in words.

    >>> told("accuracy", 83.14), told("micro_f1", 0.9731)
    ('accuracy 83.1 %', 'micro-F1 0.973')
    """
    return f"accuracy {score:.1f} %" if name == "accuracy" else f"{name.replace('_f1', '-F1')} {score:.3f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
