"""The verbs of the command, as in `gat-pyg predict RUN`: public functions, whose sources are their arguments and help.

Training is the verb of a command without one. The sources are read without their modules, which import torch.
"""

from __future__ import annotations

import ast
import csv
import functools
import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gat_pyg
from gat_pyg import VERBS as VERBS

from ..settings.rules import argument_texts
from ..terminal import columns, print_message

TRAIN = "train"  # the verb of a command without one

# What they print ----------------------------------------------------------------------------------------------------


def _predictions(frame: Any, *, out: str = "predictions.csv", level: float | None = None) -> str:
    uncertainty = "" if level is None else f"\n{frame.attrs['uncertainty']}"
    warning = f"\nwarning: {frame.attrs['warning']}" if "warning" in frame.attrs else ""
    return f"{len(frame):,} predictions in {out}{uncertainty}{warning}"


def _explanation(explained: Any, *, out: str = "explanation.png") -> str:
    """Write a picture and tables.

    Args:
        out: the picture to write, as PNG, SVG or PDF; the tables are written beside it.
    """
    from ..report.figures.explained import explanation_figure  # imports Matplotlib

    files = explained.write(out)
    explanation_figure(explained, out)
    return f"{explained}\n\n{', '.join([out, *map(str, files)])}"


def _report(report: Any) -> str:
    from ..report.tables.formats import plain  # imports torch

    tables = [plain(table, columns()) for table in report.tables if table.name in PRINTED]
    number = "1 line of results is" if report.lines == 1 else f"{report.lines} lines of results are"
    return "\n\n".join([*filter(None, tables), f"{number} in {', '.join(map(str, report.files))}"])


def _state(lines: dict[str, str]) -> str:
    return "\n".join(f"{subject:<18}{text}" for subject, text in lines.items())


# What a verb prints, by its function, if not the result as text; arguments by keyword only are options too
TEXTS: dict[str, Callable[..., str]] = {
    "predict": _predictions,
    "explain": _explanation,
    "doctor": _state,
    "write_report": _report,
}
PRINTED = ("table2", "table3", "general", "against", "strong")  # tables that `report` prints

# Their sources ------------------------------------------------------------------------------------------------------


class Argument(NamedTuple):
    """An argument of a function."""

    type: str  # its annotation
    default: Any  # `REQUIRED` without one
    text: str


REQUIRED, SEVERAL = "required", "several"


@functools.cache
def _source(name: str) -> ast.FunctionDef:
    """Return the source of a public function, or of one of this file."""
    module = gat_pyg.PUBLIC.get(name, "command.verbs")
    path = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


@functools.cache
def arguments_of(name: str) -> dict[str, Argument]:
    """Return the arguments of a function that a command can pass: no modules.

    >>> [*arguments_of("export")]
    ['run_dir', 'path', 'seed', 'trust']
    """
    source = _source(name)
    texts, its = argument_texts(ast.get_docstring(source) or ""), source.args
    values: list[Any] = [REQUIRED] * (len(its.args) - len(its.defaults)) + [*map(ast.literal_eval, its.defaults)]
    values += [*map(ast.literal_eval, filter(None, its.kw_defaults))]
    result = {}
    for node, value in zip([*its.args, *its.kwonlyargs], values, strict=True):
        annotation, text = ast.unparse(node.annotation) if node.annotation else "", texts.get(node.arg, "")
        if "Module" in annotation:
            continue
        if match := re.match(r"as in `(?:gat_pyg\.)?(\w+)`", text):
            text = arguments_of(match[1])[node.arg].text.rstrip(".") + text[match.end() :]
        is_data = annotation == "Any" and node in its.args  # of any form: graphs, files, frames
        result[node.arg] = Argument(annotation, SEVERAL if is_data else value, text)
    if its.vararg:
        result[its.vararg.arg] = Argument("str", SEVERAL, texts[its.vararg.arg])
    return result


def _own(function: str) -> dict[str, Argument]:
    """Return the arguments of the function that returns the text, but for the result."""
    return dict([*arguments_of(TEXTS[function].__name__).items()][1:]) if function in TEXTS else {}


# The command line ---------------------------------------------------------------------------------------------------


def verb_of(arguments: Sequence[str]) -> Callable[[], None] | None:
    """Return the call of the verb that the arguments begin with; None for a training.

    After wrong usage, print the right one and exit with status 2.
    """
    if not arguments or arguments[0] not in VERBS:
        return None
    values = vars(parser(arguments[0]).parse_intermixed_args(arguments[1:]))
    return partial(_run, VERBS[arguments[0]], values)


def _run(function: str, values: dict[str, Any]) -> None:
    """Call a public function, and print its result."""
    values = {name: None if value == [] else value for name, value in values.items()}
    several = _source(function).args.vararg
    items = values.pop(several.arg) or [] if several else []
    passed = {name: values[name] for name in arguments_of(function) if name in values}
    result = getattr(gat_pyg, function)(*items, **passed)
    print(TEXTS.get(function, str)(result, **{name: values[name] for name in _own(function)}))


def warn(
    message: Warning | str, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
) -> None:
    """Print a warning as a message; stands in for `warnings.showwarning`."""
    print_message(f"gat-pyg: {message}")


def parser(name: str) -> ArgumentParser:
    """Return the parser of a verb's arguments; those with a default are options.

    >>> parser("predict").parse_args(["outputs/cora", "--out", "p.jsonl"])
    Namespace(run_dir='outputs/cora', data=[], out='p.jsonl', seed=None, top_k=None, level=None, ...trust=False)
    """
    function = VERBS[name]
    result = ArgumentParser(prog=f"gat-pyg {name}", description=_summary(function), allow_abbrev=False)
    every, own = arguments_of(function), _own(function)
    texts = {argument: each.text for argument, each in [*own.items(), *every.items()]}
    for argument, (kind, default, _) in (every | own).items():
        text = texts[argument]
        help_text = text.rstrip(".").replace("`", "").replace("%", "%%")
        options: dict[str, Any] = {"metavar": argument.removesuffix("_dir").upper()}
        flag = argument if default in (REQUIRED, SEVERAL) else f"--{argument.replace('_', '-')}"
        if default == SEVERAL:
            options |= {"nargs": "*", "default": None}
        elif kind == "bool":
            options = {"action": "store_true", "dest": argument}
        elif default != REQUIRED:
            options |= {"type": _type(kind), "default": default}
            value = ",".join(default) if isinstance(default, tuple) else default
            help_text += f" (default: {value})" if default else ""
            if kind.startswith("Literal"):
                options |= {"choices": re.findall(r"'(\w+)'", kind), "metavar": None}
        result.add_argument(flag, help=help_text, **options)
    return result


def _type(annotation: str) -> Callable[[str], Any]:
    """Return the function that reads an option's value, by its annotation; a list has commas."""
    if "Sequence" in annotation:
        return _entries
    return float if "float" in annotation else _number if re.search(r"\bint\b|Seed", annotation) else str


def _entries(text: str) -> list[str]:
    return next(csv.reader([text]))


def _number(text: str) -> int | str:
    return text if text == "all" else int(text)


def _summary(function: str) -> str:
    return str(ast.get_docstring(_source(function))).partition("\n\n")[0].replace("`", "")


def usages() -> dict[str, str]:
    """Return the usage of each verb with the beginning of its first sentence, for `gat-pyg --help`."""
    lines = {"gat-pyg [train] [NAME=VALUE ...]": "Train and test a model"}
    for name, function in VERBS.items():
        words = " ".join(parser(name).format_usage().split()[2:])
        usage = re.sub(r"\[(-h|--[^]]*)\] ?", "", words).strip()  # options are in the verb's own help
        lines[f"gat-pyg {usage}"] = re.split(r"[,:] |\.?\n|\.$", _summary(function))[0]
    return lines


def completed(line: str) -> str | None:
    """Print the words that a verb adds to the completion of a command line; return the line for Hydra's, or None.

    >>> completed("gat-pyg p")
    predict
    'gat-pyg p'
    >>> completed("gat-pyg predict outputs/cora --o")
    --out
    >>> completed("gat-pyg train dataset=c")
    'gat-pyg dataset=c'
    """
    program, *words = line.split(" ")
    if len(words) == 1:
        print(" ".join(name for name in (TRAIN, *VERBS) if name.startswith(words[0])))
    elif words and words[0] == TRAIN:
        return " ".join([program, *words[1:]])
    elif words and words[0] in VERBS:
        options = parser(words[0])._option_string_actions
        print(" ".join(option for option in options if option.startswith(words[-1]) and words[-1]))
        return None
    return line
