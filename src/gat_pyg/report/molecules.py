"""Molecules: atoms and bonds read back from categorical features, and positions in the plane."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, degree

from .attended import EXTRA

_ELEMENTS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr "
    "Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir "
    "Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl "
    "Mc Lv Ts Og"
)
SYMBOLS = _ELEMENTS.split()
AROMATIC = 1.5
# The atomic number of category 0, and the orders of the categories of bonds: OGB's, then PyG's `from_smiles`.
_CONVENTIONS = ((1, {0: 1, 1: 2, 2: 3, 3: AROMATIC}), (0, {1: 1, 2: 2, 3: 3, 12: AROMATIC}))
_DEGREE, _CHARGE, _HYDROGENS = 2, 3, 4  # columns of x in both; the first is the atomic number
_NEUTRAL = 5  # the category of the charge 0
_LARGE = 500  # nodes, from which on Kamada-Kawai takes seconds


class Molecule(NamedTuple):
    """The atoms of a graph, each with its charge and its hydrogens that are no nodes, and the bonds, each once.

    Attributes:
        atomic_numbers, charges, hydrogens: one number for each of the N atoms.
        bonds: `[2, M]`, the pairs i < j, sorted.
        orders: the order of each bond: 1, 2, 3, or 1.5 if it is aromatic.
    """

    atomic_numbers: list[int]
    charges: list[int]
    hydrogens: list[int]
    bonds: Tensor
    orders: list[float]

    @classmethod
    def of(cls, data: Data) -> Molecule | None:
        """Return the molecule of a graph with OGB's or PyG's categories of atoms and bonds; None for another graph.

        A graph is a molecule if a carbon atom has four bonds, every atom has as many neighbours as its features count,
        and every bond has one of the four orders. Molecules without carbon are not recognised.

        Example:
            >>> x = torch.tensor([[5, 0, 4, 5, 3, 0, 2, 0, 0], [7, 0, 2, 5, 1, 0, 2, 0, 0]])  # methanol
            >>> edge_index, edge_attr = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 3)
            >>> Molecule.of(Data(x=x, edge_index=edge_index, edge_attr=edge_attr)).atomic_numbers
            [6, 8]
        """
        x, edge_index, edge_attr = data.x, data.edge_index, data.edge_attr
        if x is None or edge_attr is None or x.dim() != 2 or x.size(1) != 9 or edge_attr.shape[1:] != (3,):
            return None
        x, edge_index, edge_attr = x.cpu(), edge_index.cpu(), edge_attr.cpu()
        count, hydrogens = degree(edge_index[0], x.size(0)), x[:, _HYDROGENS]
        if (x != x.round()).any() or (x < 0).any() or (x[:, _DEGREE] != count + hydrogens).any():
            return None
        bonds, category = coalesce(edge_index.sort(dim=0).values, edge_attr[:, 0], reduce="max")
        for first, known in _CONVENTIONS:
            atomic_number = x[:, 0] + first
            is_element = ((atomic_number >= 1) & (atomic_number <= len(SYMBOLS))).all()  # not "any", "misc"
            if not is_element or not {*category.tolist()} <= known.keys():
                continue
            orders = [known[int(key)] for key in category]
            valence = hydrogens.float().index_add(0, bonds.flatten(), torch.tensor(orders).float().repeat(2))
            if ((atomic_number == 6) & (valence >= 4)).any():  # 5 if it is of an aromatic ring, with =O
                charge = x[:, _CHARGE] - _NEUTRAL
                numbers, charges, counts = (each.int().tolist() for each in (atomic_number, charge, hydrogens))
                return cls(numbers, charges, counts, bonds, orders)
        return None

    def label(self, atom: int, hydrogens_first: bool = False) -> str:
        """Return the symbol of an atom with its hydrogens and its charge, as Matplotlib's mathtext."""
        count, charge = self.hydrogens[atom], self.charges[atom]
        hydrogens = "" if not count else "H" if count == 1 else f"H_{{{count}}}"
        amount = "" if abs(charge) == 1 else str(abs(charge))
        sign = f"^{{{amount}{'+' if charge > 0 else '−'}}}" if charge else ""
        symbol = SYMBOLS[self.atomic_numbers[atom] - 1]
        text = hydrogens + symbol + sign if hydrogens_first else symbol + hydrogens + sign
        return rf"$\mathregular{{{text}}}$" if count > 1 or charge else text


def positions(data: Data, molecule: Molecule | None) -> NDArray[np.float64]:
    """Return positions of the nodes, `[N, 2]`, the long axis horizontal.

    Those of a molecule are by RDKit if it is installed. Others are by Kamada-Kawai, or by springs for 500 nodes and
    more. The result is deterministic.

    Raises:
        ImportError: if SciPy is missing.
    """
    place = None if molecule is None else _by_rdkit(molecule)
    if place is None:
        place = _by_distances(data)
    place = place - place.mean(0)
    _, _, axes = np.linalg.svd(place, full_matrices=False)
    result: NDArray[np.float64] = place @ axes.T if len(place) > 1 and molecule is None else place
    return result


def _by_rdkit(molecule: Molecule) -> NDArray[np.float64] | None:
    """Return RDKit's positions of the atoms in a structural formula, or None without RDKit."""
    try:
        from rdkit import Chem
        from rdkit.Chem import rdDepictor
    except ImportError:
        return None
    kinds = {1: Chem.BondType.SINGLE, 2: Chem.BondType.DOUBLE, 3: Chem.BondType.TRIPLE, 1.5: Chem.BondType.AROMATIC}
    mol = Chem.RWMol()
    for number in molecule.atomic_numbers:
        mol.AddAtom(Chem.Atom(number))
    for (i, j), order in zip(molecule.bonds.t().tolist(), molecule.orders, strict=True):
        mol.AddBond(i, j, kinds[order])
    mol.UpdatePropertyCache(strict=False)
    Chem.SetConjugation(mol)
    Chem.SetHybridization(mol)  # an sp atom has its bonds in a line
    rdDepictor.Compute2DCoords(mol)
    rdDepictor.StraightenDepiction(mol)
    place: NDArray[np.float64] = mol.GetConformer().GetPositions()[:, :2]
    return place


def _by_distances(data: Data) -> NDArray[np.float64]:
    """Return positions by NetworkX, whose distances are about those in the graph; parts are one step apart."""
    try:
        import networkx as nx
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import shortest_path
    except ImportError as error:
        raise ImportError(f"the positions of the nodes need SciPy: {EXTRA}") from error
    N, edges = int(data.num_nodes or 0), data.edge_index.cpu().numpy()
    graph: Any = nx.Graph(edges.T.tolist())
    graph.add_nodes_from(range(N))
    if N >= _LARGE:
        place = nx.spring_layout(graph, seed=0)
    else:
        steps = shortest_path(csr_array((np.ones(edges.shape[1]), edges), (N, N)), directed=False, unweighted=True)
        steps[np.isinf(steps)] = steps[np.isfinite(steps)].max() + 1
        place = nx.kamada_kawai_layout(graph, {i: dict(enumerate(row)) for i, row in enumerate(steps.tolist())})
    return np.array([place[node] for node in range(N)])
