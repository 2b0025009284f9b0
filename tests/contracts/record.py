"""Records the contracts anew, and prints what became different.

python -m tests.contracts.record [NAME...]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.contracts.documents import DOCUMENTS, RECORDED, differences, recorded
from tests.contracts.served import SERVED, client_of_a_mesh

# The order of their keys is no contract, and that of the status depends on what happened.
_UNORDERED = {"openapi", "status"}


def main(names: list[str]) -> None:
    known = (*DOCUMENTS, *SERVED)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no contract {unknown[0]}; there are {', '.join(known)}")
    wanted = names or known
    for name, make in DOCUMENTS.items():
        if name in wanted:
            _record(name, make())
    if SERVED.keys() & set(wanted):
        with tempfile.TemporaryDirectory() as folder, client_of_a_mesh(Path(folder)) as http:
            for name, ask in SERVED.items():
                document = ask(http)
                if name in wanted:
                    _record(name, document)


def _record(name: str, document: Any) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=name in _UNORDERED) + "\n"
    for line in differences(recorded(name), json.loads(text)):
        print(f"{name}: {line}")
    (RECORDED / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
