"""`miv push`: publish a model, with its card, on the Hugging Face hub."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mivhead._util.files import HUB, is_exported
from mivhead._util.optional import need
from mivhead._util.text import one_line
from mivhead.cli import card, options
from mivhead.cli.info import read_facts
from mivhead.cli.output import announce, print_json, size
from mivhead.errors import InputError, NotAvailableError

EXAMPLES = """
miv push birds.miv hf://me/birds                  # a private repository, for you alone
miv push birds.miv hf://me/birds --public --license cc-by-4.0
miv predict hf://me/birds photo.jpg               # on any computer
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "push",
        "publish a model on the Hugging Face hub",
        "Upload a model, and the card that `miv card` writes, to a repository of the Hugging Face "
        "hub. The repository is created if it does not exist, and is private unless you add "
        "--public. Log in with `hf auth login`, or set the variable HF_TOKEN to an access token. "
        "This command needs the extra hub.",
        EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="model file, or exported model")
    parser.add_argument("address", metavar=f"{HUB}OWNER/NAME", help="the repository")
    parser.add_argument(
        "--card", metavar="FILE.md", help="upload this card instead (default: as `miv card`)"
    )
    card.add_license(parser)
    parser.add_argument("--public", action="store_true", help="let everyone read it")
    parser.add_argument(
        "--with-pictures",
        action="store_true",
        help="publish the small copies of the images that the model file contains, too",
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv push`."""
    from mivhead.backbones import hub
    from mivhead.model.load import NAMES

    repository = args.address.removeprefix(HUB)
    if not args.address.startswith(HUB) or not hub.is_repository(repository):
        raise InputError(f"{one_line(args.address)!r} is not an address like {HUB}me/birds.")
    facts = read_facts(args.model)
    if args.public and facts.get("pictures") and not args.with_pictures:
        raise InputError(
            f"{args.model} contains small copies of its images, which everyone could see: fit it "
            "with --compact, or add --with-pictures."
        )
    text = _card(args, facts)
    need("huggingface_hub", "hub")
    announce(f"Uploading {args.model} ({size(facts['bytes'])}) to {args.address} ...", args)
    name = NAMES[is_exported(args.model)]
    files: dict[str, Path | bytes] = {name: Path(args.model), "README.md": text}
    page = upload(repository, files, public=args.public, instead_of=set(NAMES) - {name})
    if args.json:
        print_json({"model": args.model, "address": args.address, "url": page, "file": name})
    elif not args.quiet:
        print(f"Published {page}\nUse it with `miv predict {args.address} photo.jpg`.")
    return 0


def upload(
    repository: str,
    files: dict[str, Path | bytes],
    *,
    public: bool,
    instead_of: Collection[str] = (),
) -> str:
    """Write files to a repository of the hub in one commit; return its address.

    Files of the names in `instead_of` are removed: they are of the model that is replaced.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    from mivhead.backbones.hub import endpoint

    clients_error: Any = HfHubHTTPError.__base__  # of the HTTP client that it uses
    api = HfApi(endpoint=endpoint())
    try:
        page = api.create_repo(repository, private=not public, exist_ok=True)
        found = api.model_info(repository)
        if not public and not found.private:
            raise InputError(
                f"{repository} can be read by everyone: add --public if that is what you want."
            )
        there = {each.rfilename for each in found.siblings or ()}
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(
            repository,
            [*added, *map(CommitOperationDelete, sorted(there.intersection(instead_of)))],
            commit_message="Publish a model of mivhead",
        )
    except InputError:
        raise
    except LocalTokenNotFoundError as error:
        raise NotAvailableError(
            "You are not logged in to the hub: run `hf auth login`, or set HF_TOKEN to an access "
            "token."
        ) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise NotAvailableError(_explain(status, repository, endpoint())) from error
    except (OSError, clients_error) as error:
        raise NotAvailableError(
            f"{endpoint()} cannot be reached ({one_line(str(error))}): try again later."
        ) from error
    except (ValueError, KeyError) as error:
        raise NotAvailableError(
            f"{endpoint()} does not answer like the hub: check HF_ENDPOINT."
        ) from error
    return str(page)


def _explain(status: int | None, repository: str, place: str) -> str:
    if status in (401, 403):
        return (
            f"The hub does not let you write to {repository}: run `hf auth login` with a token "
            "that may write, or set HF_TOKEN to one, and check the owner's name."
        )
    return f"{place} answered {status} for {repository}: try again later."


def _card(args: argparse.Namespace, facts: dict[str, Any]) -> bytes:
    if args.card is None:
        accuracy = card.expected_accuracy(args.model)
        made = card.make_card(facts, accuracy, licence=args.license, address=args.address)
        return made.encode()
    if args.license:
        raise InputError("--license is for a new card: write the licence into the one you give.")
    return Path(args.card).read_bytes()
