"""The settings of training, loss, split and loader: each field has its type, its rule, and marks for what reads it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, get_type_hints

from .rules import FINITE, Rule, choice, is_finite, is_list, is_name, is_one_of, number, sequence, text, whole


class Mark(Enum):
    """A property of a setting; a new setting has it by its field alone."""

    SPEED = "no hash covers it: it changes the speed alone"
    VARIES = "the members of a stack may differ in it"
    RESUMES = "it may change when a run is resumed"
    UNUSED = "no training reads it"


@functools.cache
def hints(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a class of settings."""
    return get_type_hints(kind, include_extras=True)


def marked(mark: Mark, prefix: str, kind: type) -> frozenset[str]:
    """Return the dotted names of the settings of a class that have a mark.

    >>> sorted(marked(Mark.SPEED, "training.", Training))
    ['training.compile', 'training.cuda_graphs', 'training.sparse']
    """
    its = {key: getattr(hint, "__metadata__", ()) for key, hint in hints(kind).items()}
    return frozenset(f"{prefix}{key}" for key, marks in its.items() if mark in marks)


CRITERION = choice("both", "accuracy", "strict", "loss")
HOPS = sequence(
    "null or a list of whole numbers, one for each hop: at least 1, or -1 for all neighbours",
    lambda value: type(value) is int and (value >= 1 or value == -1),
    None,
)
FOLDS = Rule(
    f"{whole(3, None).expected}, or the path of a file of folds",
    lambda value: whole(3, None).fits(value) or is_name(value),
)
CLASS_WEIGHT = Rule(
    "null, balanced or a list of finite numbers, at least 0, one for each class",
    lambda value: is_one_of(value, (None, "balanced")) or is_list(value, is_finite),
)
POS_WEIGHT = Rule(
    "null, balanced, a finite number above 0, or a list of one for each label",
    lambda value: is_one_of(value, (None, "balanced")) or (is_finite(value) and value > 0) or is_list(value, is_finite),
)
CLIP = number("null or a number above 0", lambda value: value > 0, None)
DECAY = number("null or a number between 0 and 1", lambda value: 0 < value < 1, None)
SMOOTHING = number("a number from 0 to below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class Training:
    """The settings `training.*`."""

    lr: Annotated[float, FINITE, Mark.VARIES]
    weight_decay: Annotated[float, FINITE, Mark.VARIES]
    batch_size: Annotated[int, whole(1)]
    patience: Annotated[int | None, whole(1, None), Mark.VARIES]
    criterion: Annotated[Literal["both", "accuracy", "strict", "loss"], CRITERION, Mark.VARIES]
    max_epochs: Annotated[int, whole(1)]
    sparse: Annotated[bool | Literal["auto"], choice("auto", True, False), Mark.SPEED]
    compile: Annotated[bool, choice(True, False), Mark.SPEED]
    cuda_graphs: Annotated[bool | Literal["auto"], choice("auto", True, False), Mark.SPEED]
    warmup: Annotated[int, whole(0)]
    gradient_clip_val: Annotated[float | None, CLIP, Mark.VARIES]
    ema: Annotated[float | None, DECAY]
    label_rate: Annotated[float | None, DECAY]


@dataclass(frozen=True)
class Loss:
    """The settings `loss.*`: arguments of the task's objective."""

    class_weight: Annotated[list[float] | Literal["balanced"] | None, CLASS_WEIGHT]
    pos_weight: Annotated[float | list[float] | Literal["balanced"] | None, POS_WEIGHT]
    label_smoothing: Annotated[float, SMOOTHING]
    focal: Annotated[float, FINITE]
    error: Annotated[Literal["mse", "mae", "huber"] | None, choice(None, "mse", "mae", "huber")]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that differ from the defaults, null and 0."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class Split:
    """The settings `split.*`: how data without masks is split, and which of several splits is used."""

    per_class: Annotated[int | None, whole(0, None)]
    val: Annotated[int | None, whole(0, None)]
    test: Annotated[int | None, whole(0, None)]
    seed: Annotated[int, whole(0)]
    split: Annotated[int | Literal["all"], whole(0, "all")]
    folds: Annotated[int | str | None, FOLDS]
    fold: Annotated[int | Literal["all"], whole(0, "all")]
    column: Annotated[str | None, text("null or the name of a column", None)]
    time: Annotated[str | None, text("null or the name of a column", None)]
    scaffold: Annotated[bool, choice(False, True)]
    file: Annotated[str | None, text("null or the path of an .npz file", None)]
    draws: Annotated[int | None, whole(2, None)]

    @property
    def drawn_seed(self) -> int:
        """The seed of the split: that of number `split` if several are drawn."""
        return self.seed if self.draws is None else self.seed + int(self.split)


@dataclass(frozen=True)
class Loader:
    """The settings `loader.*`: whole graphs, or batches of one graph's nodes or links."""

    num_neighbors: Annotated[list[int] | None, HOPS] = None
    num_parts: Annotated[int | None, whole(1, None)] = None
    num_links: Annotated[int | None, whole(1, None)] = None
    batch_size: Annotated[int | None, whole(1)] = None
    num_workers: Annotated[int | None, whole(0), Mark.SPEED, Mark.RESUMES] = None

    @property
    def in_batches(self) -> bool:
        """Return True if a step is a batch of a graph's nodes."""
        return self.num_neighbors is not None or self.num_parts is not None

    @property
    def is_drawn(self) -> bool:
        """Return True if a step is a batch of a graph's nodes or links, drawn at random."""
        return self.in_batches or self.num_links is not None


GROUPS = {"training": Training, "loss": Loss, "split": Split, "loader": Loader}
