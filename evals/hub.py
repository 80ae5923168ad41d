"""Fetches single files of data sets from the hub: from the local cache, or else by one download.

The client is Hugging Face's own, so HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what
they mean everywhere."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

PROBE_S = 3.0  # without it the client retries for 15 to 23 s before it gives up


class HubError(ValueError):
    """Report that a file cannot be fetched from the hub. The message is a part of a sentence, which
    the caller completes."""


def fetch(repo: str, file: str, revision: str) -> tuple[Path, str]:
    """Return the path of a data set's file in the hub's local cache, and the commit that it belongs
    to. It is downloaded if it is not there."""
    path = cached(repo, file, revision) or _download(repo, file, revision)
    return path, path.parents[file.count("/")].name  # .../snapshots/COMMIT/FILE


def command(repo: str, files: Sequence[str], revision: str, folder: str) -> str:
    """Return the shell command that downloads the files to `folder` inside DATA, which stands for a
    folder of the user's choice."""
    place = "/".join(filter(None, ("DATA", folder)))
    return f"hf download {repo} {' '.join(files)} --repo-type dataset --revision {revision} --local-dir {place}"


def cached(repo: str, file: str, revision: str) -> Path | None:
    """Return the path of a data set's file that an earlier download left in the hub's local cache,
    or None."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, file, revision=revision, repo_type="dataset")
    return Path(path) if isinstance(path, str) else None


def _download(repo: str, file: str, revision: str) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever library the client uses

    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE forbids fetching it")
    if not reachable(constants.ENDPOINT):
        raise HubError(f"{constants.ENDPOINT} does not answer")
    try:
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except (OSError, HTTPError) as error:
        raise HubError(f"its download failed ({' '.join(str(error).split())})") from error


def reachable(endpoint: str, within_s: float = PROBE_S) -> bool:
    """Return whether a server answers at `endpoint` in time; an HTTP error or an unknown certificate
    is an answer too. Proxies of the environment are used. A thread asks, because looking up a name
    has no time limit."""
    answered = Event()

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=within_s).close()
        except urllib.error.HTTPError:
            pass
        except OSError as error:
            if not isinstance(getattr(error, "reason", None), ssl.SSLError):
                return
        answered.set()

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(within_s)
    return answered.is_set()
