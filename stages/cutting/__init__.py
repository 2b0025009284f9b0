"""Cutting a GGUF into stage files, each an ordinary smaller GGUF that unmodified llama.cpp loads."""

from stages.cutting.cache import StageCache, StageFile
from stages.cutting.cut import cut_stage
from stages.cutting.facts import ModelFacts, read_model_facts

__all__ = ["ModelFacts", "StageCache", "StageFile", "cut_stage", "read_model_facts"]
