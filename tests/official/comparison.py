"""Comparisons of our methods with released code: what each measures, and the table of what they found."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.official.clones import Repository

TABLE = Path(__file__).parents[2] / "results" / "published" / "released_code.csv"
HEAD = ("method", "setting", "released code", "commit", "compared", "same", "of", "differs from released code by")


@dataclass(frozen=True)
class Difference:
    """Says how much was `compared`, how much of it is the same, and what differs, in words with the numbers found."""

    same: int
    of: int
    words: str


@dataclass(frozen=True)
class Comparison:
    """Holds one of our methods, under `setting`, against `file` of a repository. `compared` names what is counted."""

    method: str
    repository: Repository
    file: str
    compared: str
    measure: Callable[[Path], Difference]
    setting: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.method, self.setting, self.compared)))

    def row(self) -> dict[str, str]:
        """Return the row of the table that the clone at hand gives."""
        difference = self.measure(self.repository.clone())
        where = f"{self.repository.name}: {self.file}"
        head = (self.method, self.setting, where, self.repository.commit[:12], self.compared)
        return dict(zip(HEAD, (*head, str(difference.same), str(difference.of), difference.words), strict=True))


def stored() -> list[dict[str, str]]:
    """Return the rows of the committed table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Iterable[dict[str, str]]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def common(theirs: Tensor, ours: Tensor) -> int:
    """Return how many entries of `theirs` [... K] are among `ours` [... L], both positions per head."""
    return int((theirs.unsqueeze(-1) == ours.unsqueeze(-2)).any(-1).sum())


def numbered(values: Tensor) -> Tensor:
    """Return values [1 H S D] whose channel 0 is the token's position."""
    values = values.clone()
    values[..., 0] = torch.arange(values.shape[2])
    return values


def off(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return how far apart the outputs of each token are, as a share of their length. [1 T E] -> [T]"""
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1))[0]
