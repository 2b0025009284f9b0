"""Short runs of `mesh bench fuzz` with pictures, odd sizes and parts, and that they would notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.vision.encoder import EncodedPicture
from mesh.vision.picture_reader import PictureReader
from spanmesh_proto.errors import InvalidRequest
from tests.qualification.fuzz import picture_fuzz
from tests.qualification.fuzz.picture_fuzz import fuzz_encoders, fuzz_picture_parts, fuzz_pictures
from tests.qualification.fuzz.report import FuzzOptions, as_text

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.vision.encoder import EncoderProcess
    from stages.vision.picture import Picture

pytestmark = pytest.mark.model


def test_changed_pictures_are_decoded_or_refused(tmp_path: Path) -> None:
    report = fuzz_pictures(FuzzOptions(120, 5, tmp_path, tmp_path))
    assert report.is_good, as_text(report)
    assert set(report.outcomes) == {"decoded", "refused"}


def test_a_decoder_that_crashes_is_noticed_and_its_picture_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(_reader: PictureReader, _data: bytes) -> None:
        raise InvalidRequest("the picture ended its process (SIGSEGV) while it was decoded")

    monkeypatch.setattr(PictureReader, "read", read)
    report = fuzz_pictures(FuzzOptions(2, 5, tmp_path, tmp_path))
    assert (report.num_crashes, len(report.kept)) == (2, 2)


def test_pictures_of_odd_sizes_get_rows_or_a_reason(tmp_path: Path) -> None:
    report = fuzz_encoders(FuzzOptions(40, 5, tmp_path, tmp_path))
    assert report.is_good, as_text(report)
    assert report.outcomes["encoded"] > 10


def test_rows_that_hold_no_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def encoded(_encoder: EncoderProcess, _picture: Picture) -> EncodedPicture:
        return EncodedPicture((np.array([[np.nan]], np.float32),), "")

    monkeypatch.setattr(picture_fuzz, "_encoded", encoded)
    assert fuzz_encoders(FuzzOptions(3, 5, tmp_path, tmp_path)).num_faults == 3


def test_no_part_of_a_request_is_blamed_on_the_server(
    smollm2_path: Path, cut_stages: None, tmp_path: Path
) -> None:
    report = fuzz_picture_parts(FuzzOptions(60, 5, smollm2_path, tmp_path))
    assert report.is_good, as_text(report)
    assert {"200", "400"} <= set(report.outcomes)
