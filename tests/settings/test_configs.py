"""The choices of settings, recipes, tables and searches that the package has."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch_geometric.data import Data

from gat_pyg.data import Task
from gat_pyg.runs.groups import gathered, lines_of
from gat_pyg.runs.network import build_model
from gat_pyg.settings.conf import CHOICES, check_names, config_folder
from gat_pyg.settings.factory import Factory
from gat_pyg.settings.hashing import config_hash, flattened
from gat_pyg.settings.names import dataset_name, recipe_of
from gat_pyg.settings.overrides import check_recipe, translated
from gat_pyg.settings.settings import Settings
from gat_pyg.tasks.nodes import NodeMultiLabels
from tests.settings.compositions import composed, composed_for, learns, names, parsed, task

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def entries(listed: Any) -> list[list[str]]:
    """The name of each method's model, or of each data set, and its settings."""
    return [entry.split() if isinstance(entry, str) else list(entry) for entry in listed]


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


TABLES = names("experiment")
OTHERS = {  # lines of other settings than those of today: method, study and data set, by the name of the table
    "table3": {("GraphSAGE*", "trained as GAT", "ppi")},  # its form names the last epoch
}


MANY_CELLS = ("tu", "proteins-imdb", "ablation")  # which repeat the law for more settings


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weekly] * (name in MANY_CELLS)) for name in TABLES]
)
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
    for dataset, model in product(members("molecules"), ("gat", "gcn")):
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


def test_the_page_lists_the_settings_of_every_data_set_by_name():
    page = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(papers|strong|suited)`.*? \| (`.*`) \|$", page, re.M))
    named = [name for name, choice in CHOICES["dataset"].items() if choice.file != "own"]
    listed = {recipe: [f"`{name}`" for name in named if recipe_of("auto", "gat", name) == recipe] for recipe in rows}
    assert {recipe: sorted(texts.split(", ")) for recipe, texts in rows.items()} == {
        recipe: sorted(texts) for recipe, texts in listed.items()
    }
    assert composed_for("gat", "photo") == composed_for("gat", "photo", "recipe=strong")
    assert composed_for("gcn", "tolokers") == composed_for("gcn", "tolokers", "recipe=none")
    for model, data, recipe in (("gcn", "cora", "papers"), ("gin", "mutag", "papers"), ("gcn", "photo", "suited")):
        assert recipe_of("auto", model, data) == recipe and recipe_of("none", model, data) == "none"


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


def test_hydra_leaves_logging_as_it_is():
    """Its own default would silence the warnings of every library that is imported by then."""
    hydra = compose("config", return_hydra_config=True).hydra
    assert hydra.job_logging.root is None and hydra.hydra_logging.root is None


@pytest.mark.parametrize(
    ("overrides", "name", "labels"),
    [
        ("model=gat", "GAT", ("GAT", None, None)),
        ("model=gcn64 model.act=elu", "GCN-64* (ELU)", ("GCN-64*", "ELU", None)),
        ("model=chebyshev model.order=3", "Chebyshev (K = 3)", ("Chebyshev", "K = 3", None)),
        ("model=sage model.aggr=gcn", "GraphSAGE-GCN", ("GraphSAGE-GCN", None, None)),
        ("model=sage model.aggr=lstm", "GraphSAGE-LSTM", ("GraphSAGE-LSTM", None, None)),
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


def test_a_data_set_has_the_metric_of_its_benchmark():
    assert parsed("dataset=minesweeper").metric == "roc_auc"
    assert parsed("dataset=minesweeper", "metric=accuracy").metric == "accuracy"
    assert parsed("dataset=cora").metric is None


@pytest.mark.parametrize("loader", ["full", "neighbor", "cluster"])
def test_a_loader_that_is_passed_replaces_that_of_a_recipe(loader: str):
    papers = "dataset=ogbl-ddi", "recipe=papers"
    recipe, passed, elsewhere = (
        parsed(*overrides).loader for overrides in ([*papers], [*papers, f"loader={loader}"], [f"loader={loader}"])
    )
    assert recipe.num_neighbors == [30, 30] and recipe.num_links is None
    chosen = ("num_neighbors", "num_parts", "num_links")
    assert [getattr(passed, key) for key in chosen] == [getattr(elsewhere, key) for key in chosen]
