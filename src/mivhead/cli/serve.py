"""`miv serve`: models over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.output import Output
from mivhead.errors import InputError

DEFAULT_PORT = 8765
EXAMPLES = """
miv serve birds.miv                                   # for programs on this computer
curl -F images=@photo.jpg http://127.0.0.1:8765/v1/predict
miv serve birds.miv flowers.miv                       # several models, by name
curl -F images=@photo.jpg 'http://127.0.0.1:8765/v1/predict?model=flowers&top=3'
MIV_KEY=... miv serve birds.miv --host 0.0.0.0 --key MIV_KEY   # for others too
"""


@options.command(EXAMPLES)
@click.argument(
    "models",
    nargs=-1,
    required=True,
    metavar="MODEL...",
    help="Model files, served under their names without the suffix, or as NAME=FILE.",
)
@options.host
@click.option(
    "--port",
    type=options.NOT_NEGATIVE,
    default=DEFAULT_PORT,
    metavar="N",
    help="Port to listen on; 0 chooses a free one.",
)
@click.option(
    "--key",
    metavar="VARIABLE",
    help="Environment variable of the key that clients send as `Authorization: Bearer KEY`.",
)
@click.option("--key-file", metavar="FILE", help="File of keys, one per line.")
@click.option("--no-key", is_flag=True, help="Let everyone in who can reach --host.")
@click.option(
    "--allowed-host",
    multiple=True,
    metavar="NAME",
    help="Host name that requests may address, as behind a proxy; may be repeated (default: this "
    "computer's own names, or any name if a key is required).",
)
@click.option(
    "--max-mb", type=options.POSITIVE, default=64, metavar="N", help="Megabytes per request."
)
@options.backbone
def serve(
    out: Output,
    models: Sequence[str],
    host: str,
    port: int,
    key: str | None,
    key_file: str | None,
    no_key: bool,
    allowed_host: Sequence[str],
    max_mb: int,
    backbone: dict[str, Any],
) -> None:
    """Serve trained models over HTTP until you press Ctrl-C.

    A model whose file changes is loaded again; a bad file never replaces a good model.
    /openapi.json describes all requests. Connections are not encrypted: on an open network, put an
    HTTPS proxy in front.
    """
    from mivhead._util.http import is_loopback
    from mivhead.service.application import create_app
    from mivhead.service.engine import ModelLoader, name_files
    from mivhead.service.middleware import LOOPBACK_HOSTS, ApiKeys, Limits, log_to_stderr
    from mivhead.service.server import Server

    if key and key_file:
        raise InputError("Choose one of --key and --key-file.")
    keys = ApiKeys.from_variable(key) if key else None
    if key_file:
        keys = ApiKeys.from_file(key_file)
    if keys is None and not no_key and not is_loopback(host):
        raise InputError(
            f"Anyone who can reach {host} could use this server: require a key with --key VARIABLE "
            "or --key-file FILE, or allow everyone with --no-key."
        )
    for file in models:
        options.check_model(file)
    files = name_files(models)
    hosts = None
    if allowed_host or (keys is None and is_loopback(host)):
        hosts = {*LOOPBACK_HOSTS, host, *allowed_host}
    app = create_app(
        [f"{name}={path}" for name, path in files.items()],
        load=ModelLoader(**backbone),
        limits=Limits(max_bytes=max_mb * 2**20),
        keys=keys,
        hosts=hosts,
    )
    server = Server(app, host, port)
    if out.verbose:
        log_to_stderr()
    names = list(files)
    text = f"Serving {', '.join(names)} at {server.url} (press Ctrl-C to stop)."
    out.result({"models": names, "url": server.url}, text)
    server.serve_forever()
