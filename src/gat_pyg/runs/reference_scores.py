"""Baselines without a network: linear models and forests on the features alone, heuristics for links."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import degree

from ..data.rows import READERS
from ..distributed.ranks import is_first
from ..files import needs
from ..graph.subgraph import mask_to_index
from ..settings.conf import CHOICES
from ..settings.names import dataset_name
from ..settings.settings import Settings
from ..tasks.labels import OneLabel
from ..tasks.negatives import sides_of
from ..tasks.node_ids import has_ids
from ..tasks.objective import SAMPLES, Split, any_known
from ..tasks.targets import Targets
from ..tasks.task import Task
from .task import data_key

TRAIN_ROWS, TEST_ROWS = 10_000, 20_000  # used at most; of more, a sample with a fixed seed
ELEMENTS = 4_000_000  # training rows x columns used at most; of more columns, a sample with a fixed seed
CATEGORIES = 128  # columns of whole numbers below this are also encoded one-hot
TREES, TREE_ROWS, TREE_COLUMNS = 100, 2_000, 32  # trees of the forest, and the most rows of each and columns of a split
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


def is_missing() -> bool:
    """Return True if scikit-learn is not installed."""
    return importlib.util.find_spec("sklearn") is None


class Baselines(NamedTuple):
    """Test scores by the names of the baselines, and the standard error of the best of them."""

    scores: dict[str, float]
    standard_error: float


def simple_baselines(task: Task) -> Baselines:
    """Return the test scores of models without a network, by the task's metric; fitted on training rows alone.

    For labels and targets of nodes, edges and graphs these are scikit-learn's `LogisticRegression` (`Ridge` for
    regression) on standardised columns, and a random forest of 100 trees. Their columns are the features without
    encodings; those of whole numbers from 0 to 127 are also one-hot. A row is a node; an edge with the features of both
    ends and its own; or a graph with the sums and the means over its nodes and over its edges, and their numbers. For
    nodes and edges, the linear model is also fitted to degrees alone: the logarithms of the in- and the out-degree. The
    feature that is nearest to a target predicts it as it is, such as the last value of a series.

    For links (u, v), with A the message-passing edges in both directions and k the degrees:

    - popularity, the out-degree of u times the in-degree of v; in a bipartite graph also the latter alone;
    - common neighbours, also with the weights 1 / log k of Adamic and Adar (2003);
    - in a bipartite graph, in which u and v have none, the paths of length 3 instead: the sum over i, j of
      A_ui A_ij A_jv / (k_i k_j)^(1/2) (Kovács et al., 2019).

    The standard error is that of the best score, by bootstrap samples of the test rows. All is deterministic.

    Cost: a few seconds at most. Of more than 10,000 training or 20,000 test rows, and of more columns than make up four
    million numbers in training, a random sample is used, the same in every call; a heuristic for links that would read
    more than 50 million neighbours is left out.

    Raises:
        ImportError: if scikit-learn is not installed.

    Example:
        >>> from gat_pyg.data import digits
        >>> scores, error = simple_baselines(digits())
        >>> {name: round(score) for name, score in scores.items()}, round(error)
        ({'linear model': 91, 'random forest': 92, 'degrees': 9}, 1)
    """
    needs("sklearn", "baselines")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a limit on iterations, and of bootstrap samples with labels of one kind
        outputs = {name: (out, y) for name, out, y in (_of_links if task.objective.draws_pairs else _of_rows)(task)}
        scores = {name: score for name, its in outputs.items() if (score := _score(task, *its)) == score}
        if not scores:
            return Baselines({}, 0.0)
        best = max(scores, key=lambda name: task.objective.metric.better(scores[name]))
        return Baselines(scores, _standard_error(task, *outputs[best]))


def _score(task: Task, out: Tensor, y: Tensor) -> float:
    return task.objective.score(task.objective.pool([task.objective.statistics(out, y)]))


def _standard_error(task: Task, out: Tensor, y: Tensor) -> float:
    """Return the standard deviation of the score over bootstrap samples of the rows, at most `TEST_ROWS` each."""
    draw, n = torch.Generator().manual_seed(0), min(len(y), TEST_ROWS)
    samples = (torch.randint(len(y), (n,), generator=draw) for _ in range(SAMPLES))
    scores = [score for rows in samples if (score := _score(task, out[rows], y[rows])) == score]
    return float(np.std(scores, ddof=1) * (n / len(y)) ** 0.5) if len(scores) > 1 else 0.0


# Models of rows of features -----------------------------------------------------------------------------------------


def _of_rows(task: Task) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each model on rows of features, its outputs for test rows, and their labels."""
    (train, y), (test, y_test) = _selected(task, "train", TRAIN_ROWS), _selected(task, "test", TEST_ROWS)
    objective, item = task.objective, task.objective.item
    if item == "graph":
        of_nodes = OneHot(task.features(data) for data, _ in train)
        of_edges = None if task.edge_dim is None else OneHot(cast(Tensor, data.edge_attr) for data, _ in train)
        parts = [torch.stack([_pooled(task, data, of_nodes, of_edges) for data, _ in rows]) for rows in (train, test)]
    else:
        raw = [torch.cat([_raw(task, data, index) for data, index in rows]) for rows in (train, test)]
        encode = OneHot(raw[:1])
        parts = [encode(x) for x in raw]
    fits: list[tuple[str, Callable[[Task, Array, Array], Predict], list[Tensor]]] = []
    if size := parts[0].size(1):
        chosen = _sample(size, max(1, ELEMENTS // len(parts[0])))
        parts = [x[:, chosen] for x in parts]
        fits = [("linear model", _linear, parts), ("random forest", _forest, parts)]
    if isinstance(objective, Targets) and item != "graph":
        fits.append(("one feature", _one_feature, raw))
    if item != "graph":
        degrees = [torch.cat([_degrees(task, data, index) for data, index in rows]) for rows in (train, test)]
        fits.append(("degrees", _linear, degrees))
    one_of = isinstance(objective, OneLabel)
    target = (F.one_hot(y, task.num_classes) if one_of else y).double().numpy()
    for name, fit, (x, x_test) in fits:
        predict = fit(task, x.double().numpy(), target)
        predictions = torch.from_numpy(predict(x_test.double().numpy()))
        if objective.goal == "classification":
            predictions = predictions.clamp(1e-9, 1 - 1e-9)
        yield name, objective.outputs(predictions), y_test


def _selected(task: Task, split: Split, limit: int) -> tuple[Rows, Tensor]:
    """Return at most `limit` rows of a split with a known label, and their labels."""
    objective, mask = task.objective, None if task.has_many_graphs else split
    graphs = [objective.example(data, split) for data in task.graphs(split)]
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


def _raw(task: Task, data: Data, index: Tensor) -> Tensor:
    """Return the features of nodes, or of pairs: those of both ends and their own; no columns if there are none."""
    x = task.features(data)
    x = x[:, :0] if has_ids(x) else x
    if not task.objective.has_pairs:
        return x[index]
    ends = data.edge_label_index[:, index]
    own = [data.edge_label_attr[index]] if "edge_label_attr" in data else []
    return torch.cat([x[ends[0]], x[ends[1]], *own], 1)


def _degrees(task: Task, data: Data, index: Tensor) -> Tensor:
    """Return the logarithms of 1 + the in- and the out-degrees of nodes, or of both ends of pairs."""
    degrees = torch.stack([degree(ids, data.x.size(0)) for ids in data.edge_index], 1).log1p()
    if not task.objective.has_pairs:
        return degrees[index]
    return degrees[data.edge_label_index[:, index].t()].flatten(1)


def _pooled(task: Task, data: Data, of_nodes: OneHot, of_edges: OneHot | None) -> Tensor:
    """Return the sums and the means over a graph's nodes and over its edges, and their numbers."""
    values = [of_nodes(task.features(data))]
    values += [] if of_edges is None else [of_edges(cast(Tensor, data.edge_attr))]
    sizes = torch.tensor([float(data.x.size(0)), float(data.edge_index.size(1))])
    sums = [value.sum(0) for value in values]
    means = [total / max(len(value), 1) for total, value in zip(sums, values, strict=True)]
    return torch.cat([sizes, *sums, *means])


class OneHot:
    """Columns with the one-hot encodings of those that have whole numbers from 0 to `CATEGORIES` - 1 in training.

    A value that training does not have is all zeros. A column of 0 and 1 stays as it is.
    """

    def __init__(self, values: Iterable[Tensor]) -> None:
        sizes: Tensor | None = None
        for value in values:
            if len(value):
                whole = ((value >= 0) & (value == value.round())).all(0)
                size = torch.where(whole, value.amax(0).double(), float("inf"))
                sizes = size if sizes is None else torch.maximum(sizes, size)
        all_sizes = [] if sizes is None else sizes.tolist()
        self.sizes = {k: int(size) + 1 for k, size in enumerate(all_sizes) if 1 < size < CATEGORIES}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the columns of x and their encodings."""
        parts = [x[:, [column]] == torch.arange(size) for column, size in self.sizes.items()]
        return torch.cat([x.float(), *(part.float() for part in parts)], 1)


def _linear(task: Task, x: Array, y: Array) -> Predict:
    """Return the predictions of a linear model of standardised columns that is fitted to y `[n, K]`."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def logistic(x: Array, y: Array) -> Predict:
        return cast(Predict, make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(x, y).predict_proba)

    def ridge(x: Array, y: Array) -> Predict:
        return cast(Predict, make_pipeline(StandardScaler(), Ridge()).fit(x, y).predict)

    def one_label(x: Array, y: Array) -> Predict:
        predict = logistic(x, y)
        return lambda x: predict(x)[:, 1]

    K = y.shape[1]
    if isinstance(task.objective, Targets):
        return _each(x, y, ridge)
    if isinstance(task.objective, OneLabel):
        classes = y.any(0).nonzero()[0]  # that occur
        predict = logistic(x, y.argmax(1)) if len(classes) > 1 else lambda x: np.ones((len(x), 1))
        return lambda x: predict(x) @ np.eye(K)[classes]
    step = -(-K // 10)  # for many labels, fewer rows
    return _each(x[::step], y[::step], one_label)


def _one_feature(task: Task, x: Array, y: Array) -> Predict:
    """Return for each column of y `[n, K]` the column of x that is nearest to it, as it is: in a series the last value.

    Where none is nearer than the mean, it is the mean.
    """

    def nearest(column: Array) -> Predict:
        known = ~np.isnan(column)
        errors = ((x[known] - column[known, None]) ** 2).mean(0)
        mean = column[known].mean()
        if not len(errors) or errors.min() >= column[known].var():
            return lambda x: np.full(len(x), mean)
        return lambda x: x[:, errors.argmin()]

    predicts = [nearest(column) for column in y.T]
    return lambda x: np.stack([predict(x) for predict in predicts], 1)


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
    mean = np.where(unknown, 0.0, y).sum(0) / np.maximum((~unknown).sum(0), 1)  # in place of unknown ones of many
    predict = fit(x, np.where(unknown, mean, y))
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
    yield "popularity", torch.from_numpy(directed.sum(1)[src] * directed.sum(0)[dst]), data.y
    products: dict[str, Callable[[Array], Any]]  # rows of a matrix, whose products with rows of A are the scores
    if sides_of(task.test[0]) is None:
        weighted, reads = csr_array(A.multiply(1 / np.log(np.maximum(k, 2))[None])), k
        products = {"common neighbours": lambda rows: A[rows], "Adamic-Adar": lambda rows: weighted[rows]}
    else:
        yield "popularity of dst", torch.from_numpy(directed.sum(0)[dst]), data.y
        weighted, reads = csr_array(A.multiply(np.maximum(k, 1)[None] ** -0.5)), A @ k
        products = {"paths of length 3": lambda rows: weighted[rows] @ weighted}
    cost = (reads[src] + k[dst]).cumsum()
    if cost[-1] > NEIGHBOURS:
        return
    chunks = np.split(np.arange(len(src)), np.searchsorted(cost, np.arange(CHUNK, cost[-1], CHUNK)))
    for name, rows in products.items():
        parts = [rows(src[chunk]).multiply(A[dst[chunk]]).sum(1) for chunk in chunks]
        yield name, torch.from_numpy(np.concatenate(parts, dtype=float)), data.y
