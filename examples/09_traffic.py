"""
Traffic on one road network
===========================

Forecast the speed at every sensor of a road network, half an hour ahead. The
graph is always the same and only the series change: the layers take a batch of
windows `[B, N, F]` in one call.
"""

from itertools import pairwise

import torch
from matplotlib.figure import Figure
from torch import nn

from gat_pyg import GATConv

torch.manual_seed(0)

# %%
# Two weeks of generated series: 48 sensors along two roads that cross, every
# 5 minutes. A jam begins at a sensor in the rush hours and moves to the next
# sensor upstream in a quarter of an hour. A forecast has to look at the sensors
# ahead.

N, T, DAY = 48, 14 * 288, 288
roads = [*range(24)], [*range(24, 36), 11, *range(36, 48)]
ahead = [(j, i) for road in roads for i, j in pairwise(road)]
ahead = torch.tensor(ahead).t()  # from the sensor ahead to that behind it
edge_index = torch.cat([ahead, ahead.flip(0)], 1)

hours = torch.arange(T) % DAY / 12
rush = torch.exp(-((hours - 8) ** 2)) + torch.exp(-((hours - 17) ** 2) / 2)
jams = [torch.zeros(N)] * 3
for t in range(T):
    arriving = torch.zeros(N)
    arriving = arriving.index_reduce(0, ahead[1], jams[-3][ahead[0]], "amax")
    begins = (torch.rand(N) < 0.01 * rush[t]).float()
    jams.append(
        torch.stack([0.8 * jams[-1], 0.95 * arriving, begins]).amax(0)
    )
speed = 100 - 15 * rush[:, None] - 60 * torch.stack(jams[3:])
speed = speed + 2 * torch.randn(T, N)  # km/h, [T, N]

# %%
# A window has the last hour at each node, and the label is the speed 6 steps
# later. Training is on the first ten days.

mean, std = speed[: 10 * DAY].mean(), speed[: 10 * DAY].std()
windows = ((speed - mean) / std).unfold(0, 18, 1)  # [W, N, 18]
x, y = windows[..., :12], windows[..., -1]
train, test = slice(0, 10 * DAY - 17), slice(10 * DAY, None)


class Forecast(nn.Module):
    """The last value and a correction by two attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(12, 16, heads=4)
        self.last = GATConv(64, 1)
        self.skip = nn.Linear(12, 1)

    def forward(self, x, edge_index):
        h = self.first(x, edge_index).relu()  # [B, N, 64]
        return (self.last(h, edge_index) + self.skip(x)).squeeze(-1)


model = Forecast()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for epoch in range(5):
    for batch in torch.randperm(len(x[train])).split(64):
        loss = nn.functional.mse_loss(model(x[batch], edge_index), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")

# %%
# Errors on the last days, beside a forecast that repeats the last value, and a
# linear model that sees only the sensor's own series.

with torch.no_grad():
    prediction = model(x[test], edge_index)
series, label = x[train].flatten(0, 1), y[train].flatten()[:, None]
own = torch.linalg.lstsq(series, label).solution
forecasts = {
    "last value": x[test][..., -1],
    "linear, own series": (x[test] @ own).squeeze(-1),
    "attention": prediction,
}
for name, forecast in forecasts.items():
    error = std * (forecast - y[test]).abs().mean()
    print(f"{name:>18}: mean absolute error {error:.1f} km/h")

# %%
# One sensor on one day.

figure = Figure(figsize=(7, 3), layout="constrained")
axes = figure.subplots()
day = slice(DAY, 2 * DAY)
axes.plot(
    torch.arange(DAY) / 12,
    mean + std * y[test][day, 5],
    "C7",
    label="measured",
)
for name, colour in (("linear, own series", "C0"), ("attention", "C1")):
    values = mean + std * forecasts[name][day, 5]
    axes.plot(torch.arange(DAY) / 12, values, colour, label=name)
axes.set(xlabel="hour", ylabel="km/h", title="forecast of half an hour")
axes.legend(frameon=False)
figure
