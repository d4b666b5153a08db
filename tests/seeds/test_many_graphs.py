"""Seeds trained as one on many graphs are what each would be alone on graphs in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GIN

from gat_pyg.models import GAT, Encoded
from gat_pyg.philox import draw_seed, seeds_from
from gat_pyg.seeds import EachStopping, Member, StackedInductive, train
from gat_pyg.seeds.planning import _largest_batch
from gat_pyg.training import Optimisation, Resumable
from gat_pyg.training.epoch_seeds import generator_of, seed_epoch
from gat_pyg.training.loading import TaskData
from tests.objectives import OBJECTIVES, WITH_GRAPHS, headed
from tests.seeds.test_seeds import Dropped, Make, alone, assert_same, float64, in_float64, stacked
from tests.training.loaders import pytestmark, trainer  # noqa: F401 (marks of this file)

BATCH = 2  # of five training graphs: the last batch is smaller


def gin() -> nn.Module:
    model = GIN(6, 4, 2, 3, norm="batch_norm")
    for conv in model.convs:
        conv.nn.lins[0].bias.requires_grad_(False)  # the norm takes it away: Adam makes much of its rounding
    return model


# No bias before a batch norm, for the same reason.
MODELS: dict[str, Make] = {
    "GAT": lambda: GAT(6, [4], 3, [2, 1], dropout=0.5),
    "GAT, batch norm": lambda: GAT(6, 4, 3, 2, num_layers=2, dropout=0.3, norm="batch", bias=False),
    "GATv2, graph norm": lambda: GAT(6, 4, 3, 2, num_layers=2, dropout=0.3, conv="gatv2", norm="graph"),
    "perceptron": Dropped,
    "PyG's GIN": gin,
    "encoded": lambda: Encoded(GAT(4, [4], 3, [2, 1], dropout=0.5), 4, [0] * 6),
}
# Where GAT's leaky ReLU is linear, nodes with the same neighbours have equal outputs, and rounding ranks them.
CASES = [(name, "perceptron" if "precision" in name else "GAT, batch norm") for name in WITH_GRAPHS]
CASES += [("graphs", name) for name in MODELS if name not in ("GAT, batch norm", "perceptron")]


@pytest.mark.parametrize(("objective", "model"), CASES)
def test_every_epoch_is_that_of_the_seed_alone(objective: str, model: str):
    task = in_float64(OBJECTIVES[objective]())
    with float64():
        one, other = (
            run(lambda: headed(MODELS[model](), task), task, [3, 0], 2, batch_size=BATCH) for run in (alone, stacked)
        )
    assert_same(one, other)


def test_each_stops_when_it_would_and_the_rest_go_on_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gat_pyg.seeds.module.IN_TURN", 0)
    task, options = in_float64(OBJECTIVES["graphs"]()), {"patience": 2, "batch_size": BATCH}

    def make() -> nn.Module:
        return headed(MODELS["GAT"](), task)

    with float64():
        one = alone(make, task, range(3), 15, **options)
        other = stacked(make, task, range(3), 15, leave=[6], **options)
    assert len({outcome.epochs for outcome in one[0].values()}) > 1
    assert_same(one, other)
    assert other[2].left_at


def test_in_passes_all_seeds_take_the_order_of_the_first():
    task = OBJECTIVES["graphs"]()

    def make() -> nn.Module:
        return headed(MODELS["GAT, batch norm"](), task)

    options = {
        "batch_size": BATCH,
        "max_epochs": 2,
        "progress": False,
        "accelerator": "cpu",
        "optimisation": Optimisation(0.01),
    }
    whole, stack = train(make, task, [4, 1, 2], **options)
    parts, again = train(make, task, [4, 1, 2], seeds_per_pass=2, **options)
    for one, other in zip(whole, parts, strict=True):
        assert replace(one, seconds=0.0) == replace(other, seconds=0.0)
    for key, value in stack.weights().items():
        torch.testing.assert_close(again.weights()[key], value)
    last, _ = train(make, task, [2], **options)
    assert last[0].val != whole[2].val  # in the order of its own seed


def test_a_model_draws_its_seeds_as_after_its_own_epochs_start():
    device, seeds = torch.device("cpu"), [3, 0, 2**32 - 1]
    generators = [generator_of(seed, 7, device) for seed in seeds]
    p = torch.tensor([0.5, 0.0, 0.1])  # without dropout a model draws no seed alone

    def draw(row: Tensor, p: Tensor) -> Tensor:
        with seeds_from(generators, row):
            return torch.stack([draw_seed(device), draw_seed(device, p), draw_seed(device)])

    before = torch.get_rng_state()
    together = torch.cat([torch.func.vmap(draw)(torch.arange(3), p) for _ in range(2)], 1)  # of two steps
    assert torch.equal(before, torch.get_rng_state())
    generators = [generator_of(seed, 7, device) for seed in seeds]
    assert torch.equal(draw(torch.tensor(2), torch.tensor(0.1)), together[2, :3])  # in turn, without vmap
    for row, seed in enumerate(seeds):
        seed_epoch(seed, 0, 7)
        drawn = together[row].tolist() if p[row] > 0 else together[row, [0, 2, 3, 5]].tolist()
        assert drawn == [int(draw_seed(device)) for _ in drawn]


def test_after_a_fit_each_call_draws_its_own_mask():
    task = OBJECTIVES["graphs"]()
    members = [Member(seed, task.objective) for seed in range(2)]
    module = StackedInductive([headed(MODELS["GAT"](), task) for _ in members], members)
    trainer(Resumable(None, 0), EachStopping(members), epochs=1).fit(module, datamodule=TaskData(task))
    module.train()
    batch = Batch.from_data_list(task.train)
    assert not torch.equal(module(batch), module(batch))


def test_the_trial_is_on_the_largest_batch():
    task = OBJECTIVES["graphs"]()
    graphs = [data.num_nodes for data in [*task.train, *task.val, *task.test]]
    assert _largest_batch(task, 3, False).num_nodes == sum(sorted(graphs)[-3:])
