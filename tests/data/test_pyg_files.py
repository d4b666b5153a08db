"""What PyG's transforms and torch.save leave in files: read as the same task as without, or refused by its reason."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.datasets import KarateClub

from gat_pyg.data import Task, digits, from_dataset, from_file, links, planted
from gat_pyg.data.arrays.keys import READ
from gat_pyg.models import GAT
from gat_pyg.tasks.edges import EdgeLabels
from gat_pyg.tasks.objective import MASKS, SPLITS

N = 24
SIZES = {"per_class": 2, "val": 4, "test": 4}


def graph(**others: Any) -> Data:
    nodes = torch.arange(N)
    edges = torch.cat([torch.stack([nodes, (nodes + step) % N]) for step in (1, 4)], 1)
    return Data(torch.eye(N)[:, :4] + 1, edges, y=nodes % 3).update(others)


def graphs(count: int = 12, **others: Any) -> list[Data]:
    """Graphs of 3 to 6 nodes in a ring, whose number is their only feature, with one of two classes each."""
    result = []
    for number in range(count):
        nodes = torch.arange(3 + number % 4)
        edges, x = torch.stack([nodes, nodes.roll(1)]), torch.full((len(nodes), 1), float(number))
        result.append(Data(x, edges, y=torch.tensor([number % 2])).update(others))
    return result


def same(task: Task, other: Task) -> None:
    assert task.objective == other.objective and task.edge_dim == other.edge_dim
    for split in SPLITS:
        for data, expected in zip(task.graphs(split), other.graphs(split), strict=True):
            assert data.keys() == expected.keys()
            for key, value in expected.to_dict().items():
                assert torch.equal(data[key], value), key


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(content: Any, name: str = "mine.pt") -> Path:
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return save


def arrays_in(folder: Path, form: str, values: dict[str, Any]) -> Path:
    """A `.npz` file or a folder of `.npy` files."""
    if form == "npz":
        np.savez(folder / "mine.npz", **values)
        return folder / "mine.npz"
    (folder / "mine").mkdir()
    for key, value in values.items():
        np.save(folder / "mine" / f"{key}.npy", value)
    return folder / "mine"


# Transforms ---------------------------------------------------------------------------------------------------------

NEEDS = {  # transforms that take no plain `Data`, or need other packages or data
    "AddGPSE": "a trained encoder",
    "AddMetaPaths": "types",
    "AddRandomMetaPaths": "types",
    "BaseTransform": "is abstract",
    "ComposeFilters": "returns a bool",
    "GridSampling": "pyg-lib",
    "KNNGraph": "pyg-lib",
    "RadiusGraph": "pyg-lib",
    "RootedRWSubgraph": "pyg-lib",
    "ToSLIC": "scikit-image",
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AddLaplacianEigenvectorPE": (2,),
    "AddRandomWalkPE": (3,),
    "Compose": ([T.ToUndirected(), T.AddSelfLoops()],),
    "FeaturePropagation": (torch.eye(N)[:, :4] > 0,),
    "FixedPoints": (12,),
    "LinearTransformation": (torch.eye(3),),
    "NodePropertySplit": ("popularity", [0.3, 0.1, 0.1, 0.3, 0.2]),
    "OneHotDegree": (5,),
    "Pad": (30, 100),
    "RandomFlip": (0,),
    "RandomJitter": (0.1,),
    "RandomNodeSplit": ("train_rest", 3, 1, 4, 4),
    "RandomRotate": (10,),
    "RandomScale": ((0.9, 1.1),),
    "RandomShear": (0.1,),
    "RemoveTrainingClasses": ([0],),
    "RootedEgoNets": (1,),
    "SIGN": (2,),
    "SVDFeatureReduction": (2,),
    "SamplePoints": (10,),
    "ToDense": (30,),
    "ToDevice": ("cpu",),
}
FACES = {"GenerateMeshNormals", "FaceToEdge", "SamplePoints"}
REFUSED = {
    "FixedPoints": r"edge_index holds 23, but x has 12 rows \(nodes 0 to 11\)",
    "GenerateMeshNormals": "has no edge_index; its keys are",
    "HalfHop": r"y is torch.int64 of shape \(24,\), expected torch.int64 of shape \(72,\)",
    "LineGraph": r"y is torch.int64 of shape \(24,\), expected torch.int64 of shape \(48,\)",
    "RandomLinkSplit": "has the three graphs of a RandomLinkSplit. Choose task=link_prediction, or",
    "RemoveTrainingClasses": "has nodes of class 0, the training has none",
    "SamplePoints": "has no edge_index; its keys are",
    "ToDense": "has no edge_index; .* Leave out transforms that replace the edges, such as ToSparseTensor and ToDense",
    "ToSparseTensor": "has no edge_index; .* Leave out transforms that replace the edges, such as ToSparseTensor",
}


def prepared(name: str) -> Data:
    """A graph with all that a transform needs."""
    data = graph(pos=torch.rand(N, 2 if name in ("Delaunay", "Polar") else 3))
    if name in FACES:
        data.face, data.edge_index = torch.randint(N, (3, 20)), None
    masks = name in ("RemoveTrainingClasses", "MaskToIndex")
    others = {"norm": torch.rand(N, 3), "train_index": torch.tensor([0, 1, 2]), "train_mask": torch.arange(N) < 12}
    wanted = {"PointPairFeatures": "norm", "IndexToMask": "train_index"}.get(name, "train_mask" if masks else None)
    return data.update({wanted: others[wanted]} if wanted else {})


def test_what_a_transform_leaves_is_read_as_without_it_or_refused_by_its_reason(saved: Callable[..., Path]):
    torch.manual_seed(0)
    for name in sorted({*T.__all__} - NEEDS.keys()):
        left = getattr(T, name)(*ARGUMENTS.get(name, ()))(prepared(name))
        path = saved(left)
        others = (
            set() if isinstance(left, tuple) else {key for key, value in left if isinstance(value, Tensor)} - {*READ}
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if name in REFUSED:
                with pytest.raises(ValueError, match=REFUSED[name]):
                    from_file(path, **SIZES)
                continue
            task = from_file(path, **SIZES)
        (unread,) = [str(warning.message) for warning in caught if "not read" in str(warning.message)] or [""]
        assert all(key in unread for key in others) and bool(others) == bool(unread), name
        without = Data(**{key: left[key].clone() for key in READ if key in left and key != "num_nodes"})
        same(task, from_dataset(without, **SIZES))


# The forms of files -------------------------------------------------------------------------------------------------


def hetero() -> HeteroData:
    types = {"node_type": torch.arange(N) % 2, "edge_type": torch.zeros(2 * N, dtype=torch.long)}
    return graph(**types).to_heterogeneous(node_type_names=["a", "b"], edge_type_names=[("a", "to", "b")])


def old(data: Data) -> Data:
    """A graph with the attributes of PyG 1."""
    values = {"edge_attr": None, "pos": None} | data.to_dict()
    del data.__dict__["_store"]
    data.__dict__.update(values)
    return data


def collated(many: list[Data]) -> tuple[Any, Any]:
    return InMemoryDataset.collate(many)


FORMS: dict[str, Callable[[], Any]] = {
    "a list": graphs,
    "a tuple": lambda: tuple(graphs()),
    "dicts": lambda: [data.to_dict() for data in graphs()],
    "a batch": lambda: Batch.from_data_list(graphs()),
    "a batch as a dict": lambda: Batch.from_data_list(graphs()).to_dict(),
    "batches": lambda: [Batch.from_data_list(graphs()[:5]), Batch.from_data_list(graphs()[5:])],
    "from a batch": lambda: Batch.from_data_list(graphs()).to_data_list(),
    "processed": lambda: (lambda data, slices: (data.to_dict(), slices, Data))(*collated(graphs())),
    "processed by an older PyG": lambda: collated(graphs()),
    "processed by TUDataset": lambda: (lambda data, slices: (data.to_dict(), slices, {"num_node_attributes": 1}, Data))(
        *collated(graphs())
    ),
    "PyG 1": lambda: [old(data) for data in graphs()],
    "numbers as y": lambda: [data.update({"y": int(data.y)}) for data in graphs()],
    "bools as y": lambda: [data.update({"y": bool(data.y)}) for data in graphs()],
    "numbers of NumPy": lambda: [data.update({"y": np.int64(data.y), "id": np.float32(1.5)}) for data in graphs()],
    "arrays of NumPy": lambda: [
        data.update({"x": data.x.numpy(), "names": np.array(["a", 1], object)}) for data in graphs()
    ],
    "tensors without axes": lambda: [data.update({"y": data.y[0]}) for data in graphs()],
}


@pytest.mark.parametrize("form", FORMS)
def test_graphs_in_every_form_are_the_same_task(form: str, saved: Callable[..., Path]):
    expected = from_dataset(graphs(), "mine", val=2, test=3)
    same(from_file(saved(FORMS[form]()), val=2, test=3), expected)
    if "processed" not in form and "dict" not in form and "PyG 1" not in form:
        same(from_dataset(FORMS[form](), "mine", val=2, test=3), expected)


@pytest.mark.parametrize("form", ["npz", "folder", "processed", "processed by an older PyG", "PyG 1", "NumPy"])
def test_a_graph_in_every_form_is_the_same_task(form: str, saved: Callable[..., Path], tmp_path: Path):
    data = T.ToUndirected()(graph(lambda_max=np.float64(2.0), edge_attr=torch.rand(2 * N, 2)))
    if form in ("npz", "folder"):
        values = {key: value.numpy() for key, value in data if key != "lambda_max"}
        return same(from_file(arrays_in(tmp_path, form, values), **SIZES), from_dataset(data, **SIZES))
    content = {
        "processed": (data.to_dict(), None, Data),
        "processed by an older PyG": (data, None),
        "PyG 1": old(data.clone()),
        "NumPy": Data(
            **{key: value.numpy() if key != "lambda_max" else value for key, value in data.to_dict().items()}
        ),
    }[form]
    same(from_file(saved(content), **SIZES), from_dataset(data, **SIZES))


def test_a_split_in_every_form_is_the_same_task(saved: Callable[..., Path]):
    parts = graphs()[:6], graphs()[6:9], graphs()[9:]
    expected = from_dataset(parts, "mine")
    mapping = dict(zip(SPLITS, parts, strict=True))
    for content in (mapping, list(parts), {key: Batch.from_data_list(part) for key, part in mapping.items()}):
        same(from_file(saved(content)), expected)
        same(from_dataset(content, "mine"), expected)
    with pytest.warns(UserWarning, match=r"mine: keys that are not read: val_mask \(the graphs come split\)\."):
        from_dataset([graphs(3, val_mask=torch.tensor([True]))] * 3, "mine")
    with pytest.raises(ValueError, match="is a mapping of train, valid, test, expected train, val and test"):
        from_file(saved(dict(zip(("train", "valid", "test"), parts, strict=True))))


class Lazy(Dataset):  # type: ignore[type-arg]
    """A data set that has a length and items, and does not end otherwise."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Data:
        return graphs()[number % 12]


def test_any_data_set_with_a_length_and_items_is_read():
    expected = from_dataset(graphs(), "mine", val=2, test=3)
    subset = Subset(graphs() + graphs(2), range(12))  # type: ignore[arg-type]
    for dataset in (Lazy(), subset, ConcatDataset([graphs()[:5], graphs()[5:]])):  # type: ignore[list-item]
        same(from_dataset(dataset, "mine", val=2, test=3), expected)


class Mine(InMemoryDataset):
    """A data set of a user's own."""


NO_TASK: dict[str, tuple[Callable[[], Any], str]] = {
    "processed types": (lambda: ({}, {}, HeteroData), r"holds a HeteroData, .*to_homogeneous\(\)"),
    "a data set": (KarateClub, r"needs torch_geometric\S+KarateClub, .* would run code\. .* a data set as list\(data"),
    "one's own": (Mine, r"it needs \S+\.Mine, .* would run code\. .* a data set as list\(dataset\)"),
    "three classes": (lambda: [Data, Data, Data], r"is a ABCMeta, expected a PyG Dataset"),
    "lists in lists": (lambda: [[[graph()]]] * 3, r"train graph 0 holds a list, expected torch_geometric\.data\.Data"),
    "a path": (lambda: graph(path=Path("x")), r"it needs pathlib\S+, .*Save a graph as a dict of its tensors"),
}


@pytest.mark.parametrize("case", NO_TASK)
def test_what_a_file_cannot_hold_is_refused_by_its_reason(case: str, saved: Callable[..., Path]):
    content, message = NO_TASK[case]
    with pytest.raises(ValueError, match=message) as caught:
        from_file(saved(content()), val=1, test=1)
    assert "truncated" not in str(caught.value)


def test_threads_read_files_at_once_and_the_list_of_torch_stays(saved: Callable[..., Path]):
    before, path, results = set(torch.serialization.get_safe_globals()), saved(T.ToUndirected()(graph())), []
    threads = [threading.Thread(target=lambda: results.append(from_file(path, **SIZES))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and set(torch.serialization.get_safe_globals()) == before


# Keys ---------------------------------------------------------------------------------------------------------------

UNREAD = {
    "edge_weight": (2 * N, "give it as edge_attr"),
    "edge_attrs": (2 * N, r"did you mean edge_attr\?"),
    "edge_type": (2 * N, "give it as edge_attr"),
    "trainmask": (N, r"did you mean train_mask\?"),
    "valid_mask": (N, "give it as val_mask"),
    "train_idx": (5, "give train_mask by torch_geometric.utils.index_to_mask"),
    "node_type": (N, "append it to x"),
    "pos": (N, "append it to x"),
    "label": (N, "give it as y"),
    "weight": (2 * N, "give it as edge_attr"),
    "edge_label_attr": (2 * N, "only edge labels have it"),
}


@pytest.mark.parametrize("form", ["pt", "dict", "list", "npz", "folder", "memory", "links"])
def test_keys_that_are_not_read_are_named_once(form: str, tmp_path: Path, saved: Callable[..., Path]):
    data = graph(**{key: torch.arange(rows) for key, (rows, _) in UNREAD.items()}, smiles=["C"], id=7)
    arrays = {key: value.numpy() for key, value in data.to_dict().items() if isinstance(value, Tensor)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if form in ("npz", "folder"):
            from_file(arrays_in(tmp_path, form, arrays), **SIZES)
        elif form in ("memory", "links"):
            from_dataset(data, "mine", **SIZES) if form == "memory" else links(data, "mine")
        else:
            content = {"pt": data, "dict": data.to_dict(), "list": [data] * 12}[form]
            from_file(saved(content), **SIZES)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith("mine: ") and "smiles" not in message and " id" not in message
    listed = dict(pair.split(" (") for pair in message.partition("not read: ")[2].rstrip(".").split("), "))
    for key, text in listed.items():
        assert text.rstrip(")") == UNREAD[key][1].replace("\\", "")
    assert len(listed) == len(UNREAD), message


def test_features_of_labelled_pairs_are_read(tmp_path: Path, saved: Callable[..., Path]):
    pairs = torch.tensor([[0, 3, 5, 7] * 3, [2, 1, 9, 7] * 3])
    features, sizes = torch.rand(12, 3), {"val": 1, "test": 1}
    data = graph(y=None, edge_label=torch.arange(12) % 2, edge_label_index=pairs, edge_label_attr=features)
    np.savez(tmp_path / "mine.npz", **{key: value.numpy() for key, value in data.to_dict().items()})
    union = Batch.from_data_list([data] * 6)
    for content in (saved(data), tmp_path / "mine.npz", saved(union, "several.pt")):
        assert torch.equal(from_file(content, **sizes).test[0].edge_label_attr, features)
    column = data.clone().update({"edge_label_attr": features[:, 0]})
    assert torch.equal(from_dataset(column, **sizes).train[0].edge_label_attr, features[:, :1])
    with pytest.raises(ValueError, match=r"edge_label_attr has shape \(7, 3\), expected \(12, D\)"):
        from_file(saved(data.update({"edge_label_attr": features[:7]})), **sizes)


def test_features_of_width_0_are_none():
    same(from_dataset(graph(edge_attr=torch.zeros(2 * N, 0)), **SIZES), from_dataset(graph(), **SIZES))
    assert from_dataset(graph(x=torch.zeros(N, 0)), **SIZES).train[0].x[:, 0].tolist() == list(range(N))  # the ids


def test_the_number_of_nodes_without_features_is_read(saved: Callable[..., Path]):
    data = Data(edge_index=graph().edge_index, num_nodes=N + 3)
    for task in (from_file(saved(data), task="link_prediction"), from_dataset(data, task="link_prediction")):
        assert len(task.train[0].x) == N + 3


# Masks, labels and links --------------------------------------------------------------------------------------------

PART = torch.tensor([0, 0, 1, 2, 0, 0, 0, 2, 1, 0, 0, 0])


def masked(form: Callable[[Tensor], Any]) -> list[Data]:
    masks = [{key: form(part == number) for number, key in enumerate(MASKS)} for part in PART]
    return [data.update(mask) for data, mask in zip(graphs(), masks, strict=True)]


@pytest.mark.parametrize(
    "form", [lambda m: m[None], lambda m: m, bool, lambda m: m[None].long(), lambda m: torch.stack([~m, m])[None]]
)
def test_masks_of_graphs_in_a_list_are_those_of_their_union(form: Callable[[Tensor], Any], saved: Callable[..., Path]):
    is_column = isinstance(form(PART[0] == 0), Tensor) and form(PART[0] == 0).dim() == 2
    options = {"split": 1} if is_column else {}
    lists = [[data for data, part in zip(graphs(), PART, strict=True) if part == number] for number in range(3)]
    expected, dataset = from_dataset(lists, "mine"), masked(form)
    for task in (from_file(saved(dataset), **options), from_dataset(dataset, "mine", **options)):
        same(task, expected)
        assert task.num_splits == 1 + is_column and task.split_arguments == ()
    same(from_dataset(ConcatDataset([dataset[:5], dataset[5:]]), "mine", **options), expected)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="folds=3 divides .*, but this is split already"):
        from_dataset(dataset, "mine", folds=3, **options)


@pytest.mark.parametrize("disjoint", [0.0, 0.3])
@pytest.mark.parametrize("negatives", [False, True])
def test_the_three_graphs_of_a_random_link_split_are_one(disjoint: float, negatives: bool, saved: Callable[..., Path]):
    torch.manual_seed(0)
    split = T.RandomLinkSplit(
        0.1, 0.2, is_undirected=True, add_negative_train_samples=negatives, disjoint_train_ratio=disjoint
    )
    parts = split(T.ToUndirected()(graph()))
    for content in (parts, list(parts), dict(zip(SPLITS, parts, strict=True))):
        for task in (from_file(saved(content), task="link_prediction"), from_dataset(content, task="link_prediction")):
            data = task.train[0]
            assert task.shared_graph is data and task.split_arguments == ()
            assert torch.equal(data.edge_index, parts[0].edge_index)
            for key, part, positive in zip(MASKS, parts, (True, False, False), strict=True):
                chosen = part.edge_label > 0 if positive else torch.ones_like(part.edge_label, dtype=torch.bool)
                assert torch.equal(data.edge_label_index[:, data[key]], part.edge_label_index[:, chosen])
                assert torch.equal(data.y[data[key]], part.edge_label[chosen].long())
    without = [part.clone().update({"x": None}) for part in parts]
    assert len(from_dataset(without, task="link_prediction").train[0].x) == N
    if negatives:
        assert from_dataset(parts, task="edge_classification").objective == EdgeLabels(2)
    with pytest.raises(ValueError, match=r"three splits have \[24, 23, 24\] nodes, expected the same nodes"):
        from_dataset((parts[0], parts[1].clone().update({"x": parts[1].x[1:]}), parts[2]), task="link_prediction")


# The default dtype --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_features_have_the_dtype_of_models(saved: Callable[..., Path]):
    data = graph(edge_attr=torch.ones(2 * N, 2, dtype=torch.float32))
    data.x = data.x.float()
    without = Data(edge_index=data.edge_index, y=data.y)
    tasks = {
        "file": from_file(saved(data), **SIZES),
        "ids": from_dataset(without, **SIZES),
        "links": links(data),
        "digits": digits(),
        "planted": planted(graphs=1, nodes=9),
        "quantities": planted(graphs=1, nodes=9, regression=True),
    }
    for name, task in tasks.items():
        first = task.train[0]
        model = GAT(task.num_features, [4], task.num_classes, [1, 1], edge_dim=task.edge_dim, backend="segment")
        assert model(first.x, first.edge_index, first.edge_attr).dtype == torch.float64, name
        assert task.preparation(Data(first.x.float(), first.edge_index, first.edge_attr)).x.dtype == torch.float64
