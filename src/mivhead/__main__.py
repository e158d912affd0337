"""`python -m mivhead`: the same as the command `miv`."""

import sys

from mivhead.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
