"""The names and folders of runs, and the numbers that follow from them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from gat_pyg.runs.defaults_by_data import suited
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.names import dataset_name, run_name
from gat_pyg.settings.overrides import translated
from gat_pyg.settings.settings import Settings
from tests.commands import KARATE, SETS, Command, runs
from tests.graphs import amazon_files

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

SPLIT = ("split.per_class=5", "split.val=10", "split.test=20", "data_root=data")


def parsed(*overrides: str) -> Settings:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return Settings.parse(compose("config", translated(overrides)))


def folder_of(*overrides: str) -> str:
    """Return the name of a run's folder without its time."""
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return run_name(compose("config", [*overrides], return_hydra_config=True))


def test_two_sets_of_one_class_have_names_and_folders_of_their_own_and_one_learning_rate():
    for name, model in product(("Photo", "Computers"), ("gat", "mlp")):
        amazon_files(Path("data"), name)
        overrides = (f"dataset._target_={SETS}.Amazon", f"+dataset.name={name}", f"model={model}", *SPLIT)
        assert folder_of(*overrides) == f"{model}_{name.lower()}"
        settings = suited(parsed(*overrides), overrides)
        assert (dataset_name(settings.dataset.values), settings.training.lr) == (name.lower(), 0.003)


@pytest.mark.parametrize(
    ("arguments", "lr", "heads"),
    [
        ("", 0.02, [8, 1]),
        ("dataset=pubmed", 0.01, [8, 8]),
        (f"dataset._target_={SETS}.KarateClub", 0.005, [8, 1]),
        (f"dataset=pubmed ++dataset._target_={SETS}.KarateClub", 0.005, [8, 1]),
        ("dataset=pubmed dataset.name=cora", 0.005, [8, 1]),
        ("dataset=pubmed model._target_=mine.GAT", 0.005, [8, 1]),
        ("recipe/on=papers-gat-pubmed dataset._target_=mine.Set", 0.01, [8, 8]),
    ],
)
def test_the_numbers_of_two_names_are_for_what_they_name(command: Command, arguments: str, lr: float, heads: list[int]):
    for order in (("--cfg", "job", *arguments.split()), (*arguments.split(), "--cfg", "job")):
        shown = OmegaConf.create(command(*order))
        assert (shown.training.lr, shown.model.heads) == (lr, heads)


def test_the_jobs_of_a_multirun_and_the_cells_of_a_table_have_the_numbers_of_what_they_train(command: Command):
    other = "model._target_=gat_pyg.models.GAT"
    command("-m", f"dataset._target_={SETS}.KarateClub,gat_pyg.data.digits", *KARATE, "training.max_epochs=1")
    command(f"methods=[gat,'gat {other}']", "datasets=digits", "training.max_epochs=1")
    every = [OmegaConf.load(folder / "config.yaml").training.lr for folder in runs()]
    assert every == [0.003, 0.003, 0.02, 0.005]


NAMES = {
    "": "gat_digits",
    "model=mlp +dataset.k=3": "mlp_digits",
    f"dataset._target_={SETS}.KarateClub": "gat_karateclub",
    "model=mlp model._target_=torch_geometric.nn.GCN": "pyg-gcn_digits",
    "model=mlp model._target_=gat_pyg.models.baselines.GCN": "gcn_digits",
    "loader=neighbor": "gat_digits_neighbor",
    "model.mechanism=dot": "gat_digits_dot",
    "~model.mechanism +model.mechanism._target_=gat_pyg.conv.DotProduct": "gat_digits_dotproduct",
    "model.reproduction=true loader=cluster": "gat_digits_cluster_reproduction",
    "model.reproduction=false": "gat_digits",
}


def test_folder_is_named_after_method_and_dataset(command: Command):
    command("training.max_epochs=1")
    assert [path.name.split("_", 3)[3] for path in runs()] == [NAMES[""]]
    for arguments, name in NAMES.items():
        assert folder_of(*arguments.split()) == name


def test_a_replaced_model_does_not_keep_the_methods_name():
    for own, method in ([], "GCN"), (["model.method=Mine"], "Mine"):
        assert parsed("model=gcn64", "model._target_=gat_pyg.models.baselines.GCN", *own).model.method == method
