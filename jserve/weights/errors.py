"""The one error of this folder."""

from __future__ import annotations

from jserve.models.config import ModelError


class WeightsError(ModelError):
    """A checkpoint that cannot be loaded; the message names the file, and where it matters the tensor and the bytes."""
