"""Exact mode on a GPU: what is measured there agrees with what the mesh promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.cluster.host_facts import find_gpus
from mesh.placement.gpu_layers import check_gpu_layers
from spanmesh_proto.errors import ClusterError
from stages.runtime.numerics import verdict_on
from tests.qualification.device_exactness import Exactness, measure_rows
from tests.qualification.random_model import SHAPES, write_random_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from stages.runtime.devices import Device

pytestmark = pytest.mark.gpu


def test_a_backend_in_exact_mode_gives_each_row_the_same_bits_in_any_batch(
    tmp_path: Path, gpu: Device
) -> None:
    model = tmp_path / "tiny.gguf"
    write_random_gguf(model, SHAPES["tiny"], "Q4_0")
    rows = measure_rows(model, gpu.name, widths=(2, 3, 8, 9, 33), depths=(4, 130))
    found = Exactness("as it is", gpu.description, rows)
    print(f"{gpu.description}: {found.summary}")
    # A backend that was found exact stays so; of others nothing is promised.
    assert found.is_exact or not verdict_on(gpu.name).is_exact


def test_exact_mode_refuses_other_gpus_with_the_reason(gpu: Device) -> None:
    verdict = verdict_on(gpu.name)
    gpus = find_gpus()
    assert gpu.name in [each.name for each in gpus]
    if verdict.is_exact:
        check_gpu_layers(3, gpus, is_exact=True)
        return
    with pytest.raises(ClusterError) as refused:
        check_gpu_layers(3, gpus, is_exact=True)
    assert verdict.reason in refused.value.message
