from __future__ import annotations

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from gat_pyg.runs import stacked
from gat_pyg.runs.folder import Job
from gat_pyg.settings.conf import VERSION_BASE, config_folder
from gat_pyg.settings.settings import Settings


def test_the_members_of_a_stack_do_not_depend_on_the_order_of_the_values(monkeypatch: pytest.MonkeyPatch):
    orders: set[tuple[tuple[int, float], ...]] = set()

    def record(place: Any, jobs: list[Job], *arguments: Any) -> None:
        orders.add(tuple((job.settings.seed, job.settings.training.lr) for job in jobs))

    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    monkeypatch.setattr(stacked, "_planned", lambda *arguments: (trainer, None))
    monkeypatch.setattr(stacked, "one_share", record)
    values = ((10, 0.01), (2, 0.1), (2, 0.02))
    with initialize_config_dir(str(config_folder()), **VERSION_BASE):
        settings = [Settings.parse(compose("config", [f"seed={seed}", f"training.lr={lr}"])) for seed, lr in values]
    for order in permutations(settings):
        jobs = [Job(each, Path(f"nowhere/{number}")) for number, each in enumerate(order)]
        assert stacked.all_at_once(jobs, SimpleNamespace(has_many_graphs=False)) != []
    assert orders == {tuple(sorted(values))}
