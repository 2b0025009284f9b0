"""Options models as options of commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from pydantic import ValidationError

from mesh.cli.config_file import from_variable, key_of, nearest
from mesh.cli.main import SectionedCommand
from mesh.cli.shared_options import DiskSize, GpuLayers, LayerCounts, MemorySize, Numbers, Ports
from mesh.options.option import OptionField, option_fields
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from mesh.cli.shared_options import Decorator
    from mesh.options.option import Kind, Options

_FILE: Final = click.Path(path_type=Path, dir_okay=False)
_KINDS: Final[dict[Kind, click.ParamType[Any]]] = {
    "file": _FILE,
    "folder": click.Path(path_type=Path, file_okay=False, exists=True),
    "new folder": click.Path(path_type=Path, file_okay=False),
    "size": MemorySize(),
    "disk size": DiskSize(),
    "ports": Ports(),
    "gpu layers": GpuLayers(),
    "layer counts": LayerCounts(),
    "layers": Numbers(int, 1),
    "shares": Numbers(float, 0.0, 1.0),
}
_SET: Final = "settings"

AnyOptions = TypeVar("AnyOptions", bound="Options")


class OptionsCommand(SectionedCommand):
    """A command whose options are those of a model; rare ones are given as `--set KEY=VALUE`.

    Args:
        options: The model.
        sections: By title of the help, in order: the command's own flags there, before those of the model.
        left_out: Fields of the model that this command has no option for.
    """

    def __init__(
        self,
        *arguments: Any,
        options: type[Options],
        sections: Mapping[str, tuple[str, ...]],
        left_out: Collection[str] = (),
        **settings: Any,
    ) -> None:
        fields = [field for field in option_fields(options) if field.name not in left_out]
        self.rare = [click_option(field) for field in fields if field.option.is_rare]
        usual = [field for field in fields if not field.option.is_rare]
        shown = {
            title: (*own, *(field.flag for field in usual if field.option.section == title))
            for title, own in sections.items()
        }
        super().__init__(*arguments, sections=shown, **settings)
        self.params += [click_option(field) for field in usual]
        if self.rare:
            self.params.append(_set_option(self.rare))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Also values of rare options: of --set, of the environment or a file, or by default."""
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self._explained(error) from None
        given = dict(self._setting(text) for text in ctx.params.pop(_SET, ()))
        for option in self.rare:
            option.handle_parse_result(ctx, given, [])
        return rest

    def _setting(self, text: str) -> tuple[str, Any]:
        """Parameter and value of `KEY=VALUE`."""
        key, separator, value = text.partition("=")
        known = {key_of(option): option for option in self.rare}
        if not separator or key not in known:
            raise click.BadParameter(
                f"{text!r} sets nothing: write KEY=VALUE{nearest(key, known)}", param_hint="--set"
            )
        try:
            return str(known[key].name), from_variable(known[key], value)
        except ValueError as error:
            raise click.BadParameter(f"{key}: {error}", param_hint="--set") from None

    def _explained(self, error: click.NoSuchOption) -> click.UsageError:
        for option in self.rare:
            if error.option_name in option.opts:
                value = "true" if option.is_flag else "VALUE"
                return click.UsageError(
                    f"{error.option_name} is given as --set {key_of(option)}={value}", error.ctx
                )
        return error


def _set_option(rare: list[click.Option]) -> click.Option:
    keys = ", ".join(key_of(option) for option in rare)
    return click.Option(
        ["--set", _SET],
        multiple=True,
        metavar="KEY=VALUE",
        help=f"Set what benchmarks and experts need: {keys}; may be given several times.",
    )


def options_of(model: type[Options], *names: str) -> Decorator:
    """Options of some fields of a model, for another command; the help lists them in this order."""
    fields = {field.name: field for field in option_fields(model)}

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            field = fields[name]
            command = click.option(field.flag, name, **_settings_of(field))(command)
        return command

    return add  # type: ignore[return-value]  # the command's own type


def arguments_of(model: type[Options], **values: Any) -> list[str]:
    """Arguments that give fields of a model these values, for another process.

    Args:
        model: The model.
        values: By field, of those that take a value; None and empty ones are left out.
    """
    flags = {field.name: field.flag for field in option_fields(model)}
    given = {name: value for name, value in values.items() if value not in {None, ()}}
    texts = {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in given.items()
    }
    return [part for name, text in texts.items() for part in (flags[name], text)]


def click_option(field: OptionField) -> click.Option:
    """A field as an option of click, whose parameter has the field's name."""
    return click.Option([field.flag, field.name], **_settings_of(field))


def _settings_of(field: OptionField) -> dict[str, Any]:
    option = field.option
    settings: dict[str, Any] = {"help": option.help, "default": field.default}
    if field.hint is bool:
        return settings | {"is_flag": True} | ({"flag_value": False} if option.is_denial else {})
    settings |= {"type": _type_of(field), "metavar": option.metavar, "multiple": field.is_list}
    return settings | ({} if field.default in {None, (), ""} else {"show_default": True})


def _type_of(field: OptionField) -> click.ParamType[Any]:
    if field.option.kind is not None:
        return _KINDS[field.option.kind]
    if field.choices:
        return click.Choice(field.choices)
    if field.hint is int:
        least, most = (None if bound is None else int(bound) for bound in (field.least, field.most))
        return click.IntRange(least, most)
    if field.hint is float:
        return click.FloatRange(field.least, field.most, min_open=field.is_open)
    return _FILE if field.hint is Path else click.STRING


def made(model: type[AnyOptions], values: dict[str, Any]) -> AnyOptions:
    """Options of a command.

    Raises:
        click.UsageError: If they contradict one another.
    """
    try:
        options = model(**values)
        options.require_consistent()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise click.UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except InvalidRequest as error:
        raise click.UsageError(error.message) from None
    return options
