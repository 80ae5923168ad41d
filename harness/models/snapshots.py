"""Finds the files of a model: of one commit of a hub repository, in the local cache or else on the
hub, and those of a local folder, which a hash of all their bytes identifies.

The hub is probed once before it is asked: its library retries an unreachable one for 15 to 23
seconds per file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from evals.data import value_of
from evals.hub import reachable
from harness.models.base import ModelError
from kernels.temporary import replacing

SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "*.index.json",
    "token*",
    "special_tokens_map.json",
    "*.jinja",
]
SMALL_FILES += ["vocab.json", "merges.txt", "added_tokens.json"]
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
SMALL_FILES += ADAPTER_FILES
WEIGHT_FILES = ["model*.safetensors"]
# further files that transformers reads from a local folder
LOCAL_FILES = ["additional_chat_templates/*.jinja"]
SMALL = 2**20  # bytes; the hash of a smaller file is not remembered
INDEX = "model.safetensors.index.json"
ADVICE = "point model.name at a local folder, or use model=smollm2, which needs no download"


def cache_root() -> Path:
    if named := os.environ.get("KV_HARNESS_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-harness"


def snapshot(name: str, revision: str | None, *, weights: bool) -> Path:
    """Return the folder in the local hub cache that holds one commit of a repository, and is named
    after it; what is missing is downloaded. `weights`: including the large files."""

    def complete(folder: Path) -> bool:
        return (folder / "config.json").is_file() and (not weights or has_weights(folder))

    folder = _fetched(name, revision, SMALL_FILES + WEIGHT_FILES * weights, complete)
    if weights and not has_weights(folder):
        raise ModelError(
            f"{_at(name, revision)} has no weights as safetensors, the only format read here: {ADVICE}."
        )
    return folder


def hub_file(name: str, revision: str | None, file: str) -> Path:
    """Return one file of a repository on the hub, out of the local hub cache if it is there, else
    downloaded."""
    folder = _fetched(name, revision, [file], lambda folder: (folder / file).is_file())
    if not (folder / file).is_file():
        raise ModelError(
            f"{_at(name, revision)} has no file {file}: give the name of one of its files."
        )
    return folder / file


def _fetched(
    name: str, revision: str | None, patterns: list[str], complete: Callable[[Path], bool]
) -> Path:
    """Return the folder in the local hub cache that holds one commit of a repository. Files that
    match `patterns` are downloaded if it is not `complete`."""
    from huggingface_hub import constants as hub

    if (folder := _cached(name, revision)) and complete(folder):
        return folder
    absent = f"{_at(name, revision)} is neither a local folder nor complete in the local hub cache"
    if hub.HF_HUB_OFFLINE:
        raise ModelError(f"{absent}, and HF_HUB_OFFLINE is set: unset it, or {ADVICE}.")
    if not reachable(hub.ENDPOINT):
        raise ModelError(f"{absent}, and {hub.ENDPOINT} cannot be reached: {ADVICE}.")
    return _download(name, revision, patterns)


def _cached(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError:
        raise ModelError(
            f"model.name={name} is neither a folder here nor a hub id of the form owner/name."
        ) from None
    except LocalEntryNotFoundError:
        return None


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        page = f"{constants.ENDPOINT}/{name}"
        raise ModelError(
            f"{name} is gated: accept its licence at {page} and set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"{name} has no revision {revision}: give a branch, tag or commit of it."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name} is not on the hub, or private: check model.name, or set HF_TOKEN."
        ) from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{_at(name, revision)} cannot be downloaded ({reason}): try again, or {ADVICE}."
        ) from error


def _at(name: str, revision: str | None) -> str:
    return f"{name} at {revision}" if revision else name


def has_weights(folder: Path) -> bool:
    if (folder / INDEX).is_file():
        return all(part.is_file() for part in _parts(folder))
    return (folder / "model.safetensors").is_file()


def files_of(folder: Path) -> list[Path]:
    """Return all files of a local folder that a model or its tokenizer may be read from, sorted by
    name."""
    matches = {
        file
        for pattern in SMALL_FILES + WEIGHT_FILES + LOCAL_FILES
        for file in folder.glob(pattern)
    }
    return sorted(file for file in matches | _parts(folder) if file.is_file())


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype, as safetensors names it, and the shape of every tensor in the weight files
    of a folder."""
    from safetensors import safe_open

    stored: dict[str, tuple[str, list[int]]] = {}
    for file in (file for file in files_of(folder) if file.suffix == ".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in sorted(tensors.keys())}
            stored |= {
                name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()
            }
    return stored


def fingerprint(folder: Path) -> str:
    """Return the identity of a local folder: the hash of every byte that a model or tokenizer may
    be read from."""
    files = files_of(folder)
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(file_sha256, files))
    named = [
        f"{file.relative_to(folder).as_posix()}:{sha256}\n"
        for file, sha256 in zip(files, hashes, strict=True)
    ]
    return hashlib.sha256("".join(named).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of `file`, which is remembered in the cache for other processes: hashing
    the weights of a 70B model takes minutes.

    A file is read again once its size, inode, device or a time of change differs. A program can
    reset the time of the last write, but not that of the last change of the inode."""
    status = file.stat()
    state = [status.st_size, status.st_ino, status.st_dev, status.st_mtime_ns, status.st_ctime_ns]
    named = hashlib.sha256(json.dumps([str(file.resolve()), state]).encode()).hexdigest()
    note = cache_root() / "hashes" / named[:32]
    with suppress(OSError, ValueError):  # a note that is no hash is written anew
        if (
            status.st_size > SMALL
            and note.is_file()
            and len(bytes.fromhex(known := note.read_text())) == 32
        ):
            return known
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    # unchanged while it was read
    if status.st_size > SMALL and file.stat().st_ctime_ns == status.st_ctime_ns:
        # if the cache cannot be written, every process reads the file again
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            with replacing(note) as unfinished:
                unfinished.write(digest.encode())
    return digest


def _parts(folder: Path) -> set[Path]:
    """Return the weight files that the index names, whatever they are called; none if there is no
    index."""
    index = folder / INDEX
    if not index.is_file():
        return set()
    parts = value_of(index.read_bytes(), {"weight_map": {str: "text"}}, str(index))[
        "weight_map"
    ].values()
    return {folder / part for part in parts}
