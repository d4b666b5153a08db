from __future__ import annotations

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import pickle
import shutil
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch_geometric.nn import GCN, Linear, SchNet

import gat_pyg.files
from gat_pyg import load
from gat_pyg.files import try_lock, unlock, write_whole
from gat_pyg.runs.model_file import save_model
from gat_pyg.runs.result import Result, append, read
from gat_pyg.settings import hashing
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.hashing import config_hash, flattened
from gat_pyg.settings.settings import Settings
from gat_pyg.sweeps.messages import _beside

Capture = pytest.CaptureFixture[str]
text = st.text(max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
count = st.integers(0, 2**40)
results = st.builds(
    Result,
    text,
    text,
    st.sampled_from(["accuracy", "micro_f1"]),
    number,
    count,
    count,
    count,
    number,
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
    assert Result.from_json(line) == result


def test_a_score_that_is_nan_is_null_in_the_line():
    line = Result("GAT", "cora", "accuracy", 10.0, 0, 3, 0, float("nan"), 1.0, 0.3, 9).to_json()
    assert json.loads(line)["val"] is None
    assert math.isnan(Result.from_json(line).val)


def test_a_later_field_is_left_out_and_a_missing_one_named():
    assert Result.from_json(json.dumps({**dataclasses.asdict(one()), "later": 1})) == one()
    with pytest.raises(ValueError, match=r"missing.*'value'"):
        Result.from_json(json.dumps({k: v for k, v in dataclasses.asdict(one()).items() if k != "value"}))
    for line in ("3", "null", "[" * 200_000, json.dumps({**dataclasses.asdict(one()), "value": "83.1"})):
        with pytest.raises(ValueError, match="not a Result"):
            Result.from_json(line)


def test_what_is_appended_is_read_in_order(tmp_path: Path):
    path = tmp_path / "new" / "results.jsonl"
    for seed in range(3):
        append(one(seed), path)
    assert read(path) == [one(0), one(1), one(2)]


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


def test_a_wait_for_the_shared_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture):
    path = tmp_path / "results.jsonl"
    held = try_lock(path)
    assert held is not None
    monkeypatch.setattr(gat_pyg.files, "PATIENCE", 0.1)
    writer = threading.Thread(target=append, args=(one(0), path))
    writer.start()
    writer.join(0.5)
    assert writer.is_alive() and path.read_bytes() == b""
    os.close(held)
    writer.join(10)
    assert read(path) == [one(0)]
    assert capfd.readouterr().err == f"Waiting for {path}, which another process has locked\n"


def test_an_error_of_a_lock_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(gat_pyg.files, "lock_descriptor", fail)
    path = tmp_path / "file"
    for use in (try_lock, partial(append, one(0))):
        with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)) as error:
            use(path)
        assert error.value.filename == str(path)


def test_the_hash_is_of_the_settings_and_not_of_their_order():
    assert config_hash({"a": {"b": 1, "c": 2}}) == config_hash({"a": {"c": 2, "b": 1}})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_a_lock_is_held_by_one(tmp_path: Path):
    first = try_lock(tmp_path / ".lock")
    assert first is not None
    assert try_lock(tmp_path / ".lock") is None
    os.close(first)
    again = try_lock(tmp_path / ".lock")
    assert again is not None
    os.close(again)


@pytest.mark.skipif(sys.platform == "win32", reason="there an open file cannot be removed")
def test_a_lock_that_its_holder_removes_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / ".lock"
    first = try_lock(path)
    assert first is not None
    takes = gat_pyg.files._takes

    def late(descriptor: int, path: Path) -> bool:  # it opened the file before the holder removed it
        monkeypatch.setattr(gat_pyg.files, "_takes", takes)
        unlock(path, first)
        return takes(descriptor, path)

    monkeypatch.setattr(gat_pyg.files, "_takes", late)
    second = try_lock(path)
    assert second is not None and path.exists()
    assert try_lock(path) is None
    unlock(path, second)
    assert not path.exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(beside: Path) -> None:
        beside.write_text("ne")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_whole(path, fail)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


# Trained models -----------------------------------------------------------------------------------------------------

ARGUMENTS = {"in_channels": 3, "hidden_channels": 4, "num_layers": 2, "out_channels": 5}
TARGET = "torch_geometric.nn.GCN"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model.safetensors", GCN(**ARGUMENTS), TARGET, ARGUMENTS, dataset="cora")
    return tmp_path


def test_a_saved_model_comes_back_in_eval_mode(tmp_path: Path):
    model = GCN(**ARGUMENTS, dropout=0.5, norm="batch_norm")
    save_model(tmp_path / "model.safetensors", model, TARGET, {**ARGUMENTS, "dropout": 0.5, "norm": "batch_norm"})
    again = load(tmp_path)
    assert type(again) is GCN
    assert not again.training
    assert model.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_shared_weights_come_back(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    save_model(tmp_path / "model.safetensors", model, "elsewhere.Model", {})
    again = load(tmp_path, model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert torch.equal(again[1].weight, model[0].weight)


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


def test_loading_runs_nothing(folder: Path):
    class Bomb:
        def __reduce__(self) -> object:
            return os.mkdir, (str(folder / "run"),)

    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="cannot be read"):
        load(folder)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("left", [0, 4, 100, -8])
def test_a_truncated_file_says_so(folder: Path, left: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*It is truncated or of another kind"):
        load(folder)


def test_other_shapes_are_named(folder: Path):
    wide = GCN(**{**ARGUMENTS, "hidden_channels": 7})
    before = wide.convs[0].bias.detach().clone()
    with pytest.raises(ValueError, match=r"convs\.0\.bias has shape \(7,\) in the model and \(4,\) in the file"):
        load(folder, model=wide)
    assert torch.equal(wide.convs[0].bias, before)
    with pytest.raises(ValueError, match=r"norms\.0\.module\.weight \(4,\) of the model is not in the file"):
        load(folder, model=GCN(**ARGUMENTS, norm="batch_norm"))


def test_arguments_of_another_version_are_named(folder: Path):
    save_model(folder / "model.safetensors", GCN(**ARGUMENTS), TARGET, {**ARGUMENTS, "jk": "unheard"})
    with pytest.raises(ValueError, match=r"has torch_geometric\.nn\.GCN.*which this version cannot build"):
        load(folder)


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("null", "{}"), ("3", "{}"), ("[1]", "{}"), (DEEP, "{}")]
    + [('"torch_geometric.nn.GCN"', arguments) for arguments in ("null", '"text"', "[1]", "3", DEEP)],
    ids=lambda text: text[:30],
)
def test_a_model_without_a_class_or_arguments_says_so(folder: Path, target: str, arguments: str):
    path = folder / "model.safetensors"
    save_file(GCN(**ARGUMENTS).state_dict(), path, {"gat_pyg": f'{{"target": {target}, "arguments": {arguments}}}'})
    with pytest.raises(ValueError, match=r"model\.safetensors (does not name the class|cannot be read)"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.bool])
def test_weights_of_another_kind_are_refused(folder: Path, dtype: torch.dtype):
    model = GCN(**ARGUMENTS)
    state = {key: value.to(dtype) if "weight" in key else value for key, value in model.state_dict().items()}
    about = json.dumps({"target": TARGET, "arguments": ARGUMENTS})
    save_file(state, folder / "model.safetensors", {"gat_pyg": about})
    for model in (None, GCN(**ARGUMENTS)):
        with pytest.raises(ValueError, match=rf"lin\.weight is torch.float32 in the model and {dtype} in the file"):
            load(folder, model)


def test_complex_weights_are_refused(folder: Path):
    path = folder / "model.safetensors"
    save_model(path, GCN(**ARGUMENTS).double(), TARGET, ARGUMENTS)
    path.write_bytes(path.read_bytes().replace(b'"F64"', b'"C64"'))  # safetensors before 0.6 cannot write nor read them
    with pytest.raises(ValueError, match="cannot be read|torch.float32 in the model and torch.complex64 in the file"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_taken(folder: Path, dtype: torch.dtype):
    model = GCN(**ARGUMENTS, norm="batch_norm").to(dtype)
    save_model(folder / "model.safetensors", model, TARGET, {**ARGUMENTS, "norm": "batch_norm"})
    again = load(folder)
    assert again.convs[0].bias.dtype == torch.float32
    assert torch.equal(again.convs[0].lin.weight.to(dtype), model.convs[0].lin.weight)


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


def test_a_constructor_that_computes_with_its_values_is_rebuilt(tmp_path: Path):
    with pytest.raises(RuntimeError, match="meta"), torch.device("meta"):
        SchNet(hidden_channels=4, num_filters=4, num_interactions=1)
    model = SchNet(hidden_channels=4, num_filters=4, num_interactions=1)
    arguments = {"hidden_channels": 4, "num_filters": 4, "num_interactions": 1}
    save_model(tmp_path / "model.safetensors", model, "torch_geometric.nn.SchNet", arguments)
    assert torch.equal(load(tmp_path).lin1.weight, model.lin1.weight)


def test_a_lazy_model_comes_back(tmp_path: Path):
    arguments = {**ARGUMENTS, "in_channels": -1}
    model = GCN(**arguments)
    model(torch.ones(2, 3), torch.tensor([[0], [1]]))
    save_model(tmp_path / "model.safetensors", model, TARGET, arguments)
    assert torch.equal(load(tmp_path).convs[0].lin.weight, model.convs[0].lin.weight)


def test_a_file_of_elsewhere_needs_a_model(tmp_path: Path):
    model = nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not name the class"):
        load(tmp_path)
    assert torch.equal(load(tmp_path, model=nn.Linear(2, 2)).weight, model.weight)


def test_what_is_no_run_folder_says_what_to_give(folder: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a run folder: it does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "job").mkdir()
    with pytest.raises(FileNotFoundError, match=r"job is not a run folder: it has no model\.safetensors\. Give"):
        load(tmp_path / "job")
    (tmp_path / "job" / "config.yaml").touch()
    with pytest.raises(FileNotFoundError, match=r"run is not finished\. Finish it by ckpt_path=last"):
        load(tmp_path / "job")
    (tmp_path / "jobs" / "first").mkdir(parents=True)
    (tmp_path / "jobs" / "first" / "model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"it holds the runs first\. Give one of these\.$"):
        load(tmp_path / "jobs")
    (tmp_path / "job" / "seed-3").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "job" / "seed-3" / "model.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"it holds the runs seed-3\. Give one of these, or seed=3 or seed='all'"
    ):
        load(tmp_path / "job")
    assert type(load(tmp_path / "job", seed=3)) is GCN
    assert len(load(tmp_path / "job", seed="all")) == 1
    with pytest.raises(FileNotFoundError, match=r"job has no run of seed 4, expected one of 3\."):
        load(tmp_path / "job", seed=4)
    with pytest.raises(FileNotFoundError, match=r"seed-3 holds no runs of several seeds\. Leave out seed"):
        load(tmp_path / "job" / "seed-3", seed="all")
    shutil.copytree(tmp_path / "job" / "seed-3", tmp_path / "job" / "seed-x")
    with pytest.raises(ValueError, match=r"seed-x is not a folder of a seed, expected seed-0, seed-1, \.\.\. Rename"):
        load(tmp_path / "job", seed="all")


def test_a_test_score_is_shown_beside_a_constant_prediction_and_the_papers():
    scores = ("accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373)
    result = Result("GAT", "cora", *scores, row="GAT", majority=31.9)
    assert _beside(result, paper=True) == " (constant prediction 31.9 %, the paper 83.0 %)"
    assert _beside(result) == " (constant prediction 31.9 %)"
    assert _beside(result, "averaged prediction 84.0 %").startswith(" (averaged prediction 84.0 %, constant")
    assert _beside(dataclasses.replace(result, study="ablation"), paper=True) == " (constant prediction 31.9 %)"
    assert (
        _beside(dataclasses.replace(result, value=31.9, dataset="mine")) == ""
    )  # where the warning has the constant's score
    assert "paper" not in _beside(dataclasses.replace(result, metric="micro_f1"), paper=True)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("accuracy", 71.6, "worse than a random forest of the features alone (74.0 %, standard error 2.3 %)"),
        ("accuracy", 71.8, ""),  # within one standard error
        ("rmse", 77.0, "worse than a linear model of the features alone (70.000, standard error 2.300)"),
        ("rmse", 60.0, ""),
        ("accuracy", math.nan, "worse than a random forest"),
    ],
)
def test_a_score_below_that_of_a_baseline_has_a_warning(metric: str, value: float, expected: str):
    baselines = {"linear model": 70.0, "random forest": 74.0}
    scores = (metric, value, 0, 9, 8, value, 9.2, 0.011, 923)
    result = Result("GAT", "own", *scores, baselines=baselines, baselines_error=2.3)
    assert result.warning.startswith(expected) and bool(result.warning) == bool(expected)
    constant = dataclasses.replace(result, majority=value).warning
    assert constant.endswith(result.warning) and constant.startswith("no better than ")


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


def test_the_fold_of_a_users_data_set_is_hashed():
    own = "dataset._target_=torch_geometric.datasets.FakeDataset"
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        assert hash_of(own, "+dataset.fold=0") != hash_of(own, "+dataset.fold=1")


@pytest.mark.parametrize(
    ("metric", "value", "majority", "error", "expected"),
    [
        ("accuracy", 50.0, 50.1, 2.5, "no better than predicting the majority class for every graph (50.1 %)"),
        (
            "accuracy",
            52.0,
            50.1,
            2.5,
            "within one standard error of predicting the majority class for every graph (50.1 %, standard error 2.5 %)",
        ),
        ("accuracy", 53.0, 50.1, 2.5, ""),
        (
            "rmse",
            2.06,
            2.15,
            0.2,
            "within one standard error of the best constant prediction (2.150, standard error 0.200)",
        ),
        ("rmse", 1.94, 2.15, 0.2, ""),
        ("rmse", 2.06, 2.15, None, ""),  # recorded without it
        (
            "roc_auc",
            0.51,
            0.5,
            0.02,
            "within one standard error of the same prediction for every graph (0.500, standard",
        ),
        ("roc_auc", math.nan, 0.5, 0.02, "no better than the same prediction for every graph (0.500)"),
    ],
)
def test_a_score_near_that_of_a_constant_prediction_has_a_warning(metric, value, majority, error, expected):
    fields = {"majority": majority, "standard_error": error, "item": "graph"}
    warning = Result("GAT", "own", metric, value, 0, 9, 8, value, 9.2, 0.011, 923, **fields).warning
    assert warning.startswith(expected) and bool(warning) == bool(expected)
