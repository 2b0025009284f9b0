"""Requests that no ring can answer."""

from dataclasses import replace

import pytest

from mesh.coordinator.coordinator import check_request
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from spanmesh_proto.errors import InvalidRequest
from spanmesh_proto.row_ids import FIRST_ROW_ID

OPTIONS = CoordinatorOptions(64, 1, 32, 64)


def test_a_prompt_with_rows_that_are_no_tokens_is_not_scored() -> None:
    request = GenerationRequest((1, FIRST_ROW_ID, 2), 4, num_top_logprobs=0)
    check_request(request, OPTIONS)
    with pytest.raises(InvalidRequest, match="rows that are no tokens have none"):
        check_request(replace(request, scores_prompt=True), OPTIONS)
