"""`miv mcp`: some commands as tools of the Model Context Protocol, for assistants on this computer.

The tools are the commands themselves: their names, descriptions and parameters are read from the
parsers of the command line. A call runs the command in a process of its own, which may open files
in the allowed folders only, and neither connect to anything nor start programs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mivhead._util.optional import need
from mivhead._util.schema import parse_json
from mivhead._util.text import one_line
from mivhead._version import __version__
from mivhead.cli import options
from mivhead.cli.output import print_json
from mivhead.errors import InputError, NotAvailableError

TOOLS = ("fit", "predict", "evaluate", "explain", "suggest", "add")
# What a tool does not offer: settings of this computer, the form of the answer, large jobs, and
# whatever could name code, an address or a database.
HIDDEN = {
    *("help", "threads", "quiet", "debug", "json", "csv", "excel", "raw", "device", "image_size"),
    *("out", "resume", "overwrite", "part_rows", "column", "ray", "workers", "allow_remote"),
    *("backbone", "weights", "method", "params", "where", "write"),
}
TYPES: Mapping[Any, dict[str, Any]] = {
    options.positive: {"type": "integer", "minimum": 1},
    options.not_negative: {"type": "integer", "minimum": 0},
    options.share: {"type": "number", "minimum": 0, "maximum": 1},
}
FOLDERS = "MIV_MCP_FOLDERS"  # variable that tells a command its folders
CHILD = "from mivhead.cli.mcp import run_confined; run_confined()"
SYSTEM = ("/proc", "/sys", "/dev", "/usr", "/lib")  # where Linux and its programs are
FILES = {  # what Python reports of files (https://docs.python.org/3/library/audit_events.html)
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rmdir", "os.rename"),
    *("os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime", "sqlite3.connect"),
}
REFUSED = ("socket.", "subprocess.", "os.exec", "os.system", "os.posix_spawn", "os.startfile")
HARMLESS = ("socket.__new__", "socket.gethostname")
MAX_ERROR = 2000  # characters of a message

EXAMPLES = """
miv mcp --allow photos/              # as the command of a server in an assistant's settings
miv mcp --allow photos/ models/      # relative paths start in the first folder
miv mcp --allow photos/ --json       # show the tools and their parameters
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = options.new_command(
        subparsers,
        "mcp",
        "let an assistant use the commands (Model Context Protocol)",
        f"Offer {', '.join(TOOLS[:-1])} and {TOOLS[-1]} as tools of the Model Context Protocol "
        "over standard input and output, for an assistant on this computer. The tools read and "
        "write only in the folders that you allow, and use no network. This command needs the "
        "extra mcp.",
        EXAMPLES,
    )
    parser.add_argument(
        "--allow",
        nargs="+",
        required=True,
        metavar="FOLDER",
        help="folders in which the tools may read and write",
    )
    parser.add_argument("--json", action="store_true", help="print the tools as JSON, and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `miv mcp`."""
    folders = [Path(each).resolve() for each in args.allow]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: create it, or allow another one.")
    tools = {name: describe(parser) for name, parser in commands().items()}
    if args.json:
        print_json({"tools": [{"name": name, **tool} for name, tool in tools.items()]})
        return 0
    need("mcp", "mcp")
    import anyio

    anyio.run(_serve, folders, tools)
    return 0


def commands() -> dict[str, options.Parser]:
    """Return the parsers of the commands that are tools."""
    from mivhead.cli.main import build_parser

    known = build_parser().commands
    return {name: known[name] for name in TOOLS}


def parameters(parser: options.Parser) -> Iterator[argparse.Action]:
    """Yield the parameters of a command that its tool offers."""
    for action in parser.parameters:
        if action.dest not in HIDDEN and action.help != argparse.SUPPRESS:
            yield action


def describe(parser: options.Parser) -> dict[str, Any]:
    """Return the description of a tool and the JSON schema of its parameters."""
    properties, required = {}, []
    for action in parameters(parser):
        properties[action.dest] = _schema(action)
        if action.required or (not action.option_strings and action.nargs not in ("?", "*")):
            required.append(action.dest)
    return {
        "description": " ".join((parser.description or "").split()),
        "inputSchema": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


def _schema(action: argparse.Action) -> dict[str, Any]:
    if action.nargs == 0:
        kind: dict[str, Any] = {"type": "boolean"}
    else:
        kind = dict(TYPES.get(action.type, {"type": "string"}))
        if action.choices is not None:
            kind["enum"] = list(action.choices)
        if action.nargs in ("+", "*"):
            kind = {"type": "array", "items": kind, "minItems": int(action.nargs == "+")}
    kind["description"] = " ".join((action.help or "").replace("%%", "%").split())
    if action.nargs != 0 and action.default is not None:
        kind["default"] = action.default
    return kind


def arguments(
    name: str, parser: options.Parser, given: Mapping[str, Any], folders: list[Path]
) -> list[str]:
    """Turn the arguments of a tool into those of its command; refuse what could reach elsewhere."""
    known = {action.dest: action for action in parameters(parser)}
    if unknown := sorted(set(given) - set(known)):
        raise InputError(f"{name} has no parameter {unknown[0]!r}; it has {', '.join(known)}.")
    before, after = [name, "--json", "--quiet"], []
    for dest, action in known.items():
        value = given.get(dest)
        if value is None:
            continue
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise InputError(f"{dest} must be true or false, got {value!r:.80}.")
            if isinstance(action, argparse.BooleanOptionalAction):  # --names, --no-names
                before.append(action.option_strings[0 if value else -1])
            elif value:
                before.append(action.option_strings[-1])
            continue
        values = value if isinstance(value, list) and action.nargs in ("+", "*") else [value]
        texts = [_checked(dest, each, folders) for each in values]
        if not action.option_strings:
            after += texts
        elif action.nargs in ("+", "*"):
            before += [action.option_strings[-1], *texts]
        else:
            before.append(f"{action.option_strings[-1]}={texts[0]}")
    return before + after


def _checked(name: str, value: Any, folders: list[Path]) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{name} must be text or a number, got {value!r:.80}.")
    text = str(value)
    if isinstance(value, str):
        if "://" in text:
            raise InputError(f"{name} is an address: only files in the allowed folders are read.")
        if text.startswith("-") or "\0" in text:
            raise InputError(f"{name} must not start with '-': write ./{text} for a file.")
        if not _is_inside(folders[0] / Path(text).expanduser(), folders):
            allowed = ", ".join(map(str, folders))
            raise InputError(f"{name}: {text} is outside the allowed folders ({allowed}).")
    return text


def _is_inside(path: Path, folders: list[Path]) -> bool:
    resolved = path.resolve()
    return any(resolved.is_relative_to(folder) for folder in folders)


async def _serve(folders: list[Path], tools: Mapping[str, dict[str, Any]]) -> None:
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    async def list_tools(_context: Any, _page: Any) -> Any:
        return types.ListToolsResult(
            tools=[types.Tool.model_validate({"name": k, **tool}) for k, tool in tools.items()]
        )

    async def call_tool(_context: Any, call: Any) -> Any:
        try:
            document = await _run_command(call.name, call.arguments or {}, folders)
        except (InputError, NotAvailableError) as error:
            text = types.TextContent(text=str(error))
            return types.CallToolResult(content=[text], is_error=True)
        text = types.TextContent(text=json.dumps(document, ensure_ascii=False))
        return types.CallToolResult(content=[text], structured_content=document)

    names = ", ".join(map(str, folders))
    server: Server[Any] = Server(
        "mivhead",
        version=__version__,
        instructions=f"Learns to classify images from a few per class. Files are in {names}; "
        "relative paths start in the first of these folders.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


async def _run_command(name: str, given: Mapping[str, Any], folders: list[Path]) -> Any:
    """Run a command in a process of its own; cancelling the call ends it."""
    import anyio

    if name not in TOOLS:
        raise InputError(f"There is no tool {name!r:.80}; there are {', '.join(TOOLS)}.")
    command = arguments(name, commands()[name], given, folders)
    allowed = json.dumps([str(each) for each in folders])
    with tempfile.TemporaryDirectory() as own:
        # -P: a module in the folder must not be taken for one of Python's.
        done = await anyio.run_process(
            [sys.executable, "-P", "-c", CHILD, *command],
            cwd=folders[0],
            env={**os.environ, FOLDERS: allowed, "TMPDIR": own, "TEMP": own},
            check=False,
        )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        message = lines[-1] if lines else f"{name} ended with code {done.returncode}"
        raise InputError(one_line(message.removeprefix("miv: error: "))[:MAX_ERROR])
    return parse_json(done.stdout) if done.stdout.strip() else {"done": True}


def run_confined() -> NoReturn:
    """Run `miv` in this process, confined to the folders that a variable lists."""
    from mivhead.cli.main import command

    folders = [Path(each) for each in json.loads(os.environ[FOLDERS])]
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.addaudithook(_Confinement(folders))
    command()


class _Confinement:
    """Refuses what a file could make a command do: open other files, connect, start programs.

    The command that runs is ours, and takes its paths from arguments that were checked. This holds
    what is inside files - a list of paths, a link, the name of a backbone - to the same folders.
    """

    def __init__(self, folders: list[Path]) -> None:
        import mivhead
        from mivhead._util.kept import cache_folder
        from mivhead.backbones import hub

        weights = (hub.own_folder(), hub.cache_folder())
        installed = (*filter(None, sys.path), sys.prefix, sys.base_prefix, *mivhead.__path__)
        own = [each for each in (cache_folder(), tempfile.gettempdir()) if each is not None]
        self._write = [*folders, *map(_resolved, own)]
        self._read = [*self._write, *map(_resolved, installed), *map(_resolved, SYSTEM)]
        self._read += map(_resolved, weights)

    def __call__(self, event: str, details: tuple[Any, ...]) -> None:
        """Check one event."""
        if event.startswith(REFUSED) and event not in HARMLESS:
            raise NotAvailableError("Tools use no network and start no programs.")
        if event not in FILES:
            return
        reading = event in ("os.listdir", "os.scandir") or (
            event == "open" and not _writes(details[1], details[2])
        )
        allowed = self._read if reading else self._write
        for each in details[:2] if event != "open" else details[:1]:
            if isinstance(each, str | bytes | os.PathLike):
                path = _resolved(os.fsdecode(each))
                if not any(path.is_relative_to(folder) for folder in allowed):
                    raise NotAvailableError(f"{path} is outside the allowed folders.")


def _resolved(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(path))


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
