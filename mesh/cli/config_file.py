"""Options of commands from mesh.toml and from the environment."""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
# Prefix of models that are no files.
_REMOTE: Final = "hf:"
FILE_NAME: Final = "mesh.toml"
VARIABLE: Final = "MESH_CONFIG"
# Commands with the first option send prompts and the user's API key there.
_URL: Final = "url"
_KEY_FILE: Final = "api-key-file"
# Strict: programs differ in how they read unusual addresses.
_OWN_MACHINE: Final = re.compile(
    r"https?://(?P<host>localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?"
)


@dataclass(frozen=True)
class ConfigFile:
    """The configuration file."""

    path: Path
    """The file."""
    is_chosen: bool
    """Whether the user chose it: it was named, or is the user's own. One that only lies in the working folder
    may be anybody's, such as that of a cloned repository."""


@dataclass(frozen=True)
class Setting:
    """Value of an option, with its origin."""

    value: Any
    """Value in click's form; a function if it may not be set there, which raises a `ClusterError`."""
    origin: str
    """`environment NAME` or `file PATH`."""


def key_of(param: click.Parameter) -> str:
    """`wait-for` for `--wait-for`, `model` for MODEL: the flag without its dashes."""
    longest = max(param.opts, key=len)
    return longest.lstrip("-").replace("_", "-").lower()


def keys_of(command: click.Command) -> dict[str, click.Parameter]:
    """Parameters of a command by key, except `--help` and `--set`, of which each key is one."""
    rare: list[click.Parameter] = getattr(command, "rare", [])
    return {
        key_of(param): param
        for param in (*command.params, *rare)
        if not (isinstance(param, click.Option) and param.is_eager and not param.expose_value)
        and "--set" not in param.opts
    }


def variable_of(command: str, key: str) -> str:
    """`MESH_SERVE_WAIT_FOR` for `wait-for` of `serve`."""
    return f"{prefix_of(command)}{key.upper().replace('-', '_')}"


def prefix_of(command: str) -> str:
    """Prefix of a command's variables."""
    return f"MESH_{command.upper().replace('-', '_')}_"


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean port?`, or all known words if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"


def from_toml(param: click.Parameter, value: Any, folder: Path) -> Any:
    """A TOML value in click's form.

    Args:
        param: The parameter.
        value: The value from TOML.
        folder: Folder of the file; relative paths start there.

    Raises:
        ValueError: If it is of the wrong type; a short phrase.
    """
    if _is_flag(param):
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not true or false")
        return _flag(param, is_on=value)
    if _takes_many(param):
        values = value if isinstance(value, list) else [value]
        return [_scalar(param, each, folder) for each in values]
    if isinstance(value, list):
        return ",".join(str(_scalar(param, each, folder)) for each in value)
    return _scalar(param, value, folder)


def from_variable(param: click.Parameter, text: str) -> Any:
    """A variable's text in click's form; several values are separated by commas.

    Raises:
        ValueError: If it is of the wrong type; a short phrase.
    """
    if _is_flag(param):
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is not true or false")
        return _flag(param, is_on=word in _TRUE)
    if _takes_many(param):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _scalar(param: click.Parameter, value: Any, folder: Path) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not a text or a number")  # noqa: TRY004 - of the user's, not of code
    if isinstance(param.type, click.Path):
        return _path(str(value), folder)
    return value


def _path(text: str, folder: Path) -> str:
    if text == "-" or text.startswith(_REMOTE):
        return text
    return str(folder / Path(text).expanduser())


def _is_flag(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and param.is_flag


def _takes_many(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and param.multiple


def _flag(param: click.Parameter, *, is_on: bool) -> bool:
    """The flag's value: some switch off a default."""
    negative = isinstance(param, click.Option) and param.flag_value is False and not param.secondary_opts
    return is_on != negative


def first_unknown(table: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """The first unknown key of a table."""
    names = set(known)
    return next((key for key in table if key not in names), None)


def find_config(wanted: Path | None, environment: Mapping[str, str], working_dir: Path) -> ConfigFile | None:
    """The file to read: the one named, or the first that exists among the default places.

    Args:
        wanted: File of `--config`.
        environment: `MESH_CONFIG` may name a file; XDG_CONFIG_HOME and HOME determine the user's own.
        working_dir: Folder of a `mesh.toml` with precedence over the user's own.

    Returns:
        None if none was named, and none exists.

    Raises:
        ClusterError: If one was named that does not exist.
    """
    named = wanted or (Path(environment[VARIABLE]) if environment.get(VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            how = "--config" if wanted is not None else VARIABLE
            raise ClusterError(f"{named}, named by {how}, is not a file", param="--config")
        return ConfigFile(named, is_chosen=True)
    here, own = working_dir / FILE_NAME, _own_file(environment)
    if own is not None and not own.is_file():
        own = None
    if here.is_file():
        return ConfigFile(here, is_chosen=own is not None and here.samefile(own))
    return None if own is None else ConfigFile(own, is_chosen=True)


def _own_file(environment: Mapping[str, str]) -> Path | None:
    home = environment.get("XDG_CONFIG_HOME") or (
        str(Path(environment["HOME"]) / ".config") if environment.get("HOME") else ""
    )
    return Path(home) / "spanmesh" / FILE_NAME if home else None


def is_on_own_machine(url: str) -> bool:
    """Whether a URL names a server of this machine beyond doubt."""
    match = _OWN_MACHINE.fullmatch(url)
    if match is None or match["host"] == "localhost":
        return match is not None
    try:
        return ipaddress.ip_address(match["host"].strip("[]")).is_loopback
    except ValueError:
        return False


def _refusal(name: str, key: str, value: Any, path: Path) -> str | None:
    """Reason why a file of the working folder may not set an option of a command with `--url`."""
    if key == _URL and not is_on_own_machine(str(value)):
        problem = f"would send prompts and API key of `mesh {name}` to {str(value)!r}"
    elif key == _KEY_FILE:
        problem = f"would choose the API key of `mesh {name}`"
    else:
        return None
    return (
        f"{path} {problem}, but a {FILE_NAME} that was only found in the working folder may not: give "
        f"--{key} or {variable_of(name, key)}, or if you trust the file, name it: mesh --config {path} {name}"
    )


def read_config(path: Path, commands: Collection[str]) -> dict[str, dict[str, Any]]:
    """The tables of a file, one for each command.

    Args:
        path: The file.
        commands: Names of commands, which tables may have.

    Raises:
        ClusterError: If it cannot be read, or has a table without a command.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}", param="--config") from error
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path} is not TOML: {error}", param="--config") from error
    unknown = first_unknown(tables, commands)
    if unknown is not None:
        raise ClusterError(
            f"{path}: no command [{unknown}] has options here{nearest(unknown, commands)}", param="--config"
        )
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ClusterError(f"{path}: {name} must be a table, [{name}]", param="--config")
    return tables


def settings_for(
    name: str,
    command: click.Command,
    table: Mapping[str, Any],
    file: ConfigFile | None,
    environment: Mapping[str, str],
) -> dict[str, Setting]:
    """Settings by parameter name: from the environment, else from the file.

    What the file may not set is refused when the value is asked for: the command line may have another.

    Args:
        name: Name of the command.
        command: The command.
        table: The file's table for this command.
        file: The file.
        environment: Environment of this process.

    Raises:
        ClusterError: If a key or a variable is unknown, or a value does not fit its option.
    """
    keys = keys_of(command)
    path = None if file is None else file.path
    unknown = first_unknown(table, keys)
    if unknown is not None:
        raise ClusterError(f"{path}: [{name}] has no {unknown!r}{nearest(unknown, keys)}", param="--config")
    variables = {variable_of(name, key): key for key in keys}
    stray = next(
        (each for each in environment if each.startswith(prefix_of(name)) and each not in variables), None
    )
    if stray is not None:
        raise ClusterError(
            f"the environment has {stray}, which `mesh {name}` does not know{nearest(stray, variables)}"
        )
    found: dict[str, Setting] = {}
    for key, param in keys.items():
        variable = variable_of(name, key)
        setting = None
        if environment.get(variable):
            setting = _setting(param, environment[variable], None, f"environment {variable}", key)
        elif key in table and file is not None:
            setting = _setting(param, table[key], path, f"file {path}", key)
            if _URL in keys and not file.is_chosen:
                setting = _checked(setting, _refusal(name, key, table[key], file.path))
        if setting is not None and param.name is not None:
            found[param.name] = setting
    return found


def _setting(param: click.Parameter, value: Any, path: Path | None, origin: str, key: str) -> Setting:
    """Checked here, so that the error names the place of the value."""
    try:
        taken = from_variable(param, value) if path is None else from_toml(param, value, path.parent)
        with click.Context(click.Command(None)) as context:
            param.type_cast_value(context, taken)
    except (ValueError, click.BadParameter) as error:
        reason = error.message if isinstance(error, click.BadParameter) else str(error)
        raise ClusterError(f"{key} by {origin}: {reason}", param="--config") from None
    return Setting(taken, origin)


def _checked(setting: Setting, refusal: str | None) -> Setting:
    if refusal is None:
        return setting

    def refuse() -> NoReturn:
        raise ClusterError(refusal, param="--config")

    return Setting(refuse, setting.origin)
