"""Data sets by name, and users' own data, as tasks for training."""

from ..tasks.task import Task as Task
from .citation import planetoid as planetoid
from .collate import Collate as Collate
from .encodings import encoded as encoded
from .from_pyg import from_dataset as from_dataset
from .from_pyg import from_file as from_file
from .from_pyg import from_scipy as from_scipy
from .generated import digits as digits
from .generated import planted as planted
from .links import links as links
from .ogb import ogbg as ogbg
from .ogb import ogbl as ogbl
from .ogb import ogbn as ogbn
from .proteins import listed_links as listed_links
from .proteins import ppi as ppi
from .published import filtered as filtered
from .published import wikics as wikics
from .smiles import smiles as smiles
from .tables import from_networkx as from_networkx
from .tables import from_pandas as from_pandas
from .tables import tables as tables
