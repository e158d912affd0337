"""The directive `miv-commands`: the command reference, from the parser of `miv` itself."""

import argparse
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mivhead.cli.main import build_parser


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, each group before its own commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from commands(each)


class MivCommands(SphinxDirective):
    """A section per command with what its `--help` prints."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        sections: list[nodes.Node] = []
        for parser in commands(build_parser()):
            section = nodes.section(ids=[nodes.make_id(parser.prog)])
            section += nodes.title(text=parser.prog)
            section += nodes.literal_block(text=parser.format_help(), language="text")
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("miv-commands", MivCommands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
