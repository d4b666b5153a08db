"""Tables as tasks: features against plain Python, later tables, splits, ids, edges, links and messages."""

import csv
import datetime
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from gat_pyg.data import Task, from_pandas, tables
from gat_pyg.data.reader import Rows
from gat_pyg.data.rows import read_rows
from gat_pyg.data.tables.features import Features
from gat_pyg.data.tables.split_columns import masks_by_column, masks_by_time
from gat_pyg.data.tables.targets import Targets
from gat_pyg.runs.network import build_model
from gat_pyg.settings.factory import ModelFactory
from gat_pyg.tasks.metrics import metric_named
from gat_pyg.tasks.model import Inputs
from gat_pyg.tasks.objective import MASKS, SPLITS
from gat_pyg.tasks.preparation import Preparation

CITIES = ("Oslo", "Rome", "Lima", "")


def accounts(seed: int = 0, size: int = 60, prefix: str = "A") -> pd.DataFrame:
    """Accounts with string ids, missing values, a category, a date, a split and a rare unknown label."""
    draw = np.random.default_rng(seed)
    days = pd.Timestamp("2025-01-01") + pd.to_timedelta(draw.integers(0, 90, size), unit="D")
    return pd.DataFrame(
        {
            "name": [f"{prefix} {i}" for i in range(size)],  # left out
            "account": [f"{prefix}{i:03d}" for i in draw.permutation(size)],
            "amount": np.where(draw.random(size) < 0.2, np.nan, draw.lognormal(3, 1, size).round(2)),
            "city": draw.choice(CITIES, size),
            "opened": days.strftime("%Y-%m-%d"),
            "fraud": draw.choice(["no", "yes", ""], size, p=[0.6, 0.3, 0.1]),
            "part": draw.choice(["train", "Valid", "test"], size, p=[0.5, 0.25, 0.25]),
        }
    )


def payments(nodes: pd.DataFrame, seed: int = 0, size: int = 200) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    ends = [draw.choice(nodes["account"], size) for _ in range(2)]
    return pd.DataFrame({"from_account": ends[0], "to_account": ends[1], "euros": draw.random(size).round(3)})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    nodes, edges = tmp_path / "nodes.csv", tmp_path / "edges.csv"
    accounts().to_csv(nodes, index=False)
    payments(accounts()).to_csv(edges, index=False)
    return nodes, edges


COLUMNS = {"id": "account", "target": "fraud", "column": "part", "src": "from_account", "dst": "to_account"}


def by_hand(nodes: Path, edges: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The features, labels and training rows of `accounts` in a file, by loops in float64."""
    with nodes.open() as file:
        rows = list(csv.DictReader(file))
    with edges.open() as file:
        ends = [(row["from_account"], row["to_account"]) for row in csv.DictReader(file)]
    train = [row["part"] == "train" and row["fraud"] != "" for row in rows]
    of_train = [row for row, is_train in zip(rows, train, strict=True) if is_train]
    amounts = [float(row["amount"]) for row in of_train if row["amount"]]
    cities = [row["city"] for row in of_train]
    order = sorted(set(cities), key=lambda city: (-cities.count(city), city))
    day = {row["opened"]: (datetime.date.fromisoformat(row["opened"]) - datetime.date(1970, 1, 1)).days for row in rows}
    days = [day[row["opened"]] for row in of_train]
    degrees = [[math.log1p(sum(pair[k] == row["account"] for pair in ends)) for row in rows] for k in (0, 1)]
    of_degrees = [[degree for degree, is_train in zip(each, train, strict=True) if is_train] for each in degrees]
    x = []
    for number, row in enumerate(rows):
        amount = float(row["amount"]) if row["amount"] else statistics.median(amounts)
        x.append(
            [
                (amount - statistics.fmean(amounts)) / statistics.pstdev(amounts),
                float(not row["amount"]),
                *(float(row["city"] == city) for city in order),
                (day[row["opened"]] - statistics.fmean(days)) / statistics.pstdev(days),
                *(
                    (each[number] - statistics.fmean(of)) / statistics.pstdev(of)
                    for each, of in zip(degrees, of_degrees, strict=True)
                ),
            ]
        )
    y = [["no", "yes", ""].index(row["fraud"]) for row in rows]
    return torch.tensor(x), torch.tensor([-1 if label == 2 else label for label in y]), torch.tensor(train)


def stored(task: Task) -> Preparation:
    """The preparation of a task as a run's file has it."""
    return Preparation.from_dict(json.loads(json.dumps(task.preparation.to_dict())))


def test_features_are_those_of_plain_python_fitted_on_the_training_rows(files: tuple[Path, Path]):
    task = tables(*files, **COLUMNS)
    x, y, train = by_hand(*files)
    data = task.train[0]
    torch.testing.assert_close(data.x, x)
    assert torch.equal(data.y, y) and torch.equal(data.train_mask, train)
    assert task.class_names == ("no", "yes") and task.name == files[0].parent.name
    uses = (
        "ids account of nodes.csv; ends from_account of edges.csv and to_account of edges.csv; target fraud; split part"
    )
    features = "amount, city, opened, the numbers of edges from and to each"
    assert task.notes[:2] == (
        f"{task.name}: {uses}; {x.size(1)} features of nodes: {features}; 1 feature of edges: euros",
        f"{task.name}: left out of nodes.csv: name ({int(train.sum())} different texts)",
    )
    classes = ", ".join(f"{name} ({int((y == k).sum())})" for name, k in (("no", 0), ("yes", 1), ("unknown", -1)))
    assert any(f"fraud has the classes {classes}" in note for note in task.notes)


def test_a_change_of_other_rows_changes_neither_the_encoding_nor_the_training_rows(files: tuple[Path, Path]):
    nodes, edges = accounts(), payments(accounts())
    task = from_pandas(nodes, edges, **COLUMNS)
    other = (nodes["part"] == "test").to_numpy()
    changed = nodes.copy()
    changed.loc[other, ["amount", "city", "opened"]] = [1e6, "Paris", "2031-01-01"]
    changed.loc[other, "fraud"] = changed.loc[other, "fraud"].map({"no": "yes", "yes": "no"})
    with pytest.warns(
        UserWarning, match=r"city has \d+ values that are not a category of the training rows, such as 'Paris'"
    ):
        after = from_pandas(changed, edges, **COLUMNS)
    assert after.source == task.source
    for key in ("x", "y"):
        assert torch.equal(after.train[0][key][~torch.tensor(other)], task.train[0][key][~torch.tensor(other)])


def test_amounts_that_differ_by_orders_of_magnitude_are_logarithms():
    amounts = np.array([*range(1, 201), 1e7, -1e308, 1e308])
    features = Features.fit(pd.DataFrame({"v": amounts}), ["v"], np.full(203, True))
    logarithms = np.sign(amounts) * np.log1p(np.abs(amounts))
    expected = torch.tensor((logarithms - logarithms.mean()) / logarithms.std()).float()
    torch.testing.assert_close(features(pd.DataFrame({"v": amounts}))[:, 0], expected)


def same_graph(rows: Rows, data: Data) -> None:
    (graph,) = rows.graphs
    for key in ("x", "edge_index", "edge_attr", "y", "edge_label_index", "edge_label_attr"):
        mine, other = graph.get(key), data.get(key)
        assert (mine is None) == (other is None), key
        assert mine is None or torch.equal(mine.nan_to_num(), other.nan_to_num()), key


TASKS: dict[str, dict[str, Any]] = {
    "node classes": COLUMNS,
    "node quantities": {**COLUMNS, "target": "amount"},
    "edge quantities": {"target": "euros", "ignore": ["part"]},
    "without direction": {**COLUMNS, "undirected": False},
    "without features": {**COLUMNS, "ignore": ["amount", "city", "opened"]},
    "without nodes": {"nodes": None, "target": "euros", "id": None},
}


@pytest.mark.parametrize("arguments", TASKS.values(), ids=TASKS)
def test_the_files_of_a_run_are_read_again_as_they_were(files: tuple[Path, Path], arguments: dict[str, Any]):
    task = tables(**{"nodes": files[0], "edges": files[1], "id": "account", **arguments})
    rows = read_rows(stored(task))
    same_graph(rows, task.train[0])
    ids = accounts()["account"] if task.objective.item == "node" else payments(accounts())["to_account"]
    assert [*rows.ids.values()][-1] == ids.tolist()


@pytest.mark.parametrize("target", ["fraud", "euros"])
def test_without_direction_the_order_of_the_ends_has_no_effect(files: tuple[Path, Path], target: str):
    nodes, edges = (pd.read_csv(file) for file in files)
    other, exchanged = edges.copy(), np.arange(len(edges)) % 3 == 0
    ends = ["from_account", "to_account"]
    other.loc[exchanged, ends] = edges.loc[exchanged, ends[::-1]].to_numpy()
    options = {"id": "account", "ignore": ["part"]}
    tasks = [tables(nodes, each, target, undirected=True, **options) for each in (edges, other)]
    a, b = (task.train[0] for task in tasks)
    for key in {"x", "edge_index", "edge_attr", "y"} & {*a.keys()}:
        assert torch.equal(a[key].nan_to_num(), b[key].nan_to_num()), key
    assert is_undirected(a.edge_index) and "no direction" not in " ".join(tasks[0].notes)
    same_graph(read_rows(stored(tasks[0]), [nodes, edges]), a)
    network = {"_target_": "gat_pyg.models.GAT", "hidden_channels": [4], "heads": [2, 1]}
    model = build_model(ModelFactory("model", network), tasks[0]).model.eval()
    outs = [Inputs.of(model).call(model, data) for data in (a, b)]
    assert torch.equal(*outs)
    named = edges.rename(columns={"from_account": "account_1", "to_account": "account_2"})
    notes = " ".join(tables(nodes, named, target, **options).notes)
    assert "edges have no direction, as the names of their ends" in notes
    marked = tables(nodes, edges, target, **options)
    assert marked.num_features == tasks[0].num_features + (target == "fraud")  # edges from and to each
    assert "if edges have no direction, like cables: dataset.undirected=true" in " ".join(marked.notes)


def test_later_tables_may_have_another_order_new_ids_and_new_categories(files: tuple[Path, Path], tmp_path: Path):
    task = tables(*files, **COLUMNS)
    later = accounts(1, prefix="B")
    later.loc[3, "city"] = "Bonn"
    both = pd.concat([accounts(), later])[["city", "opened", "account", "amount", "fraud"]]
    both = both.sample(frac=1, random_state=0)
    both.to_parquet(tmp_path / "later.parquet")
    payments(accounts()).iloc[::-1].to_csv(tmp_path / "payments.tsv", sep="\t", index=False)
    with pytest.warns(UserWarning, match=r"later.parquet: city has 1 values .* such as 'Bonn'"):
        rows = read_rows(stored(task), [tmp_path / "payments.tsv", tmp_path / "later.parquet"])
    (graph,), old = rows.graphs, task.train[0]
    place = {account: row for row, account in enumerate(rows.ids["account"])}
    again = torch.tensor([place[account] for account in accounts()["account"]])
    assert torch.equal(graph.x[again], old.x) and torch.equal(graph.y[again], old.y)
    assert len(graph.x) == 120
    ends = {tuple(edge) for edge in again[old.edge_index].t().tolist()}
    assert ends == {tuple(edge) for edge in graph.edge_index.t().tolist()}
    later["city"], later["opened"] = "Oslo", "2099-01-01"
    with pytest.raises(
        ValueError, match=r"is not in .* are the edges of the training. For other nodes, give their edge"
    ):
        read_rows(stored(task), later)
    with pytest.warns(UserWarning, match=r"opened has 60 of 60 dates before or after those of the training rows"):
        read_rows(stored(task), [later, payments(later)])


def test_rows_are_split_by_a_column_and_by_a_time():
    frame, known = accounts(), torch.tensor((accounts()["fraud"] != "").to_numpy())
    frame["opened"] = frame["opened"].where(frame.index != 5)
    masks, _ = masks_by_column(frame, "part", known)
    for key, name in zip(MASKS, ("train", "Valid", "test"), strict=True):
        assert torch.equal(masks[key], torch.tensor((frame["part"] == name).to_numpy()) & known)
    masks, _ = masks_by_column(frame.replace({"part": {"Valid": "train"}}), "part", known, seed=1)
    assert int(masks["val_mask"].sum()) == int((masks["train_mask"] | masks["val_mask"]).sum()) // 4

    masks, _ = masks_by_time(frame, "opened", known)
    parts = [frame["opened"][masks[key].numpy()] for key in MASKS]
    assert parts[0].max() < parts[1].min() and parts[1].max() < parts[2].min()
    assert not any(mask[5] for mask in masks.values())
    dated = known & torch.tensor(frame["opened"].notna().to_numpy())
    assert torch.equal(masks["train_mask"] | masks["val_mask"] | masks["test_mask"], dated)
    assert int(masks["test_mask"].sum()) >= int(dated.sum()) // 5  # all rows of one day are in one split


@pytest.mark.parametrize("split", ["column", "time"])
@pytest.mark.parametrize("name", ["opened", "city", "fraud", "part"])
def test_a_listed_value_is_an_empty_field_in_features_labels_and_splits(split: str, name: str):
    nodes, options = accounts(), {"column": {"column": "part"}, "time": {"time": "opened", "ignore": ["part"]}}[split]
    empty = nodes.assign(**{name: nodes[name].mask(np.arange(len(nodes)) % 5 == 1, "")})
    listed = empty.replace("", "-1")
    expected, task = (
        tables(frame, payments(nodes), "fraud", id="account", missing=missing, **options)
        for frame, missing in ((empty, []), (listed, [-1]))
    )
    for key in ("x", "y", *MASKS):
        torch.testing.assert_close(task.train[0][key], expected.train[0][key], msg=key)
    same_graph(read_rows(stored(task), [listed, payments(nodes)]), task.train[0])


def ratings(size: int = 300) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    dates = pd.Timestamp("2025-01-01") + pd.to_timedelta(draw.integers(0, 300, size), unit="D")
    return pd.DataFrame({"user": draw.integers(20, size=size), "item": draw.integers(30, size=size), "day": dates})


def test_users_and_items_have_ids_of_their_own():
    with pytest.raises(ValueError, match="20 ids are both in user and in item, such as .*dataset.bipartite=true"):
        tables(None, ratings())
    one, two = (tables(None, ratings(), bipartite=value) for value in (False, True))
    assert len(one.train[0].x) == 30 and len(two.train[0].x) == 50
    assert two.train[0].edge_index.aminmax(dim=1).max.tolist() == [49, 49]
    assert len(tables(None, ratings().rename(columns={"user": "a", "item": "b"})).train[0].x) == 30
    negative = two.test[0].edge_label_index[:, two.test[0].y == 0]
    assert ((negative < 20).sum(0) == 1).all()  # a user and an item
    rows = read_rows(stored(two), {"edges": ratings(), "pairs": pd.DataFrame({"item": [0, 3], "user": [0, 2]})})
    assert rows.ids == {"user": [0, 2], "item": [0, 3]}
    src, dst = rows.graphs[0].edge_label_index
    users, items = (ratings()[key].unique().tolist() for key in ("user", "item"))
    assert src.tolist() == [users.index(0), users.index(2)] and (dst - 20).tolist() == [items.index(0), items.index(3)]


def test_users_and_items_have_tables_of_their_own():
    users = pd.DataFrame({"user": range(20), "age": range(20), "city": ["Oslo", "Rome"] * 10})
    items = pd.DataFrame({"price": range(40), "item": range(40)})
    task = tables([users, items], ratings(), bipartite=True)
    x, links = task.train[0].x, task.test[0].edge_label_index
    assert [*task.source["columns"]["node"]] == ["user.age", "user.city", "item.price"]
    ages = torch.arange(20.0)
    torch.testing.assert_close(x[:20, 0], (ages - ages.mean()) / ages.std(correction=0))
    assert x[:20, 1].tolist() == [0.0] * 20 and x[20:, 1].tolist() == [1.0] * 40  # the items have no age
    assert len(x) == 60 and bool((links.amin(0) < 20).all()) and bool((links.amax(0) >= 20).all())
    rows = read_rows(stored(task), [users, items.iloc[::-1], ratings(), pd.DataFrame({"user": [3], "item": [39]})])
    assert rows.graphs[0].edge_label_index.tolist() == [[3], [20]]
    torch.testing.assert_close(rows.graphs[0].x[20:], x[20:].flip(0))
    learnt = tables([users[["user"]], items[["item"]]], ratings(), bipartite=True)
    later = [
        read_rows(stored(learnt), {"nodes": nodes, "edges": ratings()}).graphs[0].edge_index
        for nodes in ([users, items], [users.iloc[::-1], items.iloc[::-1]])
    ]
    assert torch.equal(*later)
    churn = tables([users.assign(churn=["yes", "no"] * 10), items], ratings(), "user.churn", bipartite=True)
    assert int((churn.train[0].y >= 0).sum()) == 20
    named = read_rows(stored(churn), [users, items, ratings()]).ids["id"]
    assert [named[row] for row in (3, 23)] == ["user 3", "item 3"]


def test_links_of_the_future_are_neither_messages_nor_training_links():
    frame = ratings()
    with pytest.raises(ValueError, match=r"disjoint=0\.5 divides links at random, but a column divides them\. Omit it"):
        tables(None, frame, bipartite=True, time="day", disjoint=0.5)
    task = tables(None, frame, bipartite=True, time="day")
    data, (users, items) = task.train[0], (frame[key].unique().tolist() for key in ("user", "item"))
    first = {}  # day of each link
    for row in frame.itertuples():
        link = (users.index(row.user), 20 + items.index(row.item))
        first[link] = min(first.get(link, row.day), row.day)
    links = {
        key: {(*pair,) for pair in data.edge_label_index[:, data[key] & (data.y == 1)].t().tolist()} for key in MASKS
    }
    assert set.union(*links.values()) == set(first) and sum(map(len, links.values())) == len(first)
    days = [{first[link] for link in links[key]} for key in MASKS]
    assert max(days[0]) < min(days[1]) and max(days[1]) < min(days[2])
    messages = {(*pair,) for pair in data.edge_index.t().tolist()}
    assert messages == links["train_mask"] | {(dst, src) for src, dst in links["train_mask"]}
    assert not set(first) & {(*pair,) for pair in data.edge_label_index[:, data.y == 0].t().tolist()}


def test_a_repeated_link_has_the_mean_of_its_features_in_its_split():
    rows = [("a", "b", 1), ("b", "a", 3), ("c", "a", 6), ("a", "b", 9), ("c", "d", 5), ("b", "c", 7)]
    edges = pd.DataFrame(rows, columns=["src", "dst", "w"]).assign(part=["train"] * 3 + ["val"] * 2 + ["test"])
    data = tables(pd.DataFrame({"id": list("abcd"), "x": [1.0, 2.0, 4.0, 3.0]}), edges, column="part").train[0]
    weights = np.array([1, 3, 6])
    values = {pair: (w - weights.mean()) / weights.std() for pair, w in {(0, 1): 2, (0, 2): 6}.items()}
    messages = {
        (*pair,): w for pair, w in zip(data.edge_index.t().tolist(), data.edge_attr[:, 0].tolist(), strict=True)
    }
    assert messages == pytest.approx(values | {pair[::-1]: w for pair, w in values.items()})


def test_edges_keep_their_rows_and_the_reverse_ones_are_marked():
    nodes = pd.DataFrame({"id": [1, 2, 3], "x": [1.0, 2.0, 4.0]})
    edges = pd.DataFrame({"src": [1, 1, 2, 3, 3], "dst": [2, 2, 3, 1, 1], "w": [1.0, 2.0, 3.0, 4.0, 5.0]})
    edges = edges.assign(y=[0.5, 1.5, 2.5, None, 3.5], part=["train", "train", "val", "train", "test"])
    data = tables(nodes, edges, "y", column="part").train[0]
    assert data.edge_label_index.tolist() == [[0, 0, 1, 2, 2], [1, 1, 2, 0, 0]]
    assert torch.equal(data.edge_index, torch.cat([data.edge_label_index, data.edge_label_index.flip(0)], 1))
    assert torch.equal(data.edge_attr[:5, 0], data.edge_label_attr[:, 0])
    assert torch.equal(data.edge_attr[:5, 0], data.edge_attr[5:, 0])
    assert data.edge_attr[:, 1].tolist() == [0.0] * 5 + [1.0] * 5
    train = data.edge_label_attr[data.train_mask, 0]
    assert float(train.mean()) == pytest.approx(0, abs=1e-6)
    both = pd.concat([edges, edges.rename(columns={"src": "dst", "dst": "src"})])
    assert tables(nodes, both, "y", column="part").train[0].edge_attr.shape == (10, 1)  # each has its reverse


def test_several_targets_are_labels_or_quantities():
    nodes = pd.DataFrame({"id": range(6), "a": [0, 1, 1, 0, 1, 0], "b": [1, 1, None, 0, 0, 1], "c": [2, 3, 4, 5, 6, 7]})
    edges = pd.DataFrame({"src": range(5), "dst": range(1, 6)})
    labels = tables(nodes, edges, ["a", "b"], val=1, test=1)
    assert type(labels.objective).__name__ == "NodeMultiLabels" and labels.class_names == ("a", "b")
    quantities = tables(nodes, edges, ["a", "c"], val=1, test=1)
    assert type(quantities.objective).__name__ == "NodeTargets"
    assert quantities.num_features == 4  # b, where it lacks, and the numbers of edges
    assert type(tables(nodes, edges, "c", task="node_regression", val=1, test=1).objective).__name__ == "NodeTargets"
    assert "choose task=node_regression" in Targets.fit(pd.DataFrame({"c": range(30)}), ["c"]).note(
        torch.arange(30), "node"
    )


def nodes_with(**columns: Any) -> dict[str, Any]:
    return {"nodes": pd.DataFrame({"id": range(6), "y": ["a", "b"] * 3, **columns})}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "z"}, r"There is no column z: nodes has id, y; edges has src, dst"),
        ({"target": "Y"}, r"Did you mean y\?"),
        ({"ignore": ["wage"]}, "There is no column wage"),
        ({"task": "graph_regression"}, "tables are one graph"),
        ({"target": None, "task": "node_regression"}, "needs target, the column"),
        ({"task": "link_prediction"}, "without a target"),
        ({"task": "node_regression"}, "y has values such as 'a', expected numbers"),
        ({"edges": None}, "edges is missing"),
        ({"src": "src"}, "expected the names of two columns"),
        ({"column": "y"}, r"nodes, row 0: y is 'a', expected train, val, test or nothing \(id 0, and 5 more rows\)"),
        ({"time": "y"}, "expected dates or numbers"),
        ({"time": "part"}, r"There is no column part: nodes has id, y\.$"),
        ({"time": "d", **nodes_with(d=["1/2/2025", "3/4/2025"] * 3)}, "may begin with the day or the month"),
        ({"time": "d", **nodes_with(d=[1, 1, 1, 1, 1, 2])}, "gives train no labelled row|gives val no labelled row"),
    ],
)
def test_messages(arguments: dict[str, Any], message: str):
    edges = pd.DataFrame({"src": [0, 1, 2, 3, 4], "dst": [1, 2, 3, 4, 5]})
    with pytest.raises(ValueError, match=message):
        tables(**{**nodes_with(), "edges": edges, "target": "y", "val": 1, "test": 1, **arguments})


def test_a_table_that_the_earlier_run_lacked_is_named():
    edges = pd.DataFrame({"src": range(6), "dst": [1, 2, 3, 4, 5, 0]})
    with pytest.raises(ValueError, match="nodes is a table of nodes, which the earlier run did not have"):
        tables(**nodes_with(), edges=edges, val=1, test=1, like=tables(None, edges, val=1, test=1).source)


def test_the_target_is_that_of_the_earlier_run():
    edges = pd.DataFrame({"src": range(6), "dst": [1, 2, 3, 4, 5, 0]})
    earlier = tables(**nodes_with(z=[0, 1] * 3), edges=edges, target="y", val=1, test=1).source
    with pytest.raises(ValueError, match="The target is z, but the earlier run predicts y. Choose the same."):
        tables(**nodes_with(z=[0, 1] * 3), edges=edges, target="z", val=1, test=1, like=earlier)


def test_messages_of_later_tables(files: tuple[Path, Path]):
    preparation, nodes = stored(tables(*files, **COLUMNS)), accounts()
    with pytest.raises(ValueError, match="There is no column city"):
        read_rows(preparation, {"nodes": nodes.drop(columns="city"), "edges": payments(nodes)})
    with pytest.raises(ValueError, match="There is no column from_account"):
        read_rows(preparation, payments(nodes).rename(columns={"from_account": "x"}))
    for kind, table in (("nodes", files[0]), ("edges", files[1])):
        with pytest.raises(ValueError, match=f"{table.name} is a second table of {kind}, expected one"):
            read_rows(preparation, [*files, table])


@pytest.mark.parametrize(
    ("names", "positive", "expected"),
    [
        (("late", "on time"), None, ("on time", "late")),  # 2 of 10 are late
        (("on time", "late"), None, ("late", "on time")),
        (("late", "on time"), "on time", ("late", "on time")),
        (("maybe", "no"), "no", ("maybe", "no")),
        (("1", "0"), None, ("0", "1")),  # numbers keep their order
        (("0", "1"), None, ("0", "1")),
        (("0", "1"), 0, ("1", "0")),
    ],
)
def test_the_positive_class_is_the_chosen_one_or_the_rarer_one(names, positive, expected) -> None:
    rare, common = names
    target = [rare if k % 10 < 2 else common for k in range(40)]
    edges = pd.DataFrame({"src": range(40), "dst": [*range(1, 40), 0], "late": target})
    task = tables(None, edges, "late", positive=positive, name="flights")
    assert task.class_names == expected
    labels = [expected[k] for split in SPLITS for k in task.labels(split).tolist()]
    assert sorted(labels) == sorted(target)
    assert task.test[0].y.tolist() == [expected.index(name) for name in target]
    metric = metric_named("average_precision", task.class_names, task.objective.column)
    assert metric.title == f"average precision of {expected[1]}"
    with pytest.raises(ValueError, match=f"dataset.positive is early of late, expected {min(names)} or {max(names)}"):
        tables(None, edges, "late", positive="early")
