"""Records the contracts anew, and prints what became different.

python -m tests.contracts.record [NAME...]
"""

import json
import sys
from typing import Any

from tests.contracts.documents import DOCUMENTS, RECORDED, differences, recorded
from tests.contracts.served import SERVED, answers_of_a_mesh


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in {*DOCUMENTS, *SERVED}]:
        sys.exit(f"there is no contract {unknown[0]}; there are {', '.join((*DOCUMENTS, *SERVED))}")
    for name, make in DOCUMENTS.items():
        if not names or name in names:
            _record(name, make())
    if not names or set(names) & set(SERVED):
        for name, document in answers_of_a_mesh().items():
            _record(name, document)


def _record(name: str, document: Any) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=name == "openapi") + "\n"
    for line in differences(recorded(name), json.loads(text)):
        print(f"{name}: {line}")
    (RECORDED / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
