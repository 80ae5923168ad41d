"""Defines a model that answers elsewhere: a server decides how it is run, and a run here only asks it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

from harness.models.base import ModelError, ModelSource

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch


class RemoteModel(ModelSource):
    """Describe a model behind a server. `tokenizer` and `identity` are those of the checkpoint that
    is served, as far as the user says which."""

    @property
    @abstractmethod
    def called(self) -> str:
        """Return the name of its rows, where a method's would stand."""

    @abstractmethod
    def asked(self) -> Self:
        """Return this model with what the server itself says filled in. Raise `ModelError` if it
        cannot be asked, or does not serve the model."""

    @abstractmethod
    def said(self) -> dict[str, Any]:
        """Return what the server says of the model, by which runs are told apart."""

    @abstractmethod
    def check(self, items: Sequence[Any], settings: Any) -> None:
        """Raise `ModelError` for examples or settings that the server cannot be asked for. `items`:
        `PreparedExample` of harness/jobs/examples.py; `settings`: those of the run."""

    @abstractmethod
    def runner(self, task: Any, settings: Any) -> Any:
        """Return what answers prepared examples, with the methods of `Runner` (harness/jobs/runner.py)
        that a run by itself calls: `warm_up`, `answers`, `record`, `notes`."""

    def build(self, dtype: torch.dtype, device: str) -> NoReturn:
        raise ModelError(
            f"{self.identity().name} is behind a server, and this command needs its weights here: use model=hf."
        )
