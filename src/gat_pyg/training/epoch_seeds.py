"""The random seed and the dropout key of an epoch."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_epoch(seed: int, rank: int, epoch: int, device: str = "cpu") -> None:
    """Seed torch (on the CPU and on `device`), numpy and Python for one epoch; takes 50 us on a CPU."""
    words = np.random.SeedSequence([seed, rank, epoch]).generate_state(3)
    if device == "cpu":
        torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed records a stack trace for the GPUs: 1 ms
    else:
        torch.manual_seed(int(words[0]))
    np.random.seed(words[1])
    random.seed(int(words[2]))


def seed_draws(seed: int, epoch: int) -> None:
    """Seed Python's generator for an epoch as on rank 0, so that all ranks draw the same negative links or labels."""
    random.seed(int(np.random.SeedSequence([seed, 0, epoch]).generate_state(3)[2]))


def generator_of(seed: int, epoch: int, device: torch.device) -> torch.Generator:
    """Return a generator in the state in which `seed_epoch` leaves that of the device in a single process."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence([seed, 0, epoch]).generate_state(1)[0]))


def key_of(seed: int, epoch: int) -> int:
    """Return the key of an epoch's dropout masks, 63 bits determined by seed and epoch; takes 8 us."""
    *_, low, high = map(int, np.random.SeedSequence([seed, 0, epoch]).generate_state(5))
    return low | (high & 0x7FFFFFFF) << 32
