"""Wire contract: protocol version, generated messages and errors."""

from typing import Final

PROTOCOL_VERSION: Final = 15
SOFTWARE_VERSION: Final = "0.2.0"

__all__ = ["PROTOCOL_VERSION", "SOFTWARE_VERSION"]
