"""The page *All settings* of the documentation, from the reference of settings that `gat-pyg --help NAME` prints."""

from __future__ import annotations

import re
from itertools import chain, zip_longest

from gat_pyg.command.help import DEFAULTS, Setting, arguments, choices, composed, plain_settings
from gat_pyg.settings.conf import CHOICES

TITLES = {  # sections of the page, by the groups
    "": "Runs, files and tables",
    "training": "Learning rate, early stopping and batches: training",
    "loss": "Loss: loss",
    "loader": "Neighbour sampling and mini-batches: loader",
    "split": "Training, validation and test split: split",
    "trainer": "Devices and processes: trainer",
}
OF_CLASSES = (
    ("model", "gat", "The network"),
    ("dataset", "file", "Your own graphs"),
    ("dataset", "tables", "Your own tables"),
    ("dataset", "smiles", "Your own molecules"),
    ("dataset", "cora_links", "Link prediction"),
    ("encoding", "rwse", "Positional encodings by random walks"),
    ("encoding", "laplacian", "Positional encodings by eigenvectors"),
    ("encoding", "columns", "Statistics of the neighbours' features"),
)


def page() -> str:
    """Return the page in Markdown."""
    config = composed(DEFAULTS)
    plain = plain_settings(config)
    sections: dict[str, list[str]] = {}
    for setting in plain.values():
        if setting.name not in CHOICES and setting.text:
            sections.setdefault(TITLES[setting.name.rpartition(".")[0]], []).append(_definition(setting))
    for group, choice, title in OF_CLASSES:
        of_class = arguments(group, composed([f"{group}={choice}"])[group])
        sections[f"{title}: {group}={choice}"] = [
            _definition(each) for each in of_class.values() if each.text and "${" not in each.value
        ]
    for name in (name for name in plain if name in CHOICES):
        rows = [f"  - `{name}={choice}`: {_markdown(text)}" for choice, text in choices(name).items()]
        sections.setdefault("Choices", []).append("\n".join([_definition(plain[name]), "", *rows]))
    return "\n\n".join("\n\n".join([f"## {title}", *entries]) for title, entries in sections.items()) + "\n"


def _definition(setting: Setting) -> str:
    """Return the entry of a definition list."""
    value = f" = `{setting.value}`" if setting.value else ""
    stop = "" if setting.text.endswith(".") else "."
    values = f" Values: *{_markdown(setting.values)}*." if setting.values else ""
    return f"`{setting.name}`{value}\n: {_markdown(setting.text)}{stop}{values}"


def _markdown(text: str) -> str:
    """Return the text of a comment or a docstring in Markdown."""
    parts = re.split(r"(?::(\w+):)?`~?([^`]*)`", text)  # plain, role, code, plain, ...
    plain = [re.sub(r"([*_|<>\[\]$])", r"\\\1", part) for part in parts[::3]]
    code = [
        f"${inner}$" if role == "math" else f"`{inner}`" for role, inner in zip(parts[1::3], parts[2::3], strict=True)
    ]
    return "".join(chain.from_iterable(zip_longest(plain, code, fillvalue="")))
