"""A loaded model with a method attached, as settings ask for it."""

from __future__ import annotations

import torch

from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.jobs.planning.effective import codec_of
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from methods.base import Budget, Method


def attach(loaded: LoadedModel, method: Method, budget: Budget | None, settings: Settings) -> Attachment:
    """`settings`: as they apply to `method` (harness/jobs/planning/effective.py)."""
    return Attachment(
        loaded.model,
        method,
        budget,
        settings.placement,
        torch.tensor([calibration_text(loaded.tokenizer)]) if method.calibration_tokens else None,
        codec=codec_of(settings),
        overlap=settings.overlap == "on",
    )
