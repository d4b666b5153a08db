"""Molecules read back from categorical features and drawn by RDKit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, degree

AROMATIC = 1.5
# The atomic number of category 0, and the orders of the categories of bonds: OGB's, then PyG's `from_smiles`.
_CONVENTIONS = ((1, {0: 1, 1: 2, 2: 3, 3: AROMATIC}), (0, {1: 1, 2: 2, 3: 3, 12: AROMATIC}))
_DEGREE, _CHARGE, _HYDROGENS = 2, 3, 4  # columns of x in both; the first is the atomic number
_NEUTRAL = 5  # the category of the charge 0
_ELEMENTS = 118


def molecule_of(data: Data) -> Any:
    """Return the RDKit molecule of a graph with OGB's or PyG's categories of atoms and bonds.

    A graph is a molecule if a carbon atom has four bonds, every atom has as many neighbours as its features count,
    and every bond has one of the four orders. Molecules without carbon are not recognised. Further columns of x, such
    as encodings, are not read. The result is None for another graph, and without RDKit.

    Example:
        >>> x = torch.tensor([[5, 0, 4, 5, 3, 0, 2, 0, 0], [7, 0, 2, 5, 1, 0, 2, 0, 0]])  # methanol
        >>> edge_index, edge_attr = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 3)
        >>> molecule = molecule_of(Data(x=x, edge_index=edge_index, edge_attr=edge_attr))
        >>> [(atom.GetSymbol(), atom.GetNumExplicitHs()) for atom in molecule.GetAtoms()]
        [('C', 3), ('O', 1)]
    """
    x, edge_index, edge_attr = data.x, data.edge_index, data.edge_attr
    if x is None or edge_attr is None or x.dim() != 2 or x.size(1) < 9 or edge_attr.shape[1:] != (3,):
        return None
    x, edge_index, edge_attr = x[:, :9].cpu(), edge_index.cpu(), edge_attr.cpu()
    count, hydrogens = degree(edge_index[0], x.size(0)), x[:, _HYDROGENS]
    if (x != x.round()).any() or (x < 0).any() or (x[:, _DEGREE] != count + hydrogens).any():
        return None
    bonds, category = coalesce(edge_index.sort(dim=0).values, edge_attr[:, 0], reduce="max")
    for first, known in _CONVENTIONS:
        atomic_number = x[:, 0] + first
        is_element = ((atomic_number >= 1) & (atomic_number <= _ELEMENTS)).all()  # not "any", "misc"
        if not is_element or not {*category.tolist()} <= known.keys():
            continue
        orders = [known[int(key)] for key in category]
        valence = hydrogens.float().index_add(0, bonds.flatten(), torch.tensor(orders).float().repeat(2))
        if ((atomic_number == 6) & (valence >= 4)).any():  # 5 if it is of an aromatic ring, with =O
            atoms = torch.stack([atomic_number, x[:, _CHARGE] - _NEUTRAL, hydrogens], 1).int().tolist()
            return _molecule(atoms, bonds.t().tolist(), orders)
    return None


def _molecule(atoms: list[list[int]], bonds: list[list[int]], orders: list[float]) -> Any:
    """Return the RDKit molecule of atoms (atomic number, charge, hydrogens) and bonds, or None without RDKit."""
    try:
        from rdkit import Chem
    except ImportError:
        return None
    kinds = {1: Chem.BondType.SINGLE, 2: Chem.BondType.DOUBLE, 3: Chem.BondType.TRIPLE, 1.5: Chem.BondType.AROMATIC}
    molecule = Chem.RWMol()
    for number, charge, hydrogens in atoms:
        atom = Chem.Atom(number)
        atom.SetFormalCharge(charge)
        atom.SetNumExplicitHs(hydrogens)
        atom.SetNoImplicit(True)
        molecule.AddAtom(atom)
    for (i, j), order in zip(bonds, orders, strict=True):
        molecule.AddBond(i, j, kinds[order])
    molecule.UpdatePropertyCache(strict=False)
    Chem.SetConjugation(molecule)
    Chem.SetHybridization(molecule)  # an sp atom has its bonds in a line
    return molecule


def picture(
    molecule: Any,
    position: NDArray[np.float64],
    size: tuple[int, int],
    bond: float,
    colours: Mapping[tuple[int, int], tuple[float, ...]],
    notes: Mapping[tuple[int, int], str],
    labels: Sequence[str] | None = None,
) -> bytes:
    """Return the structural formula of a molecule by RDKit as a PNG.

    Args:
        molecule: the result of `molecule_of`.
        position: `[N, 2]`, the positions of the atoms.
        size: width and height in pixels.
        bond: the largest mean length of a bond in pixels.
        colours: the colour of each bond `(i, j)` with i < j, RGB from 0 to 1.
        notes: the text beside a bond.
        labels: the names of the atoms in place of their symbols.
    """
    from rdkit import Chem
    from rdkit.Chem.Draw import rdMolDraw2D

    molecule = Chem.Mol(molecule)
    molecule.RemoveAllConformers()
    conformer = Chem.Conformer(molecule.GetNumAtoms())
    for atom, (x, y) in enumerate(position.tolist()):
        conformer.SetAtomPosition(atom, (x, y, 0.0))
    molecule.AddConformer(conformer)
    shades = {}
    for each in molecule.GetBonds():
        ends = tuple(sorted((each.GetBeginAtomIdx(), each.GetEndAtomIdx())))
        if ends in colours:
            shades[each.GetIdx()] = colours[ends]
        if ends in notes:
            each.SetProp("bondNote", notes[ends])
    drawer = rdMolDraw2D.MolDraw2DCairo(*size)
    options: Any = drawer.drawOptions()
    options.useBWAtomPalette()
    options.prepareMolsBeforeDrawing = False  # aromatic bonds stay dashed
    options.fixedBondLength = bond
    options.bondLineWidth = max(round(0.03 * bond), 1)
    options.highlightBondWidthMultiplier = 5
    options.maxFontSize = round(0.3 * bond)
    options.minFontSize = round(0.12 * bond)
    options.annotationFontScale = 0.6
    options.setAnnotationColour((0.2, 0.2, 0.2))
    options.setBondNoteColour((0.2, 0.2, 0.2))
    for atom, label in enumerate(labels or ()):
        options.atomLabels[atom] = label
    drawer.DrawMolecule(
        molecule, highlightAtoms=[], highlightBonds=[*shades], highlightAtomColors={}, highlightBondColors=shades
    )
    drawer.FinishDrawing()
    png: bytes = drawer.GetDrawingText()
    return png
