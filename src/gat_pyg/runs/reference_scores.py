"""Baselines without a network: linear models and trees on columns, labels of neighbours, heuristics for links."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from itertools import chain
from operator import sub
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import degree, remove_self_loops, to_undirected

from ..data.molecules.descriptors import descriptors, fingerprints
from ..data.rows import READERS
from ..distributed.ranks import is_first
from ..files import needs
from ..graph.subgraph import mask_to_index
from ..models.encoders import num_categories
from ..settings.conf import CHOICES
from ..settings.names import dataset_name
from ..settings.settings import Settings
from ..tasks.encodings import GraphColumns
from ..tasks.labels import OneLabel
from ..tasks.negatives import sides_of
from ..tasks.node_ids import has_ids
from ..tasks.objective import SAMPLES, Split, any_known
from ..tasks.targets import Targets
from ..tasks.task import Task
from .network import nearest_features
from .task import data_key

TRAIN_ROWS, TEST_ROWS = 10_000, 20_000  # used at most; of more, a sample with a fixed seed
MOLECULES = 2_000, 1_000  # likewise: descriptors take 5 to 15 ms a molecule
GRAPHS = 500  # of training and of the test, likewise, whose nodes or edges have labels
ELEMENTS = 4_000_000  # training rows x columns used at most; of more columns, a sample with a fixed seed
CATEGORIES = 128  # columns of whole numbers below this are also encoded one-hot
TREES, TREE_ROWS, TREE_COLUMNS = 100, 2_000, 32  # trees of the forest, and the most rows of each and columns of a split
SUFFICIENT, FEWEST, MOST = 1_000, 30, 100  # training rows from which trees are boosted, and the rounds
WORK = 150_000_000  # rows x columns x rounds of boosting, which take 3 s
STEPS, MULTIPLIED = 200, 4_000_000_000  # of a logistic regression; rows x columns x classes x steps
WIDE = 100  # columns of nodes up to which the neighbours' columns have columns too
READS, EDGES = 100_000_000, 5_000_000  # edges x columns of neighbours used at most, and edges: every second, third, ...
ROUNDS, PASSED = 50, 2_000_000_000  # of labels that pass over edges; edges x columns x rounds
NEIGHBOURS = 50_000_000  # of the ends of all test pairs, above which a heuristic for links is left out
CHUNK = 5_000_000  # of these, at once

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Rows: TypeAlias = list[tuple[Data, Tensor]]  # graphs, each with the ids of its nodes, or the indices of its pairs
Predict: TypeAlias = Callable[[Array], Array]  # of rows of columns


COMPUTED: dict[str, Baselines] = {}  # by `data_key`


def has_baselines(settings: Settings) -> bool:
    """Return True if results have the scores of `simple_baselines`: by default those of unnamed data."""
    if settings.baselines != "auto":
        return settings.baselines
    target = str(settings.dataset.target)
    if target.startswith("gat_pyg.data."):
        return target in READERS
    return dataset_name(settings.dataset.values) not in CHOICES["dataset"]


def baselines_of(settings: Settings, task: Task) -> Baselines | None:
    """Return the baselines for a result of the first rank, once computed for all jobs on the same data.

    None without scikit-learn or if none is asked for. An error is printed as a warning, since the training has ended.
    """
    if not is_first() or not has_baselines(settings) or is_missing():
        return None
    key = data_key(settings)
    if key not in COMPUTED:
        try:
            COMPUTED[key] = simple_baselines(task.reading_labels(None))
        except Exception as error:
            warnings.warn(f"{task.name}: the baselines failed ({type(error).__name__}: {error}).", stacklevel=2)
            COMPUTED[key] = Baselines({}, 0.0)
    return COMPUTED[key]


def is_missing(package: str = "sklearn") -> bool:
    """Return True if a package is not installed, by default scikit-learn."""
    return importlib.util.find_spec(package) is None


class Baselines(NamedTuple):
    """Test scores by the names of the baselines, and the standard error of the best of them."""

    scores: dict[str, float]
    standard_error: float


def simple_baselines(task: Task) -> Baselines:
    r"""Return the test scores of models without a network, by the task's metric; fitted on training rows alone.

    For labels and targets of nodes, edges and graphs these are scikit-learn's `LogisticRegression` (`RidgeCV` for
    regression) on standardised columns, and trees: a random forest, or from 1,000 training rows
    `HistGradientBoosting...`. Their columns are, without encodings and with those of whole numbers from 0 to 127 also
    one-hot,

    - of a node, its features, the means, minima and maxima of its neighbours' features, its degrees and PageRank
      (`gat_pyg.tasks.encodings.GraphColumns`), and the same of these columns again, if they are few;
    - of an edge, the columns of both ends and its own features;
    - of a graph, the sums and the means over its nodes and over its edges, with the degrees, their numbers, and
      `graph_attr`;
    - of a molecule with SMILES, if RDKit is installed, its descriptors and the bits of its Morgan fingerprint.

    In one graph, the neighbours' labels y predict too: each unknown f_i is 50 times replaced by the mean of its
    neighbours, which tends to the harmonic function (Zhu et al., 2003),

    .. math::
        f_i \leftarrow \frac{1}{|\mathcal{N}_i|} \sum_{j \in \mathcal{N}_i} f_j, \qquad
        f_i = y_i \text{ for training rows}

    It begins with the mean of the training rows, which remains where no label is near. Edges are neighbours if they
    begin, or end, at the same node. For targets of nodes, the feature nearest to the target in training is a baseline
    as it is, if at least two are nearer than a constant: in a series the last value, or the seasonal one.

    For links (u, v), with A the message-passing edges in both directions and k the degrees:

    - popularity, the out-degree of u times the in-degree of v; also the latter alone; with a split by time, the
      in-degree in the latest training links, as many as the test has pairs;
    - common neighbours with the weights 1 / log k of Adamic and Adar (2003);
    - in a bipartite graph, in which u and v have none, the paths of length 3 instead: the sum over i, j of
      A_ui A_ij A_jv / (k_i k_j)^(1/2) (Kovács et al., 2019).

    The standard error is that of the best score, by bootstrap samples of the test rows; of a perfect score, what one
    wrong row changes. All is deterministic, on one
    thread.

    Cost: a few seconds at most, and 5 to 15 ms a molecule. The work is limited by numbers that are known before: of
    more than 10,000 training or 20,000 test rows (2,000 and 1,000 molecules), and of more columns than make up four
    million numbers in training, a random sample is used, the same in every call. Of neighbours' features, it is a
    sample from 10^8 numbers on. Labels pass over the edges less than 50 times, or are left out, if these are many, and
    so is a heuristic for links that would read more than 50 million neighbours.

    Raises:
        ImportError: if scikit-learn is not installed.

    Example:
        >>> from gat_pyg.data import digits
        >>> {name: round(score) for name, score in simple_baselines(digits()).scores.items()}
        {"neighbours' labels": 98, 'linear model': 95, 'random forest': 95}
    """
    needs("sklearn", "baselines")
    from threadpoolctl import threadpool_limits  # scikit-learn requires it

    with warnings.catch_warnings(), threadpool_limits(1):  # threads of OpenMP wait for each other on a busy machine
        warnings.simplefilter("ignore")  # of a limit on iterations, and of bootstrap samples with labels of one kind
        outputs = {name: (out, y) for name, out, y in (_of_links if task.objective.draws_pairs else _of_rows)(task)}
        scores = {name: score for name, its in outputs.items() if (score := _score(task, *its)) == score}
        if not scores:
            return Baselines({}, 0.0)
        best = max(scores, key=lambda name: task.objective.metric.better(scores[name]))
        return Baselines(scores, standard_error(task, outputs[best][1], outputs[best][0]))


def _score(task: Task, out: Tensor, y: Tensor) -> float:
    return task.objective.score(task.objective.pool([task.objective.statistics(out, y)]))


def standard_error(task: Task, y: Tensor, out: Tensor, *other: Tensor) -> float:
    """Return the standard error of the score of outputs, or of the difference between those of two for the same rows.

    It is the standard deviation over bootstrap samples of the rows, at most `TEST_ROWS` each. Where it is 0, as for a
    perfect score, the result is the change by one more wrong row.
    """
    draw, n = torch.Generator().manual_seed(0), min(len(y), TEST_ROWS)
    samples = [torch.randint(len(y), (n,), generator=draw) for _ in range(SAMPLES)]
    each = (reduce(sub, (_score(task, values[rows], y[rows]) for values in (out, *other))) for rows in samples)
    scores = [score for score in each if score == score]
    error = float(np.std(scores, ddof=1) * (n / len(y)) ** 0.5) if len(scores) > 1 else 0.0
    return error or abs(_score(task, out, y) - _score(task, torch.cat([-out[:1], out[1:]]), y))


# Models of rows of columns ------------------------------------------------------------------------------------------


def _of_rows(task: Task) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each model, its outputs for test rows, and their labels."""
    objective, item, limits = task.objective, task.objective.item, (TRAIN_ROWS, TEST_ROWS)
    columns, of = _of_graphs if item == "graph" else _of_nodes, ""
    if item == "graph" and "smiles" in task.test[0] and not is_missing("rdkit"):
        columns, limits, of = _of_molecules, MOLECULES, " of descriptors"
    (train, y), (test, y_test) = _selected(task, "train", limits[0]), _selected(task, "test", limits[1])
    target, predictions = _numbers(task, y), dict[str, Array]()
    if task.shared_graph is not None:
        predictions = _of_neighbours(task, task.shared_graph, test[0][1])
    if isinstance(objective, Targets) and item == "node":
        earlier, later = (torch.cat([task.features(data)[index] for data, index in rows]) for rows in (train, test))
        if nearest := nearest_features(earlier.double(), y.double())[1]:
            predictions["earlier value"] = later[:, nearest].double().numpy()
    parts = columns(task, train, test)
    chosen = _sample(parts[0].size(1), max(1, ELEMENTS // max(len(y), len(y_test) // 4)))
    x, x_test = (part[:, chosen].double().numpy() for part in parts)
    if len(chosen):
        rounds = WORK // (x.size * (task.num_classes if task.num_classes > 2 else 1))
        fits = {"linear model": _linear, "random forest": _forest}
        if len(y) >= SUFFICIENT and rounds >= FEWEST:
            fits = {"linear model": _linear, "boosting": partial(_boosting, rounds=min(rounds, MOST))}
        predictions |= {name + of: fit(task, x, target)(x_test) for name, fit in fits.items()}
    for name, values in predictions.items():
        out = torch.from_numpy(values)
        yield name, objective.outputs(out.clamp(1e-9, 1 - 1e-9) if objective.goal == "classification" else out), y_test


def _numbers(task: Task, y: Tensor) -> Array:
    """Return labels as `[n, K]`: classes one-hot, NaN where they are unknown."""
    return cast(Array, (F.one_hot(y, task.num_classes) if isinstance(task.objective, OneLabel) else y).double().numpy())


def _selected(task: Task, split: Split, limit: int) -> tuple[Rows, Tensor]:
    """Return at most `limit` rows of a split with a known label, and their labels."""
    objective, mask, every = task.objective, None if task.has_many_graphs else split, task.graphs(split)
    chosen = _sample(len(every), limit if objective.item == "graph" else GRAPHS).tolist()
    graphs = [objective.example(every[number], split) for number in chosen]
    labels = [objective.labels(data, mask) for data in graphs]
    y, start, rows = torch.cat(labels), 0, []
    known = any_known(y).nonzero()[:, 0]
    known = known[_sample(len(known), limit)]
    for data, its in zip(graphs, labels, strict=True):
        index = known[(known >= start) & (known < start + len(its))] - start
        start += len(its)
        if objective.item == "node" and mask is not None:
            index = mask_to_index(data[f"{mask}_mask"])[index]
        if len(index):
            rows.append((data, index))
    return rows, y[known]


def _sample(size: int, limit: int) -> Tensor:
    """Return `limit` of the indices below `size` in ascending order, or all."""
    index = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:limit]
    return index.sort().values


def _of_nodes(task: Task, *splits: Rows) -> list[Tensor]:
    """Return the columns of nodes, or of pairs: those of both ends and their own features."""

    def nodes(data: Data, index: Tensor) -> Tensor:  # [n, 1] or [n, 2]
        return data.edge_label_index[:, index].t() if task.objective.has_pairs else index[:, None]

    def rows(data: Data, index: Tensor) -> Tensor:
        own = [of_pairs(data.edge_label_attr[index])] if "edge_label_attr" in data else []
        ends = columns[id(data.x), id(data.edge_index)][nodes(data, index)]
        return torch.cat([ends.flatten(1), *own], 1)

    graphs = {(id(data.x), id(data.edge_index)): data for data, _ in chain(*splits)}
    step = sum(data.edge_index.size(1) for data in graphs.values()) // EDGES + 1
    parts = [Data(_features(task, data), data.edge_index[:, ::step]) for data in graphs.values()]
    encode = OneHot(_features(task, data)[nodes(data, index).unique()] for data, index in splits[0])
    of_pairs = OneHot(data.edge_label_attr[index] for data, index in splits[0] if "edge_label_attr" in data)
    every = _with_neighbours(encode, Batch.from_data_list(parts)).split([len(part.x) for part in parts])
    columns = dict(zip(graphs, every, strict=True))
    return [torch.cat([rows(*each) for each in split]) for split in splits]


def _with_neighbours(encode: OneHot, graph: Data) -> Tensor:
    """Return the features of nodes and the columns of their neighbours, of a sample of them if there are many."""
    read = x = encode(graph.x)
    limit = READS // max(graph.edge_index.size(1), len(x))
    for _ in range(2):
        read = read[:, _sample(read.size(1), limit)]
        added = GraphColumns(most=limit)(Data(read, graph.edge_index)).x[:, read.size(1) :]
        read = x = torch.cat([x, added], 1)
        if x.size(1) > min(limit, WIDE):
            break
    return x


def _features(task: Task, data: Data) -> Tensor:
    """Return the features of the nodes; no columns if they are ids."""
    x = task.features(data)
    return x[:, :0] if has_ids(x) else x


def _of_graphs(task: Task, *splits: Rows) -> list[Tensor]:
    """Return the columns of graphs: sums and means over the nodes and over the edges, and their numbers."""
    of_nodes = OneHot(_with_degrees(task, data) for data, _ in splits[0])
    of_edges = OneHot(cast(Tensor, data.edge_attr) for data, _ in splits[0] if task.edge_dim is not None)

    def columns(data: Data) -> Tensor:
        values = [of_nodes(_with_degrees(task, data))]
        values += [] if task.edge_dim is None else [of_edges(cast(Tensor, data.edge_attr))]
        sizes = torch.tensor([float(data.x.size(0)), float(data.edge_index.size(1))])
        sums = [value.sum(0) for value in values]
        means = [total / max(len(value), 1) for total, value in zip(sums, values, strict=True)]
        return torch.cat([sizes, *sums, *means, *([data.graph_attr[0]] if "graph_attr" in data else [])])

    return [torch.stack([columns(data) for data, _ in rows]) for rows in splits]


def _with_degrees(task: Task, data: Data) -> Tensor:
    return torch.cat([task.features(data), degree(data.edge_index[1], data.x.size(0))[:, None]], 1)


def _of_molecules(task: Task, *splits: Rows) -> list[Tensor]:
    """Return RDKit's descriptors and Morgan fingerprints of molecules."""
    smiles = [[data.smiles for data, _ in rows] for rows in splits]
    return [torch.from_numpy(np.concatenate([descriptors(each), fingerprints(each)], 1)) for each in smiles]


class OneHot:
    """Columns with the one-hot encodings of those that have whole numbers from 0 to `CATEGORIES` - 1 in training.

    A value that training does not have is all zeros. A column of 0 and 1 stays as it is.
    """

    def __init__(self, values: Iterable[Tensor]) -> None:
        rows = [value for value in values if len(value)]
        sizes = num_categories(rows) if rows else []
        self.sizes = {k: size for k, size in enumerate(sizes) if 2 < size <= CATEGORIES}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the columns of x and their encodings."""
        parts = [x[:, [column]] == torch.arange(size) for column, size in self.sizes.items()]
        return torch.cat([x.float(), *(part.float() for part in parts)], 1)


def _linear(task: Task, x: Array, y: Array) -> Predict:
    """Return the predictions of a linear model of standardised columns that is fitted to y `[n, K]`."""
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    steps = min(max(MULTIPLIED // (x.size * y.shape[1]), 20), STEPS)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=steps))
    return _fitted(task, x, y, classifier, make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 4, 5))))


def _boosting(task: Task, x: Array, y: Array, rounds: int) -> Predict:
    """Return the predictions of boosted trees that are fitted to y `[n, K]`."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    options: Any = {"max_iter": rounds, "early_stopping": False, "random_state": 0}
    return _fitted(task, x, y, HistGradientBoostingClassifier(**options), HistGradientBoostingRegressor(**options))


def _fitted(task: Task, x: Array, y: Array, classifier: Any, regressor: Any) -> Predict:
    """Return the predictions of scikit-learn's models that are fitted to y `[n, K]`, by the kind of the task."""
    from sklearn.base import clone

    def one_label(x: Array, y: Array) -> Predict:
        predict = clone(classifier).fit(x, y).predict_proba
        return lambda x: predict(x)[:, 1]

    K = y.shape[1]
    if isinstance(task.objective, Targets):
        return _each(x, y, lambda x, y: cast(Predict, clone(regressor).fit(x, y).predict))
    if isinstance(task.objective, OneLabel):
        classes = y.any(0).nonzero()[0]  # that occur
        predict = classifier.fit(x, y.argmax(1)).predict_proba if len(classes) > 1 else lambda x: np.ones((len(x), 1))
        return lambda x: predict(x) @ np.eye(K)[classes]
    step = -(-K // 10)  # for many labels, fewer rows
    return _each(x[::step], y[::step], one_label)


def _forest(task: Task, x: Array, y: Array) -> Predict:
    """Return the predictions of a random forest that is fitted to y `[n, K]`.

    The mean of the squared error over a column for each class is their Gini impurity.
    """
    from sklearn.ensemble import RandomForestRegressor

    share = x.shape[1] / 3 if isinstance(task.objective, Targets) else x.shape[1] ** 0.5

    def fit(x: Array, y: Array) -> Predict:
        model = RandomForestRegressor(
            TREES,
            max_features=max(1, min(int(share), TREE_COLUMNS)),
            max_samples=min(len(x), TREE_ROWS),
            n_jobs=torch.get_num_threads(),
            random_state=0,
        )
        return cast(Predict, model.fit(x, y[:, 0] if y.shape[1:] == (1,) else y).predict)

    unknown = np.isnan(y)
    if unknown.any() and y.shape[1] <= 20:
        return _each(x, y, fit)
    predict = fit(x, np.where(unknown, np.nan_to_num(np.nanmean(y, 0)), y))  # means in place of unknown ones of many
    return lambda x: predict(x).reshape(len(x), -1)


def _each(x: Array, y: Array, fit: Callable[[Array, Array], Predict]) -> Predict:
    """Return the predictions of a model for each column of y `[n, K]`, fitted to its known values."""

    def fitted(column: Array) -> Predict:
        known = ~np.isnan(column)
        values = np.unique(column[known])
        if len(values) > 1:
            return fit(x[known], column[known])
        return lambda x: np.full(len(x), values.sum())

    predicts = [fitted(column) for column in y.T]
    return lambda x: np.stack([predict(x) for predict in predicts], 1)


# Models without columns ---------------------------------------------------------------------------------------------


def _of_neighbours(task: Task, graph: Data, index: Tensor) -> dict[str, Array]:
    """Return the neighbours' labels for nodes, or for test pairs, of a graph; none if it has too many edges."""
    objective, N, K = task.objective, graph.x.size(0), task.num_classes
    if objective.has_pairs:  # both ends of each
        size, index = objective.size(graph), mask_to_index(graph.test_mask)[index]
        ends = graph.edge_label_index + torch.tensor([[0], [N]])
        links = torch.arange(size).repeat(2), ends.flatten()
        steps = [_mean(*links[::-1], (2 * N, size)), _mean(*links, (size, 2 * N))]
    else:
        size, (src, dst) = N, to_undirected(remove_self_loops(graph.edge_index)[0], num_nodes=N)
        steps = [_mean(dst, src, (N, N))]
    rounds = PASSED // max(K * sum(step.nnz for step in steps), 1)
    if rounds < ROUNDS // 5:
        return {}
    rows, y = mask_to_index(graph.train_mask), _numbers(task, objective.labels(graph, "train"))
    known = np.zeros((size, K), bool)
    known[rows] = ~np.isnan(y)
    f = first = np.tile(np.nan_to_num(np.nanmean(y, 0)), (size, 1))
    first[known] = y[~np.isnan(y)]
    is_fixed = known | (steps[-1].sum(1) == 0)[:, None]
    for _ in range(min(rounds, ROUNDS)):
        for step in steps:
            f = step @ f
        f = np.where(is_fixed, first, f)
    return {"neighbours' labels": f[index.numpy()]}


def _mean(dst: Tensor, src: Tensor, shape: tuple[int, int]) -> Any:
    """Return the sparse matrix that computes the mean over the sources of each destination."""
    from scipy.sparse import csr_array

    weight = 1 / degree(dst, shape[0], torch.double)[dst]
    return csr_array((weight.numpy(), (dst.numpy(), src.numpy())), shape=shape)


# Links --------------------------------------------------------------------------------------------------------------


def _of_links(task: Task) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each heuristic, its scores of the test pairs, and their labels."""
    from scipy.sparse import csr_array

    data = task.objective.example(task.test[0], "test")
    src, dst = data.edge_label_index.numpy()
    N, ones = data.x.size(0), np.ones(data.edge_index.size(1))
    directed = csr_array((ones, tuple(data.edge_index.numpy())), shape=(N, N))
    A = csr_array((directed + directed.T) > 0).astype(float)
    k = A.sum(1)
    into = directed.sum(0)
    yield "popularity", torch.from_numpy(directed.sum(1)[src] * into[dst]), data.y
    yield "popularity of dst", torch.from_numpy(into[dst]), data.y
    if "time" in (task.split_arguments or ()):
        latest = task.test[0].edge_label_index[:, task.test[0].train_mask][:, -int(data.y.sum()) :]
        yield "recent popularity", degree(latest[1], N)[data.edge_label_index[1]], data.y
    is_bipartite = sides_of(task.test[0]) is not None
    weight, reads = (np.maximum(k, 1) ** -0.5, A @ k) if is_bipartite else (1 / np.log(np.maximum(k, 2)), k)
    weighted = csr_array(A.multiply(weight[None]))
    cost = (reads[src] + k[dst]).cumsum()
    if cost[-1] > NEIGHBOURS:
        return
    chunks = np.split(np.arange(len(src)), np.searchsorted(cost, np.arange(CHUNK, cost[-1], CHUNK)))
    rows = (weighted[src[chunk]] @ weighted if is_bipartite else weighted[src[chunk]] for chunk in chunks)
    parts = [each.multiply(A[dst[chunk]]).sum(1) for each, chunk in zip(rows, chunks, strict=True)]
    name = "paths of length 3" if is_bipartite else "Adamic-Adar"
    yield name, torch.from_numpy(np.concatenate(parts, dtype=float)), data.y
