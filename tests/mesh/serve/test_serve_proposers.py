"""Who proposes for a request, in which order."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.draft.drafter import read_drafter
from mesh.engine import GenerationRequest, SpeculationLimits, SpeculationMode
from mesh.serve.proposers import Proposers
from spanmesh_proto.row_ids import FIRST_ROW_ID
from speculative.draft.context import DraftOptions
from speculative.draft.worker import DraftProposer
from speculative.proposer import Draft, DrafterKind
from speculative.remote_drafts import RemoteDrafter, RemoteDraftProposer
from stages.slicing.model_facts import read_model_facts
from tests.support.block_drafters import BlockDrafter
from tests.support.draft_models import running_draft
from tests.support.tiny_models import TinyModel

ASKED = GenerationRequest((1, 2, 3), 8)


@pytest.mark.parametrize(
    ("server", "wanted", "names"),
    [
        ("auto", None, ["prediction", "history", "ngram"]),
        ("auto", "ngram", ["prediction", "history", "ngram"]),
        ("auto", "draft", []),
        ("auto", "off", []),
        ("ngram", "auto", ["prediction", "history", "ngram"]),
        ("draft", None, []),
    ],
)
def test_cheapest_first(server: SpeculationMode, wanted: SpeculationMode | None, names: list[str]) -> None:
    request = GenerationRequest(
        (1, 2, 3), 8, speculation=SpeculationLimits(wanted), prediction=(4, 5), history_key="ann"
    )
    assert [proposer.name for proposer in Proposers(server, keeps_history=True)(request)] == names


def test_only_what_was_given() -> None:
    assert [proposer.name for proposer in Proposers("auto", keeps_history=True)(ASKED)] == ["ngram"]
    known = GenerationRequest((1, 2, 3), 8, history_key="ann")
    assert [proposer.name for proposer in Proposers("auto")(known)] == ["ngram"]


def test_a_draft_model_is_told_whose_text_it_reads(tmp_path: Path) -> None:
    path = TinyModel("llama").write(tmp_path / "tiny.gguf")
    with running_draft(path, DraftOptions(ctx_size=64)) as draft:
        for client in ("ann", None):
            proposer = Proposers("draft", draft=draft)(replace(ASKED, client=client))[0]
            assert isinstance(proposer, DraftProposer)
            assert proposer._session.client == client
            proposer.close()
        answers = tmp_path / "answers.jsonl"
        answers.write_text('{"tokens": [7, 8, 9]}')
        replayed = replace(ASKED, speculation=SpeculationLimits("replay"))
        factory = Proposers("auto", draft=draft, replay_path=answers, replay_rates=(0.5,))
        assert [proposer.name for proposer in factory(replayed)] == ["replay"]
        # It knows no rows but those of tokens.
        assert Proposers("draft", draft=draft)(replace(ASKED, prompt=(1, FIRST_ROW_ID, 3))) == []


def test_an_answer_is_proposed_again_to_the_same_key_alone() -> None:
    proposers = Proposers("ngram", keeps_history=True)
    answer = [7, 8, 9, 10, 11]
    for key, known in (("ann", False), ("ann", True), ("bob", False)):
        request = GenerationRequest((1, 2, 3), 8, history_key=key)
        history = proposers(request)[0]
        history.extend(request.prompt)
        assert list(history.propose(5).tokens) == (answer if known else [])
        history.extend(answer)
        history.close()


@pytest.mark.parametrize(
    ("most_drafted", "rates", "mode", "name"),
    [
        (4, (0.5, 0.25), "replay", "dspark"),
        (4, (), "replay", "replay"),
        (1, (0.5,), "replay", "dspark"),
        (4, (0.5, 0.25), "draft", "dspark"),
    ],
)
def test_a_drafter_of_blocks_computes_what_is_replayed(
    most_drafted: int, rates: tuple[float, ...], mode: SpeculationMode, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"tokens": [7, 8, 9]}')
    target = TinyModel("qwen3").write(tmp_path / "qwen3.gguf")
    drafter = BlockDrafter(DrafterKind.DSPARK).write(target, tmp_path / "dspark.gguf")
    options = DraftOptions(ctx_size=64, draft_max=most_drafted)
    width = read_drafter(drafter, read_model_facts(target)).feature_width
    with running_draft(drafter, options, kind=DrafterKind.DSPARK, feature_width=width) as draft:
        factory = Proposers("auto", draft=draft, replay_path=path, replay_rates=rates)
        (proposer,) = factory(replace(ASKED, speculation=SpeculationLimits(mode)))
        assert proposer.name == name
        if isinstance(proposer, DraftProposer):
            instead = proposer._session.replace
            assert (instead is not None) == (mode == "replay")
            if instead is not None:
                assert instead([1, 2, 3, 7], 4)[1] == rates
        proposer.close()


def test_an_assistant_drafts_what_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"tokens": [7, 8, 9]}')
    replayed = replace(ASKED, speculation=SpeculationLimits("replay"))
    factory = Proposers("auto", assistant=RemoteDrafter(4), replay_path=path, replay_rates=(1.0, 1.0))
    (proposer,) = factory(replayed)
    assert isinstance(proposer, RemoteDraftProposer)
    proposer.extend([*ASKED.prompt, 7])
    proposer.take_draft(Draft(4, (1, 1), (0.5, 0.5), 2.0))
    assert proposer.propose(4).tokens == (8, 9)
    exact = Proposers("auto", assistant=RemoteDrafter(4), replay_path=path)
    assert [each.name for each in exact(replayed)] == ["replay"]
