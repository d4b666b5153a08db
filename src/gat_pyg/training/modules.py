"""The LightningModules of the transductive and the inductive setup."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torchmetrics.utilities.distributed import gather_all_tensors

from ..graph.remembered import ids_state
from ..graph.subgraph import mask_to_index, receptive_field
from ..philox import first_seeds, keyed
from ..tasks.model import Inputs, is_compiled, members
from ..tasks.objective import Objective, Split
from .averaging import Average
from .batching import is_drawn
from .checkpoint import differing
from .cuda_graphs import CudaGraphs, Step
from .epoch_seeds import key_of, seed_draws
from .optimisation import Optimisation, Schedule
from .resume import check_states

MAX_FIELD = 0.75  # above this share of the rows and edges of all layers, extracting the field costs more than it saves


class Supervised(LightningModule):
    """The base of both setups: training with an objective, that is the call of the model, loss, score, optimizer.

    Validation and test sum the objective's statistics over all graphs and processes, and compute the score from the
    sums. Logs `train_loss`, `val_loss`, `test_loss`, and the score as `val_` and `test_` with the name of the
    objective's metric.

    With `accumulate_grad_batches` of the trainer, the gradient is that of the mean over all labels of these batches,
    also if they have different numbers of labels, or the last step of an epoch has fewer batches.

    Args:
        model: any module. It is called `model(x, edge_index)`, or `model(x)` if its forward has no `edge_index`, or
            `model(data)` if its only argument is `data`, `batch` or `graph`, and returns logits `[N, K]`.
            `edge_attr=...` is passed if the forward takes it and the graph has edge features. So are `batch=...` and
            `batch_size=...` of several graphs, a `Batch` or a `Data` with `batch`; for graph labels, the logits are
            `[G, K]`. If it has a method `penalty(out, data)`, the result is added to the training loss.
        objective: meaning of the logits, `task.objective`.
        optimisation: the optimizer, learning rate, weight decay, schedule, clipping and averaging.

    Raises:
        ValueError: if the model is one of `gat_pyg.load(run_dir, predictions=True)`; in a fit, if LBFGS gets several
            processes or accumulated gradients, since it computes a step several times.
    """

    def __init__(self, model: nn.Module, objective: Objective, optimisation: Optimisation = Optimisation()) -> None:
        super().__init__()
        if members(model).returns_predictions:
            raise ValueError(
                "the model returns predictions, expected its outputs: gat_pyg.load(run_dir) without predictions=True."
            )
        self.model = model
        self.objective = objective
        self.optimisation = optimisation
        self._inspect_model(model)
        self._sums: dict[str, Tensor] = {}  # per split, since the last log
        self._num_labels: Tensor | None = None  # labels in the batches accumulated so far

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """Return the logits of a split's rows, and their labels."""
        return self.objective.rows(out, data, split)

    def forward(self, data: Data) -> Tensor:
        """Return the logits of a graph or a batch."""
        return self._call_model(self.model, data)

    def _inspect_model(self, model: nn.Module) -> None:
        """Set the attributes that follow from the model's signature and members."""
        self._inputs, optional = Inputs.of(model), members(model)
        self._num_hops, self._penalty = optional.num_hops, optional.penalty

    def _call_model(self, model: Callable[..., Tensor], data: Data) -> Tensor:
        """Call a model with the fields of the data that its forward takes."""
        return self._inputs.call(model, data, self._is_by_hop(data))

    def _is_by_hop(self, data: Data) -> bool:
        """Return True if the nodes and edges of the data are sorted by hop from the rows that count."""
        return False

    def _field_of(self, data: Data, split: Split) -> Data:
        """Return the graph, or the part of it, that a step of the split computes."""
        return self.objective.example(data, split)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        """Return the loss of a batch, scaled so that the gradients of a step are those of the mean over all labels."""
        loss, sums = self._run("train", data, lambda: self._loss(data))
        self._add("train", sums)
        if self._accumulates():
            return self._summed_over(loss, sums[..., 1])
        return self._weighted(loss, sums[..., 1]) if self._shared() else loss

    def _run(self, split: Split, data: Data, step: Step) -> tuple[Tensor, ...]:
        """Return the results of a step on a batch."""
        return step()

    def _weighted(self, loss: Tensor, size: Tensor) -> Tensor:
        """Multiply a mean over `size` labels by W * size / n, for n labels in all W processes."""
        n = size.clone()
        torch.distributed.all_reduce(n)
        return loss * (self.trainer.world_size * size / n.clamp(min=1))

    def _summed_over(self, loss: Tensor, size: Tensor) -> Tensor:
        """Multiply a mean over `size` labels by their number; Lightning divides it by the number of batches."""
        self._num_labels = size if self._num_labels is None else self._num_labels + size
        return loss * size * self.trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Divide accumulated gradients by the number of their labels."""
        if self._num_labels is None:
            return
        n, self._num_labels = self._num_labels.clone(), None
        if self._shared():  # each process has the mean of the gradients of all
            torch.distributed.all_reduce(n)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, self.trainer.world_size / n.clamp(min=1))

    def _loss(self, data: Data) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and its part of the epoch's sums: (summed loss, number of known labels)."""
        data = self._field_of(data, "train")
        out = self(data)
        loss, sums = self.objective.train_statistics(*self.labelled(out, data, "train"))
        return (loss if self._penalty is None else loss + self._penalty(out, data)), sums

    def validation_step(self, data: Data, batch_idx: int) -> None:
        """Add the statistics of a batch to the validation's sums."""
        self._add("val", *self._run("val", data, lambda: (self._counts(data, "val"),)))

    def test_step(self, data: Data, batch_idx: int) -> None:
        """Add the statistics of a batch to the test's sums."""
        self._add("test", self._counts(data, "test"))

    def predict_step(self, data: Data, batch_idx: int) -> Tensor:
        """Return the predictions for a batch: probabilities, or regression targets in their own unit.

        They are of all nodes, of all graphs, or of the labelled pairs of the test, where masks divide these.
        """
        return self.objective.predictions(self.objective.scores(*self._computed(data, "test", self.objective.example)))

    def _counts(self, data: Data, split: Split) -> Tensor:
        """Return the sufficient statistics of a batch."""
        out, data = self._computed(data, split, self._field_of)
        sums: Tensor = self._each("statistics", *self.labelled(out, data, split))
        return sums.to(self.device)

    def _each(self, statistics: str, out: Tensor, y: Tensor) -> Any:
        """Return the result of a method of the objective, given by its name; in a stack, the results of all models."""
        return getattr(self.objective, statistics)(out, y)

    def _computed(self, data: Data, split: Split, select: Callable[[Data, Split], Data]) -> tuple[Tensor, Data]:
        """Return the output for the graph of a split that `select` returns, and this graph."""
        data = select(data, split)
        return self(data), data

    def on_validation_epoch_end(self) -> None:
        """Compute `train_loss`, `val_loss` and the score from the sums, and log them."""
        metrics = self._metrics("train", "val")
        if self.trainer.state.fn != "fit":
            self._log(metrics)
        elif not self.trainer.sanity_checking:
            self._log_epoch(metrics)
            self._validated(self.lr_schedulers(), metrics)

    def _validated(self, schedule: Any, metrics: Mapping[str, float]) -> None:
        """Adapt the learning rate to a validation, if it depends on it."""
        if isinstance(schedule, Schedule):
            metric = self.objective.metric
            schedule.validated(metrics["val_loss"], metric.better(metrics[f"val_{metric.name}"]))

    def on_test_epoch_end(self) -> None:
        """Compute `test_loss` and the score from the sums, and log them."""
        self._log(self._metrics("test"))

    def configure_callbacks(self) -> list[Callback]:
        """Return the average of the weights, if any."""
        return [] if self.optimisation.ema is None else [Average(self.optimisation.ema)]

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with weight decay on all variables or on `decayed_parameters()`, and its schedule."""
        decayed = (members(self.model).decayed_parameters or self.parameters)()
        max_epochs = None if self._trainer is None else self.trainer.max_epochs
        optimizer, schedule = self.optimisation.configure(self.parameters(), decayed, max_epochs)
        if isinstance(optimizer, LBFGS) and self._trainer and (self._shared() or self._accumulates()):
            raise ValueError(
                "LBFGS computes a step several times, which needs one process and gradients of one batch. Train "
                "without accumulate_grad_batches in a single process, or choose another optimizer."
            )
        return optimizer if schedule is None else ([optimizer], [schedule])

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradient by the norm over the model, or as the trainer does if the optimisation clips nothing."""
        if (largest := self.optimisation.gradient_clip_val) is None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            self.clip_gradients(optimizer, largest, "norm")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if the checkpoint has tensors of other shapes, or lacks the state of a callback."""
        if different := differing(self.state_dict(), checkpoint["state_dict"]):
            raise ValueError(
                f"The checkpoint does not fit this model: {different}. Resume with the settings that the run was "
                "started with (config.yaml beside the checkpoint), or start again without ckpt_path."
            )
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_states(self.trainer.callbacks, checkpoint.get("callbacks"))  # type: ignore[attr-defined]
        if self._trainer is not None:  # Lightning does this after loading, which would round float64 to float32
            self.trainer.precision_plugin.convert_module(self)

    def _log(self, metrics: dict[str, float]) -> None:
        """Log values that are the same in all processes; their maximum is exact, unlike their mean."""
        self.log_dict(metrics, batch_size=1, sync_dist=True, reduce_fx="max")

    def _log_epoch(self, metrics: dict[str, float]) -> None:
        """Log an epoch's metrics in 0.1 ms, a tenth of the time of `self.log_dict`."""
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics({**metrics, "epoch": self.current_epoch}, step=self.global_step)
            logger.save()

    def _shared(self) -> bool:
        return self.trainer.world_size > 1

    def _accumulates(self) -> bool:
        return self.trainer.accumulate_grad_batches > 1

    def _add(self, split: str, sums: Tensor) -> None:
        if split in self._sums:
            sums = self._sums[split] + sums if self._summed(split) else self.objective.pool([self._sums[split], sums])
        self._sums[split] = sums

    def _summed(self, split: str) -> bool:
        """Return True if the statistics of a split are sums, and False if they are rows."""
        return split == "train" or not self.objective.by_rows

    def _metrics(self, *splits: str) -> dict[str, float]:
        """Return the metrics of some splits since the last call."""
        return self.objective.metrics(self._pooled(*splits))

    def _pooled(self, *splits: str) -> dict[str, Any]:
        """Return the statistics of some splits since the last call, over all processes: lists of sums, or all rows."""
        parts = {split: self._sums.pop(split) for split in splits if split in self._sums}
        if self._shared():
            reduce, pool = self.trainer.strategy.reduce, self.objective.pool
            parts = {
                split: reduce(values, reduce_op="sum") if self._summed(split) else pool(gather_all_tensors(values))
                for split, values in parts.items()
            }
        return {split: values.tolist() if self._summed(split) else values.cpu() for split, values in parts.items()}


class Transductive(Supervised):
    """One graph that all splits share; a step is the whole graph.

    A model may declare `num_hops`: a row of its output depends only on nodes at most that many hops away. It then gets
    only the receptive field of a split's labelled nodes. If its forward also takes `num_sampled_nodes_per_hop` and
    `num_sampled_edges_per_hop`, as PyG's models do, each layer skips the rows that no later layer reads. Loss,
    gradients and scores are those of the whole graph.

    With `cuda_graphs="auto"`, training steps (forward and backward) and validations on a GPU are captured as CUDA
    graphs in the second epoch and then replayed, with the same results. Otherwise the GPU would mostly wait for Python
    on a small graph. Python code inside the step, including hooks, does not run in a replay. The step is captured again
    if a tensor of the graph is replaced or changed in place, a parameter or buffer is replaced, frozen or unfrozen, or
    a module changes between training and evaluation. Other attributes, such as `model.dropout`, are not checked.
    Steps are not captured with several processes, mixed precision, gradient accumulation, a compiled model, a subclass
    with its own `training_step` or `backward`, more than a million edges, or tensors that are neither dense nor CSR.
    `True` has no limit on edges, and raises ValueError if the trainer or the model cannot be captured. If a step makes
    the host wait for the GPU, a warning gives the reason, and training continues without capturing.

    >>> import gat_pyg.data, lightning, torch_geometric.nn
    >>> task = gat_pyg.data.digits()
    >>> model = torch_geometric.nn.GCN(64, 16, 2, 10)
    >>> module = Transductive(model, task.objective, Optimisation(lr=0.005, weight_decay=5e-4))
    >>> lightning.Trainer(callbacks=[PaperStopping()]).fit(module, datamodule=TaskData(task))  # doctest: +SKIP
    """

    _key: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimisation: Optimisation = Optimisation(),
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(model, objective, optimisation)
        self.cuda_graphs = CudaGraphs(cuda_graphs)
        # Per split: the tensors of the graph, their state, and the receptive field.
        self._fields: dict[Split, tuple[list[Tensor], Any, Data]] = {}
        self.register_buffer("_key", None, persistent=False)  # the epoch's key and the first seeds of its stream

    def _field_of(self, data: Data, split: Split) -> Data:
        """Return the cached receptive field of the split's nodes, or the graph if that saves too little work.

        The field follows all changes of ids and labels on a CPU, and those of features that torch counts.
        """
        if (example := self.objective.example(data, split)) is not data:
            return example
        if is_drawn(data) or "part" in data:
            return data
        mask = data[f"{split}_mask"]
        tensors = [value for value in (data.x, data.edge_index, data.edge_attr, data.y, mask) if value is not None]
        if self._num_hops is None or self._penalty is not None or is_compiled(self.model):
            return data
        if any(type(value) is not Tensor or value.requires_grad or value.is_inference() for value in tensors):
            return data
        ids = [value for value in tensors if not value.is_floating_point()]
        state = [(id(value), value._version) for value in tensors], ids_state(*ids)
        _, cached, field = self._fields.get(split, ([], None, data))
        if state != cached:
            with torch.inference_mode(False), torch.no_grad():
                field = receptive_field(data, mask_to_index(mask), self._num_hops)
            field = field if _is_smaller(field, data) else data
            self._fields[split] = tensors, state, field  # the reference keeps the ids from being reused
        return field

    def _is_by_hop(self, data: Data) -> bool:
        """Return True for a receptive field or a sampled batch; the numbers per hop of others do not fit the masks."""
        is_field = any(data is field and data.x is not tensors[0] for tensors, _, field in self._fields.values())
        return is_field or (is_drawn(data) and "num_sampled_edges" in data)

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Make the dropout of gat_pyg's layers depend only on the seed and the epoch; `Resumable` calls this.

        So the masks are the same in a run of one seed, in a stack of many seeds, and in the replay of a CUDA graph.
        With several steps per epoch, each step would have the same mask, so batches of nodes use torch's generator.
        Negative links also depend only on both: all processes draw those of the step, and each takes its share. Labels
        that a step reads depend only on the epoch, so that the models of a stack share them.
        """
        self._set_key(torch.tensor(key_of(seed, epoch)))
        self._seed_draws(seed, epoch)

    def _seed_draws(self, seed: int, epoch: int) -> None:
        """Seed what the objective draws in this epoch: labels that are read, the same for each seed, or links."""
        if self.objective.draws_pairs or self.objective.label_rate:
            seed_draws(seed if self.objective.draws_pairs else 0, epoch)

    def _set_key(self, key: Tensor) -> None:
        key = first_seeds(key)
        if self._key is None or (self._key.shape, self._key.device) != (key.shape, self.device):
            self._key = key.to(self.device)
        else:
            self._key.copy_(key)  # in place: a CUDA graph reads this memory

    def forward(self, data: Data) -> Tensor:
        """Return the logits [N, K] of the graph's nodes, or those of the nodes in this process's part."""
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
            self.cuda_graphs.check(self)

    def _run(self, split: Split, data: Data, step: Step) -> tuple[Tensor, ...]:
        """Return the results of a step, computed or by a replay of its CUDA graph."""
        return self.cuda_graphs.run(self, split, data, step, self._fields)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate, or set the gradients that a replay computed."""
        if not self.cuda_graphs.set_gradients(self):
            super().backward(loss, *args, **kwargs)

    def _computed(self, data: Any, split: Split, select: Callable[[Data, Split], Data]) -> tuple[Tensor, Data]:
        """Return the output and its graph; for a loader of all nodes, computed layer by layer, and the whole graph."""
        data = self._whole(data)
        if isinstance(data, NodeLoader):
            return self._layer_by_layer(data, split)
        return super()._computed(data, split, select)

    def _whole(self, data: Data | NodeLoader) -> Data | NodeLoader:
        """Return the graph of a loader of all nodes, on the device, if the model does not compute layer by layer."""
        if not isinstance(data, NodeLoader) or members(self.model).inference is not None:
            return data
        graph: Data = self.trainer.strategy.batch_to_device(copy.copy(data.data), self.device)
        return graph

    def _layer_by_layer(self, loader: NodeLoader, split: Split) -> tuple[Tensor, Data]:
        """Return the model's output for a loader of all nodes, and the graph with the pairs of a split."""
        chosen = self.objective.example(loader.data, split)
        keys = self._inputs.names & {"edge_label_index", "edge_label_attr"}
        inference: Any = members(self.model).inference
        return inference(loader, **{key: chosen[key] for key in keys if key in chosen}), chosen

    def on_train_end(self) -> None:
        """Release the CUDA graphs, the receptive fields and the last epoch's key."""
        self._reset()

    def _reset(self) -> None:
        self.cuda_graphs.reset()
        self._fields.clear()
        self._key = None


class Inductive(Supervised):
    """Each split has graphs of its own; a step is a batch of whole graphs."""

    def labelled(self, out: Tensor, data: Data, split: Split) -> tuple[Tensor, Tensor]:
        """Return all rows: a batch belongs to one split as a whole."""
        return self.objective.rows(out, data, None)


def _is_smaller(field: Data, data: Data) -> bool:
    """Return True if the layers of a model read less than `MAX_FIELD` of a graph's rows and edges."""
    nodes, edges = field.num_sampled_nodes, field.num_sampled_edges
    layers = range(len(edges), 0, -1)
    work = sum(sum(nodes[: hop + 1]) + sum(edges[:hop]) for hop in layers) or sum(nodes)
    whole = (data.x.size(0) + data.edge_index.size(1)) * len(layers) or data.x.size(0)
    return bool(work < MAX_FIELD * whole)
