"""Options that commands share: their types, kinds and groups, and what they mean on this host."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click
import structlog
from click.core import ParameterSource

from mesh.util.child_environment import API_KEY
from spanmesh_proto.errors import ClusterError, MeshError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from mesh.hub import HubReference, PulledModel
    from mesh.options.host import HostOptions
    from mesh.util.terminal import ProgressBars
    from mesh.vision.projectors import PictureNeeds
    from spanmesh_proto.addresses import PortRange

Command = TypeVar("Command", bound="Callable[..., Any]")
Number = TypeVar("Number", int, float)
Name = TypeVar("Name", bound=str)
Value = TypeVar("Value")
_FILE: Final = click.Path(path_type=Path, dir_okay=False)
log = structlog.get_logger()


class Decorator(Protocol):
    """Adds options to a command."""

    def __call__(self, command: Command, /) -> Command:
        """The command with the options; their values arrive as keywords."""


class ParsedText(click.ParamType[Value]):
    """A type of values that are written as text; what is no text, such as a default, is a value already."""

    def parse(self, text: str) -> Value:
        """To a value.

        Raises:
            MeshError: Saying what is wrong with the text.
            ValueError: Likewise.
        """
        raise NotImplementedError

    def convert(self, value: str | Value, param: click.Parameter | None, ctx: click.Context | None) -> Value:
        """To a value, or to an error of the command line."""
        # A fraction is from a file of settings, where numbers need no quotes.
        if not isinstance(value, (str, float)):
            return value
        try:
            return self.parse(str(value))
        except MeshError as error:
            self.fail(error.message, param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class MemorySize(ParsedText[int]):
    """`8G`, `512M` and the like."""

    name = "size"

    def parse(self, text: str) -> int:
        """To bytes."""
        from mesh.cluster.host_facts import parse_size  # noqa: PLC0415 - keeps --help quick

        return parse_size(text)


class DiskSize(MemorySize):
    """`20G`, `512M` and the like, or `none`."""

    def parse(self, text: str) -> int:
        """To bytes; 0 for none."""
        return 0 if text.strip().lower() == "none" else super().parse(text)


class Ports(ParsedText["PortRange"]):
    """`20000-20099`."""

    name = "ports"

    def parse(self, text: str) -> PortRange:
        """To a range that is large enough for a host."""
        from mesh.cluster.port_plan import check_size  # noqa: PLC0415 - keeps --help quick
        from spanmesh_proto.addresses import parse_port_range  # noqa: PLC0415

        port_range = parse_port_range(text)
        check_size(port_range)
        return port_range


class GpuLayers(ParsedText[int | None]):
    """`20`, `all`, `none` or `auto`."""

    name = "layers"

    def parse(self, text: str) -> int | None:
        """To a number, as in `mesh.placement.host_capacity`."""
        from mesh.placement.gpu_layers import parse_gpu_layers  # noqa: PLC0415 - keeps --help quick

        return parse_gpu_layers(text)


class Names(ParsedText[tuple[Name, ...]]):
    """`leave,head`: some of several names.

    Args:
        what: Meaning of a name.
        known: All names, in the order of the result.
        former: Names by their former ones, which are still accepted.
    """

    name = "names"

    def __init__(
        self, what: str, known: tuple[Name, ...], *, former: Mapping[str, Name] | None = None
    ) -> None:
        self._what = what
        self._known = known
        self._former = former or {}

    def parse(self, text: str) -> tuple[Name, ...]:
        """To names."""
        wanted = [self._former.get(each, each) for each in text.split(",")]
        for each in wanted:
            if each not in self._known:
                raise ValueError(f"{each!r} is not a {self._what}; there are {', '.join(self._known)}")
        return tuple(name for name in self._known if name in wanted)


class LayerCounts(ParsedText[tuple[int, ...]]):
    """`10,10,10`."""

    name = "counts"

    def parse(self, text: str) -> tuple[int, ...]:
        """To integers; the planner checks their sum."""
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not a list of layer counts; write it like 10,10,10") from None


class Numbers(ParsedText[tuple[Number, ...]]):
    """`5,20`.

    Args:
        kind: `int` or `float`.
        least: Smallest value.
        most: Largest value, or None.
    """

    name = "numbers"

    def __init__(self, kind: type[Number], least: Number, most: Number | None = None) -> None:
        self._kind: type[Number] = kind
        self._least: Number = least
        self._most: Number | None = most

    def parse(self, text: str) -> tuple[Number, ...]:
        """To numbers within the limits."""
        try:
            numbers = tuple(self._kind(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or any(number != number for number in numbers):  # noqa: PLR0124 - "nan" is a float
            raise ValueError(f"{text!r} is not a list of numbers such as 5,20")
        if min(numbers) < self._least:
            raise ValueError(f"{min(numbers)} is below {self._least}")
        if self._most is not None and max(numbers) > self._most:
            raise ValueError(f"{max(numbers)} is above {self._most}")
        return numbers


def int_option(*names: str, least: int = 1, most: int | None = None, **fields: Any) -> Decorator:
    """An option of whole numbers, whose help names its default, if it has one.

    Args:
        names: Its flag, and the name of the parameter if that is another.
        least: Smallest value.
        most: Largest value, or None.
        fields: Further fields of `click.option`, such as `default`, `metavar` and `help`.
    """
    return _option_of(click.IntRange(least, most), names, fields)


def float_option(*names: str, least: float = 0.0, most: float | None = None, **fields: Any) -> Decorator:
    """An option of real numbers; see `int_option`."""
    return _option_of(click.FloatRange(least, most), names, fields)


def choice_option(*names: str, choices: Collection[str], **fields: Any) -> Decorator:
    """An option with few values; see `int_option`."""
    return _option_of(click.Choice(list(choices)), names, fields)


def _option_of(kind: click.ParamType[Any], names: tuple[str, ...], fields: dict[str, Any]) -> Decorator:
    if "default" in fields:
        fields.setdefault("show_default", True)
    return click.option(*names, type=kind, **fields)


def option_group(*options: Decorator) -> Decorator:
    """Several options as one; the help lists them in this order."""

    def add(command: Command, /) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def read_first_key(path: Path) -> str:
    """The first API key in a file with plain keys: the hashes of `mesh keys` open nothing.

    Raises:
        ClusterError: If there is none.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ClusterError(f"cannot read {path}: {reason}", param="--api-key-file") from error
    for line in lines:
        words = line.split()
        # `KEY` or `NAME KEY`.
        if len(words) in {1, 2} and not line.startswith("#") and not words[-1].startswith("sha256:"):
            return words[-1]
    raise ClusterError(
        f"{path} holds no API key, or only hashes of some: put the key that `mesh keys add` printed into"
        " MESH_API_KEY, or into a separate file",
        param="--api-key-file",
    )


def sendable_key(key: str, source: str, *, param: str | None = None) -> str:
    """An API key that a header of HTTP can hold; HTTP clients print any other in their errors.

    Args:
        key: The key.
        source: Where it is from, for the message.
        param: The option that names the source, if one does.

    Raises:
        ClusterError: If it holds anything but visible ASCII; without the key.
    """
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ClusterError(
            f"the API key of {source} holds a space, a line break or another character that no key has: "
            "give the one that `mesh keys add` printed",
            param=param,
        )
    return key


def command_line(context: click.Context, *, without: Collection[str] = ()) -> str:
    """Command line of the same run: all parameters that differ from their defaults.

    Files are called by their names alone: folders are another machine's.

    Args:
        context: Context of the command.
        without: Names of parameters without effect on the measurement.
    """
    command = context.command
    words: list[str] = []
    for param in sorted(command.params, key=lambda param: isinstance(param, click.Option)):
        source = context.get_parameter_source(param.name or "")
        if param.name in without or source in {ParameterSource.DEFAULT, None}:
            continue
        words += _words(param, context.params[param.name or ""])
    return shlex.join([*context.command_path.split(), *words])


def _words(param: click.Parameter, value: Any) -> Iterator[str]:
    if not isinstance(param, click.Option):
        yield _text(value)
    elif param.is_flag:
        yield param.secondary_opts[0] if param.secondary_opts and not value else param.opts[0]
    else:
        for each in value if param.multiple else (value,):
            yield param.opts[-1]
            yield _text(each)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(_text(each) for each in value)
    if isinstance(value, float):
        return f"{value:g}"
    return value.name if isinstance(value, Path) else str(value)


def use_storage(options: HostOptions) -> None:
    """Tell processes that are started from now on where weights and KV rows are kept on this host."""
    from stages.weights.disk_cache import StorageOptions  # noqa: PLC0415 - keeps --help quick

    models = None if options.models_dir is None else options.models_dir.absolute()
    StorageOptions(models, options.cache_bytes, options.kv_disk_bytes).to_environment()


def key_of(api_key_file: Path | None) -> str | None:
    """The key that the user means.

    Raises:
        ClusterError: If the file holds none, or the key cannot be sent.
    """
    if api_key_file is not None:
        return sendable_key(read_first_key(api_key_file), str(api_key_file), param="--api-key-file")
    key = os.environ.get(API_KEY)
    # Files of variables that were written on Windows leave the end of the line in it.
    return None if key is None else sendable_key(key.strip(), API_KEY)


def local_model(model: Path) -> PulledModel:
    """A model on this host.

    Args:
        model: A file, the first if there are several, or `hf:org/repo:QUANT`.

    Raises:
        ModelError: If it is at the hub, and cannot be had there.
    """
    from mesh.hub import HubLibrary, PulledModel, is_reference, parse_reference  # noqa: PLC0415
    from mesh.util.terminal import progress_bars  # noqa: PLC0415
    from stages.weights.disk_cache import default_root  # noqa: PLC0415

    if not is_reference(str(model)):
        return PulledModel(model, ())
    reference = parse_reference(str(model))
    with progress_bars() as bars:
        return HubLibrary(default_root()).pull(reference, _in_bytes(bars))


def served_model(model: Path) -> PulledModel:
    """A model on this host that is to be served; see `local_model`.

    Raises:
        ModelError: If it is at the hub, and cannot be had there, or is a drafter.
    """
    from mesh.draft.pairs import require_model  # noqa: PLC0415 - keeps --help quick

    pulled = local_model(model)
    require_model(pulled.path)
    return pulled


def projector_for(wanted: str, model: Path, path: Path) -> str:
    """The option `--mmproj` with what it means on this host: the path of a projector, or `none`.

    One that `auto` finds and that cannot be used is no reason not to serve texts.

    Args:
        wanted: A file, `hf:org/repo:NAME`, `auto` or `none`.
        model: The model, as it was named.
        path: The model on this host.

    Raises:
        ModelError: If it was named, is at the hub, and cannot be had there.
    """
    from mesh.hub import is_reference, parse_reference  # noqa: PLC0415 - keeps --help quick
    from mesh.options.model import AUTO, NONE  # noqa: PLC0415

    if wanted == AUTO:
        return _projector_beside(model, path)
    if is_reference(wanted):
        found = _pulled_projector(parse_reference(wanted))
        if found is None:
            raise ModelError(f"{wanted} has no projector for pictures: name another, or leave out --mmproj")
        return str(found)
    return wanted if wanted == NONE else str(Path(wanted).absolute())


def picture_needs(wanted: str, model: Path, *, most_tokens: int, is_tried: bool) -> PictureNeeds:
    """What pictures need with a projector; see `projector_for` and `needs_of`, whose errors it raises.

    Args:
        wanted: The option `--mmproj`.
        model: The model.
        most_tokens: The option `--image-max-tokens`.
        is_tried: See `needs_of`.
    """
    from mesh.options.model import NONE  # noqa: PLC0415 - keeps --help quick
    from mesh.vision.projectors import PictureNeeds, needs_of  # noqa: PLC0415

    projector = projector_for(wanted, model, model)
    if projector == NONE:
        return PictureNeeds()
    return needs_of(Path(projector), model, most_tokens=most_tokens, is_tried=is_tried)


def _projector_beside(model: Path, path: Path) -> str:
    from mesh.hub import is_reference, parse_reference  # noqa: PLC0415 - keeps --help quick
    from mesh.options.model import NONE  # noqa: PLC0415
    from mesh.vision.projectors import needs_of  # noqa: PLC0415
    from stages.vision.library import mtmd_path  # noqa: PLC0415

    if not is_reference(str(model)):
        return NONE
    try:
        mtmd_path()
        found = _pulled_projector(replace(parse_reference(str(model)), wanted=None))
        if found is None:
            return NONE
        needs_of(found, path)
    except MeshError as error:
        log.warning("pictures_off", model=str(model), reason=error.message)
        return NONE
    return str(found)


def _pulled_projector(reference: HubReference) -> Path | None:
    from mesh.hub import HubLibrary  # noqa: PLC0415 - keeps --help quick
    from mesh.util.terminal import progress_bars  # noqa: PLC0415
    from stages.weights.disk_cache import default_root  # noqa: PLC0415

    with progress_bars() as bars:
        return HubLibrary(default_root()).pull_projector(reference, _in_bytes(bars))


def _in_bytes(bars: ProgressBars) -> Callable[[str], Callable[[int, int], None]]:
    def begin(label: str) -> Callable[[int, int], None]:
        bar = bars.add(label)
        return lambda done, total: bar(done / total if total else 1.0)

    return begin


head_options: Final = option_group(
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the mesh's API."),
    click.option(
        "--api-key-file",
        type=_FILE,
        help=f"File whose first key is sent to the API; or set {API_KEY}.",
    ),
)
