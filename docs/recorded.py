"""Write the tables and charts of the pages Results and Speed, from the files in `benchmarks/results`.

They go to `docs/generated`. `docs/conf.py` calls `write` at each build: no number on the two pages is copied by hand.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import tomllib

matplotlib.use("Agg")  # before pyplot
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

from gat_pyg.paper.published import published
from gat_pyg.paper.tables.scores import ABLATION, TABLE2, TABLE3, score_table, shown
from gat_pyg.paper.tables.strong import strong_table
from gat_pyg.report.tables.cells import Table
from gat_pyg.report.tables.comparison import comparison_table
from gat_pyg.report.tables.formats import markdown_table
from gat_pyg.report.tables.general import Column, Rows, general_table, rows_of
from gat_pyg.runs.groups import Key, gathered, lines_of
from gat_pyg.sweeps.grid import cells_of

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
OUT = DOCS / "generated"
THEMES = {"light": "#222222", "dark": "#dddddd"}  # the colour of text
BLUE, ORANGE, GREY = "#3b8bba", "#ee7733", "#999999"
WHOLE = "GAT (strong), parts"  # the row with which experiment=parts compares
RIVALS = {"GCN-64*": TABLE2, "Const-GAT": TABLE3}  # the same networks without attention
DATASETS = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "Pubmed"}


def write() -> None:
    """Write all tables and charts."""
    OUT.mkdir(exist_ok=True)
    write_versions()
    write_results()
    write_strong()
    write_uncertainty()
    write_speed()
    write_explanations()


def chart(name: str, draw: Callable[[Any], None], size: tuple[float, float], columns: int = 1) -> None:
    """Write a chart twice, for the light and the dark pages."""
    for theme, ink in THEMES.items():
        keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style = dict.fromkeys(keys, ink) | {"svg.hashsalt": name, "font.size": 10, "axes.spines.top": False}
        with plt.rc_context(style | {"axes.spines.right": False, "svg.fonttype": "none"}):
            figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
            draw(axes)
            figure.savefig(OUT / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


def save_figure(block: Any, variables: dict[str, Any], options: dict[str, Any]) -> str:
    """Save the figure that a block of an example ends with, for sphinx-gallery."""
    figure = variables["example_globals"].get("___")  # the value of the last expression, read again later
    if not isinstance(figure, Figure):
        return ""
    variables["example_globals"]["___"] = None  # a later block without an expression does not draw it again
    path = next(variables["image_path_iterator"])
    figure.savefig(path, dpi=80)
    return str(figure_rst([path], options["src_dir"]))


def table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table."""
    lines = [heads, ["---"] * len(heads), *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = re.sub(r"(?<=\d) (?=ms|MiB|s )", "\u00a0", text)
    (OUT / f"{name}.md").write_text(text + "\n", encoding="utf-8")


def newest(pattern: str) -> Path:
    """Return the newest file of a kind: their names begin with the date."""
    return sorted(RESULTS.glob(f"*-{pattern}"))[-1]


def load(pattern: str) -> dict[str, Any]:
    """Return the newest measurements of a kind."""
    content: dict[str, Any] = json.loads(newest(pattern).read_text(encoding="utf-8"))
    return content


# Install ------------------------------------------------------------------------------------------------------------


def write_versions() -> None:
    """Write the table of dependencies: the lowest version that pyproject.toml allows, and the tested one."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = re.findall(r"^([\w-]+)==(\S+)(?: ; (.*))?$", (DOCS.parent / "constraints.txt").read_text(), re.M)
    rows = []
    for requirement in project["dependencies"]:
        name, lowest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        versions = {version: None for other, version, _ in pinned if other == name.replace("_", "-")}
        rows.append((name, lowest, " or ".join(versions)))
    table("versions", ("package", "lowest allowed", "tested"), [("Python", "3.10", "3.10 to 3.13"), *rows])


# Results ------------------------------------------------------------------------------------------------------------


def write_results() -> None:
    """Write Tables 2 and 3, what GAT gains from attention, and the ablation, from the recorded result lines."""
    names = [*(f"table2-{name}.jsonl" for name in DATASETS), "table3.jsonl", "ablation.jsonl"]
    runs = gathered(line for name in names for line in lines_of(newest(name)))
    switched = rows_of({key: its for key, its in runs.items() if key.study == ABLATION})
    tables: dict[str, Table] = {
        "table2": score_table(TABLE2, runs),
        "table3": score_table(TABLE3, runs),
        "ablation": comparison_table(switched, "GAT: text"),
    }
    for rival, scores in RIVALS.items():
        columns = [Column(dataset, scores.metric) for dataset in scores.datasets]
        rows = {
            method: {column: shown(runs, Key(method, column.dataset, column.metric)) for column in columns}
            for method in ("GAT", rival)
        }
        tables[f"against-{rival.lower().strip('*')}"] = comparison_table(rows, rival)
    for name, one in tables.items():
        write_table(name, one)

    methods = [row for number, row, dataset in published() if number == TABLE2.number and dataset == "cora"]

    def draw(axes: Sequence[Axes]) -> None:
        for axis, (dataset, title) in zip(axes, DATASETS.items(), strict=True):
            for at, method in enumerate(reversed(methods)):
                ours = shown(runs, Key(method, dataset, "accuracy"))
                paper = published().get((TABLE2.number, method, dataset))
                if paper:
                    axis.plot(paper.mean, at, "D", color=ORANGE)
                if ours:
                    axis.errorbar(ours.mean, at, xerr=ours.std, fmt="o", color=BLUE)
            axis.set_title(title)
            axis.set_yticks(range(len(methods)), list(reversed(methods)) if axis is axes[0] else [""] * len(methods))
            axis.set_xlabel("test accuracy, %")
            axis.grid(axis="x", alpha=0.3)
        axes[0].plot([], [], "o", color=BLUE, label="here, mean ± std")
        axes[0].plot([], [], "D", color=ORANGE, label="the paper")
        axes[0].figure.legend(loc="outside lower center", ncols=2, frameon=False)

    chart("table2", draw, (8.5, 4.4), columns=3)


def write_table(name: str, one: Table) -> None:
    """Write a table of the report; the page has its own headings."""
    body = markdown_table(one).split("\n", 2)[2]
    body = re.sub(r" (?=±)|(?<=±) ", "\u00a0", body.lstrip())  # a score is one word
    body = re.sub(r"(?<=\w) difference (?=\|)", " Δ ", body)
    (OUT / f"{name}.md").write_text(body + "\n", encoding="utf-8")


def write_strong() -> None:
    """Write the table of the strongest networks, that of the other lines beside it, and what each part is worth."""
    runs = gathered(line for path in sorted(RESULTS.glob("*-strong-*.jsonl")) for line in lines_of(path))
    write_table("strong", strong_table(runs))
    shown_there = {cell.hash for cell in cells_of("strong")}
    others = {key: [one for one in its if one.setting not in shown_there] for key, its in runs.items()}
    rest = rows_of({key: its for key, its in others.items() if its})
    parts = rows_of(gathered(line for path in sorted(RESULTS.glob("*-parts.jsonl")) for line in lines_of(path)))
    for name, rows, form in (("strong-others", rest, general_table), ("parts", parts, against_whole)):
        if rows:
            write_table(name, form(rows))
        else:
            (OUT / f"{name}.md").write_text("No runs are recorded yet.\n", encoding="utf-8")


def against_whole(rows: Rows) -> Table:
    """Return the table of each part's worth."""
    return comparison_table(rows, WHOLE)


# Uncertainty --------------------------------------------------------------------------------------------------------


def mean_and_std(values: Sequence[float], digits: int) -> str:
    """Return the mean ± standard deviation of several values, a single value alone, and a dash for NaN."""
    if any(map(math.isnan, values)):
        return "—"
    std = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{std}"


def write_uncertainty() -> None:
    """Write the table of calibration errors, coverage and size, over the splits of each data set."""
    rows = []
    for name, splits in load("uncertainty.json")["rows"].items():
        errors = [one["errors"] or (math.nan, math.nan) for one in splits]
        values = (
            ([one["score"] for one in splits], 2),
            ([before for before, _ in errors], 1),
            ([after for _, after in errors], 1),
            ([one["coverage"] for one in splits], 1),
            ([one["size"] for one in splits], 2),
        )
        rows.append((name, str(len(splits)), *(mean_and_std(*each) for each in values)))
    heads = ("data set, split", "splits", "test score", "calibration error (%)", "after", "coverage (%)", "size")
    table("uncertainty", heads, rows)


# Speed --------------------------------------------------------------------------------------------------------------

LAYERS = {
    "ppi-1": "two PPI graphs, 50 → 4 × 256",
    "ppi-1-gatv2": "the same, GATv2",
    "ppi-2": "two PPI graphs, 1024 → 4 × 256",
    "arxiv": "ogbn-arxiv's size, 128 → 3 × 32",
    "pubmed": "Pubmed, 500 → 8 × 8",
    "citeseer": "Citeseer, dense, 3703 → 8 × 8",
    "cora": "Cora, dense, 1433 → 8 × 8",
    "cora-sparse": "Cora, sparse",
    "cora-trained": "Cora, sparse, features dropped",
    "edges-GAT-16": "200,000 edges with 16 features, 128 → 8 × 16",
    "edges-GATv2-16": "the same, GATv2",
    "edges-Transformer-16": "the same, TransformerConv",
    "molecules": "a fresh batch of 32 molecules, 64 → 4 × 16",
}


def write_speed() -> None:
    """Write the charts and tables of layers, epochs, many seeds, sampling and inference."""
    layers()
    beside_dgl()
    examples()
    epochs()
    seeds()
    sampled()


BESIDE_DGL = {
    "20-nodes-GAT": "20 nodes, 60 edges, 64 → 4 × 16, fresh graph",
    "20-nodes-GATv2": "the same, GATv2",
    "200-nodes-GAT": "200 nodes, 800 edges, fresh graph",
    "200-nodes-GATv2": "the same, GATv2",
    "molecules": "32 molecules (600 nodes, 1300 edges), fresh graph",
    "molecules-GATv2-0": "the same, GATv2",
    "cora": "Cora, dense, 1433 → 8 × 8",
    "cora-gatv2": "the same, GATv2",
    "ppi-1-gatv2": "two PPI graphs, 50 → 4 × 256, GATv2",
    "ppi-2": "two PPI graphs, 1024 → 4 × 256",
    "arxiv": "ogbn-arxiv's size, 128 → 3 × 32",
}


def bars(axis: Axes, names: Sequence[str], values: Sequence[float], label: str, unit: str = "", base: int = 0) -> None:
    """Draw horizontal bars with their values; the bar number `base` is what the others are compared with."""
    places = range(len(names))[::-1]
    start = 1.0 if unit == "×" else 0.0  # a factor below 1 is a bar to the left
    widths = [value - start for value in values]
    axis.barh(places, widths, left=start, color=[GREY if at == base else BLUE for at in range(len(names))])
    axis.set_yticks(places, names)
    axis.set_xlabel(label)
    axis.margins(x=0.15)
    for at, value in zip(places, values, strict=True):
        axis.annotate(f" {value:.{2 if unit == '×' else 3}g}{unit}", (max(value, start), at), va="center", fontsize=9)


def layers() -> None:
    """Write the layers' table and chart: forward and backward, this package beside PyG."""
    measured = load("2cores-layers.json")
    rows = {(row["case"], row["way"]): row for row in measured["rows"]}

    def ms(case: str, way: str) -> float:
        return 1e3 * statistics.median(rows[case, way]["step"])

    def mib(case: str, way: str) -> str:
        return f"{rows[case, way]['peak_bytes'] / 2**20:.0f} MiB"

    table(
        "layers",
        ("layer", "PyG", "here", "of which Linear", "times faster", "peak, PyG", "peak, here"),
        [
            (
                title,
                f"{ms(case, 'pyg'):.1f} ms",
                f"{ms(case, 'auto'):.1f} ms",
                f"{ms(case, 'Linear alone'):.1f} ms" if (case, "Linear alone") in rows else "–",
                f"{rows[case, 'auto']['times_pyg']:.1f}",
                mib(case, "pyg"),
                mib(case, "auto"),
            )
            for case, title in LAYERS.items()
        ],
    )

    def draw(axis: Axes) -> None:
        values = [1.0, *(rows[case, "auto"]["times_pyg"] for case in LAYERS)]
        bars(axis, ["PyG's layer", *LAYERS.values()], values, "times faster than PyG, forward and backward", "×")
        axis.set_xscale("log")
        axis.set_xlim(0.5, 60)
        axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
        axis.minorticks_off()

    chart("layers", draw, (8, 3.8))
    versions = ", ".join(
        f"{name} {version}" for name, version in measured["versions"].items() if version and "gat_pyg" not in name
    )
    machine = f"Measured on {measured['date'][:10]}: {measured['processor']}, {measured['threads']} threads"
    (OUT / "machine.md").write_text(f"{machine}, {versions}.\n", encoding="utf-8")


def beside_dgl() -> None:
    """Write the table of layers beside DGL's, by minima."""
    measured = load("2cores-dgl.json")
    rows = {(row["case"], row["way"]): row for row in measured["rows"]}

    def cells(case: str) -> list[str]:
        times = [1e3 * min(rows[case, way]["step"]) for way in ("pyg", "dgl", "auto")]
        shown = [f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms" for time in times]
        return [*shown, *(f"{time / times[2]:.2g}" for time in times[:2])]

    table(
        "dgl",
        ("layer, forward and backward", "PyG", "DGL", "here", "times PyG's speed", "times DGL's"),
        [(title, *cells(case)) for case, title in BESIDE_DGL.items()],
    )


def examples() -> None:
    """Write the table of PyG's examples, before and after `accelerate`."""
    rows = []
    for row in load("2cores-accelerate.json")["rows"]:
        before, after = (f"{row[f'{name}_cpu_seconds']:.3g} s" for name in ("pyg", "gat_pyg"))
        kinds = ", ".join(sorted({*row["swapped"].values()})) or "none"
        left = ", ".join(sorted({reason.rstrip(".").split()[-1] for reason in row["left"].values()})) or "none"
        rows.append(
            (row["example"], f"{len(row['swapped'])} ({kinds})", left, before, after, f"{row['times_faster']:.2f}")
        )
    table("examples", ("example", "swapped", "left alone", "before", "after", "times faster"), rows)


def epochs() -> None:
    """Write the chart of epochs: Cora by each way of training, and PPI."""
    cora = {row["way"]: 1e3 * row["seconds"] for row in load("training-cora.json")["rows"]}
    ppi = load("inductive-ppi.json")["rows"]
    names = {"pyg": "PyG's layer", "ours": "our layer", "no attention": "no attention"}

    def draw(axes: Sequence[Axes]) -> None:
        bars(axes[0], list(cora), list(cora.values()), "ms per epoch")
        axes[0].set_title("Cora")
        bars(axes[1], list(names.values()), [ppi[way]["seconds"] for way in names], "s per epoch")
        axes[1].set_title("PPI")

    chart("epochs", draw, (8.5, 3.2), columns=2)
    table(
        "ppi-epoch",
        ("an epoch of PPI with", "seconds", "peak memory"),
        [(name, f"{ppi[way]['seconds']:.1f}", f"{ppi[way]['peak_mib']:.0f} MiB") for way, name in names.items()],
    )


def seeds() -> None:
    """Write the table of a hundred seeds: trained as one, one by one, and in a bare loop."""
    rows = []
    for dataset, title in DATASETS.items():
        ways = load(f"seeds-{dataset}.json")["ways"]
        for way, one in ways.items():
            seconds, peak = f"{one['seconds'] / one['seeds']:.2f}", f"{one['peak_mib']:.0f} MiB"
            rows.append((title, way, str(one["seeds"]), seconds, f"{one['times']:.1f}", peak))
    table("seeds", ("data set", "trained", "seeds measured", "seconds a seed", "times the first", "peak memory"), rows)


def sampled() -> None:
    """Write the tables of the neighbour sampler and of layer-by-layer inference."""
    measured = load("sampling.json")
    rows = [
        (str(row["fan_outs"]), row["sampler"], *(f"{value:,.0f}" for value in row["seeds_per_second"]))
        for row in measured["rows"]
    ]
    table("sampling", ("neighbours", "sampler", "seed nodes a second, drawn", "drawn and with features"), rows)
    measured = load("inference.json")
    table(
        "inference",
        ("layers", "way", "peak memory beside the features", "seconds"),
        [
            (str(row["layers"]), row["way"], f"{row['peak_mib']:.0f} MiB", f"{row['seconds']:.1f}")
            for row in measured["rows"]
        ],
    )


if __name__ == "__main__":
    write()


# Explanations -------------------------------------------------------------------------------------------------------


def write_explanations() -> None:
    """Write the tables of explanations: how they order true edges, what they remove, and their seconds."""
    rows = [row for row in load("explanations.json")["rows"] if row["case"] != "table"]
    kinds = [*dict.fromkeys(row["kind"] for row in rows)]
    cases = [*dict.fromkeys(row["case"] for row in rows)]
    by_key = {(row["case"], row["kind"]): row for row in rows}

    for key in ("auroc", "removed", "alone"):
        shown = [case for case in cases if any(key in by_key[case, kind] for kind in kinds)]
        body = [[kind, *(f"{by_key[case, kind][key]:.2f}" for case in shown)] for kind in kinds]
        if key != "auroc":
            body.insert(0, ["all edges", *(f"{by_key[case, kinds[0]]['before']:.2f}" for case in shown)])
        table(f"explanations-{key}", ["", *shown], body)
    seconds = [(kind, by_key["photo", kind]) for kind in kinds if kind != "random"]
    body = [[kind, f"{row['seconds']:.3f} s", f"{row['seconds_pyg']:.3f} s"] for kind, row in seconds]
    table("explanations-seconds", ["", "gat_pyg", "PyG"], body)
