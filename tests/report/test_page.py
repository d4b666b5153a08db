"""The page of a model's attention: its numbers read back, nothing fetched, and what a browser, if any, makes of it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from gat_pyg.report.figures.attended import Attended, pairs, times_uniform
from gat_pyg.report.figures.page import SCALE, attention_page
from tests.graphs import ISOLATED, LOOPS, NO_EDGES, ONE_NODE, RANDOM, Graph
from tests.laws import assert_close
from tests.report.samples import data_of, layout, model

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


def page_of(path: Path, title: str | None = None, **options: Any) -> tuple[str, dict[str, Any], Attended]:
    data = data_of(ISOLATED)
    if "label" in options:
        data.y = torch.stack([data.y == k for k in range(3)], 1).float()
    attention_page(model(), data, path, layout=layout(data), title=title, **options)
    text = path.read_text(encoding="utf-8")
    return text, content_of(text), Attended.of(model(), data, **options)


def content_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script id="content" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert match
    content: dict[str, Any] = json.loads(match[1])
    return content


def array(text: str, dtype: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).astype(np.float64))


@pytest.mark.parametrize("options", [{}, {"class_names": ["a", "b", "c"], "label": 1}], ids=["classes", "one label"])
def test_the_page_holds_every_number(options: dict[str, Any], tmp_path: Path) -> None:
    _, content, attended = page_of(tmp_path / "page.html", **options)
    assert content["classes"] == attended.class_names and len(content["colours"]) == len(attended.class_names)
    assert array(content["y"], "<i2").tolist() == attended.y.tolist()
    assert array(content["prediction"], "<i2").tolist() == attended.prediction.tolist()
    assert len(content["lists"]) == 1  # both layers have the same edges
    for layer, (edge_index, alpha) in zip(content["layers"], attended.layers, strict=True):
        assert layer["caption"] == attended.describe(content["layers"].index(layer))
        assert array(content["lists"][layer["list"]], "<i4").view(2, -1).tolist() == edge_index.tolist()
        stored = (array(layer["alpha"], "<u2").view(layer["heads"], -1).t() / SCALE).square()
        assert ((stored - alpha).abs() <= alpha.sqrt() / SCALE + 1e-7).all()
    place, position = array(content["place"], "<f4").view(-1, 2), layout(data_of(ISOLATED)).double()
    assert place.abs().max() == 0.5
    apart = torch.cdist(position, position) / torch.cdist(place, place)
    assert_close(apart[0, 1:].float(), apart[0, 1].float().expand(5))  # the same picture, smaller


def test_uniform_attention_of_a_hub_is_one_time_uniform(tmp_path: Path) -> None:
    """5,000 neighbours: a coefficient of 1/5000 itself, in 16 bits, would be 0.8 % too small."""
    N = 5000
    data = Data(x=torch.zeros(N, 16), edge_index=torch.stack([torch.arange(N), torch.zeros(N, dtype=torch.long)]))
    attention_page(model("constant"), data, tmp_path / "page.html", layout=torch.zeros(N, 2))
    content = content_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    for layer in content["layers"]:
        dst = array(content["lists"][layer["list"]], "<i4").view(2, -1)[1].long()
        alpha = (array(layer["alpha"], "<u2").view(layer["heads"], -1) / SCALE).square()
        times = alpha * dst.bincount(minlength=N)[dst]
        assert ((times - 1).abs() < 2e-3).all()


def test_the_page_is_self_contained_and_escapes_texts(tmp_path: Path) -> None:
    text, content, _ = page_of(tmp_path / "page.html", title="<b>A & B</b>", class_names=["</script>", "1", "2"])
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|<link[^>]+href=\"(?!data:)|<script[^>]+src", text)
    assert "computes a weighted mean over the neighbours of each node" in text  # what attention is
    assert "default-src 'none'" in text and "{{" not in text
    assert text.count("</script>") == 2 and content["classes"][0] == "</script>"
    assert "<title>&lt;b&gt;A &amp; B&lt;/b&gt;</title>" in text


@pytest.mark.parametrize("graph", [NO_EDGES, ONE_NODE, ISOLATED, LOOPS], ids=str)
def test_every_graph_has_a_page(graph: Graph, tmp_path: Path) -> None:
    data = data_of(graph)
    for net in (model(), pyg.TransformerConv(16, 3)):  # with and without loops
        assert attention_page(net, data, tmp_path / "new" / "page.html", layout=layout(data)).exists()
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


class Scored(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor, return_attention_weights: bool | None = None) -> Any:
        return x[:, :3], (edge_index, torch.full((edge_index.size(1), 1), 1.5))


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    data = data_of(RANDOM)
    with pytest.raises(ValueError, match=r"layout has shape \(3, 2\), expected finite numbers \[40, 2\]"):
        attention_page(model(), data, tmp_path / "page.html", layout=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="coefficients of layer 1 lie between 1.5 and 1.5, expected 0 to 1"):
        attention_page(Scored(), data, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def console_of(page: Path, folder: Path, window: str) -> list[str]:
    """The messages on a browser's console from opening the page until the script has reported."""
    folder.mkdir()
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    flags += f" --enable-logging=stderr --window-size={window} --user-data-dir={folder}"
    command = [str(BROWSER), *flags.split(), page.as_uri()]
    with (folder / "log").open("w+", encoding="utf-8") as log:
        browser = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(600):
                time.sleep(0.1)
                messages = re.findall(r'CONSOLE.*?\] "(.*)", source', (folder / "log").read_text(encoding="utf-8"))
                if any(line.startswith("VALUE") for line in messages):
                    break
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
    return messages


HELPERS = """
  const tell = value => console.log("VALUE" + JSON.stringify(value));
  const set = (id, value, event = "change") => { $(id).value = value; $(id).dispatchEvent(new Event(event)); };
  const painted = then => { const timer = setInterval(() => {
    if (document.body.dataset.state !== "painted" || !picture) return;
    clearInterval(timer);
    then();
  }, 20); };
"""


def evaluated(page: Path, script: str, folder: Path, window: str = "1200,900") -> Any:
    """The value that a script at the end of the page reports by `tell(value)`; the console must have nothing else."""
    script = f"<script>{{{HELPERS}{script}}}</script></body>"
    text = page.read_text(encoding="utf-8").replace("</body>", script)
    page.write_text(text, encoding="utf-8")
    lines = console_of(page, folder, window)
    assert len(lines) == 1 and lines[0].startswith("VALUE"), lines
    return json.loads(lines[0].removeprefix("VALUE"))


@browser
def test_the_card_of_a_node_shows_its_coefficients(tmp_path: Path) -> None:
    """The pointer is put on node 2, which attends to itself, 0 and 4; then on a single head of the first layer."""
    path = tmp_path / "page.html"
    _, _, attended = page_of(path)
    edge_index, alpha = attended.layers[0]
    script = """
      const at = i => Object.fromEntries(["clientX", "clientY"].map((key, axis) => [key, seenAt(i)[axis]]));
      const look = i => { canvas.dispatchEvent(new PointerEvent("pointermove", at(i))); return $("card").innerText; };
      const values = [look(2)];
      set("head", 1);
      values.push($("card").innerText, look(5), $("caption").innerText);
      painted(() => {
        const pixels = front.getImageData(0, 0, canvas.width, canvas.height).data;
        tell([...values, pixels.some(value => value > 0)]);
      });
    """
    mean, single, alone, caption, painted = evaluated(path, script, tmp_path / "browser")
    assert painted
    assert caption == attended.describe(0)
    times = times_uniform(edge_index, alpha, attended.num_nodes)
    for card, chosen in ((mean, slice(None)), (single, slice(1, 2))):
        assert card.startswith("Node 2\n") and f"class: {attended.class_names[2]}" in card
        assert f"prediction: {attended.class_names[attended.prediction[2]]}" in card
        for edge in (edge_index[1] == 2).nonzero().view(-1):
            for value, digits in ((times, 2), (alpha, 3)):
                assert f"{value[edge, chosen].mean().item():.{digits}f}" in card, (card, edge)
    assert alone.startswith("Node 5\n") and "5 (itself)" in alone and "\t1.00\t1.00\t1.000" in alone


@pytest.mark.weekly
@browser
def test_the_strongest_edges_are_not_those_of_small_neighbourhoods(tmp_path: Path) -> None:
    data = data_of(RANDOM)
    path = attention_page(model(), data, tmp_path / "page.html", layout=layout(data))
    script = """
      const {postMessage} = worker, sent = {};
      worker.postMessage = data => { Object.assign(sent, data); };
      choose();
      set("share", 10, "input");
      const pairs = Array.from(sent.order.subarray(0, drawn), pair => [sent.ends[2 * pair], sent.ends[2 * pair + 1]]);
      tell([pairs, $("shown").innerText]);
    """
    pairs_shown, shown = evaluated(path, script, tmp_path / "browser")
    edge_index, alpha = Attended.of(model(), data).layers[0]
    ends, weight = pairs(edge_index, times_uniform(edge_index, alpha, 40), "mean")
    strongest = weight.topk(round(len(weight) / 10))
    assert sorted(pairs_shown) == sorted(ends[:, strongest.indices].t().tolist())
    assert shown == f"strongest 10 %, at least {strongest.values[-1]:.2f} times uniform"
    _, summed = pairs(edge_index, alpha)
    assert set(summed.topk(len(pairs_shown)).indices.tolist()) != set(strongest.indices.tolist())


@pytest.mark.weekly
@browser
def test_finding_a_node_centres_it_and_fades_the_rest(tmp_path: Path) -> None:
    """An id out of range is reported."""
    path = tmp_path / "page.html"
    page_of(path)
    script = """
      set("find", 6);
      const values = [$("missing").hidden, $("missing").innerText, $("card").hidden];
      const opaque = () => {  // of a copy: a browser warns of reading the same canvas twice
        const {width, height} = canvas, copy = new OffscreenCanvas(width, height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        const {data} = copy.getImageData(0, 0, width, height);
        return data.reduce((most, value, at) => at % 4 === 3 ? Math.max(most, value) : most, 0);  // opacities
      };
      painted(() => {
        const before = opaque();
        set("find", 5);  // it has no neighbours, so all else is the faded picture
        const [x, y] = seenAt(5);
        const name = $("card").innerText.split("\\n")[0];
        values.push($("missing").hidden, name, x - (innerWidth + beside()) / 2, y - innerHeight / 2);
        painted(() => {
          front.clearRect(x - 20, y - 20, 40, 40);
          tell([...values, before, opaque()]);
        });
      });
    """
    hidden, missing, card, again, node, dx, dy, before, after = evaluated(path, script, tmp_path / "browser")
    assert not hidden and card and missing == "There is no node 6: the nodes are 0 to 5."
    assert again and node == "Node 5" and abs(dx) < 1 and abs(dy) < 1
    assert before > 200 and after < 60


@pytest.mark.weekly
@browser
def test_a_narrow_window_shows_a_node_with_its_neighbours_and_zooms(tmp_path: Path) -> None:
    """Finding a node closes the panel; the node, its neighbours and its card are visible, and two fingers zoom."""
    path = tmp_path / "page.html"
    page_of(path)
    script = """
      const touch = (type, pointerId, clientX, clientY) =>
        canvas.dispatchEvent(new PointerEvent(type, {pointerId, clientX, clientY}));
      const closed = !$("panel").open;
      $("panel").open = true;
      set("find", 2);
      const box = $("card").getBoundingClientRect(), end = innerHeight - below();
      const inside = neighbours(2).every(({j}) => {
        const [x, y] = seenAt(j);
        return 0 <= x && x <= innerWidth && 0 <= y && y <= end;
      });
      const [x, y] = seenAt(2);
      const covered = box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
      const room = [box.left, box.top, innerWidth - box.right, end - box.bottom];
      const before = view.scale;
      touch("pointerdown", 1, x - 50, y);
      touch("pointerdown", 2, x + 50, y);
      touch("pointermove", 1, x - 100, y);
      touch("pointermove", 2, x + 100, y);
      const pinched = [view.scale / before, seenAt(2)[0] - x, seenAt(2)[1] - y];
      touch("pointerup", 1, x - 100, y);
      touch("pointermove", 2, x + 110, y);
      pinched.push(seenAt(2)[0] - x);
      touch("pointerup", 2, x + 110, y);
      tell([closed, $("panel").open, inside, covered, room, pinched, pinned,
        innerWidth <= 700 && document.documentElement.scrollWidth <= innerWidth]);
    """
    closed, opened, inside, covered, room, pinched, pinned, fits = evaluated(
        path, script, tmp_path / "browser", "500,800"
    )
    assert closed and not opened and inside and not covered and fits
    assert min(room) >= 0, room
    assert pinched == pytest.approx([2, 0, 0, 10], abs=1e-6)
    assert pinned == 2  # fingers that zoomed select nothing
