"""The reference of settings: their values, and their meaning by the comments in `conf` and by docstrings.

`gat-pyg --help` and `gat-pyg --help NAME` print it, and `docs/all_settings.py` makes a page of it. What is not an
argument of a class or function is read without torch.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from ..settings.conf import CHOICES, VERSION_BASE, config_folder
from ..settings.factory import AROUND, LABELS, Factory
from ..settings.hashing import flattened
from ..settings.overrides import translated, value_text
from ..settings.rules import documented, expectations, similar
from ..settings.settings import FACTORIES, INTERNAL, rules
from .verbs import VERBS, parser, usages

MAIN = {  # the settings in `gat-pyg --help`
    "Data and method": ("dataset", "model", "recipe", "split.seed", "metric"),
    "Network (of model=gat)": ("model.hidden_channels", "model.heads", "model.dropout"),
    "Training": ("training.lr", "training.weight_decay", "training.patience", "training.max_epochs", "scheduler"),
    "Runs": ("runs", "seed", "trainer", "ckpt_path", "outputs"),
}
EXAMPLES = {
    "gat-pyg": "train GAT on digits: no download, a few seconds",
    "gat-pyg dataset=cora runs=100": "train GAT on Cora with 100 seeds at once",
    "gat-pyg dataset=file dataset.path=graph.npz": "train on your own graph",
    "gat-pyg dataset=ppi trainer=gpu": "use a GPU; trainer=ddp uses all of them",
    "gat-pyg -m dataset=cora training.lr=0.01,0.005": "compare values, and rank them",
    "gat-pyg -m search=node dataset=cora": "search for the best settings; also graph, link",
    "gat-pyg experiment=table2": "fill Table 2 of the paper; then gat-pyg report",
}
MORE = {
    "gat-pyg --help NAME": "explain a setting, a group or a verb: training.patience, split, dataset, model, predict",
    "gat-pyg --cfg job [NAME=VALUE ...]": "print all settings with their values",
    "gat-pyg --version": "print the version",
    'eval "$(gat-pyg -sc install=bash)"': "complete names and values with Tab (also zsh, fish)",
    "gat-pyg --hydra-help": "print Hydra's own options",
}
DEFAULTS = ("~recipe/method", "~recipe/family", "~recipe/on")  # the settings without a recipe's


class Setting(NamedTuple):
    """A setting: its name, its value, the values that it may have, and its meaning; "" for what is not known."""

    name: str
    value: str
    values: str
    text: str


# Sources ------------------------------------------------------------------------------------------------------------

_LINE = re.compile(r"( *)(- )?(?:override |optional )?/?([\w/]+):(?: +[^#\s]\S*(?: \S+)*?)?(?: +# (.*))?")


def comments(text: str) -> dict[str, str]:
    """Return the comment on each line of YAML by the dotted name of its setting."""
    result: dict[str, str] = {}
    group: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            indent, _, key, comment = match.groups()
            group = [(depth, name) for depth, name in group if depth < len(indent)]
            group.append((len(indent), key))
            name = ".".join(key for _, key in group).removeprefix("defaults.")
            result[name] = result.get(name) or comment or ""
    return result


def choices(group: str) -> dict[str, str]:
    """Return the first sentence of the comment above each choice of a group, by the choices' names."""
    return {
        name: re.split(r"(?<=\w\w[).`])\.? (?=[A-Z`])", " ".join(choice.comment.split()))[0].rstrip(".")
        for name, choice in sorted(CHOICES[group].items(), key=lambda item: item[0].lower())
    }


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """Return the configuration with some overrides, with Hydra's own."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        return compose("config", translated(overrides), return_hydra_config=True)


def plain_settings(config: DictConfig) -> dict[str, Setting]:
    """Return the settings that are not arguments of a class, by their names in the order of `conf/config.yaml`."""
    texts = comments((config_folder() / "config.yaml").read_text(encoding="utf-8"))
    for group in ("loader", "trainer"):  # described where they have a value
        for choice, described in CHOICES[group].items():
            for key, text in comments(described.text).items():
                earlier = texts.get(f"{group}.{key}")
                of_choice = f"{text} ({group}={choice})" if text else ""
                texts[f"{group}.{key}"] = "; ".join(filter(None, (earlier, of_choice)))
    texts["loader.num_links"] = "pairs of nodes in a batch, for labels of pairs; messages pass over the whole graph"
    selected, rule_of = config.hydra.runtime.choices, rules()
    values: Any = OmegaConf.to_container(config, resolve=False)
    values = flattened({key: value for key, value in values.items() if key != "hydra"})
    result = {}
    for name in dict.fromkeys((*texts, *rule_of)):
        is_setting = name in rule_of or name in CHOICES or (name.startswith("trainer.") and texts.get(name))
        if not is_setting or name in INTERNAL or "/" in name:
            continue
        value = selected.get(name) if name in CHOICES else values.get(name)
        result[name] = Setting(
            name, _shown(value), rule_of[name].expected if name in rule_of else "", texts.get(name, "")
        )
    return result


def arguments(group: str, values: DictConfig) -> dict[str, Setting]:
    """Return the arguments of the class or function of a group, such as that of `model`, by their names."""
    factory = Factory(group, cast(Any, OmegaConf.to_container(values, resolve=False)))
    if factory.target is None:
        return {}
    target = factory.locate()
    texts, expected = documented(target), expectations(group, target)
    if group == "model":
        texts |= {**AROUND, **LABELS}
    return {
        key: Setting(f"{group}.{key}", _shown(factory.get(key, "???")), expected.get(key, ""), texts.get(key, ""))
        for key in dict.fromkeys([*expected, *texts])
        if key not in SUPPLIED
    }


SUPPLIED = ("self", "in_channels", "out_channels", "skip", "params", "like")  # arguments that the command passes


# Texts --------------------------------------------------------------------------------------------------------------


def explanation(name: str, overrides: Sequence[str] = ()) -> str:
    """Return the description of a setting, or of all settings of a group.

    Raises:
        ValueError: if there is no such setting; the message suggests a name.
    """
    config, (group, _, key) = composed(overrides), name.partition(".")
    plain = plain_settings(config)
    parts = []
    if name in VERBS:
        parts.append(parser(name).format_help().rstrip())
    if name in plain:
        parts.append(_entry(plain[name]))
    if name in CHOICES:
        parts.append(_columns({f"{name}={choice}": text for choice, text in choices(name).items()}))
    parts += [_entry(setting) for setting in plain.values() if setting.name.startswith(f"{name}.")]
    if not parts and group in FACTORIES and key:
        parts = _of_class(group, key, config)
    elif name in FACTORIES and config[name].get("_target_"):
        names = ", ".join(f"{name}.{argument}" for argument in arguments(name, config[name]))
        parts.append(textwrap.fill(f"Its settings, of {config[name]._target_}: {names}.", _width()))
    if not parts:
        raise ValueError(f"{name} is unknown.{similar(name, [*plain, *(f'model.{key}' for key in AROUND), *VERBS])}")
    return "\n\n".join(parts)


def _of_class(group: str, key: str, config: DictConfig) -> list[str]:
    """Return the description of an argument of the selected class of a group, else of the others that have it."""
    known = arguments(group, config[group])
    if key in known:
        return [_entry(known[key])]
    entries: dict[str, str] = {}
    for choice, described in sorted(CHOICES[group].items()):
        values = described.node.get(group, described.node)
        if "_target_" in values and values._target_ not in entries:
            with suppress(ValueError, KeyError):  # a class of a package that is not installed, or without the argument
                entries[values._target_] = f"With {group}={choice}: {_entry(arguments(group, values)[key])}"
    if not entries:
        raise ValueError(
            f"{group}.{key} is not an argument of {config[group].get('_target_')}."
            f"{similar(f'{group}.{key}', [setting.name for setting in known.values()])}"
        )
    return [*entries.values()]


def overview() -> str:
    """Return the text of `gat-pyg --help`: the verbs, the settings that users change, and examples."""
    config = composed(DEFAULTS)
    known = plain_settings(config)
    for name, text in comments(CHOICES["model"]["gat"].text).items():
        if name in config.model:
            known[f"model.{name}"] = Setting(f"model.{name}", _shown(config.model[name]), "", text)
    sections = {"Usage, with --help after a verb for its options": usages()}
    for title, names in MAIN.items():
        sections[title] = {f"{name}={known[name].value}": known[name].text.partition(";")[0] for name in names}
    sections |= {"Examples": EXAMPLES, "More": MORE}
    width = 2 + max(len(left) for title in MAIN for left in sections[title])
    title = "Train graph attention networks and their baselines, and use what was trained."
    texts = (f"{title}:\n{_columns(rows, width if title in MAIN else None)}" for title, rows in sections.items())
    return "\n\n".join([title, *texts])


def _shown(value: Any) -> str:
    """Return a value of a configuration as on the command line; "" for a value that is missing."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    return "" if value == "???" else value if isinstance(value, str) and "${" in value else value_text(value)


def _entry(setting: Setting) -> str:
    head = f"{setting.name}={setting.value}" if setting.value else setting.name
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", setting.text)
    lines = [text, setting.values and f"Values: {setting.values}"]
    return "\n".join([head, *(_indented(line) for line in lines if line)])


def _indented(text: str) -> str:
    return textwrap.fill(text, _width(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _columns(rows: dict[str, str], width: int | None = None) -> str:
    """Return rows of two columns, wrapped to the terminal; a long left one has its text below."""
    width = 2 + max(map(len, rows)) if width is None else width
    indent = " " * (2 + width)
    lines = []
    for left, right in rows.items():
        text = textwrap.wrap(right, max(_width() - len(indent), 20), break_on_hyphens=False)
        beside = len(left) + 2 <= width and bool(text)
        lines.append(f"  {left:<{width}}{text[0]}" if beside else f"  {left}")
        lines += [f"{indent}{line}" for line in text[beside:]]
    return "\n".join(lines)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)
