"""Families that read pictures, with tiny random models and projectors, and those that are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.qualification.own_models import OWN_MODELS, gemma4_e
from tests.support import tiny_projectors
from tests.support.tiny_families import (
    HEAD,
    HEADS,
    HEADS_KV,
    N_EMBD,
    N_FF_EXP,
    TINY_FAMILIES,
    Noise,
    Tensors,
    TinyFamily,
    attention,
    dense,
    experts,
    head_norms,
)
from tests.support.tiny_models import TinyModel
from tests.support.tiny_projectors import write_projector
from tests.support.tiny_vision import MROPE_SECTIONS, OWN_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_VISION: Final = ("<|vision_start|>", "<|vision_end|>")
_CELLS: Final = [(row, column) for row in (1, 2, 3) for column in (1, 2, 3)]
_CONTROLS: Final[Mapping[str, tuple[str, ...]]] = {
    "idefics3": (
        *("\n\n", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row, column in _CELLS),
    ),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), ("<|image>", "<image|>")),
    **dict.fromkeys(("qwen2vl", "qwen25vl", "qwen3vl"), _VISION),
    **dict.fromkeys(("pixtral", "mistral3"), ("[IMG_END]",)),
    "internvl": ("<img>", "</img>"),
    "minicpmv": ("<image>", "</image>", "<slice>", "</slice>"),
    "lfm2": (
        *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        *(f"<|img_row_{row}_col_{column}|>" for row, column in _CELLS),
    ),
    "glm4v": ("<|begin_of_image|>", "<|end_of_image|>"),
    "kimivl": ("<|media_start|>", "<|media_end|>"),
    "llama4": ("<|image_start|>", "<|image_end|>", "<|image|>"),
}
# Every third layer of LFM2 has attention.
_LFM2_LAYERS: Final = 6
# Of E2B, by which libmtmd tells that their rows do not see all.
_GEMMA4_E_WIDTH: Final = 1536


@dataclass(frozen=True)
class PictureFamily:
    """A family, or another kind of model for the same projector."""

    model: TinyModel | TinyFamily
    """Its text model."""
    projector: str
    """Name of the function of `tests.support.tiny_projectors` that writes its projector."""
    write_own: Callable[[Path], Path] | None = None
    """Writes it instead."""

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both; returns the model's file and the projector's."""
        model, projector = folder / "model.gguf", folder / "mmproj-model.gguf"
        controls = _CONTROLS.get(self.projector, ())
        if isinstance(self.model, TinyFamily):
            replace(self.model, controls=controls).write(model)
        else:
            self.model.write(model, controls=controls)
        write = self.write_own or getattr(tiny_projectors, self.projector)
        return model, write(projector)


def _as(name: str, architecture: str, **metadata: object) -> TinyFamily:
    """A tiny family with another name, and more metadata."""
    family = TINY_FAMILIES[name]
    return replace(family, architecture=architecture, metadata={**family.metadata, **metadata})  # type: ignore[dict-item]


def _vision(noise: Noise, _layer: int, *, has_norms: bool, has_biases: bool) -> Tensors:
    tensors = attention(noise) | dense(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)}
    if has_biases:
        sizes = {"q": HEADS * HEAD, "k": HEADS_KV * HEAD, "v": HEADS_KV * HEAD}
        tensors |= {f"attn_{part}.bias": noise.vector(size, 0.0) for part, size in sizes.items()}
    return tensors | (head_norms(noise) if has_norms else {})


def _lfm2(noise: Noise, layer: int) -> Tensors:
    common = dense(noise) | {"ffn_norm.weight": noise.vector(N_EMBD)}
    if _LFM2_KV_HEADS[layer]:
        return common | attention(noise) | head_norms(noise)
    return common | {
        "attn_norm.weight": noise.vector(N_EMBD),
        "shortconv.conv.weight": noise.matrix(N_EMBD, 3),
        "shortconv.in_proj.weight": noise.matrix(3 * N_EMBD, N_EMBD),
        "shortconv.out_proj.weight": noise.matrix(N_EMBD, N_EMBD),
    }


def _glm4(noise: Noise, _layer: int) -> Tensors:
    norms = ("post_attention_norm", "ffn_norm", "post_ffw_norm")
    inner = dense(noise)
    del inner["ffn_gate.weight"]
    inner["ffn_up.weight"] = noise.matrix(2 * len(inner["ffn_up.weight"]), N_EMBD)
    return attention(noise) | inner | {f"{name}.weight": noise.vector(N_EMBD) for name in norms}


def _qwen35moe(noise: Noise, layer: int) -> Tensors:
    tensors = OWN_FAMILIES["qwen35"].layer(noise, layer)
    for name in dense(noise):
        del tensors[name]
    tensors["ffn_gate_inp_shexp.weight"] = noise.vector(N_EMBD, 0.0)
    return tensors | experts(noise) | dense(noise, "_shexp", N_FF_EXP)


_LFM2_KV_HEADS: Final = [HEADS_KV * (layer % 3 == 2) for layer in range(_LFM2_LAYERS)]
_ATTENTION: Final = {
    key: value for key, value in TINY_FAMILIES["phi3"].metadata.items() if "sliding" not in key
}
_QWEN2VL: Final = TinyFamily(
    "qwen2vl",
    4,
    partial(_vision, has_norms=False, has_biases=True),
    _ATTENTION | MROPE_SECTIONS,
    (1, 2, 3),
)
_GLM4: Final = TinyFamily("glm4", 4, _glm4, _ATTENTION | MROPE_SECTIONS, (1, 2, 3))
_QWEN35MOE: Final = replace(
    OWN_FAMILIES["qwen35"],
    architecture="qwen35moe",
    layer=_qwen35moe,
    metadata={
        **OWN_FAMILIES["qwen35"].metadata,
        **{key: value for key, value in TINY_FAMILIES["qwen3next"].metadata.items() if "expert" in key},
    },
)
_LFM2: Final = TinyFamily(
    "lfm2",
    _LFM2_LAYERS,
    _lfm2,
    _ATTENTION | {"attention.head_count_kv": _LFM2_KV_HEADS, "shortconv.l_cache": 3},
    (1, 2, 3, 4, 5),
    final_norm="token_embd_norm",
)

PICTURE_FAMILIES: Final[Mapping[str, PictureFamily]] = {
    "LLaVA": PictureFamily(TinyModel("llama", n_layers=4), "llava"),
    "SmolVLM": PictureFamily(TinyModel("llama", n_layers=4), "idefics3"),
    "Granite 3 Vision": PictureFamily(TinyModel("granite", n_layers=4), "llava"),
    "Gemma 3": PictureFamily(TinyModel("gemma3", n_layers=6), "gemma3"),
    "Gemma 4": PictureFamily(OWN_MODELS["gemma4-dense"](2), "gemma4"),
    "Gemma 4 12B": PictureFamily(OWN_MODELS["gemma4-dense"](2), "gemma4_unified"),
    "Gemma 4 26B": PictureFamily(OWN_MODELS["gemma4-moe"](2), "gemma4"),
    "Gemma 4 E": PictureFamily(
        gemma4_e(1, n_embd=_GEMMA4_E_WIDTH),
        "gemma4",
        partial(tiny_projectors.gemma4, n_embd=_GEMMA4_E_WIDTH),
    ),
    "Qwen2-VL": PictureFamily(_QWEN2VL, "qwen2vl"),
    "Qwen2.5-VL": PictureFamily(_QWEN2VL, "qwen25vl"),
    "Qwen3-VL": PictureFamily(TINY_FAMILIES["qwen3vl"], "qwen3vl"),
    "Qwen3-VL MoE": PictureFamily(
        replace(_as("qwen3moe", "qwen3vlmoe", n_deepstack_layers=2, **MROPE_SECTIONS), n_layers=5), "qwen3vl"
    ),
    "Qwen3.5": PictureFamily(
        OWN_FAMILIES["qwen35"], "qwen3vl", partial(tiny_projectors.qwen3vl, num_deepstack=0)
    ),
    "Qwen3.5 MoE": PictureFamily(_QWEN35MOE, "qwen3vl", partial(tiny_projectors.qwen3vl, num_deepstack=0)),
    "Pixtral": PictureFamily(TinyModel("llama", n_layers=4), "pixtral"),
    "Mistral 3": PictureFamily(TinyModel("mistral3", n_layers=4), "mistral3"),
    "InternVL": PictureFamily(TinyModel("qwen2", n_layers=4), "internvl"),
    "MiniCPM-V": PictureFamily(
        TinyModel("qwen2", n_layers=4, n_embd=tiny_projectors.MINICPM_WIDTH, n_heads=8), "minicpmv"
    ),
    "LFM2-VL": PictureFamily(_LFM2, "lfm2"),
    "GLM-4.xV": PictureFamily(OWN_FAMILIES["glm4v"], "glm4v"),
    "GLM-4.1V": PictureFamily(_GLM4, "glm4v"),
    "CogVLM": PictureFamily(OWN_FAMILIES["cogvlm"], "cogvlm"),
    "Janus": PictureFamily(TinyModel("llama", n_layers=4), "janus"),
    "Kimi-VL": PictureFamily(TINY_FAMILIES["deepseek2"], "kimivl"),
    "Llama 4": PictureFamily(TINY_FAMILIES["llama4-short"], "llama4"),
    "Phi-4": PictureFamily(TINY_FAMILIES["phi3"], "phi4"),
    **{
        f"rows on {name}": PictureFamily(TINY_FAMILIES[name], "llava")
        for name in ("qwen3moe", "gpt-oss", "falcon-h1", "nemotron_h", "granitehybrid")
    },
}
"""By name. "rows on" is for models with any projector whose rows are nothing but embeddings."""


@dataclass(frozen=True)
class RefusedFamily:
    """A family that is not served with pictures, or in one stage only."""

    model: TinyModel | TinyFamily
    """Its text model."""
    kind: str
    """llama.cpp's name of its projector."""
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Metadata of a `TinyModel`."""
    is_for_pictures: bool = True

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the model, and a projector of which nothing but the header is read."""
        model = folder / "model.gguf"
        if isinstance(self.model, TinyFamily):
            self.model.write(model)
        else:
            self.model.write(model, arrays={key: list(numbers) for key, numbers in self.arrays})
        more = {"clip.has_vision_encoder": self.is_for_pictures or None}
        return model, write_projector(folder / "mmproj-model.gguf", self.kind, {}, {}, more)


_LLAMA: Final = TinyModel("llama", n_layers=2)
REFUSED_FAMILIES: Final[Mapping[str, RefusedFamily]] = {
    "HunyuanVL": RefusedFamily(_LLAMA, "hunyuanvl"),
    "DeepSeek-4 Vision": RefusedFamily(_LLAMA, "deepseek4v"),
    "GLM-4.xV without parts of positions": RefusedFamily(TINY_FAMILIES["glm4moe"], "glm4v"),
    "Granite 4 Vision": RefusedFamily(
        TinyModel("granite", n_layers=4), "granite4_vision", (("granite.deepstack_mapping", (-1, 0, 1, -1)),)
    ),
    "Gemma 3n": RefusedFamily(OWN_MODELS["gemma3n-dense"](1), "gemma3nv"),
    "sound (Ultravox)": RefusedFamily(_LLAMA, "ultravox", is_for_pictures=False),
    "sound (Qwen2-Audio)": RefusedFamily(_LLAMA, "qwen2a", is_for_pictures=False),
}
"""Those that are refused, each by its first reason."""
