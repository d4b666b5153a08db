"""
Serve a trained model
=====================

A web service for predictions: the model is an ONNX file, the server has
neither torch nor PyG. It needs `pip install fastapi uvicorn onnxruntime`.
"""

# sphinx_gallery_thumbnail_path = "thumbnails/serve.png"

import logging
import tempfile
from pathlib import Path

import torch

import gat_pyg

logging.getLogger("torch.onnx").setLevel("ERROR")  # without its hints
torch.manual_seed(0)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "model.onnx")

# %%
# The file: `gat-pyg export RUN model.onnx` for a trained run, or for any
# module as here.

model = gat_pyg.GAT(16, [8], 3, heads=[4, 1]).eval()
example = torch.randn(10, 16), torch.randint(10, (2, 30))
ANY = torch.export.Dim.DYNAMIC
torch.onnx.export(
    model,
    example,
    path,
    input_names=["x", "edge_index"],
    dynamic_shapes=({0: ANY}, {1: ANY}),
    verbose=False,
)

# %%
# The server. Saved as `server.py`, `uvicorn server:app` starts it.

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

app = FastAPI()
session = onnxruntime.InferenceSession(path)


class Graph(BaseModel):
    x: list[list[float]]  # [N, 16]
    edge_index: tuple[list[int], list[int]]  # src, dst


@app.post("/predict")
def predict(graph: Graph) -> list[list[float]]:
    x = np.asarray(graph.x, np.float32).reshape(-1, 16)
    edge_index = np.asarray(graph.edge_index, np.int64)
    if (
        edge_index.size
        and not 0 <= edge_index.min() <= edge_index.max() < len(x)
    ):
        raise HTTPException(
            422, f"edge_index has ids outside 0 to {len(x) - 1}"
        )
    (logits,) = session.run(None, {"x": x, "edge_index": edge_index})
    return logits.tolist()


# %%
# A request: `curl localhost:8000/predict --json '{"x": [...], "edge_index":
# [[0, 1], [1, 2]]}'`. Here, without a network:

x, edge_index = torch.randn(5, 16), torch.tensor([[0, 1, 2], [1, 2, 3]])
answer = predict(Graph(x=x.tolist(), edge_index=edge_index.tolist()))
print(np.round(answer, 2))
expected = model(x, edge_index)
assert torch.allclose(torch.tensor(answer), expected, atol=1e-5)
folder.cleanup()
