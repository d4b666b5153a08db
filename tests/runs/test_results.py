from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch_geometric.nn import GCN, Linear, SchNet

from gat_pyg import load
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.result import Result, append, read
from gat_pyg.settings import hashing
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.hashing import config_hash, flattened
from gat_pyg.settings.settings import Settings
from gat_pyg.sweeps.messages import _beside

text = st.text(max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
score = number | st.just(math.nan)  # null in the line
count = st.integers(0, 2**40)
results = st.builds(
    Result,
    text,
    text,
    st.sampled_from(["accuracy", "micro_f1"]),
    score,
    count,
    count,
    count,
    score,
    number,
    number,
    count,
    versions=st.dictionaries(text, st.none() | text, max_size=3),
    run_dir=text,
    majority=st.none() | number,
)


def one(seed: int = 0, **fields: object) -> Result:
    result = Result("GAT", "cora", "accuracy", 83.0, seed, 500, 400, 82.0, 9.0, 0.018, 92373)
    return dataclasses.replace(result, **fields)


# Lines --------------------------------------------------------------------------------------------------------------


@given(results)
def test_a_result_comes_back_from_its_one_line(result: Result):
    line = result.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=pytest.fail)  # NaN and infinities are not JSON, but may be in a text
    again = Result.from_json(line)
    for key in ("value", "val"):
        assert getattr(again, key) == pytest.approx(getattr(result, key), rel=0, abs=0, nan_ok=True)
    assert dataclasses.replace(again, value=0.0, val=0.0) == dataclasses.replace(result, value=0.0, val=0.0)


def test_a_later_field_is_left_out_and_a_missing_one_named():
    assert Result.from_json(json.dumps({**dataclasses.asdict(one()), "later": 1})) == one()
    with pytest.raises(ValueError, match=r"missing.*'value'"):
        Result.from_json(json.dumps({k: v for k, v in dataclasses.asdict(one()).items() if k != "value"}))
    for line in ("3", "null", "[" * 200_000, json.dumps({**dataclasses.asdict(one()), "value": "83.1"})):
        with pytest.raises(ValueError, match="not a Result"):
            Result.from_json(line)


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_line_is_named_and_loses_no_other(tmp_path: Path, cut: int):
    path = tmp_path / "results.jsonl"
    append(one(0), path)
    append(one(1), path)
    path.write_bytes(path.read_bytes()[:-cut])  # cut=1: the line is whole, its end is not
    if cut > 1:
        with pytest.warns(UserWarning, match=r"results\.jsonl, line 2 is torn"):
            assert read(path) == [one(0)]
    append(one(2), path)
    if cut == 1:
        assert read(path) == [one(0), one(1), one(2)]
    else:
        with pytest.warns(UserWarning, match="line 2 is torn"):
            assert read(path) == [one(0), one(2)]


def _append_many(path: Path, first: int, times: int) -> None:
    for seed in range(first, first + times):
        append(one(seed, method="x" * 5000), path)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_processes_that_append_at_once_lose_and_tear_nothing(tmp_path: Path):
    path, start = tmp_path / "results.jsonl", multiprocessing.get_context("fork")
    writers = [start.Process(target=_append_many, args=(path, 100 * i, 25)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(result.seed for result in read(path)) == [100 * i + k for i in range(4) for k in range(25)]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "results.jsonl"
    append(one(0), path)
    whole, write = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:7]))
    with pytest.raises(OSError, match=r"No space left on device: .*results\.jsonl"):
        append(one(1), path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\xff\xfe", b"\n{\n"], ids=["torn", "whole", "binary", "half"])
def test_a_line_is_added_once(tmp_path: Path, ending: bytes):
    path = tmp_path / "results.jsonl"
    path.write_bytes(one(0).to_json().encode() + ending)
    before = path.read_bytes()
    append(one(0), path)
    assert path.read_bytes() == before
    for _ in range(2):
        append(one(1), path)
        assert path.read_bytes().splitlines()[-1] == one(1).to_json().encode()
        assert path.read_bytes().count(b'"seed": 1') == 1


# Trained models -----------------------------------------------------------------------------------------------------

ARGUMENTS = {"in_channels": 3, "hidden_channels": 4, "num_layers": 2, "out_channels": 5}
TARGET = "torch_geometric.nn.GCN"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model.safetensors", GCN(**ARGUMENTS), TARGET, ARGUMENTS, dataset="cora")
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "gat_pyg.run.main",  # ours, but no model
        "gat_pyg.run.os.system",  # reached through ours
        "gat_pyg.models.gat.nn.Sequential",
        "torch_geometric.nn.sequential.Sequential",  # its arguments become source code
        "torch_geometric.data.Data",
        "torch.nn.Linear",
        "torch_geometric.nn.Nothing",
        "nowhere",
    ],
)
def test_no_other_class_is_built_by_its_name(folder: Path, target: str):
    save_model(folder / "model.safetensors", GCN(**ARGUMENTS), target, ARGUMENTS)
    with pytest.raises(ValueError, match=rf"names the class {target}, expected .*Build the model yourself: load"):
        load(folder)
    assert isinstance(load(folder, model=GCN(**ARGUMENTS)), GCN)


@pytest.mark.parametrize("case", ["float32", "float16", "float64", "lazy", "schnet"])
def test_a_saved_model_comes_back_in_eval_mode(case: str, tmp_path: Path):
    arguments: dict[str, Any] = {**ARGUMENTS, "dropout": 0.5, "norm": "batch_norm"}
    kind, target = GCN, TARGET
    if case == "lazy":
        arguments = {**ARGUMENTS, "in_channels": -1}
    elif case == "schnet":  # whose constructor computes with its values, which `meta` tensors do not have
        kind, target = SchNet, "torch_geometric.nn.SchNet"
        arguments = {"hidden_channels": 4, "num_filters": 4, "num_interactions": 1}
    model = kind(**arguments)
    if case == "lazy":
        model(torch.ones(2, 3), torch.tensor([[0], [1]]))
    model.to(getattr(torch, case, torch.float32))
    save_model(tmp_path / "model.safetensors", model, target, arguments)
    again = load(tmp_path)
    assert type(again) is kind and not again.training
    state, saved = again.state_dict(), model.state_dict()
    assert state.keys() == saved.keys()
    for key, value in saved.items():
        assert state[key].dtype in (torch.float32, torch.int64) and torch.equal(state[key].to(value.dtype), value), key


def test_weights_of_a_model_of_elsewhere_come_back_shared_ones_too(tmp_path: Path):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    model = build()
    model[1].weight = model[0].weight
    save_model(tmp_path / "model.safetensors", model, "elsewhere.Model", {})
    assert torch.equal(load(tmp_path, model=build())[1].weight, model[0].weight)
    (tmp_path / "plain").mkdir()
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "plain" / "model.safetensors")
    with pytest.raises(ValueError, match="does not name the class"):
        load(tmp_path / "plain")


class Bomb:
    """An object whose pickle makes a folder as it is read."""

    def __reduce__(self) -> object:
        return os.mkdir, ("ran",)


def test_a_damaged_file_is_named_and_runs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    path, model = folder / "model.safetensors", GCN(**ARGUMENTS)
    whole, deep = path.read_bytes(), "[" * 200_000 + "]" * 200_000
    for content in (pickle.dumps(Bomb()), *(whole[:left] for left in (0, 4, 100, -8))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"safetensors cannot be read: .*It is truncated or of another kind"):
            load(folder)
    assert not Path("ran").exists()
    named = '"torch_geometric.nn.GCN"'
    for target, arguments in [(text, "{}") for text in ("null", "3", "[1]", deep)] + [
        (named, text) for text in ("null", '"text"', "[1]", "3", deep)
    ]:
        save_file(model.state_dict(), path, {"gat_pyg": f'{{"target": {target}, "arguments": {arguments}}}'})
        with pytest.raises(ValueError, match=r"model\.safetensors (does not name the class|cannot be read)"):
            load(folder)
    about = {"gat_pyg": json.dumps({"target": TARGET, "arguments": ARGUMENTS})}
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.bool):
        state = {key: value.to(dtype) if "weight" in key else value for key, value in model.state_dict().items()}
        save_file(state, path, about)
        for passed in (None, GCN(**ARGUMENTS)):
            with pytest.raises(ValueError, match=rf"lin\.weight is torch.float32 in the model and {dtype} in the file"):
                load(folder, passed)
    save_model(path, GCN(**ARGUMENTS).double(), TARGET, ARGUMENTS)
    path.write_bytes(path.read_bytes().replace(b'"F64"', b'"C64"'))  # safetensors before 0.6 cannot write nor read them
    with pytest.raises(ValueError, match="cannot be read|torch.float32 in the model and torch.complex64 in the file"):
        load(folder)
    save_model(path, model, TARGET, {**ARGUMENTS, "jk": "unheard"})
    with pytest.raises(ValueError, match=r"has torch_geometric\.nn\.GCN.*which this version cannot build"):
        load(folder)


def test_other_shapes_are_named(folder: Path):
    wide = GCN(**{**ARGUMENTS, "hidden_channels": 7})
    before = wide.convs[0].bias.detach().clone()
    with pytest.raises(ValueError, match=r"convs\.0\.bias has shape \(7,\) in the model and \(4,\) in the file"):
        load(folder, model=wide)
    assert torch.equal(wide.convs[0].bias, before)
    with pytest.raises(ValueError, match=r"norms\.0\.module\.weight \(4,\) of the model is not in the file"):
        load(folder, model=GCN(**ARGUMENTS, norm="batch_norm"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_channels": 5000, "in_channels": 9000}, r"has shape \(5000,\) in the model and \(4,\) in the file"),
        ({"num_layers": 10**9}, r"GCN with num_layers=1000000000, but at most 10000 numbers"),
        ({"hidden_channels": 10**18}, r"GCN with hidden_channels=1000000000000000000, but"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_memory_is_taken(
    folder: Path, changes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
):
    save_model(folder / "model.safetensors", GCN(**ARGUMENTS), TARGET, {**ARGUMENTS, **changes})
    reset = Linear.reset_parameters

    def small(self: Linear) -> None:
        assert self.weight.is_meta
        reset(self)

    monkeypatch.setattr(Linear, "reset_parameters", small)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_what_is_no_run_folder_says_what_to_give(folder: Path, tmp_path: Path):
    def refused(name: str, text: str, seed: int | Literal["all"] | None = None) -> None:
        with pytest.raises((FileNotFoundError, ValueError), match=re.escape(text)):
            load(tmp_path / name, seed=seed)

    refused("nowhere", "nowhere is not a run folder: it does not exist")
    (tmp_path / "job" / "seed-3").mkdir(parents=True)
    refused("job", "job is not a run folder: it has no model.safetensors. Give")
    (tmp_path / "job" / "config.yaml").touch()
    refused("job", "run is not finished. Finish it by ckpt_path=last")
    (tmp_path / "jobs" / "first").mkdir(parents=True)
    (tmp_path / "jobs" / "first" / "model.safetensors").touch()
    refused("jobs", "it holds the runs first. Give one of these.")
    (folder / "model.safetensors").rename(tmp_path / "job" / "seed-3" / "model.safetensors")
    refused("job", "it holds the runs seed-3. Give one of these, or seed=3 or seed='all'")
    assert type(load(tmp_path / "job", seed=3)) is GCN
    assert len(load(tmp_path / "job", seed="all")) == 1
    refused("job", "job has no run of seed 4, expected one of 3.", 4)
    refused("job/seed-3", "seed-3 holds no runs of several seeds. Leave out seed", "all")
    shutil.copytree(tmp_path / "job" / "seed-3", tmp_path / "job" / "seed-x")
    refused("job", "seed-x is not a folder of a seed, expected seed-0, seed-1, ... Rename", "all")


BELOW = {"baselines": {"linear model": 70.0, "random forest": 74.0}, "baselines_error": 2.3}


def near(majority: float, error: float | None) -> dict[str, Any]:
    return {"majority": majority, "standard_error": error, "item": "graph"}


NEAR = "within one standard error of "


@pytest.mark.parametrize(
    ("metric", "value", "fields", "expected"),
    [
        ("accuracy", 71.6, BELOW, "worse than a random forest of the features (74.0 %, standard error 2.3 %)"),
        ("accuracy", 71.8, BELOW, ""),  # within one standard error
        ("accuracy", 97.2973, {"baselines": {"linear model": 100.0}, "baselines_error": 2.7027}, ""),  # 36 and 37 of 37
        ("rmse", 77.0, BELOW, "worse than a linear model of the features (70.000, standard error 2.300)"),
        ("rmse", 60.0, BELOW, ""),
        ("accuracy", math.nan, BELOW, "worse than a random forest"),
        ("accuracy", 50.0, {"majority": 60.0, **BELOW}, "no better than predicting the majority class for every node"),
        ("accuracy", 50.0, near(50.1, 2.5), "no better than predicting the majority class for every graph (50.1 %)"),
        (
            *("accuracy", 52.0, near(50.1, 2.5)),
            f"{NEAR}predicting the majority class for every graph (50.1 %, standard error 2.5 %)",
        ),
        ("accuracy", 53.0, near(50.1, 2.5), ""),
        ("rmse", 2.06, near(2.15, 0.2), f"{NEAR}the best constant prediction (2.150, standard error 0.200)"),
        ("rmse", 1.94, near(2.15, 0.2), ""),
        ("rmse", 2.06, near(2.15, None), ""),  # recorded without it
        ("roc_auc", 0.51, near(0.5, 0.02), f"{NEAR}the same prediction for every graph (0.500, standard"),
        ("roc_auc", math.nan, near(0.5, 0.02), "no better than the same prediction for every graph (0.500)"),
    ],
)
def test_a_score_near_a_constant_prediction_or_below_a_baseline_has_a_warning(
    metric: str, value: float, fields: dict[str, Any], expected: str
):
    warning = Result("GAT", "own", metric, value, 0, 9, 8, value, 9.2, 0.011, 923, **fields).warning
    assert warning.startswith(expected) and bool(warning) == bool(expected)
    assert ("; worse than " in warning) == ({"majority", "baselines"} <= fields.keys())


def test_a_test_score_is_shown_beside_a_constant_prediction():
    scores = ("accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373)
    result = Result("GAT", "cora", *scores, row="GAT", majority=31.9)
    assert _beside(result) == " (constant prediction 31.9 %)"
    assert _beside(result, "averaged prediction 84.0 %").startswith(" (averaged prediction 84.0 %, constant")
    assert (
        _beside(dataclasses.replace(result, value=31.9, dataset="mine")) == ""
    )  # where the warning has the constant's score


def hash_of(*overrides: str) -> str:
    return Settings.parse(compose("config", list(overrides))).hash


def test_the_hash_covers_what_differs_from_the_defaults(monkeypatch: pytest.MonkeyPatch):
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        settings = Settings.parse(compose("config", ["dataset=cora", "training.lr=0.01"]))
        assert hash_of("dataset=cora") == "95a4a9b3b2c7"  # a changed default raises VERSION
        assert hash_of("dataset=cora", "training.lr=0.0050") == hash_of("dataset=cora") != settings.hash
        assert hash_of("training.weight_decay=0") == hash_of("training.weight_decay=0.0")
        assert hash_of("dataset=mutag", "split.fold=1") == hash_of("dataset=mutag")
        assert hash_of("optimizer=adam", "scheduler=none") == hash_of()
        for group in ("optimizer=sgd", "scheduler=step"):
            assert hash_of(group, "training.max_epochs=60") != hash_of("training.max_epochs=60")
        elsewhere = ("trainer.accelerator=auto", "+trainer.strategy=auto", "trainer.deterministic=false")
        two = hash_of("training.max_epochs=2")
        assert two == hash_of("trainer.max_epochs=2") == hash_of("training.max_epochs=2", *elsewhere)
        others = (
            "training.lr=0.1",
            "trainer.max_epochs=1",
            "+trainer.precision=64-true",
            "+trainer.gradient_clip_val=1",
        )
        own = "dataset._target_=torch_geometric.datasets.FakeDataset"
        assert hash_of(own, "+dataset.fold=0") != hash_of(own, "+dataset.fold=1")
        hashes = {hash_of("training.max_epochs=2", other) for other in others}
        assert len({two, *hashes}) == 1 + len(others)
    flat = flattened(settings.to_dict())
    defaults = hashing.defaults() | {"training.new": 3, "split.new": None}
    monkeypatch.setattr(hashing, "defaults", lambda: defaults)
    with_new = flat | {"training.new": 3, "split.new": None}
    assert config_hash(hashing.hashed(with_new)) == settings.hash  # as before the settings were added
    assert config_hash(hashing.hashed(with_new | {"training.new": 4})) != settings.hash
    before = settings.hash
    monkeypatch.setattr(hashing, "VERSION", hashing.VERSION + 1)
    assert settings.hash != before
