"""Comparison of tokenizing long runs with llama.cpp on a stack that is large enough for any of them.

Every kind of vocabulary that llama.cpp's source names x runs of every class of characters x lengths.
llama.cpp splits a text by functions that call themselves for each character: a long run needs a large stack.

    python -m tests.qualification.tokenizer_parity --kind gpt-4o --length 60000
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import re
import signal
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import click
import llama_cpp

from mesh.serve.options import demo_model
from mesh.text.text_jobs import TextModel
from mesh.text.text_service import TextRequest, TextService
from mesh.text.tokenizer import Tokenizer
from mesh.util.printable import say
from meshbench.lab.llama_cpp_build import unpacked_source
from spanmesh_proto.errors import InvalidModel, MeshError, RequestError
from stages.gguf import Value, ValueType, read_header
from stages.runtime.llama import init_backend
from tests.qualification.fuzz.altered_models import PRE_KIND, text_array, text_value, write_vocabulary
from tests.qualification.fuzz.hostile_texts import RUNS, run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from types import TracebackType

    # Ids of a text, special tokens of the model left out; None for a refusal with a 4xx.
    Encode = Callable[[str], Sequence[int] | None]

LENGTHS: Final = (100, 5_000, 28_000, 200_000, 1_000_000)
LARGE_STACK_BYTES: Final = 4 * 2**30
_PRE_NAME: Final = re.compile(r'tokenizer_pre\s*==\s*"([^"]+)"')
_SOURCE_FILE: Final = "src/llama-vocab.cpp"
_NUM_RWKV_WORDS: Final = 2000
_IMPORTS: Final = ("tests.qualification.fuzz.altered_models", "mesh.serve.options", "mesh.text.tokenizer")


@dataclass(frozen=True)
class VocabularyFile:
    """A vocabulary to compare."""

    name: str
    """Such as `pre gpt-4o`."""
    path: Path
    """A GGUF file without tensors."""


class TokenizingEndedError(MeshError):
    """The process that tokenizes has ended."""


class TokenizingProcess:
    """Tokenizes in a process of its own, in a thread with a stack of a given size; a context manager.

    Args:
        load: Loads a vocabulary: a function of a module.
        path: The vocabulary.
        stack_bytes: Size of the stack; 0 for that of any thread.

    Raises:
        InvalidModel: On entering, if the vocabulary cannot be loaded.
        TokenizingEndedError: On entering, if loading it ends the process.
    """

    def __init__(self, load: Callable[[Path], Encode], path: Path, stack_bytes: int) -> None:
        # Forked from a process that has imported what takes long: thousands of them are started.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_IMPORTS))
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, load, path, stack_bytes), daemon=True)
        self._theirs = theirs

    def __enter__(self) -> Self:
        """Start it, and wait for the vocabulary."""
        self._process.start()
        self._theirs.close()
        try:
            refusal = self._received()
        except TokenizingEndedError:
            self._end()
            raise
        if refusal is not None:
            self._end()
            raise InvalidModel(str(refusal))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._end()

    def encode(self, text: str) -> Sequence[int] | None:
        """Ids of a text; None for a refusal.

        Raises:
            TokenizingEndedError: If that ended the process.
        """
        self._connection.send(text)
        found: Sequence[int] | None = self._received()
        return found

    def _received(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            raise TokenizingEndedError(f"the process that tokenizes ended with {how}") from None

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


class ProductEncoding:
    """Tokenizing as the head does it: in the processes for clients' texts.

    Args:
        path: The vocabulary.

    Raises:
        InvalidModel: If the vocabulary cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        tokenizer = Tokenizer(path)
        self._texts = TextService(TextModel(str(tokenizer.path), tokenizer.stamp))

    def encode(self, text: str) -> Sequence[int] | None:
        """Ids of a text; None for a refusal with a 4xx."""
        request = TextRequest(text, "prompt", add_special=False)
        try:
            (found,) = asyncio.run(self._texts.ids([request], most_tokens=len(text), client=None))
        except RequestError:
            return None
        return found


@dataclass(frozen=True)
class ParityCase:
    """One text with one vocabulary."""

    vocabulary: str
    """Its name."""
    run: str
    """Class of characters; one of `RUNS`."""
    num_chars: int
    """Length of the run."""
    outcome: str
    """`equal`, `refused`, `differs` or `ended`; or `not loaded`, for a vocabulary as a whole."""
    reason: str = ""
    """What differs, or how it ended."""

    @property
    def is_good(self) -> bool:
        """Whether the ids are right, or the text was refused."""
        return self.outcome not in {"differs", "ended"}


class Encoding(Protocol):
    """What is compared, for one vocabulary; `TokenizingProcess` is one."""

    def encode(self, text: str) -> Sequence[int] | None:
        """Ids of a text; None for a refusal with a 4xx.

        Raises:
            TokenizingEndedError: If that ended what tokenizes.
        """


def known_kinds(source: Path) -> list[str]:
    """Every `tokenizer.ggml.pre` that llama.cpp knows, in the order of its source.

    Args:
        source: Folder of llama.cpp's source.

    Raises:
        OSError: If it is no such folder.
        InvalidModel: If none is found, since the source is written in another way.
    """
    path = source / _SOURCE_FILE
    kinds = list(dict.fromkeys(_PRE_NAME.findall(path.read_text(encoding="utf-8"))))
    if not kinds:
        raise InvalidModel(f"{path} names no kinds of vocabularies as it used to: adapt the pattern here")
    return kinds


def vocabularies(source: Path, model: Path, folder: Path) -> Iterator[VocabularyFile]:
    """All vocabularies, each file written when it comes up, and removed when the next one does.

    Those of the source's `ggml-vocab-*.gguf` (SentencePiece, WordPiece, Unigram and others), one of RWKV's
    type, the model's without a kind, and the model's under each known kind.

    Args:
        source: Folder of llama.cpp's source.
        model: A GGUF file with a vocabulary of GPT-2's type.
        folder: For files that are written.

    Raises:
        OSError: If there is no source.
        ModelError: If the model is none.
    """
    for path in sorted(source.glob("models/ggml-vocab-*.gguf")):
        yield VocabularyFile(path.stem, path)
    path = folder / "vocabulary.gguf"
    yield VocabularyFile("rwkv", _write_rwkv(model, path))
    yield VocabularyFile("no pre", write_vocabulary(model, path, {PRE_KIND: None}))
    for kind in known_kinds(source):
        yield VocabularyFile(f"pre {kind}", write_vocabulary(model, path, {PRE_KIND: text_value(kind)}))


def _write_rwkv(model: Path, output: Path) -> Path:
    """A vocabulary of RWKV's type: every byte, and some words, in its own spelling of tokens."""
    single = [f"\\x{number:02x}" for number in range(256)]
    doubled = [letter * count for letter in "aZ1!- " for count in (2, 3, 5, 8)]
    words = [f"w{number}" for number in range(_NUM_RWKV_WORDS)]
    tokens = ["<s>", *single, *doubled, *words]
    kept = {key: None for key in read_header(model).metadata if key.startswith("tokenizer.")}
    changes: dict[str, Value | None] = {
        **kept,
        "tokenizer.ggml.model": text_value("rwkv"),
        "tokenizer.ggml.tokens": text_array(tokens),
        "tokenizer.ggml.token_type": Value.array(ValueType.INT32, (3, *(1 for _ in tokens[1:]))),
    }
    return write_vocabulary(model, output, changes)


def _serve(connection: Connection, load: Callable[[Path], Encode], path: Path, stack_bytes: int) -> None:
    def work() -> None:
        try:
            encode = load(path)
        except MeshError as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            try:
                text = connection.recv()
            except EOFError:
                return
            connection.send(encode(text))

    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def llama_encode(path: Path) -> Encode:
    """llama.cpp's own tokenizing, with nothing of ours around.

    Raises:
        InvalidModel: If llama.cpp cannot load the vocabulary.
    """
    init_backend()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise InvalidModel(f"{path} has no vocabulary that llama.cpp can load")
    vocab = llama_cpp.llama_model_get_vocab(model)
    add_special = parse_special = False

    def encode(text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, room, add_special, parse_special)
        return list(buffer[:count])

    return encode


def compare(
    files: Iterable[VocabularyFile],
    opened: Callable[[Path], AbstractContextManager[Encoding]],
    *,
    runs: Sequence[str] = tuple(RUNS),
    lengths: Sequence[int] = LENGTHS,
) -> Iterator[ParityCase]:
    """Compare tokenizing with llama.cpp on a large stack.

    Args:
        files: Vocabularies; each is done with before the next is taken.
        opened: Opens what is compared, with a vocabulary; again after each text that ended it.
        runs: Classes of characters.
        lengths: Lengths of the runs, in characters.

    Raises:
        MeshError: If llama.cpp ends on the large stack, too.
    """
    for file in files:
        try:
            with TokenizingProcess(llama_encode, file.path, LARGE_STACK_BYTES) as reference:
                yield from _compare_one(
                    file, reference, opened, [(run, num) for run in runs for num in lengths]
                )
        except (InvalidModel, TokenizingEndedError) as error:
            yield ParityCase(file.name, "", 0, "not loaded", error.message)


def _compare_one(
    file: VocabularyFile,
    reference: Encoding,
    opened: Callable[[Path], AbstractContextManager[Encoding]],
    cases: Iterable[tuple[str, int]],
) -> Iterator[ParityCase]:
    with ExitStack() as stack:
        compared = stack.enter_context(opened(file.path))
        for run, num_chars in cases:
            text = run_of(run, num_chars)
            try:
                found = compared.encode(text)
            except TokenizingEndedError as error:
                yield ParityCase(file.name, run, num_chars, "ended", error.message)
                stack.close()
                compared = stack.enter_context(opened(file.path))
                continue
            # A refusal has nothing to compare; llama.cpp takes minutes for some texts that are refused.
            outcome = ("refused", "") if found is None else _outcome(found, _expected(reference, text))
            yield ParityCase(file.name, run, num_chars, *outcome)


def _expected(reference: Encoding, text: str) -> Sequence[int] | None:
    try:
        return reference.encode(text)
    except TokenizingEndedError as error:
        gib = LARGE_STACK_BYTES / 2**30
        raise MeshError(f"{error.message} on a stack of {gib:g} GiB: enlarge it here") from None


def _outcome(found: Sequence[int], expected: Sequence[int] | None) -> tuple[str, str]:
    """Name of the outcome, and the reason."""
    if expected is None:
        return "differs", "llama.cpp itself fails"
    if list(found) == list(expected):
        return "equal", ""
    place = next(
        (place for place, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other),
        min(len(found), len(expected)),
    )
    return "differs", f"{len(found)} ids in place of {len(expected)}, the first that differs is {place}"


@contextmanager
def product(path: Path) -> Iterator[ProductEncoding]:
    """The product's tokenizing, for `compare`."""
    yield ProductEncoding(path)


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="GGUF to alter, or the demo's.")
@click.option("--kind", "kinds", multiple=True, help="Vocabularies whose name has this; all unless given.")
@click.option("--run", "runs", multiple=True, type=click.Choice(tuple(RUNS)), help="All unless given.")
@click.option("--length", "lengths", multiple=True, type=click.IntRange(1), help="Characters of a run.")
@click.option(
    "--from", "first", metavar="NAME", help="Vocabulary to begin with, such as that of an interruption."
)
def main(
    model: Path | None,
    kinds: tuple[str, ...],
    runs: tuple[str, ...],
    lengths: tuple[int, ...],
    first: str | None,
) -> None:
    """Compare tokenizing with llama.cpp on a large stack; exits with 1 if ids differ or a process ended.

    llama.cpp's source is that of `SPANMESH_LLAMA_CPP`, or the one that the lab has unpacked. All vocabularies
    take some 150 minutes on 2 processors; a line is printed when one is done.
    """
    source = unpacked_source()
    if source is None:
        raise click.UsageError("there is no source of llama.cpp: name its folder in SPANMESH_LLAMA_CPP")
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="spanmesh-vocabularies-") as name:
        files = vocabularies(source, model or demo_model(), Path(name))
        later = itertools.dropwhile(lambda file: first not in {None, file.name}, files)
        wanted = (file for file in later if not kinds or any(kind in file.name for kind in kinds))
        cases = compare(wanted, product, runs=runs or tuple(RUNS), lengths=lengths or LENGTHS)
        for vocabulary, each in itertools.groupby(cases, lambda case: case.vocabulary):
            found = Counter(_told(case) for case in each)
            outcomes += found
            say(f"{vocabulary}: {_summary(found)}")
    if not outcomes:
        raise click.UsageError("no vocabulary has such a name")
    say(f"in all: {_summary(outcomes)}")
    if outcomes["differs"] or outcomes["ended"]:
        sys.exit(1)


def _told(case: ParityCase) -> str:
    """The outcome of a case, which is printed unless it is `equal`."""
    if case.outcome != "equal":
        shown = f"{case.num_chars} x {case.run}" if case.run else "all"
        say(f"{case.vocabulary}, {shown}: {case.outcome} {case.reason}")
    return case.outcome


def _summary(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))


if __name__ == "__main__":
    main()
