"""The files of a run: whatever is damaged is named."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from gat_pyg.runs.folder import Job, finished
from gat_pyg.runs.result import Result, result_in, settings_in
from gat_pyg.runs.task import settings_of
from gat_pyg.runs.warm_start import with_earlier_model
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.errors import message
from gat_pyg.settings.settings import Settings

BROKEN = (b"", b"{", b"[1]", b"3", b"\xff\xfe", b"dataset: [", b"dataset: ${nowhere}")


@pytest.fixture
def settings() -> Settings:
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return Settings.parse(compose("config"))


READERS: dict[str, Callable[[Path, Settings], Any]] = {
    "of the command": lambda folder, settings: settings_in(folder),
    "of a verb": lambda folder, settings: settings_of(folder),
    "of a trusted run": lambda folder, settings: settings_of(folder, trust=True),
    "of from=": lambda folder, settings: with_earlier_model(settings.replace(from_=str(folder)), []),
}


@pytest.mark.parametrize("reader", READERS)
def test_settings_that_cannot_be_read_are_named(reader: str, settings: Settings, tmp_path: Path):
    path = tmp_path / "config.yaml"
    (tmp_path / "model.safetensors").touch()
    for content in BROKEN:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.yaml cannot be read, expected the settings of a run: ."):
            READERS[reader](tmp_path, settings)
    Job(settings, tmp_path).save_settings()
    lines = path.read_bytes().splitlines(keepends=True)
    READERS[reader](tmp_path, settings)
    for end in range(len(lines)):  # cut off, which is valid YAML
        path.write_bytes(b"".join(lines[:end]))
        if "verb" in reader:
            with pytest.raises(ValueError, match=r"config\.yaml"):
                settings_of(tmp_path)


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "result.json"
    assert result_in(tmp_path) is None
    for content in BROKEN:
        path.write_bytes(content)
        for read in (result_in, lambda folder: finished(folder, str(tmp_path / "results.jsonl"))):
            with pytest.raises(ValueError, match=r"result\.json cannot be read: .*Remove it, and the same command"):
                read(tmp_path)
    result = Result("GAT", "cora", "accuracy", 83.1, 0, 812, 711, 82.0, 9.2, 0.011, 92373)
    path.write_text(result.to_json())
    assert result_in(tmp_path) == result


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_only_a_training_continues_after_a_full_disk(number: int):
    error = OSError(number, "why", "predictions.csv")
    verb, training = message(error, training=False), message(error)
    assert verb is not None and training is not None and "predictions.csv" in verb
    assert not any(word in verb for word in ("ckpt_path", "hydra", "outputs"))
    assert ("ckpt_path=last" if number == errno.ENOSPC else "hydra.run.dir=") in training
