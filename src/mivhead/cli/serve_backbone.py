"""`miv backbones serve`: a local backbone for other machines."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from typing import Any

from mivhead.cli import options

EXAMPLES = """
miv backbones serve efficientnet_lite0                # for programs on this machine
miv fit shots/ -o birds.miv --backbone http://127.0.0.1:8765
miv backbones serve clip_vitl14 --device cuda --host 0.0.0.0 --key MIV_KEY  # for others
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "serve",
        "let other programs use a backbone over HTTP",
        "Serve a backbone over HTTP until Ctrl-C, so that one machine with a GPU can work for "
        "many. Its address is then a backbone elsewhere: --backbone http://HOST:PORT. There is no "
        "encryption: on an open network, put a proxy with HTTPS in front.",
        EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="any backbone, as for --backbone")
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint for it")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: here)"
    )
    parser.add_argument(
        "--port",
        type=options.not_negative,
        default=8765,
        metavar="N",
        help="where to listen; 0 takes a free one (default: 8765)",
    )
    parser.add_argument(
        "--key",
        metavar="VARIABLE",
        help="environment variable with a key that clients must send; they name theirs with "
        "http://HOST:PORT#key=VARIABLE",
    )
    options.add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    options.prepare(args)
    import numpy as np

    from mivhead.backbones import load_backbone
    from mivhead.backbones.transport import is_loopback
    from mivhead.serve.backbone import BackboneServer

    backbone = load_backbone(args.name, weights=args.weights, device=args.device)
    backbone.extract([np.zeros((8, 8, 3), np.uint8)])  # what is missing is missed now
    server = BackboneServer(backbone, args.host, args.port, key=args.key)
    if not is_loopback(args.host) and args.key is None:
        print(
            f"miv: warning: whoever can reach {args.host} can use this server and no key is "
            "asked for; give one with --key VARIABLE.",
            file=sys.stderr,
        )
    if not args.quiet:
        _log_requests()
    print(f"Serving {backbone.identity.name} at {server.url} (Ctrl-C stops it).", flush=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's Ctrl-C
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.close_gently()
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("mivhead.serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
