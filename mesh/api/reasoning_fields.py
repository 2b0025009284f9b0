"""Amount of reasoning that a request wants, by the names of several APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mesh.text.reasoning_switches import ReasoningWish


class _OwnFields(BaseModel):
    """An object without other fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _whole(value: Any) -> Any:
    """A number without a fraction as an integer; -1, as for no limit, as none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value == -1 and not isinstance(value, bool) else value


_Tokens = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_whole)]


class ThinkingBody(_OwnFields):
    """Whether the model is to reason, as Z.ai, DeepSeek and Moonshot have it in chats."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: _Tokens = None


class ReasoningFields(BaseModel):
    """Amount of reasoning; the names are those of Qwen's and vLLM's APIs."""

    enable_thinking: bool | None = None
    thinking_budget: _Tokens = None
    thinking_token_budget: _Tokens = None

    @property
    def budget_field(self) -> str | None:
        """Name of the field with the most tokens of reasoning; None without one."""
        names = ("thinking_budget", "thinking_token_budget")
        return next((name for name in names if getattr(self, name) is not None), None)

    def wish(
        self, *, effort: str | None = None, is_on: bool | None = None, budget_tokens: int | None = None
    ) -> ReasoningWish:
        """All that is said of it.

        Args:
            effort: Amount by the API's own field.
            is_on: Whether there is any, likewise.
            budget_tokens: Most tokens, likewise.
        """
        own = (self.thinking_budget, self.thinking_token_budget, budget_tokens)
        return ReasoningWish(
            is_on if self.enable_thinking is None else self.enable_thinking,
            effort,
            next((number for number in own if number is not None), None),
        )
