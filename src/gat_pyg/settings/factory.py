"""Settings of a class or function: its dotted name as `_target_`, and its arguments."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .rules import check_arguments

LABELS = {  # settings of `model` that name it in results, not arguments of its class
    "method": "the name of the method in results and tables; by default that of its class",
    "form": "the name of a variant, if a method has several",
    "study": "the name of a study, whose runs are not those of the paper's tables",
}
AROUND = {  # settings of `model` for what is put around the network
    "encoder": "the width of an encoder of the features, or {channels: 64, scaling: quantile}: gat_pyg.models.Encoder",
    "readout": "the pooling of a graph's nodes, such as mean, or a list; count adds sizes: gat_pyg.models.Readout",
    "change": "true: predict the change of a series from its last value, in units of its spread: gat_pyg.models.Change",
    "decoder": "the score of a pair of nodes: dot, bilinear or mlp: gat_pyg.models.link_decoder",
}
NAMESAKES = ("GAT",)  # our classes that have the name of a PyG class


@dataclass(frozen=True)
class Factory:
    """A group of settings for a class or function: its name as `_target_`, and its arguments.

    >>> Factory("model", {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 1})()
    Linear(in_features=2, out_features=1, bias=True)
    """

    group: str
    values: Mapping[str, Any]

    @property
    def target(self) -> str | None:
        """The dotted name of the class or function."""
        return self.values.get("_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        """A copy of the arguments."""
        return {key: copy.deepcopy(value) for key, value in self.values.items() if key != "_target_"}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the argument of this name, or `default` if it is not set."""
        return self.values.get(key, default)

    def locate(self) -> Any:
        """Import the class or function.

        Raises:
            ValueError: if it cannot be found or called.
        """
        from hydra.utils import get_object

        name = f"{self.group}._target_={self.target}"
        try:
            target = get_object(self.target or "")
        except Exception as error:
            cause = error.__cause__ or error
            raise ValueError(
                f"{name} cannot be imported ({type(cause).__name__}: {cause}). Give the dotted name of a class or a "
                "function in an installed package or in a file of the working folder, such as mine.Net for mine.py."
            ) from error
        if not callable(target):
            raise ValueError(f"{name} cannot be called, expected a class or a function.")
        return target

    def check(self) -> None:
        """Raise ValueError for arguments that the class or function does not take."""
        check_arguments(self.group, self.locate(), self.arguments)

    def __call__(self, **others: Any) -> Any:
        """Instantiate the class or call the function; `others` extend or replace the arguments.

        Raises:
            ValueError: if it rejects the arguments; the message includes its error.
        """
        from hydra.errors import HydraException
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from .conf import instantiate

        try:
            return instantiate(self.values, _convert_="all", **others)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, HydraException) else error  # as Hydra 1.4 raises it
            if not isinstance(cause, (TypeError, ValueError, RuntimeError, MisconfigurationException)):
                raise
            hint = " On this machine, trainer=cpu or trainer=ddp_cpu may work." if _NO_DEVICE.search(str(cause)) else ""
            text = " ".join(str(cause).split())
            if str(self.target).startswith("gat_pyg."):  # its message is complete
                raise ValueError(text) from error
            settings = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
            message = f"{self.group}._target_={self.target}: {text}{hint} Its settings: {settings}."
            raise ValueError(message) from error


_NO_DEVICE = re.compile("accelerator is not available|No supported gpu backend|your machine only has")  # of Lightning


@dataclass(frozen=True)
class ModelFactory(Factory):
    """The settings `model.*`: the model's arguments, and the names by which the report finds the results.

    The names are the `method` (by default the class's name), its `form` if a method has several, and the `study` that
    the run is part of if it is not for the paper's tables.

    >>> ModelFactory("model", {"_target_": "gat_pyg.models.GAT", "form": "text", "study": "ablation"}).name
    'GAT: text'
    """

    @property
    def method(self) -> str:
        """The method, a row of a table."""
        kind = str(self.target).rpartition(".")[2]
        namesake = kind in NAMESAKES and not str(self.target).startswith("gat_pyg.")
        return str(self.get("method") or (f"PyG's {kind}" if namesake else kind))

    @property
    def name(self) -> str:
        """The method with its form and study, as results show it."""
        form, study = self.get("form"), self.get("study")
        if study == "ablation":
            return f"{self.method}: {form}"
        return self.method + (f" ({form})" if form else "") + (f", {study}" if study else "")

    @property
    def arguments(self) -> dict[str, Any]:
        """A copy of the arguments."""
        return {key: value for key, value in super().arguments.items() if key not in {*LABELS, *AROUND}}

    @property
    def encoder(self) -> dict[str, Any] | None:
        """The `channels` of an encoder of the features, `init` and `scaling` if they are set; None without one."""
        encoder = self.get("encoder")
        if isinstance(encoder, dict):
            return {"channels": 64, **encoder}
        return None if encoder is None else {"channels": encoder}

    def check(self) -> None:
        """Raise ValueError if the class is not a model, or does not take the arguments."""
        from torch import nn

        target = self.locate()
        if not inspect.isclass(target) or not issubclass(target, nn.Module):
            raise ValueError(f"model._target_={self.target} is not a torch.nn.Module, expected the class of one.")
        for label in LABELS:
            if not isinstance(self.get(label), (str, type(None))):
                raise ValueError(f"model.{label} is {self.get(label)!r}, expected text: a name in the results.")
        if (encoder := self.encoder) is not None:
            channels = encoder.get("channels")
            if type(channels) is not int or channels < 1 or encoder.keys() - {"channels", "init", "scaling"}:
                raise ValueError(
                    f"model.encoder is {self.get('encoder')!r}, expected a width, at least 1, or a mapping such as "
                    "{channels: 64, init: orthogonal}."
                )
            if encoder.get("scaling", "standard") not in ("standard", "quantile"):
                raise ValueError(f"model.encoder.scaling is {encoder['scaling']!r}, expected standard or quantile.")
        arguments = self.arguments
        if self.get("readout") is not None and "head_layers" not in inspect.signature(target).parameters:
            arguments.pop("head_layers", None)  # of the readout
        check_arguments(self.group, target, arguments, AROUND)
