"""Data sets by name, and users' own data, as tasks for training."""

from ..tasks.task import Task as Task
from .arrays.from_pyg import from_dataset as from_dataset
from .arrays.from_pyg import from_file as from_file
from .arrays.from_pyg import from_scipy as from_scipy
from .collate import Collate as Collate
from .encodings import encoded as encoded
from .links import links as links
from .molecules.smiles import smiles as smiles
from .named.citation import planetoid as planetoid
from .named.generated import digits as digits
from .named.generated import planted as planted
from .named.ogb import ogbg as ogbg
from .named.ogb import ogbl as ogbl
from .named.ogb import ogbn as ogbn
from .named.proteins import ppi as ppi
from .named.published import filtered as filtered
from .named.published import wikics as wikics
from .tables.tables import from_networkx as from_networkx
from .tables.tables import from_pandas as from_pandas
from .tables.tables import tables as tables
