"""Figures of `tests.qualification.drafter_costs`, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from meshbench.report_tools import Line
from spanmesh_proto.errors import MeshError
from tests.qualification.drafter_costs.timing import BlockTimes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.qualification.drafter_costs.timing import DrafterTimes

_BYTES_PER_VALUE: Final = 2
# Of long prompts, one way.
LONG_DELAY_MS: Final = 5.0
LEAST_DECODE_RATIO: Final = 0.97
MOST_FIRST_TOKEN_RATIO: Final = 1.05
MOST_ABSORBED_RATIO: Final = 0.2
MOST_BYTES_RATIO: Final = 1.05
# With fewer, the first ratio would measure the absence of features.
LEAST_RECEIVED_SHARE: Final = 0.95


@dataclass(frozen=True)
class DecodeRound:
    """Decode rates of one prompt, in tokens per second."""

    delay_ms: float
    """One way."""
    off: float
    """Plain decoding."""
    features: float
    """The same with features that nobody uses."""
    again: float
    """Plain decoding once more: the noise."""
    received_share: float
    """Of the rows whose features were wanted, those that got them."""


@dataclass(frozen=True)
class FirstTokenRound:
    """Time to the first token of one long prompt, in ms."""

    off: float
    """Without the drafter."""
    draft: float
    """With it."""
    num_wanted: int
    """Rows whose features were wanted, those of the answer included."""


@dataclass(frozen=True)
class SentFeatures:
    """Features of one or more answers."""

    num_rows: int = 0
    """Rows of windows that wanted features and whose features arrived; rejected ones included."""
    num_rejected: int = 0
    """Those of them that were rejected."""
    num_bytes: int = 0
    """That arrived."""

    @classmethod
    def of(cls, timings: Mapping[str, Any]) -> SentFeatures:
        """From `timings` of an answer whose windows went one at a time.

        Raises:
            MeshError: If others were void, or it had no features: their rows are unknown.
        """
        found = timings["speculation"]
        if found["stale_rows"] or not found["features"] or not found["features"]["received"]:
            raise MeshError(
                f"the features of an answer cannot be counted: {found['stale_rows']} rows were void, "
                f"features: {found['features']}"
            )
        # Each window has a row for the committed token and one for each proposed token. Of the proposed ones
        # `received` counts those that were accepted.
        num_rejected = found["proposed"] - found["accepted"]
        return cls(found["features"]["received"] + num_rejected, num_rejected, found["features"]["bytes"])

    def __add__(self, other: SentFeatures) -> SentFeatures:
        """Sums of both."""
        return SentFeatures(
            self.num_rows + other.num_rows,
            self.num_rejected + other.num_rejected,
            self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True)
class Figures:
    """All that was measured."""

    decode: tuple[DecodeRound, ...]
    """At all delays."""
    first_token: tuple[FirstTokenRound, ...]
    """At one."""
    times: DrafterTimes | BlockTimes
    """Of the drafter alone."""
    listened: SentFeatures
    """Features of answers without drafts."""
    drafted: SentFeatures
    """Features of answers with drafts."""
    row_values: int
    """Values of a row: taps × width."""
    row_bytes: int
    """Of a row in the format in which features travel."""
    num_read: int
    """Rows of a long prompt whose features the drafter reads."""

    def lines(self) -> list[Line]:
        """The table, with its bounds."""
        return [
            *(line for delay_ms in self._delays_ms for line in self._decode_lines(delay_ms)),
            *self._first_token_lines(),
            *time_lines(self.times),
            self._bytes_line("no drafts", self.listened),
            self._bytes_line("drafts", self.drafted),
            self._position_line("no drafts", self.listened),
            self._position_line("drafts", self.drafted),
        ]

    @property
    def _delays_ms(self) -> list[float]:
        return list(dict.fromkeys(each.delay_ms for each in self.decode))

    def _decode_lines(self, delay_ms: float) -> list[Line]:
        rounds = [each for each in self.decode if each.delay_ms == delay_ms]
        at = f"at {delay_ms:g} ms"
        return [
            _ratio_line(
                f"decode rate with features and no drafts over off, {at}",
                [2 * each.features / (each.off + each.again) for each in rounds],
                LEAST_DECODE_RATIO,
            ),
            _ratio_line(
                f"decode rate, off again over off, {at}", [each.again / each.off for each in rounds], None
            ),
            Line(
                f"share of the wanted features that arrived, {at}",
                min(each.received_share for each in rounds),
                LEAST_RECEIVED_SHARE,
                note="the lowest",
            ),
        ]

    def _first_token_lines(self) -> list[Line]:
        ratio = _ratio_line(
            f"time to the first token of a long prompt, drafter over off, at {LONG_DELAY_MS:g} ms",
            [each.draft / each.off for each in self.first_token],
            MOST_FIRST_TOKEN_RATIO,
        )
        off_ms, draft_ms = (
            median(getattr(each, name) for each in self.first_token) for name in ("off", "draft")
        )
        return [
            replace(ratio, is_ceiling=True, note=f"{ratio.note}; medians {draft_ms:.0f} and {off_ms:.0f} ms"),
            Line(
                "rows whose features were wanted then, fewest",
                min(each.num_wanted for each in self.first_token),
                self.num_read,
            ),
        ]

    def _bytes_line(self, what: str, sent: SentFeatures) -> Line:
        values_bytes = sent.num_rows * self.row_values * _BYTES_PER_VALUE
        return Line(
            f"bytes of features over rows × taps × width × {_BYTES_PER_VALUE}, {what}",
            sent.num_bytes / values_bytes,
            MOST_BYTES_RATIO,
            is_ceiling=True,
            note=f"{sent.num_bytes} bytes, {sent.num_rows} rows, {sent.num_rejected} of them rejected",
        )

    def _position_line(self, what: str, sent: SentFeatures) -> Line:
        f16_bytes = self.row_values * _BYTES_PER_VALUE
        return Line(
            f"bytes of a position's features, {what}",
            sent.num_bytes / sent.num_rows,
            MOST_BYTES_RATIO * self.row_bytes,
            is_ceiling=True,
            note=f"{self.row_bytes} in their format, {self.row_bytes / f16_bytes:.0%} of f16",
        )


def time_lines(times: DrafterTimes | BlockTimes) -> list[Line]:
    """Times of the drafter alone."""
    return _block_lines(times) if isinstance(times, BlockTimes) else _absorbed_lines(times)


def _block_lines(times: BlockTimes) -> list[Line]:
    return [
        *(
            Line(f"drafter: block of {length}, ms", found_ms, None, note=f"{found_ms / length:.2f} a token")
            for length, found_ms in times.blocks_ms.items()
        ),
        *(
            Line(f"drafter: features of {num_rows} rows read, ms", found_ms, None)
            for num_rows, found_ms in times.reading_ms.items()
        ),
    ]


def _absorbed_lines(times: DrafterTimes) -> list[Line]:
    absorbed_ms, full_ms, chained_ms = map(median, (times.absorbed, times.full, times.chained))
    encoder_ms = full_ms - chained_ms
    return [
        Line(
            f"drafter: {times.num_rows} rows absorbed over as many with outputs",
            absorbed_ms / full_ms,
            MOST_ABSORBED_RATIO,
            is_ceiling=True,
            note=f"{absorbed_ms:.1f} over {full_ms:.1f} ms, medians of {len(times.full)}",
        ),
        Line(
            "the same without the encoder of features, by difference",
            (absorbed_ms - encoder_ms) / chained_ms,
            None,
            note=f"encoder {encoder_ms:.1f} ms",
        ),
    ]


def _ratio_line(title: str, ratios: Sequence[float], wanted: float | None) -> Line:
    note = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    return Line(title, median(ratios), wanted, note=note)
