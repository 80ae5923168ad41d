"""What ended a run that failed, and how it goes on."""

from __future__ import annotations

from collections.abc import Iterator

from harness.results.folder.names import ERROR
from harness.results.store import StoredRun


def failure(run: StoredRun) -> Iterator[str]:
    """Why it failed, and where the traceback lies, in sentences; none for a run that did not."""
    if run.status != "failed":
        return
    reason = " ".join(str(run.info.get("error") or "no reason was left").split()).rstrip(".")
    yield f"It failed: {reason}."
    if (path := run.folder / ERROR).is_file():
        yield f"The traceback is in {path}."
