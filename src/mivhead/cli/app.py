"""`miv app`: a page in the browser to make and use a classifier."""

from __future__ import annotations

import secrets
import sys
from contextlib import closing
from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output

EXAMPLES = """
miv app                        # a new project in the folder my-classes
miv app birds/                 # class folders that you have, or a new project
miv app birds/ --no-browser    # prints the link only
miv app birds/ --host 0.0.0.0  # for your phone as well
"""
WARNING = """
On your phone, in the same network:
  {link}
Warning: everyone in this network who has the link can see, change and delete the photos, and the
connection is not encrypted. Use it at home, not in a public network.
"""


@options.command(EXAMPLES)
@click.argument(
    "folder",
    default="my-classes",
    metavar="[FOLDER]",
    help="Folder of the project: a new one, or one with a folder of photos per class.",
)
@options.host
@click.option(
    "--port",
    type=options.NOT_NEGATIVE,
    default=0,
    metavar="N",
    help="Port to listen on; by default any free one.",
)
@click.option("--no-browser", is_flag=True, help="Print the link and do not open the browser.")
@options.classifier
@options.no_flip
def app(
    out: Output, folder: str, host: str, port: int, no_browser: bool, classifier: dict[str, Any]
) -> None:
    """Open a page in the browser to make and use a classifier.

    You make classes, drop photos on them, see at once how good the classifier is, let it name new
    photos and correct it. One folder holds everything: a folder of photos per class, and the model
    file. Photos that you delete on the page move to its hidden folder .miv-app/trash. Nothing
    leaves this computer, unless you let your phone in with --host. The page works until you press
    Ctrl-C; start again, and you are where you were.
    """
    from mivhead._util.http import is_loopback
    from mivhead.app.learner import Learner
    from mivhead.app.project import Project
    from mivhead.app.routes import address_for_others, make_server

    model = options.new_classifier(Output(quiet=True), **classifier)
    with closing(Project(folder)) as project:
        if project.message:
            out.note(project.message)
        learner = Learner(project, model)
        token = secrets.token_urlsafe(32)  # each start has a new link
        server = make_server(project, learner, token, port, host)
        here = f"http://localhost:{server.port}" if host in ("0.0.0.0", "::") else server.url
        link = f"{here}/?token={token}"
        phone = None
        if not is_loopback(host):
            phone = f"http://{address_for_others(host)}:{server.port}/?token={token}"
        place = "at this URL" if no_browser else "in the browser"
        out.result(
            {"folder": str(project.folder), "url": link, "phone": phone},
            f"{project.folder} is open {place} (press Ctrl-C to stop):\n  {link}",
        )
        if phone is not None:
            print(WARNING.format(link=phone), file=sys.stderr)
        if not no_browser:
            import webbrowser

            webbrowser.open(link)
        learner.start()
        try:
            server.serve_forever()
        finally:
            learner.stop()
