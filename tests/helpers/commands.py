"""The commands of `miv`, found and parsed without running them."""

import click

from mivhead.cli.main import GENERAL, miv


def list_commands(group=miv, path="miv"):
    """Return all commands by the words that call them."""
    context = click.Context(group, info_name=path)
    commands = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            commands |= list_commands(command, f"{path} {name}")
        else:
            commands[f"{path} {name}"] = command
    return commands


def parse(words, group=miv):
    """Parse the words after the name of a group; return the parameters of the command."""
    rest = GENERAL.make_context("miv", list(words)).args
    while isinstance(group, click.Group):
        group = group.get_command(click.Context(group), rest.pop(0))
        assert group is not None, words
    return group.make_context("miv", rest).params
