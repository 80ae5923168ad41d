"""The model of the last run, which stays loaded for the next one of a sweep."""

from __future__ import annotations

from harness.models.base import LoadedModel, ModelSource

_loaded: dict[tuple[ModelSource, str, str], LoadedModel] = {}


def is_loaded(model: ModelSource, dtype: str, device: str) -> bool:
    """Whether it is there from the last run; another model is let go of, so that its memory counts as free."""
    if (model, dtype, device) not in _loaded:
        _loaded.clear()
    return bool(_loaded)


def load(model: ModelSource, dtype: str, device: str) -> LoadedModel:
    """The model of the last run stays loaded for the next one of a sweep; never two at once."""
    key = (model, dtype, device)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = model.load(dtype, device)
    return _loaded[key]
