"""JSON Schema's formats that can be said as patterns; each says less than the format may allow."""

from __future__ import annotations

from typing import Final

_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE: Final = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = "[a-z](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{1,3}}"

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": "^P(?:[1-9][0-9]{0,3}W|[1-9][0-9]{0,3}D(?:T[1-9][0-9]{0,3}[HMS])?|T[1-9][0-9]{0,3}[HMS])$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": "^(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "hostname": f"^{_HOST}$",
    "email": rf"^[a-z0-9](?:[a-z0-9_-]{{0,30}}[a-z0-9])?@{_HOST}$",
    "uri": rf"^https?://{_HOST}(?:/[A-Za-z0-9_~.-]{{1,40}}){{0,6}}/?$",
}
