"""What is built from settings: models, data, trainers and loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from torch_geometric.data import Data

from gat_pyg.data import Task, from_dataset
from gat_pyg.models.gat import GAT
from gat_pyg.runs.build import build_logger, build_module, build_trainer
from gat_pyg.runs.network import build_model
from gat_pyg.runs.task import build_task
from gat_pyg.runs.unused import check_effects
from gat_pyg.settings.overrides import names_of
from gat_pyg.settings.settings import Settings
from gat_pyg.tasks.graphs import GraphLabels
from tests.settings.compositions import learns, names, parsed, task

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


class Doubled(torch.nn.Module):
    """A model whose weights a safetensors file cannot hold."""

    def __init__(self, in_channels: int, out_channels: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(in_channels, out_channels, dtype=torch.complex128))


@pytest.mark.parametrize("model", ["gat", "gine", "pyg_gcn"])
def test_a_batch_of_one_node_is_trained_on(model: str) -> None:
    atom = Data(torch.zeros(1, 5), torch.zeros(2, 0, dtype=torch.long), y=torch.tensor([0]))
    graphs = [atom, atom.clone().update({"y": torch.tensor([1])})]
    built = build_model(
        parsed(f"model={model}", "dataset=molesol", "++model.norm=batch").model,
        Task("atoms", graphs, graphs, graphs, 5, GraphLabels(2)),
    ).model
    built.train()(atom.x, atom.edge_index).sum().backward()


def test_edge_features_reach_the_model():
    learns(compose("config", ["model=gat"]), task(edge_dim=2))


def test_a_model_with_a_loss_on_node_labels_is_refused_for_pairs():
    settings = parsed("model=semiemb")
    src = torch.arange(20)
    edge_index = torch.cat([torch.stack([src, (src + k) % 20]) for k in (1, -1)], 1)
    task = from_dataset(Data(torch.randn(20, 5), edge_index), "ring", val=2, test=2, task="link_prediction")
    with pytest.raises(ValueError, match="SemiEmb trains with a loss on node labels, and ring has labels of pairs. C"):
        build_module(settings, task, build_model(settings.model, task).model)


def test_a_model_that_could_not_be_saved_is_refused_before_training():
    settings = parsed(f"model={{_target_:{__name__}.Doubled}}")
    with pytest.raises(ValueError, match=r"weight of Doubled has dtype torch\.complex128, which a safetensors file"):
        build_model(settings.model, task())


@pytest.mark.parametrize("override", ["jk=cat", "readout=attentional"])
def test_a_network_without_an_output_layer_takes_the_lists_of_one_with_it(override: str):
    settings, data = parsed(f"++model.{override}"), task(graphs=override != "jk=cat")
    model = build_model(settings.model, data).model
    assert [conv.heads for module in model.modules() if isinstance(module, GAT) for conv in module.convs] == [8]
    with pytest.raises(ValueError, match=r"model\.heads has no effect: the last entry, 1, is for an output layer"):
        check_effects(settings.replace(passed=names_of(["model.heads=[8,1]", f"model.{override}"])), data)


@pytest.mark.parametrize("dataset", ["digits", "planted"])
def test_data_sets_that_need_no_files(dataset: str):
    built = build_task(parsed(f"dataset={dataset}"))
    assert (built.name, built.has_many_graphs) == (dataset, dataset != "digits")


@pytest.mark.parametrize("trainer", names("trainer"))
def test_trainers(trainer: str, tmp_path: Path):
    config = compose("config", [f"trainer={trainer}", "training.max_epochs=7"])
    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        config.trainer.accelerator = "cpu"  # the rest of it is built all the same
        config.trainer.devices = 1
    settings = Settings.parse(config)
    built = build_trainer(settings.trainer, settings.logger, tmp_path)
    assert built.max_epochs == 7
    assert built.world_size == (2 if trainer == "ddp_cpu" else 1)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("logger", names("logger"))
def test_loggers(logger: str, tmp_path: Path):
    settings = parsed(f"logger={logger}")
    try:
        built = build_logger(settings.logger, tmp_path)
    except ValueError as error:
        assert f"Run: python -m pip install {logger}" in str(error)  # noqa: PT017 (whether it is raised is the machine's)
    else:
        assert built is False if logger == "csv" else Path(built.save_dir) == tmp_path
