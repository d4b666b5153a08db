"""Training of one model: the LightningModules, the data module, the stopping rule, exact resume."""

from .averaging import Average as Average
from .checkpoint import SafeCheckpoints as SafeCheckpoints
from .loading import TaskData as TaskData
from .modules import Inductive as Inductive
from .modules import Supervised as Supervised
from .modules import Transductive as Transductive
from .neighbours import TorchSampler as TorchSampler
from .optimisation import Optimisation as Optimisation
from .optimisation import Schedule as Schedule
from .resume import Resumable as Resumable
from .stopping import PaperStopping as PaperStopping
