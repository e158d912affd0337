"""What `miv serve` and `miv backbones serve` share: addresses, access and limits."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.output import print_json
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.service.protection import ApiKeys

DEFAULT_PORT = 8765


def add_options(parser: options.Parser) -> None:
    """Add the options of a server."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on"
    )
    parser.add_argument(
        "--port",
        type=options.not_negative,
        default=DEFAULT_PORT,
        metavar="N",
        help="port to listen on; 0 chooses a free one",
    )
    group = parser.add_argument_group("access")
    keys = group.add_mutually_exclusive_group()
    keys.add_argument(
        "--key",
        metavar="VARIABLE",
        help="environment variable that holds the key clients must send as "
        "`Authorization: Bearer KEY`",
    )
    keys.add_argument("--key-file", metavar="FILE", help="file of keys, one per line")
    keys.add_argument(
        "--no-key",
        action="store_true",
        help="require no key, even on other addresses than this computer's own",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests that are addressed to this host name, as behind a proxy; may be "
        "repeated (default: this computer's own names, or any name if a key is required)",
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-images", type=options.positive, default=64, metavar="N", help="images per request"
    )
    group.add_argument(
        "--max-mb", type=options.positive, default=64, metavar="N", help="megabytes per request"
    )
    group.add_argument(
        "--max-megapixels",
        type=options.positive,
        default=64,
        metavar="N",
        help="megapixels of an image, and of all images that are being decoded at the same time",
    )
    group.add_argument(
        "--max-queue",
        type=options.positive,
        default=256,
        metavar="N",
        help="images that may wait; beyond it, requests are answered with 503 and Retry-After",
    )
    group.add_argument(
        "--deadline",
        type=options.positive,
        default=60,
        metavar="SECONDS",
        help="time for a request, from its first byte to the last byte of the answer",
    )


def check_options(args: argparse.Namespace) -> ApiKeys | None:
    """Return the keys, and refuse a server that is open to everyone unless it is asked for."""
    from mivhead._util.optional import need

    for module in ("starlette", "uvicorn", "python_multipart", "prometheus_client"):
        need(module, "serve")
    from mivhead._util.http import is_loopback
    from mivhead.service.protection import ApiKeys

    if args.key:
        return ApiKeys.from_variable(args.key)
    if args.key_file:
        return ApiKeys.from_file(args.key_file)
    if not is_loopback(args.host) and not args.no_key:
        raise InputError(
            f"Anyone who can reach {args.host} could use this server: require a key with --key "
            "VARIABLE or --key-file FILE, or allow everyone with --no-key."
        )
    return None


def serve(args: argparse.Namespace, title: str, facts: dict[str, Any], **what: Any) -> int:
    """Serve what `mivhead.service.application.create_app` takes until Ctrl-C or SIGTERM.

    `title` says what is served, `facts` say it for `--json`.
    """
    from mivhead._util.http import is_loopback
    from mivhead.service.application import create_app
    from mivhead.service.observation import log_to_stderr
    from mivhead.service.protection import LOOPBACK_HOSTS, Limits
    from mivhead.service.server import Server

    keys = check_options(args)
    limits = Limits(
        max_bytes=args.max_mb * 2**20,
        max_images=args.max_images,
        max_pixels=args.max_megapixels * 2**20,
        max_queue=args.max_queue,
        deadline=args.deadline,
    )
    hosts = None
    if args.allowed_host or (keys is None and is_loopback(args.host)):
        hosts = {*LOOPBACK_HOSTS, args.host, *args.allowed_host}
    app = create_app(limits=limits, keys=keys, hosts=hosts, **what)
    server = Server(app, args.host, args.port, deadline=limits.deadline)
    if not args.quiet:
        log_to_stderr()
    if args.json:
        print_json({**facts, "url": server.url})
    else:
        print(f"Serving {title} at {server.url} (press Ctrl-C to stop).")
    sys.stdout.flush()
    server.serve_forever()
    return 0
