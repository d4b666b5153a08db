"""Rules for the values of settings, each with a description for error messages."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Rule(NamedTuple):
    """The values that a setting may have."""

    expected: str
    fits: Callable[[Any], bool]


def whole(least: int, *others: Any) -> Rule:
    """Return the rule for an integer of at least `least`, or one of `others`.

    >>> whole(1, "auto").expected
    'auto or a whole number, at least 1'
    """
    alternatives = "".join(f"{_text_of(other)} or " for other in others)
    return Rule(
        f"{alternatives}a whole number, at least {least}",
        lambda value: (type(value) is int and value >= least) or is_one_of(value, others),
    )


def number(expected: str, fits: Callable[[float], bool], *others: Any) -> Rule:
    """Return the rule for a number that satisfies `fits`, or one of `others`."""
    return Rule(expected, lambda value: (type(value) in (int, float) and fits(value)) or is_one_of(value, others))


def choice(*values: Any) -> Rule:
    """Return the rule for one of several values.

    >>> choice("auto", True, False).expected
    'auto, true or false'
    """
    *first, last = map(_text_of, values)
    return Rule(f"{', '.join(first)} or {last}" if first else last, lambda value: is_one_of(value, values))


def text(expected: str, *others: Any) -> Rule:
    """Return the rule for non-empty text, or one of `others`."""
    return Rule(expected, lambda value: is_name(value) or is_one_of(value, others))


def sequence(expected: str, fits: Callable[[Any], bool], *others: Any) -> Rule:
    """Return the rule for a non-empty list whose elements satisfy `fits`, or one of `others`."""
    return Rule(expected, lambda value: is_list(value, fits) or is_one_of(value, others))


def is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Return True if `value` is a non-empty list whose elements satisfy `fits`."""
    return isinstance(value, list) and len(value) > 0 and all(map(fits, value))


def is_finite(value: Any) -> bool:
    """Return True if `value` is a finite number, at least 0."""
    return type(value) in (int, float) and 0 <= value < math.inf


def is_name(value: Any) -> bool:
    """Return True if `value` is non-empty text."""
    return isinstance(value, str) and value != ""


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Return True if `value` equals one of `values` and has the same type: 1 is not `True`."""
    return any(type(value) is type(other) and value == other for other in values)


def _text_of(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


POSITIVE = number("a number above 0", lambda value: value > 0)
FINITE = Rule("a finite number, at least 0", is_finite)
SECONDS = number("a number of seconds, at least 0", lambda value: value >= 0)


def similar(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a sentence that suggests the known name closest to `name`, or lists the names of its group, or all names.

    >>> similar("training.lrr", ["training.lr", "seed"])
    ' Did you mean training.lr?'
    """
    last = {other: other.rpartition(".")[2].lower() for other in known}
    group, _, key = name.lower().rpartition(".")
    close = difflib.get_close_matches(name.lower(), [*map(str.lower, last)], 1, 0.8)
    close = [other for other in last if other.lower() in close]
    close = close or [other for other in last if last[other] in difflib.get_close_matches(key, last.values(), 1, 0.66)]
    if close:
        return f" Did you mean {prefix}{close[0]}?"
    longer = [other for other in last if key and last[other].startswith(key)]
    if longer:
        return f" Did you mean {' or '.join(f'{prefix}{other}' for other in longer[:3])}?"
    siblings = [other for other in last if other.rpartition(".")[0] == group]
    return f" Known are: {', '.join(siblings or last)}."


# Arguments of classes and functions ---------------------------------------------------------------------------------

_MAY_BE_ZERO = ("decayed_layers", "num_iterations", "num_negative_samples", "pretrain_steps", "steps")  # model.*
_LIST = "a list in which each element is "
_OF_HYDRA = ("_args_", "_convert_", "_partial_", "_recursive_", "_target_")


def check_arguments(
    group: str, target: Callable[..., Any], arguments: Mapping[str, Any], others: Iterable[str] = ()
) -> None:
    """Check the arguments for `target` against its signature, and in this package against its annotations.

    `others` are settings of the group that are not arguments of `target`, for the error message.

    Raises:
        ValueError: if an argument is unknown or has a wrong type; the message names the setting, `group.argument`.
    """
    parameters = _parameters(target)
    unknown = [key for key in arguments if key not in (*parameters, *_OF_HYDRA)]
    if parameters and unknown:
        known = [f"{group}.{parameter}" for parameter in (*parameters, *others)]
        name = f"{group}.{unknown[0]}"
        raise ValueError(f"{getattr(target, '__qualname__', target)} has no argument {name}.{similar(name, known)}")
    types = _types(target)
    for key, value in arguments.items():
        if key in types and not _is_a(value, types[key], _least(group, key)):
            raise ValueError(f"{group}.{key} is {value!r}, expected {_description(types[key], _least(group, key))}.")
        if key.endswith("dropout") and key in types and not 0 <= (value or 0) <= 1:
            raise ValueError(f"{group}.{key} is {value}, expected a number from 0 to 1.")


def documented(target: Callable[..., Any]) -> dict[str, str]:
    """Return the texts on arguments in the docstrings of `target` and of the classes that it passes others to.

    >>> documented(documented)
    {}
    """
    texts: dict[str, str] = {}
    package = getattr(target, "__module__", "").partition(".")[0]
    for each in reversed(_targets(target)):
        if each.__module__.partition(".")[0] != package:
            continue
        for part in (each, each.__init__) if inspect.isclass(each) else (each,):
            texts |= argument_texts(str(inspect.getdoc(part)))
    return texts


def argument_texts(doc: str) -> dict[str, str]:
    """Return the texts on arguments in a docstring."""
    section = re.split(r"\n(?=\S)", doc.partition("\nArgs:\n")[2])[0]
    entries = re.findall(r"^    (\w[\w, ]*)(?: ?\(.*?\))?: *(.*(?:\n(?:     .*|(?=\n)))*)", section, re.M)
    return {key: " ".join(text.split()) for keys, text in entries for key in re.findall(r"\w+", keys)}


def expectations(group: str, target: Callable[..., Any]) -> dict[str, str]:
    """Return for each argument of `target` the values that `check_arguments` accepts, "" if it accepts any."""
    types = _types(target)
    return {
        name: _description(types[name], _least(group, name)) if name in types and types[name] is not Any else ""
        for name in _parameters(target)
    }


def _least(group: str, key: str) -> int:
    return 0 if group == "dataset" or key in _MAY_BE_ZERO else 1


def _types(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of arguments in this package; annotations of other packages may be wrong."""
    types: dict[str, Any] = {}
    if getattr(target, "__module__", "").startswith("gat_pyg."):
        for each in reversed(_targets(target)):
            if each.__module__.startswith("gat_pyg."):
                types |= get_type_hints(each.__init__ if inspect.isclass(each) else each)
    return types


def _targets(target: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return `target` and the classes to which it passes its `**kwargs`, if it names them in `passes_to`."""
    return [target, *getattr(target, "passes_to", ())]


def _parameters(target: Callable[..., Any]) -> list[str]:
    """Return the names of all arguments of `target`; [] if it has any `**kwargs` or its signature cannot be read."""
    parameters: dict[str, inspect.Parameter] = {}
    targets = _targets(target)
    with suppress(ValueError):
        for each in targets:
            parameters |= inspect.signature(each).parameters
    any_name = {name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD}
    return [] if any_name and len(targets) == 1 else [name for name in parameters if name not in any_name]


def _is_a(value: Any, kind: Any, least: int) -> bool:
    """Return True if a plain value has an annotated type; a mapping (an object by its `_target_`) has every type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or isinstance(value, dict):
        return True
    if origin is Literal:
        return value in inner
    if origin in (Union, UnionType):
        return any(_is_a(value, option, least) for option in inner)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_is_a, value, inner, repeat(least)))
    if origin is Sequence:
        return isinstance(value, list) and all(_is_a(element, inner[0], least) for element in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int:
        return type(value) is int and value >= least
    return type(value) is (str if kind is Path else kind)


def _description(kind: Any, least: int) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return choice(*inner).expected
    if origin in (Union, UnionType):
        texts = dict.fromkeys(_description(option, least) for option in inner)
        single = " or ".join(each for each in texts if not each.startswith(_LIST))
        lists = ("a list of these" if each == _LIST + single else each for each in texts if each.startswith(_LIST))
        return ", or ".join(filter(None, [single, *lists]))
    if origin in (tuple, Sequence):
        return _LIST + _description(inner[0], least)
    simple = {int: whole(least).expected, float: "a finite number", bool: "true or false", str: "text", Path: "text"}
    simple |= {Any: "any value", type(None): "null"}
    return simple.get(kind) or f"a {kind.__name__} by its _target_"
