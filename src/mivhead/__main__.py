"""`python -m mivhead`: the same as the command `miv`."""

from mivhead.cli.main import command

if __name__ == "__main__":
    command()
