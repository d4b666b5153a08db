"""Write a notebook beside each example, as sphinx-gallery writes them at the end of the pages.

python docs/notebooks.py
"""

from pathlib import Path

from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook, save_notebook
from sphinx_gallery.py_source_parser import remove_config_comments, split_code_and_text_blocks

EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    """Write every notebook."""
    for path in sorted(EXAMPLES.glob("*.py")):
        _, blocks = split_code_and_text_blocks(str(path))
        blocks = [(kind, remove_config_comments(text), line) for kind, text, line in blocks]
        save_notebook(jupyter_notebook(blocks, DEFAULT_GALLERY_CONF, str(EXAMPLES)), path.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
