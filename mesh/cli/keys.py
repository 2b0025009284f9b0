"""`mesh keys`."""

from __future__ import annotations

import datetime as dt
import re
import secrets
from pathlib import Path

import click

from mesh.api.api_keys import KeyRecord, add_key, default_key_file, digest_of, read_key_file, remove_key
from mesh.cli.shared_options import ParsedText
from mesh.util.printable import say

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
@_FILE
def add(
    *,
    name: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent: int | None,
    expires: dt.datetime | None,
    may_load: bool,
    path: Path | None,
) -> None:
    """Make a key named NAME and print it once: the file has only its hash."""
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
    # A right that few keys have: without one its column would only take room.
    has_rights = any(record.may_load for record in records)
    for column in (*columns, "may load") if has_rights else columns:
        table.add_column(column)
    for record in records:
        limits = (record.requests_per_minute, record.tokens_per_minute)
        when = "never" if record.expires_at is None else f"{record.expires_at:%Y-%m-%d %H:%M %Z}"
        if record.is_expired(now_s):
            when += ", expired"
        name = f"{record.name} (not hashed)" if record.is_plain else record.name
        at_once = "all slots but one" if record.max_concurrent is None else str(record.max_concurrent)
        right = (("yes" if record.may_load else "no"),) if has_rights else ()
        limited = ("no limit" if limit is None else str(limit) for limit in limits)
        table.add_row(name, *limited, at_once, when, *right)
    PrintableConsole(markup=False).print(table)


@keys.command()
@click.argument("name")
@_FILE
def rm(*, name: str, path: Path | None) -> None:
    """Remove the key NAME: it is refused from the next request on.

    A key without a name is named by its hash, such as key-3f1c92aa40b7; the first digits will do, if no
    other begins so.
    """
    path = path or default_key_file()
    say(f"the key {remove_key(path, name)} was removed from {path}", err=True)
