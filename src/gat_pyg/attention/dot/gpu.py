"""The scaled dot product on CUDA: the kernels of `attention.pair` compute it too."""

from ..pair.gpu import backward as backward
from ..pair.gpu import forward as forward
