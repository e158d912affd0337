"""`miv app`: a page in the browser to make and use a classifier."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mivhead.cli import options
from mivhead.cli.output import announce, print_json

EXAMPLES = """
miv app                      # a new project in the folder my-classes
miv app birds/               # class folders that you have, or a new project
miv app birds/ --no-browser  # prints the link only
miv app birds/ --host 0.0.0.0  # for your phone as well: prints a QR code
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "app",
        "make and use a classifier in the browser",
        "Open a page in the browser on which you make classes, drop photos on them, see at once "
        "how good the classifier is, let it name new photos and correct it. One folder holds "
        "everything: a folder of photos per class, and the model file. Nothing leaves this "
        "computer, unless you let your phone in with --host. The page works until you press "
        "Ctrl-C; start again, and you are where you were.",
        EXAMPLES,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default="my-classes",
        metavar="FOLDER",
        help="folder of the project: a new one, or one that has a folder of photos per class "
        "(default: my-classes)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 admits other devices in the network that have the "
        "link, such as your phone, and prints the link as a QR code",
    )
    parser.add_argument(
        "--port",
        type=options.not_negative,
        default=None,
        metavar="N",
        help="port to listen on (default: the same as last time, or any free one)",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the link and do not open the browser"
    )
    parser.add_argument(
        "--new-link", action="store_true", help="make a new link; earlier ones stop working"
    )
    options.add_extraction(parser)
    options.add_training(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv app`."""
    from mivhead._util.optional import need

    for module in ("starlette", "uvicorn", "segno"):
        need(module, "serve")
    announce("Starting ...", args)
    from mivhead._util.http import is_loopback
    from mivhead.app.learner import Learner
    from mivhead.app.project import opened
    from mivhead.app.routes import Token, address_for_others, make_server

    options.prepare(args)
    model = options.classifier_from(args)
    model.verbose = False
    model.make_classifier()  # refuses bad options before the page opens
    with opened(args.folder) as project:
        if project.links and not args.quiet:
            names = ", ".join(map(repr, project.links))
            print(f"The app does not follow links, so it leaves out {names}.", file=sys.stderr)
        learner = Learner(project, model)
        token = Token(project, renew=args.new_link)
        server = make_server(project, learner, token, args.port, args.host)
        link = f"{_for_this_computer(server)}/?token={token.value}"
        phone = None
        if not is_loopback(args.host):
            phone = f"http://{address_for_others(args.host)}:{server.port}/?token={token.value}"
        if args.json:
            print_json({"folder": str(project.folder), "url": link, "phone": phone})
        else:
            where = "at this address" if args.no_browser else "in the browser"
            print(f"{project.folder} is open {where} (press Ctrl-C to stop):\n  {link}")
        if phone is not None:
            _invite(phone)
        sys.stdout.flush()
        if not args.no_browser:
            import webbrowser

            webbrowser.open(link)
        learner.start()
        try:
            server.serve_forever()
        finally:
            learner.stop()
    return 0


def _for_this_computer(server: Any) -> str:
    """Return the address of a server in a browser on the same computer."""
    if server.host in ("0.0.0.0", "::"):
        return f"http://localhost:{server.port}"
    return str(server.url)


def _invite(link: str) -> None:
    """Print the link for other devices, as a QR code too, and what it means to use it."""
    import segno

    print(f"\nOn your phone, in the same network:\n  {link}\n", file=sys.stderr)
    segno.make(link, micro=False).terminal(out=sys.stderr, compact=True, border=2)
    print(
        "Warning: everyone in this network who has the link can see, change and delete the photos, "
        "and\nthe connection is not encrypted. Use it at home, not in a public network. "
        "--new-link ends earlier links.\n",
        file=sys.stderr,
    )
