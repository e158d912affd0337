"""Renders formulas as MathML when the site is built: pages need no script and no other host."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _inline(writer, node: nodes.math) -> None:  # Sphinx's HTML writer
    writer.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def _block(writer, node: nodes.math_block) -> None:  # Sphinx's HTML writer
    writer.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
