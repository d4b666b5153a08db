"""Columns of molecules by RDKit: descriptors and fingerprints."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ...files import needs

BITS, RADIUS = 1024, 2  # of Morgan fingerprints
REMEMBERED = 20_000  # molecules whose descriptors are kept for a second call

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def descriptors(smiles: Sequence[str]) -> Array:
    """Return RDKit's descriptors of molecules `[n, D]` in float32, all finite: `rdkit.Chem.Descriptors.descList`.

    A value that is not defined for a molecule, such as the charges of an atom without parameters, is 0. `Ipc`, which
    grows exponentially with the number of atoms, is log(1 + `Ipc`). The columns have different scales, and some are
    constant in most sets of molecules. D depends on the version of RDKit, which is deterministic.

    Raises:
        ImportError: if RDKit is not installed.
        ValueError: if a text is no SMILES.

    Cost: 5 to 15 ms a molecule; the last 20,000 are remembered.

    Example:
        >>> alcohol, benzene = descriptors(["CCO", "c1ccccc1"]).max(1)  # the largest are the molecular weights
        >>> f"{alcohol:.2f} {benzene:.2f}"
        '46.07 78.11'
    """
    return np.stack([_descriptors(text) for text in smiles])


def fingerprints(smiles: Sequence[str]) -> Array:
    """Return the bits of Morgan fingerprints `[n, 1024]` of radius 2, as float32 (Rogers and Hahn, 2010).

    Raises:
        ImportError: if RDKit is not installed.
        ValueError: if a text is no SMILES.

    Example:
        >>> int(fingerprints(["CCO"]).sum())
        6
    """
    generator = needs("rdkit.Chem.rdFingerprintGenerator", "molecules").GetMorganGenerator(RADIUS, fpSize=BITS)
    rows = [generator.GetFingerprintAsNumPy(_molecule(text)) for text in smiles]
    return np.stack(rows).astype(np.float32)


@functools.lru_cache(REMEMBERED)
def _descriptors(smiles: str) -> Array:
    values = needs("rdkit.Chem.Descriptors", "molecules").CalcMolDescriptors(_molecule(smiles), missingVal=0.0)
    values["Ipc"] = np.log1p(values["Ipc"])
    row = np.array([*values.values()], dtype=np.float32)  # overflows to inf
    return np.where(np.isfinite(row), row, np.float32(0))


def _molecule(smiles: str) -> Any:
    with needs("rdkit.rdBase", "molecules").BlockLogs():
        mol = needs("rdkit.Chem", "molecules").MolFromSmiles(smiles)
    if mol is None:
        raise ValueError(f"{smiles!r} is no SMILES of a molecule.")
    return mol
