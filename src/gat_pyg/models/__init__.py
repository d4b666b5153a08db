"""Graph attention networks and the attention of any model."""

from .attention import attention_of as attention_of
from .gat import GAT as GAT
from .gat import PRESETS as PRESETS
from .readout import Readout as Readout
