"""The process in which a self-check runs: `python -m stages.cutting.certify_child MODEL CUT`.

Exits with 0 if the cut is bit-equal; otherwise the last line that it prints says why not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spanmesh_proto.errors import MeshError
from stages.certify import certify


def main(model: str, cut: str) -> int:
    """Certify one cut in a small form."""
    try:
        (result,) = certify(Path(model), [int(cut)], n_prompt=16, n_decode=4).cuts
    except MeshError as error:
        return _fail(error.message)
    if result.difference.is_bit_equal:
        return 0
    return _fail(
        f"logits differ by up to {result.difference.max_logit_diff:.3g} from the whole model's "
        f"when it is cut at layer {cut}"
    )


def _fail(reason: str) -> int:
    sys.stdout.write(f"{reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
