"""What all request bodies, and the objects in them, are made from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """Types are strict: a number in quotes is an error, as at OpenAI. Other fields land in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
