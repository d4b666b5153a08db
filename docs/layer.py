"""Draw what an attention layer does into `docs/pictures`: one node with three neighbours, one head, computed here.

python docs/layer.py
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

OUT = Path(__file__).parent / "pictures"
THEMES = {"light": "#222222", "dark": "#dddddd"}  # the colour of text and lines
NAMES = ("i", "1", "2", "3")  # the node itself, by its self-loop, and its neighbours
ROWS = dict(zip(NAMES, (3.3, 2.4, 1.5, 0.6), strict=True))
PLACES = {"i": (0.95, 1.95), "1": (0.35, 2.95), "2": (0.25, 1.05), "3": (1.4, 0.7)}
ORANGE, CELL = "#ee7733", 0.28

H = np.array([[0.9, -0.4, 0.3, -0.8], [0.6, 0.7, -0.5, 0.2], [-0.7, 0.5, 0.9, 0.4], [0.2, -0.9, 0.6, -0.3]])
W = np.array([[0.8, -0.3, 0.5], [0.2, 0.9, -0.6], [-0.4, 0.6, 0.7], [-0.5, 0.1, 0.4]])
A_DST, A_SRC = np.array([0.3, -0.2, 0.2]), np.array([-0.5, 0.6, 0.4])


def attention() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows W h_j, scores e_ij, coefficients alpha_ij and the output of node i: equations (1) to (4)."""
    x = H @ W
    raw = x[0] @ A_DST + x @ A_SRC
    scores = np.where(raw > 0, raw, 0.2 * raw)
    alpha = np.exp(scores) / np.exp(scores).sum()
    return x, scores, alpha, alpha @ x


def strip(axes: Axes, left: float, middle: float, values: np.ndarray, ink: str) -> float:
    """Draw a vector as coloured cells, and return its right end."""
    for k, value in enumerate(values):
        colour = plt.get_cmap("PuOr_r")(0.5 + value / 2.6)
        corner = (left + k * CELL, middle - CELL / 2)
        axes.add_patch(Rectangle(corner, CELL, CELL, facecolor=colour, edgecolor=ink, linewidth=0.6))
    return left + len(values) * CELL


def arrow(axes: Axes, start: float, end: float, y: float, ink: str, y_end: float | None = None) -> None:
    """Draw an arrow to the right."""
    style = {"arrowstyle": "->", "color": ink, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end, y if y_end is None else y_end), (start, y), arrowprops=style)


def draw(axes: Axes, ink: str) -> None:
    """Draw the neighbourhood, and its rows from features to the output."""
    x, scores, alpha, out = attention()
    axes.set(xlim=(0, 10.6), ylim=(0, 4.35))
    axes.set_aspect("equal")
    axes.set_axis_off()
    for name, weight in zip(NAMES, alpha, strict=True):
        if name != "i":
            style = {"arrowstyle": "-|>", "color": ORANGE, "lw": 0.8 + 7 * weight, "shrinkA": 9, "shrinkB": 11}
            axes.annotate("", PLACES["i"], PLACES[name], arrowprops=style)
    for name, place in PLACES.items():
        axes.plot(*place, "o", ms=19, mfc=ORANGE if name == "i" else "none", mec=ink, mew=1)
        axes.text(*place, f"${name}$", ha="center", va="center", color="white" if name == "i" else ink, fontsize=11)
    heads = {2.55: "features\n$h_j$", 4.3: "projected\n$x_j = W h_j$", 5.75: "score\n$e_{ij}$"}
    heads |= {7.45: "coefficient\n$\\alpha_{ij}$", 9.85: "output\n$\\Sigma_j\\ \\alpha_{ij} x_j$"}
    for at, text in heads.items():
        axes.text(at, 4.1, text, ha="center", va="center", color=ink, fontsize=10, linespacing=1.3)
    axes.text(0.95, 4.1, "node $i$ and\nits neighbours", ha="center", va="center", color=ink, fontsize=10)
    for (name, y), h, row, score, weight in zip(ROWS.items(), H, x, scores, alpha, strict=True):
        axes.text(1.9, y, f"${name}$", ha="right", va="center", color=ink, fontsize=10)
        arrow(axes, strip(axes, 2.0, y, h, ink) + 0.1, 3.78, y, ink)
        arrow(axes, strip(axes, 3.88, y, row, ink) + 0.1, 5.35, y, ink)
        axes.text(5.75, y, f"{score:.2f}".replace("-", "−"), ha="center", va="center", color=ink, fontsize=10)
        arrow(axes, 6.15, 6.6, y, ink)
        axes.add_patch(Rectangle((6.7, y - 0.14), 1.5 * weight, 0.28, facecolor=ORANGE, linewidth=0))
        axes.text(6.78 + 1.5 * weight, y, f"{weight:.2f}", va="center", color=ink, fontsize=10)
        arrow(axes, 8.3, 9.25, y, ink, 1.95)
    axes.text(6.37, 0.05, "softmax over the neighbourhood", ha="center", va="bottom", color=ink, fontsize=9)
    axes.text(3.45, 0.05, "the same $W$ for all", ha="center", va="bottom", color=ink, fontsize=9)
    strip(axes, 9.43, 1.95, out, ink)


def main() -> None:
    """Write the picture for the light and for the dark pages."""
    for theme, ink in THEMES.items():
        with plt.rc_context({"svg.hashsalt": "layer", "svg.fonttype": "path", "mathtext.fontset": "cm"}):
            figure = plt.figure(figsize=(9.2, 3.8), layout="constrained")
            draw(figure.subplots(), ink)
            figure.savefig(OUT / f"layer-{theme}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
