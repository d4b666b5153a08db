"""A run folder from somebody else: its settings build classes of gat_pyg, PyG and OGB alone."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gat_pyg import calibration, evaluate, explain, export, load, predict
from gat_pyg.runs.task import settings_of, task_of
from tests.commands import run_command

SMALL = ("training.patience=null", "training.max_epochs=2", "model.hidden_channels=[4]", "model.heads=[2,1]")
NODES = {"_target_": "torch_geometric.datasets.FakeDataset", "num_graphs": 1}
FINISHED: dict[str, Callable[[Path], Any]] = {
    "predict": predict,
    "predict --level": lambda run: predict(run, level=0.9),
    "evaluate": evaluate,
    "explain": lambda run: explain(run, node=0),
    "calibration": calibration,
    "figures": task_of,
}
UNFINISHED: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "predict": predict,
    "evaluate": evaluate,
    "export": lambda run: export(run, run / "model.pt2"),
}


def trained(folder: Path) -> tuple[Path, Path]:
    """Return the folders of a finished and of an interrupted run."""

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    finished, unfinished = folder / "finished", folder / "unfinished"
    settings = *SMALL, "checkpoint_every=0", f"outputs={folder}/outputs"
    run_command(*settings, f"hydra.run.dir={finished}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gat_pyg.runs.sequential.write_outputs", interrupted)
        with pytest.raises(SystemExit, match="130"):
            run_command(*settings, f"hydra.run.dir={unfinished}")
    return finished, unfinished


class Payload:
    """An object whose pickle writes a file as it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def hostile(folder: Path) -> dict[str, tuple[str, Any]]:
    """Return settings that would write the file `ran`, by a name for each, as the setting and its value."""
    marker = folder / "ran"
    source = f"from pathlib import Path\ndef make(*args, **kwargs):\n    Path({str(marker)!r}).touch()\n"
    (folder / "payload.py").write_text(f"{source}make()\nclass Net: pass\n")
    (folder / "hubconf.py").write_text(f"{source}make()\n")
    for path in (folder / "data.pt", folder / "data/Cora/processed/data.pt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(Payload(marker)))
    copied = {"src": str(folder / "data.pt"), "dst": str(marker)}
    datasets: dict[str, dict[str, Any]] = {
        "module of the folder": {"_target_": "payload.make"},
        "class of the folder": {"_target_": "payload.Net"},
        "torch.hub": {"_target_": "torch.hub.load", "repo_or_dir": str(folder), "model": "make", "source": "local"},
        "shutil": {"_target_": "shutil.copy", **copied},
        "os": {"_target_": "os.system", "command": f"touch {marker}"},
        "builtins": {"_target_": "builtins.exec", "_args_": [f"open({str(marker)!r}, 'w')"]},
        "hydra": {"_target_": "hydra.utils.get_method", "path": "payload.make"},
        "instantiate": {"_target_": "hydra.utils.instantiate", "config": {"_target_": "payload.make"}},
        "torch.load": {"_target_": "torch.load", "f": str(folder / "data.pt"), "weights_only": False},
        "PyG's loader": {"_target_": "torch_geometric.io.fs.torch_load", "path": str(folder / "data.pt")},
        "a module in PyG's": {"_target_": "torch_geometric.datasets.planetoid.os.system", "command": f"touch {marker}"},
        "a function of gat_pyg": {
            "_target_": "gat_pyg.files.write_whole",
            "path": str(marker),
            "write": "payload.make",
        },
        "a module of gat_pyg": {"_target_": "gat_pyg.data.splits.np.save", "file": str(marker), "arr": 1},
        "transform": {**NODES, "transform": {"_target_": "payload.make"}},
        "partial": {**NODES, "pre_transform": {"_target_": "payload.make", "_partial_": True}},
        "list": {**NODES, "transform": {**NODES, "transforms": [{"_target_": "payload.make"}]}},
        "reference": {"_target_": "${dataset.name}", "name": "payload.make"},
        "escaped reference": {**NODES, "transform": r"\${oc.create:{_target_: payload.make}}"},
        "root": {"_target_": "torch_geometric.datasets.Planetoid", "root": str(folder / "data"), "name": "Cora"},
        "name": {"_target_": "gat_pyg.data.ogbn", "name": f"../../..{folder}/data"},
        "inner root": {
            "_target_": "gat_pyg.data.links",
            "dataset": {"_target_": "gat_pyg.data.planetoid", "name": "cora", "root": str(folder / "data")},
        },
        "transform's file": {**NODES, "transform": {"_target_": "torch_geometric.transforms.Constant", "x": "~/x"}},
    }
    others = {
        **{f"{group}._target_": "payload.make" for group in ("model", "trainer", "optimizer", "logger", "encoding")},
        "model.mechanism": {"_target_": "payload.make"},
        "trainer.profiler": {"_target_": "lightning.pytorch.profilers.SimpleProfiler", "dirpath": str(folder)},
        "data_root": str(folder / "data"),
    }
    named = {name: ("dataset", {**values, "val": 1, "test": 1}) for name, values in datasets.items()}
    return named | {key: (key, value) for key, value in others.items()}


def sent(run: Path, to: Path, setting: str, value: Any) -> Path:
    """Copy the folder of a run with a setting of its sender."""
    shutil.copytree(run, to)
    config: Any = OmegaConf.load(to / "config.yaml")
    OmegaConf.update(config, setting, value, merge=False, force_add=True)
    OmegaConf.save(config, to / "config.yaml")
    return to


def test_a_received_folder_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The gate refuses every hostile setting before anything is imported or called, and every verb passes it.

    The owner of a folder may trust it.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GAT_PYG_DATA", str(tmp_path / "mine"))
    marker, runs = tmp_path / "ran", trained(tmp_path)
    refused = r"config\.yaml(: [\w.]+ is| has a reference) .*, expected .*trust=True \(--trust in the command\)"
    settings_of(runs[0])
    for number, (name, (setting, value)) in enumerate(hostile(tmp_path).items()):
        with pytest.raises(ValueError, match=refused):
            print(f"{name}: not refused, but", settings_of(sent(runs[0], tmp_path / str(number), setting, value)))
        assert not marker.exists(), name
    for run, verbs in zip(runs, (FINISHED, UNFINISHED), strict=True):
        evil = sent(run, tmp_path / f"{run.name}-evil", "dataset", {"_target_": "payload.make"})
        for verb, call in verbs.items():
            with pytest.raises(ValueError, match=refused):
                print(f"{verb}: not refused, but returned", call(evil))
            assert not marker.exists(), verb
    with pytest.raises(
        SystemExit
    ):  # the settings are the command's: those of the folder are compared with them as text
        run_command(*SMALL, f"hydra.run.dir={evil}", "ckpt_path=last")
    evil = tmp_path / "finished-evil"
    run_command(*SMALL, f"from={evil}", f"outputs={tmp_path}/o")  # reads the weights alone
    assert not marker.exists() and "payload" not in sys.modules
    with pytest.raises(ValueError, match="expected a PyG Dataset"):
        evaluate(evil, trust=True)
    assert marker.exists()
