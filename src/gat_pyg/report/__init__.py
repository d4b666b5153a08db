"""What is shown of models and results: figures, pages, and tables beside what the paper printed.

>>> import gat_pyg
>>> gat_pyg.report.attention_figure.__module__
'gat_pyg.report.figures'
"""

from .figures import attention_figure as attention_figure
from .figures import degree_figure as degree_figure
from .figures import entropy_figure as entropy_figure
from .figures import neighbourhood_figure as neighbourhood_figure
from .page import attention_page as attention_page
