"""The verbs of the command, as in `gat-pyg predict RUN`: functions whose signatures and docstrings are their help.

Training is the verb of a command without one. This file imports neither torch nor readers of data: a verb does, when it
runs.
"""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args, get_type_hints

from ..settings.rules import documented
from ..terminal import print_message

# The verbs ----------------------------------------------------------------------------------------------------------


def predict(
    run: str,
    *data: str,
    out: str = "predictions.csv",
    seed: int | None = None,
    top_k: int | None = None,
    level: float | None = None,
    keep: str | None = None,
    trust: bool = False,
) -> None:
    """Write the predictions of a trained run as a table.

    Args:
        run: the folder of the run, or of the runs of several seeds
        data: files of the form that the run was trained on; without them, the run's own
        out: the file to write: .csv, .parquet, or .jsonl for JSON lines
        seed: seed of the model, if the run has several; without it, the mean over all and its standard deviation
        top_k: the number of most probable new links of each node, instead of a row for each pair
        level: such as 0.9, adds prediction sets or intervals that hold this share of the labels
        keep: columns of the table that are written too, as in date,carrier
        trust: build whatever the folder's settings name, as in your own runs; else only classes of gat_pyg, PyG and OGB
    """
    from ..trained.predict import predict

    kept = keep.split(",") if keep else []
    frame = predict(run, list(data) or None, out, seed=seed, top_k=top_k, level=level, keep=kept, trust=trust)
    print(f"{len(frame):,} predictions in {out}")
    if level is not None:
        print(frame.attrs["uncertainty"])


def export(run: str, file: str, *, seed: int | None = None, trust: bool = False) -> None:
    """Write a trained run as one file for ONNX Runtime or torch.

    Args:
        run: the folder of the run, or of the runs of several seeds
        file: model.onnx or model.pt2; a description is written beside it
        seed: seed of the model, if the run has several; without it, the mean over all
        trust: build whatever the folder's settings name, as in your own runs; else only classes of gat_pyg, PyG and OGB
    """
    from ..trained.export import export

    print(export(run, file, seed=seed, trust=trust))


def best(dataset: str, *, results: str = "outputs/results.jsonl", metric: str | None = None) -> None:
    """Print the best run of a data set by its validation score, its command, and how sure that is.

    Args:
        dataset: its name in the results
        results: the file of results
        metric: metric of the runs to compare; by default the newest run's
    """
    from ..report.best import best

    print(best(dataset, results, metric))


def doctor() -> None:
    """Check the installation: print versions, devices, kernels, caches and missing extras."""
    from .doctor import doctor

    for subject, text in doctor().items():
        print(f"{subject:<18}{text}")


def evaluate(
    run: str,
    *data: str,
    seed: int | None = None,
    top_k: int | None = None,
    level: float | None = None,
    trust: bool = False,
) -> None:
    """Print the scores of a trained run on its test data, or on other data with labels.

    Args:
        run: the folder of the run, or of the runs of several seeds
        data: files of the form that the run was trained on, with labels; a table of later links needs none
        seed: seed of the model, if the run has several
        top_k: the number of most probable links of each node in which its links are counted (recall@k)
        level: such as 0.9, adds the share of labels that prediction sets or intervals of this level hold
        trust: build whatever the folder's settings name, as in your own runs; else only classes of gat_pyg, PyG and OGB
    """
    from ..trained.evaluate import evaluate

    print(evaluate(run, list(data) or None, seed=seed, top_k=top_k, level=level, trust=trust))


def explain(
    run: str,
    *data: str,
    node: str | None = None,
    graph: str | None = None,
    link: str | None = None,
    output: str | None = None,
    k: int | None = None,
    seed: int | None = None,
    out: str = "explanation.png",
    trust: bool = False,
) -> None:
    """Explain a prediction of a trained run: edges and features by name, a picture, and how faithful it is.

    Args:
        run: the folder of the run, or of the runs of several seeds
        data: files of the form that the run was trained on; without them, the run's own
        node: the id of a node, or its number
        graph: the number of a graph, or the SMILES or the name of a molecule
        link: both ends of a pair, as in u7,i12
        output: the class, label or target to explain; without it, the most probable one
        k: the number of edges that are removed to measure how faithful it is (default: 5, at most half)
        seed: seed of the model, if the run has several; without it, the mean over all
        out: the picture to write, as PNG, SVG or PDF; the tables are written beside it
        trust: build whatever the folder's settings name, as in your own runs; else only classes of gat_pyg, PyG and OGB
    """
    from ..report.explained import explanation_figure
    from ..trained.explain import explain

    ends = None if link is None else link.rsplit(",", 1)
    explained = explain(
        run, list(data) or None, node=node, graph=graph, link=ends, output=output, k=k, seed=seed, trust=trust
    )
    print(explained)
    files = explained.write(out)
    explanation_figure(explained, out)
    print(f"\n{', '.join([out, *map(str, files)])}")


def warm(*runs: str, heads: int | None = None, channels: int | None = None) -> None:
    """Compile the kernels now, so that first calls are fast, also in the containers of an image.

    Args:
        runs: folders of trained runs whose kernels are compiled; without them, layers of the usual sizes
        heads: number of heads of layers of another size
        channels: number of channels of each head
    """
    from .warm import warm_up

    print(warm_up(*runs, heads=heads, channels=channels))


VERBS: dict[str, Callable[..., None]] = {
    verb.__name__: verb for verb in (predict, evaluate, explain, export, best, doctor, warm)
}
TRAIN = "train"  # the verb of a command without one

# The command line ---------------------------------------------------------------------------------------------------


def verb_of(arguments: Sequence[str]) -> Callable[[], None] | None:
    """Return the call of the verb that the arguments begin with; None for a training.

    After wrong usage, print the right one and exit with status 2.
    """
    if not arguments or arguments[0] not in VERBS:
        return None
    verb = VERBS[arguments[0]]
    values = vars(parser(verb).parse_intermixed_args(arguments[1:]))
    positional: list[Any] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += values.pop(name)
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(values.pop(name))
    return partial(verb, *positional, **values)


def warn(
    message: Warning | str, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
) -> None:
    """Print a warning as a message; stands in for `warnings.showwarning`."""
    print_message(f"gat-pyg: {message}")


def parser(verb: Callable[..., None]) -> ArgumentParser:
    """Return the parser of a verb's arguments; those by keyword only are options.

    >>> parser(predict).parse_args(["outputs/cora", "--out", "p.jsonl"])
    Namespace(run='outputs/cora', data=[], out='p.jsonl', seed=None, top_k=None, level=None, keep=None, trust=False)
    """
    texts = documented(verb)
    summary = str(inspect.getdoc(verb)).partition("\n\nArgs:\n")[0]
    result = ArgumentParser(prog=f"gat-pyg {verb.__name__}", description=summary, allow_abbrev=False)
    for name, parameter in inspect.signature(verb).parameters.items():
        default = None if parameter.default is parameter.empty else parameter.default
        hint = get_type_hints(verb)[name]
        kind = next((one for one in get_args(hint) if one is not type(None)), hint)
        options: dict[str, Any] = {"type": kind, "metavar": name.upper(), "default": default}
        if parameter.kind is parameter.VAR_POSITIONAL:
            options |= {"nargs": "*", "default": []}
        elif parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is not parameter.empty:
            options["nargs"] = "?"
        elif kind is bool:
            options = {"action": "store_true"}
        text = texts[name].replace("%", "%%")
        shown = f"{text} (default: {default})" if default and kind is not bool else text
        flag = f"--{name.replace('_', '-')}" if parameter.kind is parameter.KEYWORD_ONLY else name
        result.add_argument(flag, help=shown, **options)
    return result


def usages() -> dict[str, str]:
    """Return the usage of each verb with the beginning of its first sentence, for `gat-pyg --help`."""
    lines = {"gat-pyg [train] [NAME=VALUE ...]": "Train and test a model"}
    for verb in VERBS.values():
        words = " ".join(parser(verb).format_usage().split()[2:])
        usage = re.sub(r"\[(-h|--[^]]*)\] ?", "", words).strip()  # options are in the verb's own help
        lines[f"gat-pyg {usage}"] = re.split(r"[,:] |\.?\n|\.$", str(inspect.getdoc(verb)))[0]
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
        options = parser(VERBS[words[0]])._option_string_actions
        print(" ".join(option for option in options if option.startswith(words[-1]) and words[-1]))
        return None
    return line
