"""Console for tables and progress, which draws control characters of what it shows as escapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from mesh.util.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text


class PrintableConsole(Console):
    """Rich's console; only what it draws itself controls the terminal. Arguments are those of `Console`."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape before the text is measured: its column has room for the escapes."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what comes from other renderables, such as `Text` and tracebacks."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
