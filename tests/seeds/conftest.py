"""Fixtures of trainings."""

from tests.training.conftest import cuda as cuda
from tests.training.conftest import one_thread as one_thread
