"""`miv serve`: models over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from mivhead.cli import options, serving
from mivhead.cli.output import announce, plural

EXAMPLES = """
miv serve birds.miv                                   # for programs on this computer
curl -F images=@photo.jpg http://127.0.0.1:8765/v1/predict
miv serve birds.miv flowers.miv                       # several models, by name
curl -F images=@photo.jpg 'http://127.0.0.1:8765/v1/predict?model=flowers&top=3'
MIV_KEY=... miv serve birds.miv --host 0.0.0.0 --key MIV_KEY   # for others too
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "serve",
        "serve models over HTTP",
        "Serve trained models over HTTP until you press Ctrl-C. A model whose file changes is "
        "loaded again; a bad file never replaces a good model. /openapi.json describes all "
        "requests. Connections are not encrypted: on an open network, put an HTTPS proxy in "
        "front.",
        EXAMPLES,
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="model file, served under its name without the suffix, or NAME=FILE",
    )
    serving.add_options(parser)
    parser.add_argument(
        "--reload-every",
        type=options.not_negative,
        default=2,
        metavar="SECONDS",
        help="how often to look for changed model files; 0: never",
    )
    parser.add_argument(
        "--share-backbone",
        action="store_true",
        help="also serve the backbone of the first model, as `miv backbones serve` does",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="let clients add, remove and relabel shots, and rename classes; needs a key",
    )
    parser.add_argument(
        "--label-studio",
        metavar="URL",
        help="fetch the images of tasks from this Label Studio server",
    )
    parser.add_argument(
        "--label-studio-key",
        metavar="VARIABLE",
        help="environment variable that holds an access token of Label Studio",
    )
    options.add_model_backbone(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv serve`."""
    serving.check_options(args)
    from mivhead._util.files import is_exported
    from mivhead.service.label_studio import LabelStudio
    from mivhead.service.models import ModelLoader, name_files

    files = name_files(args.models)
    announce("Loading ...", args)
    if not all(is_exported(path) for path in files.values()):  # those need no PyTorch
        options.prepare(args)
    load = ModelLoader(backbone=args.backbone, weights=args.weights, device=args.device)
    backbone = None
    if args.share_backbone:
        backbone = load.backbone(next(iter(files.values())))
    source = None
    if args.label_studio:
        source = LabelStudio(args.label_studio, args.label_studio_key)
    names = list(files)
    title = names[0] if len(names) == 1 else f"{plural(len(names), 'model')} ({', '.join(names)})"
    return serving.serve(
        args,
        title,
        {"models": names},
        models=[f"{name}={path}" for name, path in files.items()],
        load=load,
        backbone=backbone,
        reload_seconds=args.reload_every or None,
        label_studio=source,
        allow_changes=args.allow_changes,
    )
