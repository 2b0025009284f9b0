"""Memory that each of three hosts holds of a random model."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
import gguf
import numpy as np
import structlog
from gguf.constants import GGMLQuantizationType

from mesh.bench.blocking_client import Ask, Batch, Client
from mesh.bench.report_tools import markdown_table
from mesh.bench.stress.memory import footprints
from mesh.lab.memory_watch import MemoryWatch
from mesh.lab.network import Lab, lab_supported
from mesh.lab.systems import MeshSystem, get_json
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.util.completion_stream import COMPLETION_PATH
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import ClusterError, MeshError
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from mesh.bench.stress.memory import Footprint


WeightType = Literal["Q4_0", "Q8_0"]

# Elements that share a scale, which comes first, in float16.
_BLOCK: Final = 32
_SCALE_BYTES: Final = 2
# Bytes of a block without its scale, and the spread of what random bytes there mean.
_BODIES: Final[dict[WeightType, tuple[int, float]]] = {"Q4_0": (16, 4.61), "Q8_0": (32, 73.9)}
_CONTEXT: Final = 4096
# Tokens that are no words: <unk>, <s>, </s>, and one for each byte.
_SPECIAL: Final = ("<unk>", "<s>", "</s>")


def write_random_gguf(
    path: Path, shape: Shape, weight_type: WeightType, *, seed: int = 1, n_ctx_train: int = _CONTEXT
) -> None:
    """Write a model that computes like any other, and says nonsense.

    Memory for one tensor at a time is taken.

    Args:
        path: Of the file.
        shape: Of the model.
        weight_type: Of its matrices; norms are float32.
        seed: The same seed, the same bytes.
        n_ctx_train: Positions that it claims to be trained for.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"Random {shape.num_parameters / 1e9:.1f}B")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads_kv)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, shape.n_vocab)
    raw = GGMLQuantizationType[weight_type]
    for name, rows, columns in shape.matrices():
        row_bytes = columns // _BLOCK * (_SCALE_BYTES + _BODIES[weight_type][0])
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, raw_dtype=raw)
    for name, width in shape.vectors():
        writer.add_tensor_info(name, (width,), np.dtype(np.float32), 4 * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = np.random.default_rng(seed)
    for _, rows, columns in shape.matrices():
        writer.write_tensor_data(random_blocks(noise, rows, columns, weight_type))
    for _, width in shape.vectors():
        writer.write_tensor_data(noise.normal(1.0, 0.1, width).astype(np.float32))
    writer.close()


def random_blocks(
    noise: np.random.Generator, rows: int, columns: int, weight_type: WeightType
) -> NDArray[np.uint8]:
    """Random blocks, uint8 (rows, bytes of a row), whose values spread by the inverse root of the width.

    Args:
        noise: Source of the values.
        rows: Rows of the matrix.
        columns: Its columns, a multiple of 32.
        weight_type: Format of the blocks.
    """
    body_bytes, spread = _BODIES[weight_type]
    num_blocks = rows * columns // _BLOCK
    blocks = np.empty((num_blocks, _SCALE_BYTES + body_bytes), np.uint8)
    blocks[:, _SCALE_BYTES:] = noise.integers(0, 256, (num_blocks, body_bytes), np.uint8)
    scale = np.array([1.0 / (spread * np.sqrt(columns))], np.float16)
    blocks[:, :_SCALE_BYTES] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Add a SentencePiece vocabulary: special tokens, every byte, and made-up words."""
    encoded_bytes = [f"<0x{number:02X}>" for number in range(256)]
    words = [f"\u2581w{number}" for number in range(n_vocab - len(_SPECIAL) - len(encoded_bytes))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * len(encoded_bytes) + [gguf.TokenType.NORMAL] * len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*_SPECIAL, *encoded_bytes, *words])
    writer.add_token_scores([-float(number) for number in range(n_vocab)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@dataclass(frozen=True)
class Shape:
    """Of a model of llama.cpp's architecture `llama`.

    Attributes:
        n_layers: Layers.
        n_embd: Width of the hidden state.
        n_ff: Width inside the feed-forward part.
        n_heads: Heads of queries.
        n_heads_kv: Heads of keys and values.
        n_vocab: Tokens.
        is_tied: Whether the embedding is the head as well.
    """

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    n_vocab: int
    is_tied: bool

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.n_embd // self.n_heads

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(rows * columns for _, rows, columns in self.matrices()) + sum(
            width for _, width in self.vectors()
        )

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of each matrix, in the order of the file."""
        kv = self.n_heads_kv * self.head_width
        yield "token_embd.weight", self.n_vocab, self.n_embd
        if not self.is_tied:
            yield "output.weight", self.n_vocab, self.n_embd
        for layer in range(self.n_layers):
            for name, rows, columns in (
                ("attn_q", self.n_embd, self.n_embd),
                ("attn_k", kv, self.n_embd),
                ("attn_v", kv, self.n_embd),
                ("attn_output", self.n_embd, self.n_embd),
                ("ffn_gate", self.n_ff, self.n_embd),
                ("ffn_up", self.n_ff, self.n_embd),
                ("ffn_down", self.n_embd, self.n_ff),
            ):
                yield f"blk.{layer}.{name}.weight", rows, columns

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Name and width of each norm."""
        yield "output_norm.weight", self.n_embd
        for layer in range(self.n_layers):
            yield f"blk.{layer}.attn_norm.weight", self.n_embd
            yield f"blk.{layer}.ffn_norm.weight", self.n_embd


SHAPES: Final[Mapping[str, Shape]] = {
    # That of TinyLlama-1.1B.
    "1.1b": Shape(22, 2048, 5632, 32, 4, 32_000, is_tied=False),
    # That of Llama-3.2-1B, with its large vocabulary.
    "1.2b": Shape(16, 2048, 8192, 32, 8, 128_256, is_tied=True),
    # Made in a moment, for a test of all the rest.
    "tiny": Shape(6, 64, 128, 4, 2, 320, is_tied=False),
}


log = structlog.get_logger()

_NUM_STAGES: Final = 3
_LOOK_S: Final = 1.0
# Words that the random vocabulary has, so that a prompt has about as many tokens.
_PROMPT: Final = " ".join(f"w{number % 60}" for number in range(100))


@dataclass(frozen=True)
class BigSharesOptions:
    """Options of the measurement.

    Attributes:
        shape: A name in `SHAPES`.
        weight_type: Of its matrices.
        num_tokens: Of each answer.
        num_answers: Number of concurrent answers.
        workload: What the mesh is to hold besides weights.
        folder: Where the model and logs go; None: a temporary one, removed afterwards.
    """

    shape: str
    weight_type: WeightType
    num_tokens: int
    num_answers: int
    workload: Workload
    folder: Path | None = None


@dataclass(frozen=True)
class BigShares:
    """Result of the measurement.

    Attributes:
        model_bytes: Size of the model's file.
        layers: Of each stage, for people.
        footprints: Of each stage, with the most that its process ever held once the mesh served.
        num_tokens: That were answered.
    """

    model_bytes: int
    layers: tuple[str, ...]
    footprints: tuple[Footprint, ...]
    num_tokens: int


def measure_big_shares(options: BigSharesOptions) -> BigShares:
    """Measure it.

    Raises:
        ClusterError: If no lab can be made here.
        MeshError: If the mesh does not come up, or does not answer.
    """
    reason = lab_supported()
    if reason is not None:
        raise ClusterError(reason)
    workload = options.workload
    with ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mesh-big-shares-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        model = folder / "random.gguf"
        log.info("writing_model", shape=options.shape, type=options.weight_type)
        write_random_gguf(model, SHAPES[options.shape], options.weight_type)
        facts = read_model_facts(model)
        lab = stack.enter_context(Lab(_NUM_STAGES + 1, shared=[folder]))
        serve = ["--speculate", "off", "--parallel", str(workload.num_slots)]
        serve += ["--ctx-size", str(workload.ctx_size), "--kv-type", workload.kv_type]
        mesh = MeshSystem(lab, model, folder, options=[*serve, *["--exact"] * workload.is_exact])
        stack.callback(mesh.kill)
        log.info("starting", hosts=_NUM_STAGES)
        mesh.start(timeout_s=600.0)
        client = stack.enter_context(Client(lab))
        # It looks every second from now on: what is only there while a stage loads is another matter.
        watch = stack.enter_context(MemoryWatch(lab, _LOOK_S))
        asks = tuple(
            Ask(
                COMPLETION_PATH,
                {
                    "prompt": f"w{number} {_PROMPT}",
                    "temperature": 0,
                    "max_tokens": options.num_tokens,
                    **mesh.fields,
                },
            )
            for number in range(options.num_answers)
        )
        answers = client.ask(Batch(mesh.port, asks, num_at_once=options.num_answers)).answers
        time.sleep(3 * _LOOK_S)
        stages = get_json(lab, 0, mesh.port, "/mesh/status")["stages"]
        hosts = [int(stage["host"].removeprefix("host")) for stage in stages]
        found = footprints(stages, hosts, StageSizes(facts, workload), tuple(watch.samples))
        mesh.stop()
        return BigShares(
            model_bytes=facts.file_bytes,
            layers=tuple("[{}, {})".format(*stage["layers"]) for stage in stages),
            footprints=tuple(found),
            num_tokens=sum(answer.num_tokens for answer in answers),
        )


_MB = 1e6
_HEADS = ("stage", "host", "layers", "weights", "KV cache", "stage's process", "the rest", "within 300 MB")


def shares_table(found: Sequence[Footprint], layers: Sequence[str]) -> str:
    """A line for each stage; sizes in MB.

    Args:
        found: Stages, in order.
        layers: What each holds, for people.
    """
    return markdown_table(
        _HEADS,
        [
            (
                str(each.index),
                each.host,
                held,
                f"{each.weight_bytes / _MB:.0f}",
                f"{each.cache_bytes / _MB:.0f}",
                f"{each.process_bytes / _MB:.0f}",
                f"{each.overhead_bytes / _MB:.0f}",
                "yes" if each.is_within else "NO",
            )
            for each, held in zip(found, layers, strict=True)
        ],
    )


@click.command()
@click.option("--shape", default="1.1b", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--type", "weight_type", default="Q4_0", show_default=True, type=click.Choice(["Q4_0", "Q8_0"]))
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="Of each answer.")
@click.option(
    "--answers", default=2, show_default=True, type=click.IntRange(1, 16), help="Asked for at once."
)
@click.option("--ctx-size", default=2048, show_default=True, type=click.IntRange(256, 4096))
@click.option("--parallel", default=4, show_default=True, type=click.IntRange(1, 16))
@click.option("--exact", is_flag=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keep model and logs here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    *,
    shape: str,
    weight_type: WeightType,
    tokens: int,
    answers: int,
    ctx_size: int,
    parallel: int,
    exact: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Run a random model of a billion parameters over three lab hosts, and see what each of them holds."""
    set_up_logs()
    workload = Workload(ctx_size, parallel, is_exact=exact)
    options = BigSharesOptions(shape, weight_type, tokens, answers, workload, folder)
    try:
        found = measure_big_shares(options)
    except MeshError as error:
        sys.exit(f"error: {error.message}")
    is_within = all(each.is_within for each in found.footprints)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"within": is_within}))
    else:
        click.echo(
            f"{SHAPES[shape].num_parameters / 1e9:.2f} billion parameters in {weight_type}, "
            f"{found.model_bytes / 1e6:.0f} MB, {found.num_tokens} tokens answered; sizes in MB\n"
        )
        click.echo(shares_table(found.footprints, found.layers))
    sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
