"""SHA-256 hashes of what the package computes on a CPU, to show that a change of its structure changes no bit.

    python benchmarks/oracle.py --record before.json   # before the change
    python benchmarks/oracle.py --compare before.json  # after it: prints the differences; status 1 if any

Four parts: outputs and gradients of the layers, single and stacked by vmap; networks of three seeds trained as one; the
hashes of the settings of recorded results; weights, scores and metrics of a short training of each kind. `--only TEXT`
selects hashes by name, as `--only layers/dot`. A name that is gone counts as a difference, a new one does not. The bits
depend on the machine and on the versions of the libraries: compare on the machine that recorded.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # before torch is imported

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch_geometric import EdgeIndex

import gat_pyg.data
import gat_pyg.run
import gat_pyg.seeds
from gat_pyg import GAT, GATConv, GATv2Conv

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from tests.graphs import LOOPS, RANDOM, ZOO, Graph, graph, random, union  # noqa: E402

Case = tuple[str, Callable[[], dict[str, Any]]]

# Layers -------------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    **{kind: (GATConv, {"mechanism": kind}) for kind in ("additive", "constant", "dot", "gatv2")},
    **{f"{kind}, edge_dim": (GATConv, {"mechanism": kind, "edge_dim": 3}) for kind in ("additive", "dot", "gatv2")},
    "GATv2Conv": (GATv2Conv, {}),
    "GATv2Conv, edge_dim": (GATv2Conv, {"edge_dim": 3}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "self-loops": {"add_self_loops": True},
    "mean of heads, skip": {"concat": False, "residual": True},
    "slope 0.5, no bias": {"negative_slope": 0.5, "bias": False},
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("fused", "segment", "reference")
SOME = [LOOPS, *ZOO[-4:]]
STARS = graph("stars", [edge for leaf in range(1, 5000) for edge in ((leaf, 0), (0, leaf))], 5000)
LONG = union(STARS, random(500, 500, 20_000))  # a row of several chunks, by dst and by src; work for two threads


def adjacency(graph: Graph, form: str) -> Any:
    size = graph.num_src, graph.num_dst
    if form == "csr":
        return torch.sparse_coo_tensor(graph.index.flip(0), torch.ones(graph.index.size(1)), size[::-1]).to_sparse_csr()
    return EdgeIndex(graph.index, sparse_size=size) if form == "EdgeIndex" else graph.index


def attended(
    kind: str, graph: Graph, dtype: torch.dtype, models: int, form: str, order: int, threads: int, **options: Any
) -> dict[str, Any]:
    """Output, attention and the gradients of this order of a layer, or of so many layers stacked by vmap."""
    make, own = LAYERS[kind]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    both = graph.num_src != graph.num_dst
    weights, channels = options.pop("weights", None), options.pop("channels", 5)
    options = {"heads": 3, "add_self_loops": False, **own, **options}
    layers = [make((4, 6) if both else 4, channels, **options).to(dtype) for _ in range(models or 1)]
    for _, value in sorted((pair for layer in layers for pair in layer.named_parameters()), key=itemgetter(0)):
        value.data = torch.randn(value.shape).to(dtype)
    edges = adjacency(graph, form)  # a matrix has no repeated edges, of which PyG takes the features in its own order
    num_edges = edges._nnz() if form == "csr" else graph.index.size(1)
    shapes = {"x": (graph.num_src, 4), "x_dst": (graph.num_dst, 6), "edge_attr": (num_edges, 3)}
    used = {"x": True, "x_dst": both, "edge_attr": "edge_dim" in own}
    inputs = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items() if used[name]}
    parameters = stack_module_state(layers)[0] if models else dict(layers[0].named_parameters())
    x = (inputs["x"], inputs["x_dst"]) if both else inputs["x"]
    layer = torch.compile(layers[0], backend="aot_eager") if form == "compiled" else layers[0]
    call = partial(layer, x, edges, inputs.get("edge_attr"), return_attention_weights=weights)
    torch.manual_seed(1)  # of dropout
    if models:
        stacked = torch.vmap(
            lambda each: functional_call(layer, each, call.args, call.keywords), randomness="different"
        )
    result = stacked(parameters) if models else call()
    results = {"out": result[0], "alpha": result[1][1]} if weights else {"out": result}
    total, variables = (results["out"] * torch.randn(results["out"].shape).to(dtype)).sum(), {**inputs, **parameters}
    for prefix in ("d ", "dd ")[:order]:
        slopes = torch.autograd.grad(total, [*variables.values()], allow_unused=True, create_graph=order > 1)
        results |= {prefix + name: slope for name, slope in zip(variables, slopes, strict=True) if slope is not None}
        total = sum(slope.square().sum() for slope in slopes if slope is not None)
    torch.set_num_threads(1)
    return results


def layers() -> Iterator[Case]:
    """The zoo of graphs; then other shapes, long rows, threads, options, second derivatives, forms of a graph."""

    def case(kind: str, graph: Graph, dtype: str, p: float, models=0, form="", order=1, threads=1, **options) -> Case:
        options = {"dropout": p, **options}
        call = partial(attended, kind, graph, DTYPES[dtype], models, form, order, threads, **options)
        settings = (f"{key}={value}" for key, value in options.items())
        return "/".join([kind, str(graph), dtype, f"{models=} {form=} {order=} {threads=}", *settings]), call

    for models, backend, kind, dtype, p in product((0, 3), BACKENDS, LAYERS, DTYPES, (0.0, 0.6)):
        for one in SOME if models and (backend == "reference" or dtype == "float16") else ZOO:
            yield case(kind, one, dtype, p, models, backend=backend)
    for backend, kind, p in product(BACKENDS[:2], LAYERS, (0.0, 0.6)):
        for one, (H, C) in product((RANDOM, LONG), ((8, 8), (2, 37))):  # whole tiles, ragged ones
            yield case(kind, one, "float32", p, heads=H, channels=C, backend=backend)
        yield case(kind, LONG, "float64", p, models=2, backend=backend)
        yield case(kind, LONG, "float32", p, threads=2, heads=2, channels=37, backend=backend)
        for one in SOME:
            yield case(kind, one, "float32", p, weights=True, backend=backend)
            yield case(kind, one, "float64", p, order=2, backend=backend)
            yield from (case(kind, one, "float32", p, backend=backend, **its) for its in VARIANTS.values())
    for kind, form in product(LAYERS, ("EdgeIndex", "csr", "compiled")):
        yield case(kind, RANDOM, "float32", 0.6, form=form)
    yield from (case(kind, RANDOM, "float32", 0.6, flow="target_to_source") for kind in LAYERS)


# Stacks and settings ------------------------------------------------------------------------------------------------


def stacks() -> Iterator[Case]:
    """Networks of three seeds on digits, trained as one."""

    def trained(**options: Any) -> dict[str, Any]:
        task = gat_pyg.data.digits()
        make = partial(GAT, 64, [8, 8], 10, heads=[2, 2, 1], dropout=0.6, residual=[False, True, False], **options)
        outcomes, stack = gat_pyg.seeds.train(make, task, range(3), max_epochs=4, progress=False)
        scores = [(one.seed, one.value, one.val, one.epochs, one.best_epoch) for one in outcomes]
        with torch.no_grad():
            return {**stack.state_dict(), "scores": scores, "out": stack(task.test[0].x, task.test[0].edge_index)}

    yield from ((kind, partial(trained, mechanism=kind)) for kind in ("additive", "constant", "dot", "gatv2"))
    yield "authors' form", partial(trained, reproduction=True)


def setting_hash(*arguments: str) -> str:
    """The hash that a line of results with these settings has: the one function here that uses internals."""
    from gat_pyg.settings.settings import Settings

    return Settings.parse(compose("config", list(arguments))).hash


def settings() -> Iterator[Case]:
    """Every model on every data set, and each recorded line that one of these or a table's cell can write."""
    conf = Path(gat_pyg.settings.conf.config_folder())

    def cells() -> Iterator[tuple[str, ...]]:
        for table in (choice.node for _, choice in sorted(gat_pyg.settings.conf.CHOICES["experiment"].items())):
            for pair in product(table.get("datasets") or [], table.get("methods") or []):
                (dataset, *of_data), (model, *own) = (text.split() if isinstance(text, str) else text for text in pair)
                cell = f"model={model}", f"dataset={dataset}", *of_data, *own
                yield cell
                yield *cell, "+trainer.precision=bf16-mixed"

    def hashes() -> dict[str, Any]:
        models, datasets = gat_pyg.settings.conf.CHOICES["model"], gat_pyg.settings.conf.CHOICES["dataset"]
        paths = {"file": ["dataset.path=x"], "smiles": ["dataset.path=x"], "tables": ["dataset.edges=x"]}
        with initialize_config_dir(str(conf), version_base="1.3"):
            named = {
                f"{model} on {dataset}": setting_hash(f"model={model}", f"dataset={dataset}", *paths.get(dataset, []))
                for model, dataset in product(models, datasets)
            }
            today = {*named.values(), *(setting_hash(*cell) for cell in cells())}
        lines = {
            f"{file.stem}/{number}": json.loads(line)["config_hash"]
            for file in HERE.rglob("*.jsonl")
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        }
        return {**named, **{name: value for name, value in lines.items() if value in today}}

    yield "hash", hashes


# Trainings ----------------------------------------------------------------------------------------------------------

SCORES = ("metric", "value", "val", "majority", "epochs", "best_epoch", "parameters", "config_hash")
TINY = ("model.hidden_channels=[8]", "model.heads=[2,2]", "model.residual=false", "training.max_epochs=1")
PLANTED = ("dataset=planted", "dataset.graphs=4", "training.batch_size=2")
CORA = ("dataset=cora",)
TWO = ("trainer=ddp_cpu", "trainer.devices=2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "digits": ("training.max_epochs=6",),
    "digits, float64": ("+trainer.precision=64-true",),
    "digits, bf16": ("+trainer.precision=bf16-mixed",),
    "digits, three seeds together": ("runs=3", "vectorize=on"),
    "digits, two seeds one by one": ("runs=2", "vectorize=off"),
    "digits, neighbours": ("loader=neighbor", "loader.num_neighbors=[5,5]"),
    "digits, halo": (*TWO, "trainer.strategy=halo"),
    "digits, seeds in two processes": (*TWO, "runs=3", "vectorize=on"),
    "cora": CORA,
    "cora, clusters": (*CORA, "loader=cluster"),
    "cora, authors' form": (*CORA, "model.reproduction=true", "training.criterion=loss"),
    "cora, authors' form, two seeds together": (*CORA, "model.reproduction=true", "runs=2", "vectorize=on"),
    "ppi": ("dataset=ppi", *TINY),
    "planted": PLANTED,
    "planted, two processes": (*PLANTED, *TWO),
    **{f"planted, {model}": (*PLANTED, f"model={model}") for model in ("const_gat", "random")},
    "planted, sage_mean": (*PLANTED, "model=sage"),
    **{f"cora, {model}": (*CORA, f"model={model}") for model in ("gcn", "chebyshev", "monet", "mlp", "lp")},
    **{f"digits, {model}": (f"model={model}",) for model in ("semiemb", "manireg", "planetoid")},
    "digits, gcn64_elu": ("model=gcn64", "model.act=elu"),
}


def trainings() -> Iterator[Case]:
    """The command with a few epochs of everything."""

    def trained(*arguments: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            line = ["training.max_epochs=3", *arguments, f"outputs={folder}"]
            if set(TWO) <= set(arguments):  # the second process repeats the first one's command line
                subprocess.run([sys.executable, "-m", "gat_pyg.run", *line], check=True, capture_output=True)
            else:
                screen = io.StringIO()
                with patch("sys.argv", ["gat-pyg", *line]), redirect_stdout(screen), redirect_stderr(screen):
                    gat_pyg.run.main()
            results: dict[str, Any] = {}
            for result in map(json.loads, (Path(folder) / "results.jsonl").read_text().splitlines()):
                run, seed = Path(result["run_dir"]), f"seed {result['seed']}, "
                results[seed + "result"] = [result[name] for name in SCORES]
                results |= {seed + name: value for name, value in load_file(run / "model.safetensors").items()}
                results |= {seed + path.name: path.read_text() for path in run.glob("metrics.csv")}
            return results

    yield from ((name, partial(trained, *arguments)) for name, arguments in COMMANDS.items())


# Comparison ---------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """The first 16 digits of the SHA-256 of a tensor's dtype, shape and bits, or of JSON."""
    content = json.dumps(value, sort_keys=True).encode() if not isinstance(value, Tensor) else b""
    if isinstance(value, Tensor):
        content = f"{value.dtype} {tuple(value.shape)} ".encode()
        content += value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def hashes(text: str) -> dict[str, str]:
    """Hashes by name, of the cases whose name contains the text; of a case that raises, the exception's class."""
    results: dict[str, str] = {}
    raised = Counter[str]()
    for part in (layers, stacks, settings, trainings):
        start, before = time.perf_counter(), len(results)
        for name, call in part():
            name = f"{part.__name__}/{name}"
            if text in name:
                try:
                    results |= {f"{name}: {key}": digest(value) for key, value in call().items()}
                except (Exception, SystemExit) as error:
                    results[name] = f"raises {type(error).__name__}"
                    raised[f"{part.__name__}: {type(error).__name__}: {str(error)[:100]}"] += 1
        print(f"{part.__name__}: {len(results) - before:,} hashes in {time.perf_counter() - start:.0f} s", flush=True)
    for error, cases in raised.items():
        print(f"{cases:,} cases raise in {error}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--record", type=Path, metavar="FILE")
    way.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="TEXT")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    now = hashes(arguments.only)
    if arguments.record:
        arguments.record.write_text(json.dumps(now, indent=0) + "\n", encoding="utf-8")
        return
    recorded = json.loads(arguments.compare.read_text(encoding="utf-8"))
    before = {name: value for name, value in recorded.items() if arguments.only in name.partition(": ")[0]}
    different = {name: value for name, value in before.items() if now.get(name) != value}
    for name, value in different.items():
        print(f"{name}: {value}, now {now.get(name, 'gone')}")
    print(f"{len(before):,} compared: {len(different):,} differ or are gone, {len(now.keys() - before):,} are new")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
