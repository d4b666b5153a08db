"""Graph attention networks, the parts of a model around them, and the attention of any model."""

from .attention import attention_of as attention_of
from .block import Block as Block
from .change import Change as Change
from .decoders import link_decoder as link_decoder
from .encoders import Encoded as Encoded
from .encoders import Encoder as Encoder
from .gat import GAT as GAT
from .gat import PRESETS as PRESETS
from .link_scores import LinkScores as LinkScores
from .readout import Readout as Readout
