"""Training of many seeds and settings as one model."""

from .callbacks import EachStopping as EachStopping
from .fitting import Outcome as Outcome
from .fitting import train as train
from .member import Member as Member
from .module import Stacked as Stacked
from .module import StackedInductive as StackedInductive
