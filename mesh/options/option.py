"""Options models: fields, and how users give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

Kind = Literal[
    "file",
    "folder",
    "new folder",
    "size",
    "disk size",
    "ports",
    "gpu layers",
    "layer counts",
    "layers",
    "shares",
]
"""How a text is read where the field's type does not say it."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field on the command line, in mesh.toml and in the environment; in the field's `Annotated`."""

    help: str
    """What it does. The default is added, if there is one."""
    section: str
    """Title in the help of commands."""
    flag: str = ""
    """Its flag; `--` and the field's name unless given. The flag without dashes is its key in files."""
    metavar: str | None = None
    """Stands for the value in the help."""
    kind: Kind | None = None
    """How its text is read; by the field's type unless given."""
    is_denial: bool = False
    """The flag switches the field off."""
    is_rare: bool = False
    """Given as `--set KEY=VALUE`: for benchmarks and experts."""
    is_of_stages: bool = False
    """Stages are loaded with it: a head takes over only stages that were loaded with the same value."""


@dataclass(frozen=True)
class OptionField:
    """A field with its option."""

    name: str
    """Of the field."""
    option: Option
    """How it is given."""
    hint: Any
    """Its type, without None."""
    default: Any
    """Its default."""
    least: float | None
    """Smallest value of a number, or None."""
    is_open: bool
    """Whether that value itself is too small."""
    most: float | None
    """Largest value of a number, or None."""
    choices: tuple[str, ...]
    """Values of a text that has few."""

    @property
    def flag(self) -> str:
        """Such as `--wait-for`."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return get_origin(self.hint) is tuple and self.option.kind in {None, "folder"}


class Options(BaseModel):
    """A set of options; nothing changes it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, arbitrary_types_allowed=True)

    def changed(self, **changes: Any) -> Self:
        """The options with other values of some fields, which are not checked.

        Raises:
            TypeError: If there is no such field.
        """
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no field {min(unknown)}")
        return self.model_copy(update=changes)

    def of_stages(self) -> dict[str, Any]:
        """Values of the options that stages are loaded with, by field."""
        marked = (each.name for each in option_fields(type(self)) if each.option.is_of_stages)
        return {name: getattr(self, name) for name in marked}

    def require_consistent(self) -> None:
        """Check that no options contradict one another.

        Raises:
            InvalidRequest: Naming one of them.
        """


def option_fields(model: type[BaseModel]) -> Iterator[OptionField]:
    """Fields of a model that have an option, in their order."""
    for name, field in model.model_fields.items():
        for option in field.metadata:
            if isinstance(option, Option):
                yield _option_field(name, option, field)


def _option_field(name: str, option: Option, field: FieldInfo) -> OptionField:
    hint: Any = field.annotation
    if type(None) in get_args(hint):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    bounds = {
        kind: getattr(each, kind)
        for each in field.metadata
        for kind in ("ge", "gt", "le")
        if hasattr(each, kind)
    }
    choices = get_args(hint) if get_origin(hint) is Literal else _choices(field.json_schema_extra)
    default = field.get_default(call_default_factory=True, validated_data={})
    return OptionField(
        name,
        option,
        hint,
        default,
        least=bounds.get("ge", bounds.get("gt")),
        is_open="gt" in bounds,
        most=bounds.get("le"),
        choices=tuple(choices),
    )


def _choices(extra: Any) -> tuple[str, ...]:
    found: Mapping[str, Any] = extra if isinstance(extra, dict) else {}
    return tuple(found.get("enum", ()))
