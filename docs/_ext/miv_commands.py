"""The directive `miv-commands`: the command reference, from the commands of `miv` themselves."""

from collections.abc import Iterator

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mivhead.cli.main import miv
from mivhead_bench.cli.main import bench


def commands(group: click.Group, parent: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the names of all commands and what their `--help` prints."""
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        if command is None:
            continue
        context = click.Context(command, info_name=name, parent=parent, terminal_width=100)
        yield context.command_path, command.get_help(context)
        if isinstance(command, click.Group):
            yield from commands(command, context)


class MivCommands(SphinxDirective):
    """A section per command with what its `--help` prints."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        sections: list[nodes.Node] = []
        top = click.Context(miv, info_name="miv", **miv.context_settings)
        laboratory = click.Context(bench, info_name="bench", parent=top)
        for name, text in (*commands(miv, top), *commands(bench, laboratory)):
            section = nodes.section(ids=[nodes.make_id(name)])
            section += nodes.title(text=name)
            section += nodes.literal_block(text=text, language="text")
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("miv-commands", MivCommands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
