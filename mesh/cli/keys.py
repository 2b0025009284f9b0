"""`mesh keys`."""

from __future__ import annotations

import datetime as dt
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.api.api_keys import KeyRecord, add_key, default_key_file, digest_of, read_key_file, remove_key
from mesh.cli.shared_options import ParsedText
from mesh.util.printable import say
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

_SPAN = re.compile(r"(\d{1,6})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 24 * 7}
# A prefix as in the field, so that scanners for leaked secrets recognise it.
_PREFIX = "sk-mesh-"
_RANDOM_BYTES = 32

_FILE = click.option(
    "--api-key-file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Key file; the one in the user's configuration folder unless given.",
)
_LIMIT = click.IntRange(1, 10**12)
_RIGHTS: Final[dict[str, Callable[[KeyRecord], str | None]]] = {
    "may load": lambda record: "yes" if record.may_load else None,
    "may record": lambda record: "yes" if record.may_record else None,
    "group": lambda record: record.group,
}


class _Expiry(ParsedText[dt.datetime]):
    """`30d`, `12h`, `2w`, or a date, in UTC unless it names another zone."""

    name = "expiry"

    def parse(self, text: str) -> dt.datetime:
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        try:
            if span := _SPAN.fullmatch(text):
                return now + dt.timedelta(hours=int(span[1]) * _HOURS[span[2]])
            moment = dt.datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            raise ValueError(
                f"{text!r} is not a duration such as 12h, 30d or 2w, or a date such as 2027-01-31"
            ) from None
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
        if moment <= now:
            raise ValueError(f"{text!r} is in the past")
        return moment


@click.group()
def keys() -> None:
    """Manage the API keys: named keys in a file that holds only their hashes.

    A server that was started with the file applies every change from the next request on.
    """


@keys.command()
@click.argument("name")
@click.option(
    "--requests-per-minute", type=_LIMIT, metavar="N", help="Limit of requests per minute; none unless given."
)
@click.option(
    "--tokens-per-minute",
    type=_LIMIT,
    metavar="N",
    help="Limit of tokens per minute, of prompts and answers; none unless given.",
)
@click.option(
    "--concurrent",
    "max_concurrent",
    type=_LIMIT,
    metavar="N",
    help="Limit of concurrent answers; all slots of a model but one unless given.",
)
@click.option("--expires", type=_Expiry(), metavar="WHEN", help="Expiry, such as 30d, 12h or 2027-01-31.")
@click.option(
    "--may-load",
    is_flag=True,
    help="Let its requests load models of the library, see `mesh serve --library`.",
)
@click.option(
    "--may-record",
    is_flag=True,
    help="Let its answers be recorded, see `mesh serve --record`; ask whose texts they are.",
)
@click.option(
    "--group",
    metavar="GROUP",
    help="With --may-record: share a drafter that is tuned on the answers to all keys of this group.",
)
@_FILE
def add(
    *,
    name: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent: int | None,
    expires: dt.datetime | None,
    may_load: bool,
    may_record: bool,
    group: str | None,
    path: Path | None,
) -> None:
    """Make a key named NAME and print it once: the file has only its hash."""
    if group is not None and not may_record:
        raise MeshError(
            f"--group {group} is for keys whose answers may be recorded: add --may-record, or leave it out"
        )
    path = path or default_key_file()
    key = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    record = KeyRecord(
        name,
        digest_of(key),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        expires_at=expires,
        max_concurrent=max_concurrent,
        may_load=may_load,
        may_record=may_record,
        group=group,
    )
    add_key(path, record)
    say(key)
    say(f"the key {name} is in {path}, as a hash only: keep the printed key", err=True)


@keys.command("list")
@_FILE
def list_(*, path: Path | None) -> None:
    """Show the names of all keys, their limits and rights."""
    from rich.table import Table  # noqa: PLC0415

    from mesh.util.terminal import PrintableConsole  # noqa: PLC0415 - keeps --help quick

    now_s = dt.datetime.now(dt.UTC).timestamp()
    records = read_key_file(path or default_key_file())
    table = Table()
    # `mesh keys rm` needs the whole name: the other columns shrink on a narrow terminal.
    table.add_column("key", min_width=max((len(record.name) for record in records), default=0))
    columns = ["requests/minute", "tokens/minute", "at once", "expires"]
    # Rights that few keys have: without one its column would only take room.
    rights = {
        column: [right(record) for record in records]
        for column, right in _RIGHTS.items()
        if any(map(right, records))
    }
    for column in (*columns, *rights):
        table.add_column(column)
    for index, record in enumerate(records):
        limits = (record.requests_per_minute, record.tokens_per_minute)
        when = "never" if record.expires_at is None else f"{record.expires_at:%Y-%m-%d %H:%M %Z}"
        if record.is_expired(now_s):
            when += ", expired"
        name = f"{record.name} (not hashed)" if record.is_plain else record.name
        at_once = "all slots but one" if record.max_concurrent is None else str(record.max_concurrent)
        held = (has[index] or "no" for has in rights.values())
        limited = ("no limit" if limit is None else str(limit) for limit in limits)
        table.add_row(name, *limited, at_once, when, *held)
    PrintableConsole(markup=False).print(table)


@keys.command()
@click.argument("name")
@click.option(
    "--recording",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Also erase at once what this recording holds of it, and drafters that learned from that; a server "
    "that records there does so itself.",
)
@_FILE
def rm(*, name: str, folder: Path | None, path: Path | None) -> None:
    """Remove the key NAME: it is refused from the next request on.

    A key without a name is named by its hash, such as key-3f1c92aa40b7; the first digits will do, if no
    other begins so.
    """
    path = path or default_key_file()
    digests = {record.name: record.digest for record in read_key_file(path)}
    if folder is not None:
        from mesh.tuning.recording import read_recording_header  # noqa: PLC0415 - keeps --help quick

        # Once the key is gone, nothing tells which answers are its own.
        read_recording_header(folder)
    removed = remove_key(path, name)
    say(f"the key {removed} was removed from {path}", err=True)
    if folder is not None:
        from mesh.tuning.recording_folder import erase_key  # noqa: PLC0415 - keeps --help quick
        from mesh.tuning.tuned_folder import TunedFolder  # noqa: PLC0415

        digest = digests[removed].hex()
        num_answers = erase_key(folder, digest)
        num_drafters = TunedFolder(folder).erase_key(digest)
        say(
            f"{num_answers} recorded answers and {num_drafters} drafters were erased from {folder}",
            err=True,
        )
