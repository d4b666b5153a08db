"""Seconds and peak memory of a training step of the command, with our layers and with PyG's in the same loop.

    python benchmarks/steps.py dataset=peptides-func                # settings are those of the command
    python benchmarks/steps.py --steps 6 dataset=ogbl-ddi           # sampled neighbourhoods
    python benchmarks/steps.py --steps 6 dataset=ogbl-ddi loader=full loader.num_links=65536  # whole graph

Both networks are the recipe's, with the same weights; one has PyG's GATConv in place of ours. They take turns batch by
batch in one process. Before, loss and gradients of the first batch must agree in float64, without dropout, to 1e-8 of
the gradient's norm. A step is what Lightning calls: the module's loss of a batch, backward and Adam; batches are made
before. An epoch is the median step times the number of steps. The peak is of the first step, in resident memory beyond
what was there before it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from itertools import cycle, islice

import torch
import torch_geometric.nn as pyg
from hydra import compose, initialize_config_dir
from lightning import seed_everything
from torch import Tensor, nn
from torch_geometric.data import Data

import machine
from gat_pyg.conv.gat import GATConv
from gat_pyg.runs.build import build_data, build_module, build_trainer
from gat_pyg.runs.network import build_model
from gat_pyg.runs.task import build_task
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.settings import Settings
from gat_pyg.training import Supervised


def with_pyg(model: nn.Module) -> nn.Module:
    """A copy of a model with PyG's layers and the same weights."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, conv in module.named_children():
            if isinstance(conv, GATConv):
                setattr(module, name, pygs(conv))
    return model


def pygs(conv: GATConv) -> pyg.GATConv:
    layer = pyg.GATConv(
        conv.in_channels,
        conv.out_channels,
        conv.heads,
        conv.concat,
        conv.negative_slope,
        conv.dropout,
        conv.add_self_loops,
        conv.edge_dim,
        conv.fill_value,
        conv.bias is not None,
        conv.res is not None,
    )
    layer.load_state_dict(conv.state_dict())
    return layer


def step(module: Supervised, optimizer: torch.optim.Optimizer, batch: Data) -> float:
    optimizer.zero_grad()
    loss, _ = module._loss(batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def gradients(module: Supervised, batch: Data) -> list[Tensor]:
    """The loss and every gradient in float64, without dropout and with the same negative pairs."""
    module = copy.deepcopy(module).double().eval()
    seed_everything(0, verbose=False)
    batch = batch.clone().apply(lambda value: value.double() if value.is_floating_point() else value)
    loss, _ = module._loss(batch)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in module.parameters() if weight.grad is not None)]


def check(modules: dict[str, Supervised], batch: Data) -> float:
    """The largest difference between loss and gradients, relative to the norm of all gradients."""
    ours, theirs = (gradients(module, batch) for module in modules.values())
    norm = torch.stack([part.norm() for part in theirs]).norm()
    worst = max(float((a - b).norm() / norm) for a, b in zip(ours, theirs, strict=True))
    if not worst <= 1e-8:
        raise SystemExit(f"the networks differ by {worst:.1e} in float64, allowed 1e-8")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", help="of the command, such as dataset=peptides-func")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        settings = Settings.parse(compose("config", options.settings))
    task = build_task(settings)
    seed_everything(0, verbose=False)
    model = build_model(settings.model, task).model
    trainer = build_trainer(settings.trainer, settings.logger, machine.FOLDER)
    loader = build_data(settings.loader, settings.training, task, model, trainer, 0).train_dataloader()
    batches = list(islice(cycle(loader), options.steps))
    models = {"ours": model, "pyg": with_pyg(model)}
    modules = {name: build_module(settings, task, one) for name, one in models.items()}
    error = check(modules, batches[0])

    optimizers = {name: torch.optim.Adam(module.parameters(), lr=1e-3) for name, module in modules.items()}
    peaks = {}
    for name, module in modules.items():

        def first(name: str = name, module: Supervised = module) -> dict[str, Tensor]:
            step(module.train(), optimizers[name], batches[0])
            return {}

        first()  # compiles kernels, and makes Adam's moments
        peaks[name] = machine.step_peak(first, device)
    times: dict[str, list[float]] = {name: [] for name in modules}
    for batch in batches:
        for name, module in modules.items():
            times[name].append(machine.seconds(lambda n=name, m=module, b=batch: step(m, optimizers[n], b), device))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    record = {
        "settings": options.settings,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": options.steps,
        "steps_per_epoch": len(loader),
        "median_seconds": medians,
        "epoch_seconds": {name: len(loader) * median for name, median in medians.items()},
        "times_faster": medians["pyg"] / medians["ours"],
        "peak_mib": {name: None if peak is None else peak / 2**20 for name, peak in peaks.items()},
        "error": error,
    }
    print(record)
    suffix = "" if settings.loader.num_neighbors is None else "-sampled"
    machine.write(machine.results(f"steps-{task.name}{suffix}", device), machine.about(device) | record)


if __name__ == "__main__":
    main()
