from __future__ import annotations

import copy
import dataclasses
import functools
import math
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch_geometric.data import Batch, Data

from gat_pyg.data import Task, digits, from_dataset
from gat_pyg.paper.published import as_published
from gat_pyg.runs.build import build_logger, build_module, build_trainer
from gat_pyg.runs.defaults_by_data import suited
from gat_pyg.runs.groups import gathered, lines_of
from gat_pyg.runs.network import build_model
from gat_pyg.runs.process import check_gpus
from gat_pyg.runs.task import build_task
from gat_pyg.runs.unused import check_effects
from gat_pyg.settings.conf import CHOICES, VERSION_BASE, check_names, config_folder
from gat_pyg.settings.factory import Factory
from gat_pyg.settings.hashing import config_hash, flattened
from gat_pyg.settings.names import dataset_name
from gat_pyg.settings.overrides import check_recipe, names_of, translated
from gat_pyg.settings.settings import INTERNAL, Settings
from gat_pyg.tasks.graphs import GraphLabels, GraphMultiLabels
from gat_pyg.tasks.links import LinkLabels
from gat_pyg.tasks.metrics import METRICS, metric_named
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import MASKS
from gat_pyg.training import Inductive

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def names(group: str) -> list[str]:
    return sorted(CHOICES[group])


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        yield


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """The settings composed from these overrides; they cannot be changed, since other tests have the same."""
    config = compose("config", list(overrides))
    OmegaConf.set_readonly(config, True)
    return config


FILES = {  # a user's
    "file": ["dataset.path=x.npz"],
    "tables": ["dataset.edges=x.csv"],
    "smiles": ["dataset.path=x.csv"],
}


def composed_for(model: str, dataset: str, *others: str) -> DictConfig:
    """The settings of a model on a data set."""
    return composed(f"model={model}", f"dataset={dataset}", *FILES.get(dataset, []), *others)


def parsed(*overrides: str) -> Settings:
    return Settings.parse(composed(*overrides))


def entries(listed: Any) -> list[list[str]]:
    """The name of each method's model, or of each data set, and its settings."""
    return [entry.split() if isinstance(entry, str) else list(entry) for entry in listed]


def task(edge_dim: int | None = None, categories: bool = False, graphs: bool = False) -> Task:
    x = torch.randint(4, (6, 5)).float() if categories else torch.randn(6, 5)
    data = Data(x, torch.randint(6, (2, 12)), y=torch.rand(6, 3).round())
    if edge_dim is not None:
        data.edge_attr = torch.randn(12, edge_dim)
    if graphs:
        each = [Data(x[i : i + 1], torch.zeros(2, 1, dtype=torch.long), y=data.y[i : i + 1]) for i in range(6)]
        return Task("tiny", each, each, each, 5, GraphMultiLabels(3))
    return Task("tiny", [data], [data.clone()], [data.clone()], 5, NodeMultiLabels(3), edge_dim=edge_dim)


@pytest.mark.parametrize("model", ["gat", "gine", "pyg_gcn"])
def test_a_batch_of_one_node_is_trained_on(model: str) -> None:
    atom = Data(torch.zeros(1, 5), torch.zeros(2, 0, dtype=torch.long), y=torch.tensor([0]))
    graphs = [atom, atom.clone().update({"y": torch.tensor([1])})]
    built = build_model(
        parsed(f"model={model}", "dataset=molesol", "++model.norm=batch").model,
        Task("atoms", graphs, graphs, graphs, 5, GraphLabels(2)),
    ).model
    built.train()(atom.x, atom.edge_index).sum().backward()


def learns(config: DictConfig, task: Task) -> None:
    """The model of these settings is built for the task, and every parameter receives a gradient or is fitted."""
    settings = Settings.parse(config)
    model, *_ = build_model(settings.model, task)
    if hasattr(model, "fit"):
        return
    module = Inductive(model.train(), task.objective, settings.optimisation)
    out = module(Batch.from_data_list(task.train) if task.has_many_graphs else task.train[0])
    assert out.shape == (6, 3)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_each_fold_is_an_argument_of_the_data():
    settings = Settings.parse(composed_for("gat", "smiles", "split.folds=3")).on_split(2)
    assert settings.dataset.values["fold"] == settings.split.fold == 2
    settings.dataset.check()


# the paper's baselines with a loss of their own, which reads the features or ignores them
UNENCODED = {"deepwalk", "ica", "lp", "manireg", "planetoid", "random", "semiemb"}


KINDS = ("digits", "molesol", "ogbl-ddi", "planted")  # node labels, quantities of graphs, links, many labels
EVERYWHERE = "gat"


def with_own_models() -> Iterator[str]:
    """The data sets whose section, family or recipe may have settings of the model, one of each family."""
    families = set()
    for dataset in names("dataset"):
        text = CHOICES["dataset"][dataset].text
        family = text.partition("/family: ")[2].partition("\n")[0]
        has_recipe = any(name.endswith(f"-{dataset}") for name in CHOICES["recipe/on"])
        if (family and family not in families) or "model:" in text or has_recipe:
            yield dataset
        families.add(family)


@pytest.mark.parametrize("model", names("model"))
def test_every_model_learns_on_each_kind_of_data(model: str):
    learnt: list[DictConfig] = []  # most data sets leave the model's settings as they are
    for dataset in with_own_models() if model == EVERYWHERE else KINDS:
        config = composed_for(model, dataset)
        Settings.parse(config)
        if config.model not in learnt and not ("encoder" in config.model and model in UNENCODED):
            learns(config, task(graphs="head_layers" in config.model))
            learnt.append(config.model)
        assert callable(get_object(config.dataset._target_))


def test_edge_features_reach_the_model():
    learns(compose("config", ["model=gat"]), task(edge_dim=2))


class Doubled(torch.nn.Module):
    """A model whose weights a safetensors file cannot hold."""

    def __init__(self, in_channels: int, out_channels: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(in_channels, out_channels, dtype=torch.complex128))


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


STEP = "scheduler._target_=torch.optim.lr_scheduler.StepLR"
OF_GAT = "model._target_=gat_pyg.models.GAT"
WRONG = {
    "training.lrr=1": r"training\.lrr is unknown\. Did you mean training\.lr\?",
    "lr=1": r"lr is unknown\. Did you mean training\.lr\?",
    "+training.momentum=1": r"training\.momentum is unknown\. Known are: training\.lr, ",
    "+epochs=1": r"epochs is unknown\. Did you mean training\.max_epochs\?",
    "model.dropuot=0": r"MLP has no argument model\.dropuot\. Did you mean model\.dropout\?",
    "loader.num_neighbors=[5,5]": r"num_neighbors is \[5, 5\], but loader=full takes .* Choose loader=neighbor\.",
    "loader.num_neighbors=5": r"loader\.num_neighbors is 5, expected null or a list of whole",
    "loader.num_neighbors=[a,b]": r"loader\.num_neighbors is \['a', 'b'\], expected null or a",
    "loader.num_neighbors=[0]": r"loader\.num_neighbors is \[0\], expected null or a list",
    "+loader.num_parts=4": r"num_parts is 4, but loader=full takes whole graphs\. Choose loader=cluster\.",
    "+trainer.limit_test_batches=0": r"trainer\.limit_test_batches is 0, expected a number above 0\.",
    "+trainer.limit_train_batches=0": r"trainer\.limit_train_batches is 0, expected a number above 0\.",
    "+trainer.fast_dev_run=true": r"trainer\.fast_dev_run is True, expected false\.",
    "+trainer.callbacks=[1]": r"trainer\.callbacks is set by the command\. Leave it out\.",
    "+trainer.enable_checkpointing=true": r"trainer\.enable_checkpointing is set by the command\.",
    "+trainer.num_sanity_val_steps=2": r"trainer\.num_sanity_val_steps is set by the command\.",
    "+trainer.speed=3": r"Trainer has no argument trainer\.speed\. Known are: trainer\.accelerator, ",
    "trainer.devices=0": r"trainer\.devices is 0, expected auto, a number of devices, at least 1, or a list",
    "trainer.devices=true": r"trainer\.devices is True, expected auto",
    "model.dropout=abc": r"model\.dropout is 'abc', expected a finite number\.",
    "model.dropout=nan": r"model\.dropout is nan, expected a finite number\.",
    f"{OF_GAT} model.attention_dropout=2": r"model\.attention_dropout is 2, expected a number from 0 to 1\.",
    f"{OF_GAT} model.norm_frist=true": r"GAT has no argument model\.norm_frist\. Did you mean model\.norm_first\?",
    f"{OF_GAT} model.feed_forward=0": r"model\.feed_forward is 0, expected a whole number, at least 1 or null\.",
    f"{OF_GAT} model.backend=cuda": r"model\.backend is 'cuda', expected auto, fused, segment or reference\.",
    "model.hidden_channels=0": r"model\.hidden_channels is 0, expected a whole number, at least 1\.",
    "model.num_layers=-1": r"model\.num_layers is -1, expected a whole number, at least 1\.",
    "model.encoder=[8,8]": r"model\.encoder is \[8, 8\], expected a width, at least 1, or a mapping such as ",
    "model.encoder={width:8}": r"model\.encoder is \{'width': 8\}, expected a width, at least 1, or a mapping such as ",
    "+model.method=3": r"model\.method is 3, expected text: a name in the results\.",
    "+dataset.k=abc": r"dataset\.k is 'abc', expected a whole number, at least 0\.",
    "+dataset.neighbours=3": r"digits has no argument dataset\.neighbours\. Known are: dataset\.k\.",
    "dataset._target_=gat_pyg.data.planted +dataset.nodes=abc": r"dataset\.nodes is 'abc', expected a whole number, at",
    "dataset._target_=abc": r"dataset\._target_=abc cannot be called, expected a class or a function\.",
    "methods=5": r"methods is 5, expected null or a list such as \[gat,gcn\]",
    "methods=[5]": r"methods is \[5\], expected null or a list such as \[gat,gcn\]",
    "methods=[[]]": r"methods is \[\[\]\], expected null or a list such as \[gat,gcn\]",
    "datasets=5": r"datasets is 5, expected null or a list such as \[cora,citeseer\]",
    "datasets=[[]]": r"datasets is \[\[\]\], expected null or a list such as \[cora,citeseer\], where a data set with",
    "seeds_per_pass=true": r"seeds_per_pass is True, expected auto or a whole number, at least 1\.",
    "metric=f1": r"metric is 'f1', expected null or one of accuracy, .* Did you mean micro_f1 or macro_f1\?",
    "training.lr=inf": r"training\.lr is inf, expected a finite number, at least 0\.",
    "training.lr=1e400": r"training\.lr is inf, expected a finite number, at least 0\.",
    "training.weight_decay=inf": r"training\.weight_decay is inf, expected a finite number, at least 0\.",
    "training.sparse=0": r"training\.sparse is 0, expected auto, true or false\.",
    "ckpt_path=": r"ckpt_path is '', expected null, last or the path of a checkpoint\.",
    "data_root=[]": r"data_root is \[\], expected null or the path of a folder",
    "outputs=": r"outputs is '', expected the path of a folder, such as outputs or \./1\.",
    "outputs=null": r"outputs is None, expected the path of a folder, such as outputs or \./1\.",
    "results=": r"results is '', expected the path of a file",
    "results=null": r"results is None, expected the path of a file",
    "vectorize=perhaps": r"vectorize is 'perhaps', expected auto, on or off\.",
    "seeds_per_pass=0": r"seeds_per_pass is 0, expected auto or a whole number, at least 1\.",
    "processes=2 trainer.strategy=ddp": r"processes is 2, which train one seed each, but trainer\.strategy is ddp",
    "processes=0": r"processes is 0, expected a whole number",
    "runs=0": r"runs is 0, expected a whole number, at least 1\.",
    "seed=-1": r"seed is -1, expected a whole number, at least 0\.",
    "seed=abc": r"seed is 'abc', expected a whole number, at least 0\.",
    "training.lr=abc": r"training\.lr is 'abc', expected a finite number, at least 0\.",
    "training.lr=-1": r"training\.lr is -1, expected a finite number, at least 0\.",
    "training.lr=nan": r"training\.lr is nan, expected a finite number, at least 0\.",
    "optimizer.lr=0.1": r"optimizer\.lr is set by the command\. Write training\.lr=\.\.\.",
    "optimizer.weight_decay=0": r"optimizer\.weight_decay is set by the command\. Write training\.weight_decay=",
    "optimizer.beta=0.9": r"Adam has no argument optimizer\.beta\. Did you mean optimizer\.betas\?",
    "optimizer._target_=torch.optim.SGD optimizer.momentum=-1": "SGD cannot be used: Invalid momentum value: -1",
    f"{STEP} scheduler.optimizer=1": r"scheduler\.optimizer is set by the command\. Leave it out\.",
    f"{STEP} scheduler.size=3": r"StepLR has no argument scheduler\.size\. Did you mean scheduler\.step_size\?",
    STEP: "StepLR cannot be used: .*missing 1 required positional argument: 'step_size'",
    "training.ema=1": r"training\.ema is 1, expected null or a number between 0 and 1\.",
    "training.gradient_clip_val=0": r"training\.gradient_clip_val is 0, expected null or a number above 0\.",
    "training.gradient_clip_val=1 +trainer.gradient_clip_val=1": r"trainer\.gradient_clip_val clips too\. Leave it",
    "scheduler._target_=torch.optim.lr_scheduler.ConstantLR": r"may never run out, .*max_epochs=100000\. Set",
    "training.patience=null": r"training\.patience is null, so training ends after training\.max_epochs=100000\. Set",
    "training.weight_decay=-0.5": r"training\.weight_decay is -0\.5, expected a finite number, at least 0\.",
    "training.batch_size=0": r"training\.batch_size is 0, expected a whole number, at least 1\.",
    "training.batch_size=true": r"training\.batch_size is True, expected a whole number, at least 1\.",
    "training.patience=x": r"training\.patience is 'x', expected null or a whole number, at least 1\.",
    "training.patience=2.5": r"training\.patience is 2\.5, expected null or a whole number, at least 1\.",
    "split.val=x": r"split\.val is 'x', expected null or a whole number, at least 0\.",
    "seed=4294967295 runs=2": r"seed is 4294967295 with runs=2, expected seeds from 0 to 2\^32 - 1\.",
    "training.max_epochs=0": r"training\.max_epochs is 0, expected a whole number, at least 1\.",
    "training.patience=0": r"training\.patience is 0, expected null or a whole number, at least 1\.",
    "training.criterion=f1": r"training\.criterion is 'f1', expected both, accuracy \(or micro-F1\) or loss\.",
    "training.sparse=perhaps": r"training\.sparse is 'perhaps', expected auto, true or false\.",
    "training.compile=auto": r"training\.compile is 'auto', expected true or false\.",
    "loss.class_weight=[1,a]": r"loss\.class_weight is \[1, 'a'\], expected null, balanced or a list of finite numbers",
    "loss.pos_weight=0": r"loss\.pos_weight is 0, expected null, balanced, a finite number above 0, or a list of",
    "loss.label_smoothing=1": r"loss\.label_smoothing is 1, expected a number from 0 to below 1\.",
    "loss.focal=-1": r"loss\.focal is -1, expected a finite number, at least 0\.",
    "loss.error=l1": r"loss\.error is 'l1', expected null, mse, mae or huber\.",
    "+loss.gamma=2": r"loss\.gamma is unknown\. Known are: loss\.class_weight, ",
    "ckpt_path=x.ckpt runs=2": r"ckpt_path=x\.ckpt is one checkpoint, but runs=2\.",
    "model._target_=torch.nn.Linear": r"Linear has no argument model\.\w+\. Known are: model\.in_features, ",
    "model._target_=gat_pyg.data.Task": r"model\._target_=gat_pyg\.data\.Task is not a torch\.nn\.Module",
    "model._target_=gat_pyg.models.Gat": r"_target_=gat_pyg\.models\.Gat cannot be imported \(.*'gat_pyg\.models\.Gat'",
    "dataset._target_=nowhere.Set": r"cannot be imported \(.* 'nowhere'\)\. Give .* such as mine\.Net for mine\.py",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_settings_are_refused(arguments: str):
    config = copy.deepcopy(composed("model=mlp"))
    OmegaConf.set_readonly(config, None)
    OmegaConf.set_struct(config, False)
    for override in OverridesParser.create().parse_overrides(arguments.split()):
        OmegaConf.update(config, str(override.key_or_group), override.value(), force_add=True)
    with pytest.raises(ValueError, match=WRONG[arguments]):
        suited(Settings.parse(config), [])


TABLES = names("experiment")
OTHERS = {  # lines of other settings than those of today: method, study and data set, by the name of the table
    "table3": {("GraphSAGE*", "trained as GAT", "ppi")},  # its form names the last epoch
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_and_its_recorded_lines_are_of_settings_that_exist(name: str):
    table = composed(f"experiment={name}")
    datasets, models = entries(table.datasets), entries(table.methods)
    assert {dataset for dataset, *_ in datasets} <= {*names("dataset")}
    assert table.runs > 1 or any(text.startswith(("runs=", "split.split=all")) for text in datasets[0])
    here, candidates, names_here = set(), {}, set()
    for dataset, (model, *settings) in product(datasets, models):
        config = composed_for(model, *dataset, *settings)
        if dataset == datasets[0]:
            learns(config, task(graphs="readout" in config.model or "head_layers" in config.model))
        cell = Settings.parse(config)
        half = cell.replace(trainer=Factory("trainer", {**cell.trainer.values, "precision": "bf16-mixed"}))
        here |= {cell.hash, half.hash}
        names_here.add((cell.model.method, dataset_name(cell.dataset.values)))
        candidates.setdefault((model, *dataset), []).append(cell.hash)
    if table.protocol is not None:
        here |= {config_hash({"protocol": table.protocol, "candidates": sorted(some)}) for some in candidates.values()}
    recorded = gathered(line for path in RESULTS.glob(f"*-{name}*.jsonl") for line in lines_of(path))
    if name == "strong":  # lines of other protocols and methods are in its files too
        recorded = {key: its for key, its in recorded.items() if (key.row, key.dataset) in names_here}
    assert recorded
    others = set()
    for key, its in recorded.items():
        by_split = name == "strong"  # which has a row for each kind of splits
        newest = {one.lines[0].result.data if by_split else "": one.setting for one in reversed(its)}
        others |= {(key.row, key.study, key.dataset)} if {*newest.values()} - here else set()
    assert others == OTHERS.get(name, set())


def members(family: str) -> list[str]:
    """Return the data sets of a family, by their sections."""
    return [name for name in names("dataset") if f"override /family: {family}\n" in CHOICES["dataset"][name].text]


def test_a_family_gives_each_of_its_data_sets_its_recipes():
    assert all(len(members(family)) > 1 for family in names("family"))
    for dataset, model in product(members("molecules"), ("gat", "gatv2", "transformer", "gcn")):
        config = composed_for(model, dataset)
        assert (config.model.encoder, config.training.batch_size) == (64, 64)
        assert (config.model.get("norm") == "batch") == (model != "gcn")  # for which it has no recipe
    for dataset in members("links"):
        assert compose("config", [f"dataset={dataset}"]).training.weight_decay == 0


@pytest.mark.parametrize("name", [f"{kind}={name}" for kind in ("recipe/on", "recipe/family") for name in names(kind)])
def test_a_recipe_is_that_of_a_model_and_a_data_set_that_exist(name: str):
    group, _, choice = name.partition("=")
    recipe, model, data = choice.split("-", 2)
    dataset = data if group == "recipe/on" else members(data)[0]
    assert model in names("model") and dataset in names("dataset")
    config = composed_for(model, dataset, f"recipe={recipe}")
    learns(config, task(categories="encoder" in config.model, graphs=data in ("molecules", "tu")))
    own: Any = OmegaConf.to_container(CHOICES[group][choice].node)
    groups = {"dataset", "model", "training", "loss", "scheduler", "optimizer", "encoding", "trainer", "loader"}
    assert own.keys() <= {"defaults", *groups}
    for key, value in flattened({key: own[key] for key in own if key != "defaults"}).items():
        assert "${" in str(value) or OmegaConf.select(config, key) == value


def test_the_recipe_of_a_paper_is_that_of_a_model_that_exists():
    for recipe in names("recipe/method"):
        model = recipe.removeprefix("papers-")
        assert composed(f"model={model}").training != composed(f"model={model}", "recipe=none").training


def test_every_section_of_the_files_is_a_choice_of_its_own():
    lines = [line for path in (config_folder() / "groups").rglob("*.yaml") for line in path.read_text().splitlines()]
    heads = [line.removesuffix(":").split(" @")[0].partition("=") for line in lines if line[:1].strip(" #")]
    listed = [(group, name) for group, _, choices in heads for name in choices.split(", ")]
    assert sorted(listed) == sorted((group, name) for group in CHOICES for name in CHOICES[group])
    assert all(choice.comment for choice in CHOICES["dataset"].values())


@pytest.mark.parametrize("content", ["name: cora\n", "defaults: [pubmed]\n"])
@pytest.mark.parametrize("own", ["dataset/cora", "recipe/on/papers-mlp-cora", "hydra/sweeper/search"])
def test_a_file_with_the_name_of_a_choice_is_refused(own: str, content: str, tmp_path: Path):
    group, _, name = own.rpartition("/")
    (tmp_path / group).mkdir(parents=True)
    (tmp_path / group / "mine.yaml").write_text(content)
    check_names(tmp_path)
    (tmp_path / f"{own}.yaml").write_text(content)
    with pytest.raises(ValueError, match=rf"{own}\.yaml has the name of a choice of gat_pyg, {group}={name}\. Rename"):
        check_names(tmp_path)


@pytest.mark.parametrize("recipe", [f"setup/{name}" for name in names("recipe/setup")])
def test_a_setup_can_be_chosen_for_any_model(recipe: str):
    learns(compose("config", ["model=mlp", f"recipe={recipe}"]), task())


@pytest.mark.parametrize("rule", names("recipe/strong"))
def test_the_rule_of_a_kind_of_task_can_be_chosen_for_any_data_set(rule: str):
    for dataset in ("digits", "molesol"):
        config = composed(f"dataset={dataset}", f"recipe=strong/{rule}")
        learns(config, task(categories="encoder" in config.model))
    assert rule == "graph" or config.model.norm_kwargs == {"mode": "node"}
    assert composed(f"recipe=strong/{rule}", "model.norm=batch").model.get("norm_kwargs") is None


@pytest.mark.parametrize("name", names("search"))
def test_a_search_is_of_at_most_100_settings_that_learn(name: str):
    config = compose("config", [f"search={name}"], return_hydra_config=True)
    sweeper, launcher = config.hydra.sweeper, config.hydra.runtime.choices["hydra/launcher"]
    params = translated([f"{setting}={values}" for setting, values in sweeper.params.items()])
    lists = [[*each.sweep_string_iterator()] for each in OverridesParser.create().parse_overrides(params)]
    space = {text.partition("=")[0]: values for text, values in zip(params, lists, strict=True)}
    assert math.prod(map(len, lists)) <= 100 and launcher == "stacked"
    for ends in (0, -1):
        learns(composed(f"search={name}", *(f"{setting}={values[ends]}" for setting, values in space.items())), task())


@pytest.mark.parametrize(
    ("model", "dataset", "expected"),
    [
        (
            "gat",
            "digits",
            r"recipe=strong has no settings of model=gat for dataset=digits, only for dataset=.*minesweep.*"
            r" gat-pyg -m search=node dataset=d",
        ),
        ("gcn", "minesweeper", r"model=gcn for dataset=minesweeper, only for model=gat\.$"),
    ],
)
def test_a_recipe_of_data_sets_is_refused_for_others(model: str, dataset: str, expected: str):
    choices = {"recipe": "strong", "model": model, "dataset": dataset, "recipe/on": f"strong-{model}-{dataset}"}
    with pytest.raises(ValueError, match=expected):
        check_recipe(choices)
    check_recipe({**choices, "recipe": "papers"})
    check_recipe(strong := {**choices, "model": "gat", "dataset": "minesweeper"})
    with pytest.raises(ValueError, match=r"recipe=strong has no settings"):  # of a class by dataset._target_
        check_recipe({name: choice for name, choice in strong.items() if name != "recipe/on"})


@pytest.mark.parametrize("group", ["loader", "trainer", "logger", "optimizer", "scheduler"])
def test_every_choice_composes(group: str):
    for name in names(group):
        config = composed(f"{group}={name}", "training.max_epochs=60")  # which a scheduler needs
        Settings.parse(config)


def test_hydra_leaves_logging_as_it_is():
    """Its own default would silence the warnings of every library that is imported by then."""
    hydra = compose("config", return_hydra_config=True).hydra
    assert hydra.job_logging.root is None and hydra.hydra_logging.root is None


@pytest.mark.parametrize(
    ("aggr", "method", "channels"), [("gcn", "GCN", None), ("lstm", "LSTM", 128), ("pool", "pool", 512)]
)
def test_an_aggregator_brings_its_name_and_size(aggr: str, method: str, channels: int | None):
    settings = parsed("model=sage", f"model.aggr={aggr}")
    assert (settings.model.name, settings.model.get("aggr_channels")) == (f"GraphSAGE-{method}", channels)


@pytest.mark.parametrize(
    ("overrides", "name", "labels"),
    [
        ("model=gat", "GAT", ("GAT", None, None)),
        ("model=gcn64 model.act=elu", "GCN-64* (ELU)", ("GCN-64*", "ELU", None)),
        ("model=chebyshev model.order=3", "Chebyshev (K = 3)", ("Chebyshev", "K = 3", None)),
        ("model=gat +model.study=ablation +model.form=text", "GAT: text", ("GAT", "text", "ablation")),
        (
            "model=sage_star '+model.study=trained as GAT'",
            "GraphSAGE*, trained as GAT",
            ("GraphSAGE*", None, "trained as GAT"),
        ),
    ],
)
def test_the_name_of_a_method_is_made_of_its_labels(overrides: str, name: str, labels: tuple[str | None, ...]):
    model = parsed(*shlex.split(overrides)).model
    assert (model.name, (model.method, model.get("form"), model.get("study"))) == (name, labels)


# Section 3.3 of the paper: heads, C, dropout, L2, learning rate, batch, what the stop looks at; parameters.
PAPER = {
    "gat_cora": ((1433, 7), [8], [8, 1], 0.6, 5e-4, 0.005, 1, "both", 92373),
    "gat_citeseer": ((3703, 6), [8], [8, 1], 0.6, 5e-4, 0.005, 1, "accuracy", 237586),
    "gat_pubmed": ((500, 3), [8], [8, 8], 0.6, 1e-3, 0.01, 1, "both", None),
    "gat_ppi": ((50, 121), [256, 256], [4, 4, 6], 0.0, 0.0, 0.005, 2, "both", None),
    "const_gat_ppi": ((50, 121), [256, 256], [4, 4, 6], 0.0, 0.0, 0.005, 2, "both", None),
}


@pytest.mark.parametrize("experiment", PAPER)
def test_the_papers_numbers(experiment: str):
    sizes, hidden, heads, dropout, l2, lr, batch, criterion, parameters = PAPER[experiment]
    name, _, dataset = experiment.rpartition("_")
    config = composed_for(name, dataset)
    model, training = config.model, config.training
    assert (model.hidden_channels, model.heads, model.dropout) == (hidden, heads, dropout)
    assert (training.weight_decay, training.lr, training.batch_size, training.criterion) == (l2, lr, batch, criterion)
    assert (training.patience, config.trainer.max_epochs) == (100, 100_000)
    assert (model.residual == [False, True, False]) == ("ppi" in experiment)
    assert (model.get("mechanism") == "constant") == ("const" in experiment)
    if parameters is not None:
        F, K = sizes
        data = Data(torch.zeros(1, F), torch.zeros(2, 0, dtype=torch.long), y=torch.zeros(1, K))
        like = Task("like", [data], [data.clone()], [data.clone()], F, NodeMultiLabels(K))
        built, *_ = build_model(Settings.parse(config).model, like)
        assert sum(parameter.numel() for parameter in built.parameters()) == parameters


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in ("loader", "trainer") for name in names(group)])
def test_settings_come_back_from_their_plain_values(choice: str):
    config = composed(choice, "vectorize=on", "methods=[[gat,'runs=2']]")
    settings = Settings.parse(config)
    assert Settings.parse(OmegaConf.create(settings.to_dict())) == settings
    plain, values = flattened(OmegaConf.to_container(config, resolve=True)), flattened(settings.to_dict())
    for key in ("num_neighbors", "num_parts", "num_links"):  # null, as if it were not set
        assert plain.pop(f"loader.{key}", None) == values.pop(f"loader.{key}", None)
    assert values == plain | {"vectorize": True}


def test_a_data_set_has_the_metric_of_its_benchmark():
    assert parsed("dataset=minesweeper").metric == "roc_auc"
    assert parsed("dataset=minesweeper", "metric=accuracy").metric == "accuracy"
    assert parsed("dataset=cora").metric is None


def test_average_precision_has_one_name():
    short, long = (parsed(f"metric={name}") for name in ("ap", "average_precision"))
    assert short == long and short.metric == "average_precision"
    assert "ap" not in METRICS and metric_named("ap") is METRICS["average_precision"]
    for objective in (NodeLabels(3), NodeMultiLabels(3), LinkLabels(3)):
        assert objective.scored_by("ap") == objective.scored_by("average_precision")


def test_what_the_command_sets_itself_is_in_no_users_settings():
    config = compose("config")
    assert not {*INTERNAL} & {*config} and not {*INTERNAL} & {*Settings.parse(config).to_dict()}
    cell = Settings.parse(config).replace(candidates=["a"], content="b")
    assert Settings.parse(OmegaConf.create(cell.to_dict())) == cell


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("dataset", ["cora", "molesol"])
def test_an_argument_of_the_model_needs_no_sign_whether_a_recipe_has_it_or_not(dataset: str, sign: str):
    config = compose(
        "config", translated([f"dataset={dataset}", f"{sign}model.norm=layer", f"{sign}model.dropout=0.3"])
    )
    assert (config.model.norm, config.model.dropout) == ("layer", 0.3)
    with pytest.raises(ValueError, match=r"GAT has no argument model\.nrom\. Did you mean model\.norm\?"):
        Settings.parse(compose("config", translated([f"dataset={dataset}", f"{sign}model.nrom=layer"])))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("dataset=cora", True),
        ("dataset=cora model.reproduction=true training.criterion=loss seed=3 runs=5 trainer.devices=2", True),
        ("dataset=cora model=gcn64 model.act=elu", True),
        ("dataset=ppi model=sage model.aggr=pool", True),
        ("dataset=cora ++model.num_layers=5 model.hidden_channels=8 model.heads=8", False),
        ("dataset=cora split.val=100", False),
        ("dataset=cora training.lr=0.01", False),
        ("dataset=cora training.max_epochs=5", False),
        ("dataset=cora loader=neighbor", False),
        ("dataset=pubmed ~recipe/on", False),
        ("dataset=digits", False),  # not in the paper
    ],
)
def test_only_the_settings_of_the_papers_runs_are_shown_beside_its_numbers(settings: str, expected: bool):
    overrides = settings.split()
    model = next((text.partition("=")[2] for text in overrides if text.startswith("model=")), "gat")
    cell = parsed(*overrides).replace(cell=model)
    assert as_published(cell) is expected


def test_settings_of_recipes_and_data_sets_may_have_no_effect():
    settings = parsed("++model.readout=sum", "split.val=3", "training.batch_size=2")
    check_effects(settings, digits())
    with pytest.raises(ValueError, match=r"training\.batch_size has no effect"):
        check_effects(settings.replace(passed=names_of(["training.batch_size=2"])), digits())


def test_the_loss_has_the_options_that_fit_the_task_and_is_hashed():
    settings = parsed("loss.class_weight=balanced", "loss.focal=2")
    objective = build_task(settings).objective
    assert isinstance(objective, NodeLabels) and objective.class_weight == (1.0,) * 10 and objective.focal == 2
    assert parsed("loss.focal=0.0").hash == parsed().hash != settings.hash
    expected = r"digits: pos_weight does not fit 10 node classes, expected class_weight, label_smoothing, focal\."
    with pytest.raises(ValueError, match=expected):
        build_task(parsed("loss.pos_weight=balanced"))
    fitted = parsed("model=deepwalk", "loss.focal=2").replace(passed={"loss.focal"})
    with pytest.raises(ValueError, match=r"loss has no effect: DeepWalk has a loss of its own\. Leave it out\."):
        check_effects(fitted, digits())


def test_a_function_may_take_a_setting_of_the_split_by_another_name():
    settings = parsed("split.val=123", "split.test=45")
    dataset = Factory("dataset", {"_target_": "mine.links", "graph": {"_target_": "mine.graph", "num_val": 123}})
    settings = settings.replace(dataset=dataset)
    check_effects(settings.replace(passed=names_of(["split.val=123"])), digits())
    with pytest.raises(ValueError, match=r"split\.test has no effect: digits has a split of its own\. Leave it out\."):
        check_effects(settings.replace(passed=names_of(["split.test=45"])), digits())


def test_a_setting_of_a_random_split_beside_folds_is_an_error_with_advice():
    settings = parsed("dataset=mutag", "split.val=3")
    labels = torch.arange(30) % 2
    folds = from_dataset([Data(torch.randn(2, 1), torch.tensor([[0], [1]]), y=y[None]) for y in labels], folds=3)
    with pytest.raises(ValueError, match=r"split\.folds, split\.fold, .* Leave it out, or choose split\.folds=null\."):
        check_effects(settings.replace(passed=names_of(["split.val=3"])), folds)


def test_the_size_of_batches_of_nodes_has_no_effect_on_batches_of_pairs():
    settings = parsed("+loader.num_links=8", "+loader.batch_size=4")
    with pytest.raises(ValueError, match=r"loader\.batch_size has no effect: a step takes loader\.num_links pairs of"):
        check_effects(settings.replace(passed=names_of(["+loader.batch_size=4"])), digits())


@pytest.mark.parametrize("loader", ["full", "neighbor", "cluster"])
def test_a_loader_that_is_passed_replaces_that_of_a_recipe(loader: str):
    recipe, passed, elsewhere = (
        parsed(*overrides).loader
        for overrides in (["dataset=ogbl-ddi"], ["dataset=ogbl-ddi", f"loader={loader}"], [f"loader={loader}"])
    )
    assert recipe.num_neighbors == [30, 30] and recipe.num_links is None
    chosen = ("num_neighbors", "num_parts", "num_links")
    assert [getattr(passed, key) for key in chosen] == [getattr(elsewhere, key) for key in chosen]


def drawn(y: Tensor, task: str | None = None, graphs: int = 1, **options: Any) -> tuple[str, ...] | None:
    """Return the arguments on which the split of graphs with these labels depends."""
    masks = options.pop("masks", ())
    edges = torch.tensor([[0, 1], [1, 0]])
    one = Data(torch.randn(len(y) if graphs == 1 else 3, 2), edges, y=y)
    for key in masks:
        one[key] = torch.arange(len(y)) % 3 == MASKS.index(key)
    data = one if graphs == 1 else [one.clone() for _ in range(graphs)]
    return from_dataset(data, "drawn", 1, 2, 2, task=task, **options).split_arguments


def test_a_task_knows_the_arguments_on_which_its_split_depends():
    classes, masks = torch.arange(12) % 2, ("train_mask", "val_mask", "test_mask")
    assert drawn(classes) == ("per_class", "val", "test", "seed")
    assert drawn(classes, masks=masks) == ()
    assert drawn(classes, masks=masks[1:]) == ("per_class", "seed")
    assert drawn(torch.rand(12)) == ("val", "test", "seed")
    for options, expected in (
        ({"task": "graph_regression"}, ("val", "test", "seed")),
        ({"folds": 3}, ("folds", "fold", "seed")),
    ):
        with pytest.warns(UserWarning, match="all known training labels are equal"):
            assert drawn(torch.tensor([0]), graphs=9, **options) == expected


def test_settings_cannot_be_changed():
    settings = parsed()
    for part, name in ((settings, "seed"), (settings.training, "lr"), (settings.model, "values")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, 1)


@pytest.mark.parametrize("dataset", ["digits", "planted"])
def test_data_sets_that_need_no_files(dataset: str):
    built = build_task(parsed(f"dataset={dataset}"))
    assert (built.name, built.has_many_graphs) == (dataset, dataset != "digits")


@pytest.mark.parametrize("trainer", names("trainer"))
def test_trainers(trainer: str, tmp_path: Path):
    if trainer == "ray":
        pytest.skip("it is built in the processes that Ray starts")
    config = compose("config", [f"trainer={trainer}", "training.max_epochs=7"])
    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        config.trainer.accelerator = "cpu"  # the rest of it is built all the same
        config.trainer.devices = 1
    settings = Settings.parse(config)
    built = build_trainer(settings.trainer, settings.logger, tmp_path)
    assert built.max_epochs == 7
    assert built.world_size == (2 if trainer == "ddp_cpu" else 1)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("gpus", "settings"),
    [
        (2, ["trainer=ddp"]),
        (2, ["trainer=ddp", "trainer.devices=-1"]),
        (2, ["trainer=ddp", "trainer.devices=2"]),
        (2, ["trainer=gpu", "trainer.devices=[1]"]),
        (2, ["trainer=gpu", "trainer.devices='0,1'"]),
        (2, ["trainer=ddp", "trainer.devices='2'"]),
        (0, ["trainer=ddp_cpu", "trainer.devices=4"]),
        (0, ["trainer=ray", "trainer.accelerator=gpu"]),  # on Ray's machines
    ],
)
def test_gpus_that_suffice_are_not_refused(gpus: int, settings: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    check_gpus(parsed(*settings).trainer)


@pytest.mark.parametrize("logger", names("logger"))
def test_loggers(logger: str, tmp_path: Path):
    settings = parsed(f"logger={logger}")
    try:
        built = build_logger(settings.logger, tmp_path)
    except ValueError as error:
        assert f"Run: python -m pip install {logger}" in str(error)  # noqa: PT017 (whether it is raised is the machine's)
    else:
        assert built is False if logger == "csv" else Path(built.save_dir) == tmp_path
