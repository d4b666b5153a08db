"""What the README and the pages beside it show does run."""

import os
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from gat_pyg.run import config_folder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = re.findall(r"^\$ (?:\w+=\w+ )?gat-pyg ([^#\n]+?) *(?:#.*)?$", "\n".join(PAGES), re.MULTILINE)
CODE = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_there_are_examples():
    assert len(COMMANDS) >= 8
    assert len(CODE) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_command_composes(command):
    words = [word for word in shlex.split(command) if "=" in word]
    options = [word if "[" in word else word.split(",")[0] for word in words]  # a list, or the first of a sweep
    with initialize_config_dir(str(config_folder()), version_base=None):
        config = compose("config", options)
    assert config.dataset._target_


@pytest.mark.skipif("GAT_PYG_DATA" not in os.environ, reason="GAT_PYG_DATA is not set")
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")  # its hints on speed
def test_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {}
    for block in CODE:
        if "gat_pyg.load" not in block:  # which needs a finished run
            exec(block.replace("max_epochs=100_000", "max_epochs=2"), seen)
    assert seen["conv"].heads == 8
    assert seen["trainer"].current_epoch == 2
    assert seen["alpha"].shape[1] == 1
