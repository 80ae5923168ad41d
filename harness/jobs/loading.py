"""The model of the last run, which stays loaded for the next one of a sweep."""

from __future__ import annotations

from harness.models.base import LoadedModel, ModelSource

_Key = tuple[ModelSource, str, str, str]
_loaded: dict[_Key, LoadedModel] = {}


def is_loaded(model: ModelSource, dtype: str, device: str) -> bool:
    """Whether it is there from the last run; another model is let go of, so that its memory counts as free."""
    if _key(model, dtype, device) not in _loaded:
        _loaded.clear()
    return bool(_loaded)


def load(model: ModelSource, dtype: str, device: str) -> LoadedModel:
    """The model of the last run stays loaded for the next one of a sweep; never two at once."""
    key = _key(model, dtype, device)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = model.load(dtype, device)
    return _loaded[key]


def _key(model: ModelSource, dtype: str, device: str) -> _Key:
    """Return what tells loaded models apart: a local folder whose files were changed is another model."""
    return model, model.identity().revision, dtype, device
