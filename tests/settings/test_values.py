"""The values of settings: which are refused, have an effect, and come back."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch_geometric.data import Data

from gat_pyg.data import digits, from_dataset
from gat_pyg.runs.defaults_by_data import suited
from gat_pyg.runs.process import check_gpus
from gat_pyg.runs.task import build_task
from gat_pyg.runs.unused import check_effects
from gat_pyg.settings.factory import Factory
from gat_pyg.settings.hashing import data_settings, flattened
from gat_pyg.settings.options import Split
from gat_pyg.settings.overrides import names_of, translated
from gat_pyg.settings.settings import INTERNAL, Settings, rules
from gat_pyg.tasks.links import LinkLabels
from gat_pyg.tasks.metrics import METRICS, metric_named
from gat_pyg.tasks.nodes import NodeLabels, NodeMultiLabels
from gat_pyg.tasks.objective import MASKS
from tests.settings.compositions import composed, composed_for, names, parsed, task

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


STEP = "scheduler._target_=torch.optim.lr_scheduler.StepLR"


OF_GAT = "model._target_=gat_pyg.models.GAT"


WRONG = {
    "training.lrr=1": r"training\.lrr is unknown\. Did you mean training\.lr\?",
    "lr=1": r"lr is unknown\. Did you mean training\.lr\?",
    "model.dropuot=0": r"MLP has no argument model\.dropuot\. Did you mean model\.dropout\?",
    "loader.num_neighbors=[5,5]": r"num_neighbors is \[5, 5\], but loader=full takes .* Choose loader=neighbor\.",
    "loader.num_neighbors=[0]": r"loader\.num_neighbors is \[0\], expected null or a list",
    "+loader.num_parts=4": r"num_parts is 4, but loader=full takes whole graphs\. Choose loader=cluster\.",
    "+trainer.limit_train_batches=0": r"trainer\.limit_train_batches is 0, expected a number above 0\.",
    "+trainer.callbacks=[1]": r"trainer\.callbacks is set by the command\. Leave it out\.",
    "+trainer.enable_checkpointing=true": r"trainer\.enable_checkpointing is set by the command\.",
    "+trainer.speed=3": r"Trainer has no argument trainer\.speed\. Known are: trainer\.accelerator, ",
    "trainer.devices=0": r"trainer\.devices is 0, expected auto, a number of devices, at least 1, or a list",
    "model.dropout=nan": r"model\.dropout is nan, expected a finite number\.",
    f"{OF_GAT} model.attention_dropout=2": r"model\.attention_dropout is 2, expected a number from 0 to 1\.",
    f"{OF_GAT} model.norm_frist=true": r"GAT has no argument model\.norm_frist\. Did you mean model\.norm_first\?",
    f"{OF_GAT} model.feed_forward=0": r"model\.feed_forward is 0, expected a whole number, at least 1 or null\.",
    f"{OF_GAT} model.backend=cuda": r"model\.backend is 'cuda', expected auto, fused, segment or reference\.",
    "model.hidden_channels=0": r"model\.hidden_channels is 0, expected a whole number, at least 1\.",
    "model.encoder=[8,8]": r"model\.encoder is \[8, 8\], expected a width, at least 1, or a mapping such as ",
    "model.encoder={width:8}": r"model\.encoder is \{'width': 8\}, expected a width, at least 1, or a mapping such as ",
    "+model.method=3": r"model\.method is 3, expected text: a name in the results\.",
    "+dataset.neighbours=3": r"digits has no argument dataset\.neighbours\. Known are: dataset\.k\.",
    "dataset._target_=gat_pyg.data.planted +dataset.nodes=abc": r"dataset\.nodes is 'abc', expected a whole number, at",
    "dataset._target_=abc": r"dataset\._target_=abc cannot be called, expected a class or a function\.",
    "methods=[[]]": r"methods is \[\[\]\], expected null or a list such as \[gat,gcn\]",
    "datasets=[[]]": r"datasets is \[\[\]\], expected null or a list such as \[cora,citeseer\], where a data set with",
    "metric=f1": r"metric is 'f1', expected null or one of accuracy, .* Did you mean micro_f1 or macro_f1\?",
    "outputs=": r"outputs is '', expected the path of a folder, such as outputs or \./1\.",
    "results=": r"results is '', expected the path of a file",
    "seeds_per_pass=0": r"seeds_per_pass is 0, expected auto or a whole number, at least 1\.",
    "seed=-1": r"seed is -1, expected a whole number, at least 0\.",
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
    "training.batch_size=true": r"training\.batch_size is True, expected a whole number, at least 1\.",
    "seed=4294967295 runs=2": r"seed is 4294967295 with runs=2, expected seeds from 0 to 2\^32 - 1\.",
    "training.patience=0": r"training\.patience is 0, expected null or a whole number, at least 1\.",
    "loss.class_weight=[1,a]": r"loss\.class_weight is \[1, 'a'\], expected null, balanced or a list of finite numbers",
    "loss.pos_weight=0": r"loss\.pos_weight is 0, expected null, balanced, a finite number above 0, or a list of",
    "loss.label_smoothing=1": r"loss\.label_smoothing is 1, expected a number from 0 to below 1\.",
    "+loss.gamma=2": r"loss\.gamma is unknown\. Known are: loss\.class_weight, ",
    "ckpt_path=x.ckpt runs=2": r"ckpt_path=x\.ckpt is one checkpoint, but runs=2\.",
    "model._target_=torch.nn.Linear": r"Linear has no argument model\.\w+\. Known are: model\.in_features, ",
    "model._target_=gat_pyg.data.Task": r"model\._target_=gat_pyg\.data\.Task is not a torch\.nn\.Module",
    "model._target_=gat_pyg.models.Gat": r"_target_=gat_pyg\.models\.Gat cannot be imported \(.*'gat_pyg\.models\.Gat'",
    "dataset._target_=nowhere.Set": r"cannot be imported \(.* 'nowhere'\)\. Give .* such as mine\.Net for mine\.py",
}


def changed(values: Iterable[tuple[str, Any]]) -> DictConfig:
    """The settings of a perceptron with other values, without their composition."""
    config = copy.deepcopy(composed("model=mlp"))
    OmegaConf.set_readonly(config, None)
    OmegaConf.set_struct(config, False)
    for name, value in values:
        OmegaConf.update(config, name, value, merge=False, force_add=True)
    return config


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_settings_are_refused(arguments: str):
    overrides = OverridesParser.create().parse_overrides(arguments.split())
    config = changed((str(override.key_or_group), override.value()) for override in overrides)
    with pytest.raises(ValueError, match=WRONG[arguments]):
        suited(Settings.parse(config), [])


def test_every_setting_is_refused_by_its_rule_with_its_name():
    for name, rule in rules().items():
        with pytest.raises(ValueError, match=re.escape(f"{name} is {{}}, expected {rule.expected}.")):
            Settings.parse(changed([(name, {})]))


@pytest.mark.parametrize("group", ["loader", "trainer", "logger", "optimizer", "scheduler"])
def test_settings_come_back_from_their_plain_values(group: str):
    for name in names(group):
        config = composed(f"{group}={name}", "vectorize=on", "methods=[[gat,'runs=2']]", "training.max_epochs=60")
        settings = Settings.parse(config)
        assert Settings.parse(OmegaConf.create(settings.to_dict())) == settings
        plain, values = flattened(OmegaConf.to_container(config, resolve=True)), flattened(settings.to_dict())
        for key in ("num_neighbors", "num_parts", "num_links"):  # null, as if it were not set
            assert plain.pop(f"loader.{key}", None) == values.pop(f"loader.{key}", None)
        assert values == plain | {"vectorize": True}


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


NO_EFFECT = {
    "model.readout=sum": r"model\.readout has no effect: digits predicts 10 node classes, and a readout is for",
    "+loader.batch_size=4": r"loader\.batch_size has no effect: loader=full takes whole graphs\. Choose",
    "+loader.num_links=8 +loader.batch_size=4": r"loader\.batch_size has no .*: a step takes loader\.num_links",
    "training.batch_size=4": r"training\.batch_size has no effect: digits is one graph, .* or choose loader=neig",
    "split.val=10": r"split\.val has no effect: digits has a split of its own\. Leave it out\.",
    "split.folds=10": r"split\.folds has no effect: digits has a split of its own\. Leave it out\.",
    "split.fold=1": r"split\.fold has no effect: digits has a split of its own\. Leave it out\.",
    "scheduler.patience=5": r"scheduler\.patience has no effect: there is no scheduler\. Choose one of",
    "encoding.k=5": r"encoding\.k has no effect: there is no encoding\. Choose one of conf/encoding",
}


@pytest.mark.parametrize("overrides", NO_EFFECT)
def test_settings_without_effect_are_refused_unless_a_recipe_or_data_set_has_them(overrides: str):
    settings = parsed(*translated(overrides.split()))
    check_effects(settings, digits())
    with pytest.raises(ValueError, match=NO_EFFECT[overrides]):
        check_effects(settings.replace(passed=names_of(overrides.split()[-1:])), digits())


def test_batches_and_random_splits_without_effect_name_the_other_setting():
    graphs, settings = task(graphs=True), parsed("+loader.batch_size=4")
    reason = r"has no effect: tiny has many graphs, and a step takes training\.batch_size of them"
    with pytest.raises(ValueError, match=reason):
        check_effects(settings.replace(passed=names_of(["loader.batch_size=4"])), graphs)
    shares = from_dataset(Data(torch.randn(9, 2), torch.zeros(2, 1).long(), y=torch.rand(9)), val=2, test=2)
    settings = parsed("split.per_class=3").replace(passed={"split.per_class"})
    with pytest.raises(ValueError, match=r"split\.per_class has no effect: .* by split\.val, split\.test, "):
        check_effects(settings, shares)


def test_a_training_that_cannot_learn_is_warned_of():
    with (
        pytest.warns(UserWarning, match=r"training\.lr is 0, so the weights keep"),
        pytest.warns(UserWarning, match=r"model\.dropout is 1, so training drops everything"),
        pytest.warns(UserWarning, match=r"model\.edge_dropout is 1"),
    ):
        check_effects(parsed("training.lr=0", "model.dropout=1", "++model.edge_dropout=1"), digits())


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


def test_settings_cannot_be_changed():
    settings = parsed()
    for part, name in ((settings, "seed"), (settings.training, "lr"), (settings.model, "values")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, 1)


@pytest.mark.parametrize(
    ("gpus", "settings", "message"),
    [
        (2, "trainer=ddp", ""),
        (2, "trainer=ddp trainer.devices=-1", ""),
        (2, "trainer=ddp trainer.devices=2", ""),
        (2, "trainer=gpu trainer.devices=[1]", ""),
        (2, "trainer=gpu trainer.devices='0,1'", ""),
        (2, "trainer=ddp trainer.devices='2'", ""),
        (0, "trainer=ddp_cpu trainer.devices=4", ""),
        (0, "trainer=gpu", r"trainer\._target_=.* On this machine, trainer=cpu or trainer=ddp_cpu may work\."),
        (1, "trainer=ddp trainer.strategy=halo trainer.devices='2'", r"requested gpu: \[0, 1\] But .* has: \[0\]"),
        (2, "trainer=ddp trainer.devices='0,2'", r"requested gpu: \[0, 2\] But .* has: \[0, 1\] On this machine"),
    ],
)
def test_missing_gpus_are_named(gpus: int, settings: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    trainer = parsed(*settings.split()).trainer
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_gpus(trainer)


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("dataset", ["cora", "molesol"])
def test_an_argument_of_the_model_needs_no_sign_whether_a_recipe_has_it_or_not(dataset: str, sign: str):
    config = compose(
        "config", translated([f"dataset={dataset}", f"{sign}model.norm=layer", f"{sign}model.dropout=0.3"])
    )
    assert (config.model.norm, config.model.dropout) == ("layer", 0.3)
    with pytest.raises(ValueError, match=r"GAT has no argument model\.nrom\. Did you mean model\.norm\?"):
        Settings.parse(compose("config", translated([f"dataset={dataset}", f"{sign}model.nrom=layer"])))


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


def test_each_fold_is_an_argument_of_the_data():
    settings = Settings.parse(composed_for("gat", "smiles", "split.folds=3")).on_split(2)
    assert settings.dataset.values["fold"] == settings.split.fold == 2
    settings.dataset.check()


def test_every_setting_of_a_split_but_its_number_distinguishes_data():
    names = {field.name for field in dataclasses.fields(Split)}
    chosen = {name for name in names if data_settings({f"split.{name}": 3})}
    assert names - chosen == {"split", "fold"}
