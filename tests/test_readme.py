"""The commands and the code of the README run, and the settings in the commands of every page are accepted."""

import json
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gat_pyg.run import main
from gat_pyg.runs.result import read
from gat_pyg.settings.conf import CHOICES, VERSION_BASE, config_folder
from gat_pyg.settings.overrides import translated
from gat_pyg.settings.settings import Settings
from tests.graphs import amazon_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]
TEXT = "\n".join(PAGES)
COMMANDS = [*dict.fromkeys(re.findall(r"^ *\$ (?:\w+=\w+ )?gat-pyg ([^#\n]+?) *(?:#.*|\\)?$", TEXT, re.MULTILINE))]
CODE = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SPEEDS = ("ppi-1", "edges-GATv2-16", "cora", "molecules")  # the rows of the README
SETTINGS = re.findall(r"^```yaml\n((?:# @package [^\n]*\n)?# (\S+)\n.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_there_are_examples():
    assert len(COMMANDS) >= 8
    assert len(CODE) == 2
    assert len(SETTINGS) >= 2


def test_the_speeds_are_the_newest_recorded_ones():
    newest = max((ROOT / "benchmarks" / "results").glob("*-2cores-layers.json"))
    rows = {(row["case"], row["way"]): row for row in json.loads(newest.read_text(encoding="utf-8"))["rows"]}
    section = README.partition("<!-- speed -->")[2].partition("\n\n")[0]
    cells = [re.findall(r"[\d.]+", line.partition("|")[2].partition("|")[2]) for line in section.splitlines()]
    printed = [row for row in cells if row]
    assert len(printed) == len(SPEEDS)
    of_pyg, of_ours = printed[0][3:]
    headline = f"up to {printed[0][2]} times faster on a CPU, with {of_ours} instead of {of_pyg} MiB of memory"
    assert headline in " ".join(README.split())
    for case, numbers in zip(SPEEDS, printed, strict=True):
        pyg, ours = rows[case, "pyg"], rows[case, "auto"]
        ms = [1e3 * statistics.median(row["step"]) for row in (pyg, ours)]
        mib = [row["peak_bytes"] / 2**20 for row in (pyg, ours)]
        for number, measured in zip(numbers, [*ms, ours["times_pyg"], *mib], strict=True):
            assert float(number) == round(measured, len(number.partition(".")[2])), case


@pytest.fixture
def own_settings(tmp_path):
    """The folder with the pages' own settings, mine/dataset/products.yaml and so on."""
    for content, name in SETTINGS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def overrides(command: str) -> list[Override]:
    words = [word for word in shlex.split(command) if "=" in word and not word.startswith("hydra")]
    return OverridesParser.create().parse_overrides(words)


def by_new_names() -> tuple[list[str], list[str]]:
    """Return the commands with the first use of a setting, and the others."""
    first: dict[str, str] = {}
    for command in COMMANDS:
        for override in overrides(command):
            first.setdefault(override.get_key_element(), command)
    return [*dict.fromkeys(first.values())], [command for command in COMMANDS if command not in first.values()]


FIRST, OTHERS = by_new_names()


@pytest.mark.parametrize("command", FIRST)
def test_the_settings_of_a_command_are_accepted(command, own_settings):
    options = [
        f"{one.get_key_element()}={next(one.sweep_string_iterator())}" if one.is_sweep_override() else one.input_line
        for one in overrides(command)
    ]
    if "--config-dir mine" in command:
        options.append(f"hydra.searchpath=[file://{own_settings / 'mine'}]")
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        Settings.parse(compose("config", translated(options)))


def test_the_choices_of_commands_exist(own_settings):
    chosen = [override for command in OTHERS for override in overrides(command) if not override.is_sweep_override()]
    for override in chosen:
        group, _, name = f"{override.get_key_element()}/{override.get_value_element_as_str()}".rpartition("/")
        if name not in CHOICES.get(group, {name: None}):
            assert (own_settings / "mine" / group / f"{name}.yaml").is_file(), override.input_line


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
def test_own_settings_are_used(own_settings, monkeypatch):
    monkeypatch.chdir(own_settings)
    amazon_files(Path("data"), "Photo")
    commands = [shlex.split(command) for command in COMMANDS if "--config-dir mine" in command]
    quick = ("data_root=data", "training.max_epochs=2", "split.per_class=5", "split.val=10", "split.test=20")
    for words in commands:
        monkeypatch.setattr(sys, "argv", ["gat-pyg", *(word.replace("runs=10", "runs=2") for word in words), *quick])
        main()
    results = read("outputs/results.jsonl")
    assert [(one.method, one.dataset) for one in results] == [
        (method, "photo") for method in ("GAT", "GAT", "GAT", "GCN", "GCN")
    ]
    rates = [OmegaConf.load(Path(one.run_dir) / "config.yaml").training.lr for one in results]
    assert rates == [0.01] * 3 + [0.003] * 2  # of the recipe for GAT, and what suits the data for GCN
    assert Path(results[0].run_dir).name.endswith("_gat_photo")
    assert {path.name for path in Path("outputs/table").iterdir()} == {"photo_gat", "photo_gcn"}


def test_code_runs():
    names = {}
    for block in CODE:
        exec(block.replace("range(100)", "range(2)"), names)
        names.setdefault("model_of_pyg", names["model"])
    assert [type(conv) for conv in names["model_of_pyg"].convs] == [names["GATConv"]] * 2
    assert names["alpha"].shape == (names["edge_index"].size(1), 8)


def test_every_law_has_its_test():
    folder = Path(__file__).parent
    tables = (folder / "README.md").read_text(encoding="utf-8")
    files = [*folder.rglob("test_*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    functions = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert set(re.findall(r"\btest_\w+", tables)) <= functions | {file.stem for file in files}
