"""The LightningModules of the transductive and the inductive setup: one training step of each."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ..graph.remembered import ids_state
from ..graph.subgraph import is_sampled, mask_to_index, receptive_field
from ..philox import first_seeds, keyed
from ..tasks.objective import Objective, Split
from .cuda_graphs import SMALL, Captured, _parts_of, _plain_tensors, _reason, _Repeated
from .differing import differing
from .epoch_seeds import key_of
from .loading import is_compiled, is_drawn
from .receptive_field import _is_less
from .resume import _check_states

# The two setups -----------------------------------------------------------------------------------------------------


class Supervised(LightningModule):
    """Training by an objective, in common to both setups: the call of the model, loss and score, Adam with L2.

    Validation and test pool the objective's statistics over all graphs and all processes before they divide. Logs
    `train_loss`, `val_loss`, `test_loss`, and the score as `val_` and `test_` with the name of the objective's metric.

    Args:
        model: any module called `model(x, edge_index)`, with `edge_attr=...` where it takes edge features and the graph
            has some, and `model(x)` where it takes no edges. It gives logits `[N, K]`. For labels of graphs it is also
            called with `batch=...` and `batch_size=...`, where it takes these, and gives logits `[G, K]`.
        objective: what the logits predict, as `task.objective`.
        lr: the learning rate.
        weight_decay: the paper's L2 on all variables, biases too: exactly `Adam(weight_decay=...)`. It acts on the
            model's `decayed_parameters()` alone where it has such; its `penalty(out, data)` is added to the training
            loss.
    """

    def __init__(self, model: nn.Module, objective: Objective, lr: float = 0.005, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.lr = lr
        self.weight_decay = weight_decay
        self._inspect_model(model)
        self._sums: dict[str, Tensor] = {}  # per split, since the last log

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """Return the rows of the logits that a split is about, and their labels."""
        raise NotImplementedError

    def forward(self, data: Data) -> Tensor:
        """Return the logits of a graph or a batch."""
        return self._call_model(self.model, data)

    def _inspect_model(self, model: nn.Module) -> None:
        """Read from the model's signature what it takes."""
        takes = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        self._takes_edges = "edge_index" in takes
        self._takes_edge_attr = "edge_attr" in takes and bool(getattr(model, "supports_edge_attr", True))
        self._takes_batch = self.objective.item == "graph" and "batch" in takes
        self._takes_hops = {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"} <= takes.keys()
        self._num_hops: int | None = getattr(model, "num_hops", None)
        self._penalty: Callable[[Tensor, Data], Tensor] | None = getattr(model, "penalty", None)

    def _call_model(self, model: Callable[..., Tensor], data: Data) -> Tensor:
        """Call a model with the fields of the data that it takes."""
        if not self._takes_edges:
            return model(data.x)
        options: dict[str, Any] = {}
        if self._takes_edge_attr and data.edge_attr is not None:
            options["edge_attr"] = data.edge_attr
        if self._takes_batch and isinstance(data, Batch):
            options |= {"batch": data.batch, "batch_size": data.num_graphs}
        return model(data.x, data.edge_index, **options, **self._hops(data))

    def _hops(self, data: Data) -> dict[str, Any]:
        """Return the numbers of nodes and edges per hop, if the model takes them."""
        return {}

    def _field_of(self, data: Data, split: Split) -> Data:
        """Return the part of the graph that the split needs."""
        return data

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        """Return the loss of a batch; over several processes scaled so that DDP's mean is that of all graphs."""
        loss, sums = self._loss(data)
        self._add("train", sums)
        return self._weighted(loss, sums[..., 1]) if self._shared() else loss

    def _weighted(self, loss: Tensor, size: Tensor) -> Tensor:
        """Return the mean over `size` labels times W size / n, for n labels in all W processes."""
        n = size.clone()
        torch.distributed.all_reduce(n)
        return loss * (self.trainer.world_size * size / n.clamp(min=1))

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the summands of the epoch's mean: (loss, known)."""
        data = self._field_of(data, "train")
        out = self(data)
        loss, sums = self.objective.train_statistics(*self.labelled(out, data, "train"))
        return (loss if self._penalty is None else loss + self._penalty(out, data)), sums

    def validation_step(self, data: Data, batch_idx: int) -> None:
        """Add a batch to the sums of the validation."""
        self._add("val", self._counts(data, "val"))

    def test_step(self, data: Data, batch_idx: int) -> None:
        """Add a batch to the sums of the test."""
        self._add("test", self._counts(data, "test"))

    def _counts(self, data: Data, split: Split) -> Tensor:
        """Return the sufficient statistics of a batch."""
        data = self._field_of(data, split)
        return self.objective.statistics(*self.labelled(self(data), data, split))

    def on_validation_epoch_end(self) -> None:
        """Turn the sums into `train_loss`, `val_loss` and the score."""
        metrics = self._metrics("train", "val")
        if self.trainer.state.fn != "fit":
            self._log(metrics)
        elif not self.trainer.sanity_checking:
            self._log_epoch(metrics)

    def on_test_epoch_end(self) -> None:
        """Turn the sums into `test_loss` and the score."""
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

    def _log_epoch(self, metrics: dict[str, float]) -> None:
        """Log an epoch's metrics as `self.log_dict` does, in a tenth of its time: 0.1 ms."""
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics({**metrics, "epoch": self.current_epoch}, step=self.global_step)
            logger.save()

    def _shared(self) -> bool:
        return self.trainer.world_size > 1

    def _add(self, split: str, sums: Tensor) -> None:
        self._sums[split] = self._sums[split] + sums if split in self._sums else sums

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Return the metrics of some splits since the last call."""
        return self.objective.metrics(self._pooled(*splits))

    def _pooled(self, *splits: str) -> dict[str, Any]:
        """Return the statistics of some splits since the last call, over all processes, as lists."""
        sums = {split: self._sums.pop(split) for split in splits if split in self._sums}
        if self._shared():
            sums = {split: self.trainer.strategy.reduce(values, reduce_op="sum") for split, values in sums.items()}
        return {split: values.tolist() for split, values in sums.items()}


class Transductive(Supervised):
    """One graph that all splits share; a step is the whole graph.

    A model that declares `num_hops`, how far away nodes may be that a row of its output depends on, gets only the
    receptive field of a split's labelled nodes; with `num_sampled_nodes_per_hop` and `num_sampled_edges_per_hop`, as
    PyG's models have them, each of its layers leaves out what no later one reads. Loss, gradients and scores are those
    of the whole graph.

    With `cuda_graphs="auto"`, a training step's forward and backward and a validation are captured on a GPU as CUDA
    graphs in the second epoch and then replayed, with the same results: a small graph of nodes leaves a GPU waiting for
    Python otherwise. Python code inside the step, hooks included, does not run in a replay. The step is captured again
    after a tensor of the graph was replaced or written to, a parameter or buffer was replaced, frozen or unfrozen, or a
    module changed between training and evaluation; other attributes, such as `model.dropout`, are not watched.
    Steps are not captured with several processes, mixed precision, gradient accumulation, a compiled model, a subclass
    with its own `training_step` or `backward`, over a million edges, or a graph that holds other than dense or CSR
    tensors. `True` is for any number of edges and raises ValueError where the trainer or the model rules it out. A
    step that makes the host wait for the GPU cannot be captured: a warning says why and training continues without.

    >>> import gat_pyg.data, lightning, torch_geometric.nn
    >>> task = gat_pyg.data.digits()
    >>> module = Transductive(torch_geometric.nn.GCN(64, 16, 2, 10), task.objective, lr=0.005, weight_decay=5e-4)
    >>> lightning.Trainer(callbacks=[PaperStopping()]).fit(module, datamodule=TaskData(task))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        lr: float = 0.005,
        weight_decay: float = 0.0,
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(model, objective, lr, weight_decay)
        self.cuda_graphs = cuda_graphs
        self._fields: dict[Split, tuple[list[Tensor], list[tuple[int, int]], Data]] = {}  # what is seen, and of what
        self._captured: dict[Split, _Repeated] = {}
        self._grads: Sequence[Tensor | None] | None = None  # of the last training step, where it was a replay
        self._refused = False  # once a capture has failed, none is tried again in this fit
        self._key: Tensor | None = None  # the epoch's key and the first seeds that follow from it

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """Return the rows that the graph assigns to the split."""
        return self.objective.rows(out, data, split)

    def _field_of(self, data: Data, split: Split) -> Data:
        """Return the receptive field of the labelled nodes if it is less than `MAX_FIELD` of the work, cached."""
        if is_drawn(data) or "part" in data:
            return data
        mask = data[f"{split}_mask"]
        given = [value for value in (data.x, data.edge_index, data.edge_attr, data.y, mask) if value is not None]
        if self._num_hops is None or self._penalty is not None or is_compiled(self.model):
            return data
        if any(type(value) is not Tensor or value.requires_grad or value.is_inference() for value in given):
            return data
        state = [(id(value), value._version) for value in given]
        _, known, part = self._fields.get(split, ([], [], data))
        if state != known:
            with torch.inference_mode(False), torch.no_grad():
                part = receptive_field(data, mask_to_index(mask), self._num_hops)
            part = part if _is_less(part, data) else data
            self._fields[split] = given, state, part  # an id is that of a tensor for as long as it lives
        return part

    def _hops(self, data: Data) -> dict[str, Any]:
        """Return the numbers per hop of a receptive field; those of another's batch would not fit rows and masks."""
        ours = any(data is part and data.x is not given[0] for given, _, part in self._fields.values())
        if not self._takes_hops or not (ours or (is_sampled(data) and "num_sampled_edges" in data)):
            return {}
        return {
            "num_sampled_nodes_per_hop": data.num_sampled_nodes,
            "num_sampled_edges_per_hop": data.num_sampled_edges,
        }

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Let the dropout of gat_pyg's layers depend on the seed and the epoch alone; `Resumable` calls this.

        Then it is the same in a process of its own, in a stack of many seeds, and replayed as a CUDA graph. Of several
        steps in an epoch each would drop the same, so batches of nodes draw from torch's generator.
        """
        self._set_key(torch.tensor(key_of(seed, epoch)))

    def _set_key(self, key: Tensor) -> None:
        key = first_seeds(key)
        if self._key is None or (self._key.shape, self._key.device) != (key.shape, self.device):
            self._key = key.to(self.device)
        else:
            self._key.copy_(key)  # where a CUDA graph reads it

    def forward(self, data: Data) -> Tensor:
        """Return the logits [N, K] of the graph's nodes, or of those of this process's part."""
        with data.part.joined(self.model, data.edge_index) if "part" in data else nullcontext():
            if self._key is None or not self.training or is_drawn(data):
                return super().forward(data)
            return self._call_keyed(self.model, data, self._key)

    def _call_keyed(self, model: Callable[..., Tensor], data: Data, key: Tensor) -> Tensor:
        with keyed(key):
            return self._call_model(model, data)

    def setup(self, stage: str) -> None:
        """Reset the state of an earlier fit; raise ValueError if `cuda_graphs=True` is impossible here."""
        if stage == "fit":
            self._reset()
            if self.cuda_graphs is True and (why := self._capture_obstacle()):
                raise ValueError(f"cuda_graphs is true, but {why}. Use cuda_graphs=auto or false.")

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        """Return the loss of the graph; a replayed CUDA graph computes the gradients, too."""

        def step() -> tuple[Tensor, ...]:
            loss, sums = self._loss(data)
            return loss.detach(), sums, *torch.autograd.grad(loss, self._trainable_parameters(), allow_unused=True)

        if (captured := self._capture("train", data, step)) is None:
            self._grads = None
            return super().training_step(data, batch_idx)
        loss, sums, *self._grads = captured()
        self._add("train", sums.clone())
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate, or take the gradients of the CUDA graph."""
        if self._grads is None:
            super().backward(loss, *args, **kwargs)
            return
        for parameter, grad in zip(self._trainable_parameters(), self._grads, strict=True):
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
        """Return the sufficient statistics of the graph; of a loader of all its nodes, layer by layer."""
        if not isinstance(data, NodeLoader):
            return super()._counts(data, split)
        whole: Data = data.data
        layer_by_layer = getattr(self.model, "inference", None)
        if layer_by_layer is None or isinstance(self.model, BasicGNN):  # PyG's takes no loader but its own
            moved = self.trainer.strategy.batch_to_device(copy.copy(whole), self.device)
            return super()._counts(moved, split)
        out, rows = layer_by_layer(data), mask_to_index(whole[f"{split}_mask"])
        return self.objective.statistics(out[rows], whole.y[rows]).to(self.device)

    def on_train_end(self) -> None:
        """Release the CUDA graphs, the receptive fields and the last epoch's key: another fit draws its own masks."""
        self._reset()

    def _reset(self) -> None:
        self._captured.clear()
        self._fields.clear()
        self._key = self._grads = None
        self._refused = False

    def _capture(
        self, split: Split, data: Data | NodeLoader, step: Callable[[], tuple[Tensor, ...]]
    ) -> Captured | None:
        """Return the step's CUDA graph, captured as soon as the step repeats, or None where it runs without one."""
        if self.cuda_graphs is False or self._refused or isinstance(data, NodeLoader) or is_drawn(data):
            return None
        if self._capture_obstacle() or (tensors := _plain_tensors(data)) is None:
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
                known.held.append(self._fields.get(split))
            except Exception as error:  # whatever the driver, or an operation that cannot be captured, may raise
                self._refused = True
                rank_zero_warn(
                    f"The {split} step cannot be captured as a CUDA graph: {_reason(error)}. Training continues "
                    "without capturing, with the same results. Pass cuda_graphs=False (training.cuda_graphs=false in "
                    "the command) to silence this warning."
                )
        return known.captured

    def _capture_obstacle(self) -> str | None:
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

    def _trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


class Inductive(Supervised):
    """Each split has graphs of its own; a step is a batch of whole graphs."""

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """Return all rows: a batch belongs to one split as a whole."""
        return self.objective.rows(out, data, None)
