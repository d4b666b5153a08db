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

from gat_pyg import GAT
from gat_pyg.report.attended import Attended
from gat_pyg.report.page import SCALE, attention_page
from graphs import ISOLATED, LOOPS, NO_EDGES, ONE_NODE, RANDOM, Graph
from laws import assert_close

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def data_of(graph: Graph) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(graph.num_src, 16, generator=generator)
    return Data(x=x, edge_index=graph.index, y=torch.arange(graph.num_src) % 3)


def model() -> GAT:
    torch.manual_seed(0)
    return GAT(16, [4], 3, heads=[2, 1])


def layout(data: Data) -> Tensor:
    return torch.randn(data.num_nodes, 2, generator=torch.Generator().manual_seed(1))


def page_of(path: Path, **options: Any) -> tuple[str, dict[str, Any], Attended]:
    data = data_of(ISOLATED)
    attention_page(model(), data, path, layout=layout(data), **options)
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script id="content" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return text, json.loads(found[1]), Attended.of(model(), data)


def array(text: str, dtype: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).astype(np.float64))


def test_the_page_holds_every_number(tmp_path: Path) -> None:
    _, content, seen = page_of(tmp_path / "page.html")
    assert array(content["y"], "<i2").tolist() == seen.y.tolist()
    assert array(content["prediction"], "<i2").tolist() == seen.prediction.tolist()
    assert len(content["lists"]) == 1  # both layers have the same edges
    for layer, (edge_index, alpha) in zip(content["layers"], seen.layers, strict=True):
        assert array(content["lists"][layer["list"]], "<i4").view(2, -1).tolist() == edge_index.tolist()
        found = array(layer["alpha"], "<u2").view(layer["heads"], -1).t() / SCALE
        assert (found - alpha).abs().max() <= 0.5 / SCALE + 1e-7
    place, given = array(content["place"], "<f4").view(-1, 2), layout(data_of(ISOLATED)).double()
    assert place.abs().max() == 0.5
    apart = torch.cdist(given, given) / torch.cdist(place, place)
    assert_close(apart[0, 1:].float(), apart[0, 1].float().expand(5))  # the same picture, smaller


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text, content, _ = page_of(tmp_path / "page.html", title="<b>A & B</b>", classes=["</script>", "1", "2"])
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|<link[^>]+href=\"(?!data:)|<script[^>]+src", text)
    assert "default-src 'none'" in text and "{{" not in text
    assert text.count("</script>") == 2 and content["classes"][0] == "</script>"
    assert "<title>&lt;b&gt;A &amp; B&lt;/b&gt;</title>" in text


@pytest.mark.parametrize("net", [GAT(16, [4], 3, [2, 1]), pyg.TransformerConv(16, 3)], ids=["loops", "no loops"])
@pytest.mark.parametrize("graph", [NO_EDGES, ONE_NODE, ISOLATED, LOOPS, RANDOM], ids=str)
def test_every_graph_has_a_page(graph: Graph, net: nn.Module, tmp_path: Path) -> None:
    data = data_of(graph)
    assert attention_page(net, data, tmp_path / "made" / "page.html", layout=layout(data)).exists()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["page.html"]


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


def console_of(page: Path, folder: Path) -> list[str]:
    """What a browser says on its console from opening the page until it has told."""
    folder.mkdir()
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    command = [str(BROWSER), *flags.split(), "--enable-logging=stderr", f"--user-data-dir={folder}", page.as_uri()]
    with (folder / "log").open("w+", encoding="utf-8") as log:
        browser = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(600):
                time.sleep(0.1)
                found = re.findall(r'CONSOLE.*?\] "(.*)", source', (folder / "log").read_text(encoding="utf-8"))
                if any(line.startswith("TOLD") for line in found):
                    break
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
    return found


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """The pointer is put on node 2, which attends to itself, 0 and 4; then on a single head of the first layer."""
    path = tmp_path / "page.html"
    text, _, seen = page_of(path)
    edge_index, alpha = seen.layers[0]
    script = """
      const at = i => Object.fromEntries(["clientX", "clientY"].map((key, axis) => [key, seenAt(i)[axis]]));
      const look = i => { canvas.dispatchEvent(new PointerEvent("pointermove", at(i))); return $("card").innerText; };
      const told = [look(2)];
      $("head").value = 1;
      $("head").dispatchEvent(new Event("change"));
      told.push($("card").innerText, look(5));
      const wait = setInterval(() => {
        if (document.body.dataset.state !== "painted" || !picture) return;
        clearInterval(wait);
        const pixels = front.getImageData(0, 0, canvas.width, canvas.height).data;
        console.log("TOLD" + JSON.stringify([...told, pixels.some(value => value > 0)]));
      }, 20);
    """
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    lines = console_of(path, tmp_path / "browser")
    assert len(lines) == 1 and lines[0].startswith("TOLD"), lines
    summed, single, alone, painted = json.loads(lines[0].removeprefix("TOLD"))
    assert painted
    for card, value in ((summed, alpha.sum(-1)), (single, alpha[:, 1])):
        assert card.startswith("Node 2\n") and f"class: {seen.classes[2]}" in card
        assert f"prediction: {seen.classes[seen.prediction[2]]}" in card
        for src, coefficient in zip(edge_index[0], value, strict=True):
            if (edge_index[:, edge_index[0] == src][1] == 2).any():
                mine = value[(edge_index[0] == src) & (edge_index[1] == 2)].item()
                assert f"{mine:.3f}" in card, (card, coefficient)
    assert alone.startswith("Node 5\n") and "5 (itself)" in alone
