"""`atoll plan --weights`: bytes against parameter counts, ranks against Megatron's own numbering."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.parallel_state import RankGenerator

from atoll.cli.main import main
from atoll.cli.plan_weights import (
    CASES,
    LINKS,
    estimate_push,
    links_of,
    replica_shard_layouts,
    trainer_shard_layouts,
)
from atoll.config.load import validate
from atoll.config.resolve import resolve
from atoll.config.schema import ParallelConfig, TrainerSection, WeightsSection
from atoll.runtime.memory import rank_memory
from atoll.runtime.model_spec import Experts
from atoll.wire.types import ShardLayout
from tests.builders import model_spec

SPEC = model_spec(
    vocab_size=256,
    num_layers=4,
    qkv_bias=False,
    qk_norm=True,
    experts=Experts(num=4, per_token=2, intermediate_size=8, norm_topk_prob=True),
)
LAYOUT = ParallelConfig(tensor=2, sequence=True, pipeline=2, expert=4, data=4)  # 16 ranks


def sizes(shard_layout: ShardLayout) -> int:
    return int((shard_layout.boxes["rows"] * shard_layout.boxes["columns"]).sum())


def test_ranks_are_numbered_as_megatron_does() -> None:
    """Its groups along an axis are the ranks that differ only along that axis."""
    ranks = trainer_shard_layouts(SPEC, LAYOUT)
    dense = RankGenerator(tp=2, ep=1, dp=4, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    experts = RankGenerator(tp=1, ep=4, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")

    def held(rank: int, of_experts: bool) -> set[tuple[object, ...]]:
        boxes = ranks[rank].boxes.tolist()
        named = ((ranks[rank].tensors[box[0]], *box[1:5]) for box in boxes)
        return {box for box in named if (".experts." in str(box[0])) == of_experts}

    for groups, axis, of_experts in ((dense, "dp", False), (experts, "dp", True)):
        copies = groups.get_ranks(axis)
        assert len({frozenset(held(group[0], of_experts)) for group in copies}) == len(copies)
        for group in copies:
            assert all(held(rank, of_experts) == held(group[0], of_experts) for rank in group)
    for rank, shard_layout in enumerate(ranks):
        assert sizes(shard_layout) * 2 == rank_memory(SPEC, section(LAYOUT), rank // 8, "update").parameters


def section(parallel: ParallelConfig) -> TrainerSection:
    return TrainerSection(parallel=parallel, dtype="bfloat16")


def test_virtual_stages_take_turns() -> None:
    """Two stages of two pieces each, of one layer: stage 0 has layers 0 and 2."""
    first, second = trainer_shard_layouts(SPEC, ParallelConfig(pipeline=2, virtual_pipeline=2))
    assert {name.split(".")[2] for name in first.tensors if ".layers." in name} == {"0", "2"}
    assert {name.split(".")[2] for name in second.tensors if ".layers." in name} == {"1", "3"}
    assert "model.embed_tokens.weight" in first.tensors
    assert "lm_head.weight" in second.tensors


def test_a_replica_keeps_a_tied_embedding_once() -> None:
    tied = replace(SPEC, tied=True)
    whole = sizes(trainer_shard_layouts(tied, ParallelConfig())[0])
    assert whole == sizes(trainer_shard_layouts(SPEC, ParallelConfig())[0]) - 256 * 16
    assert sizes(replica_shard_layouts(tied, 1)[0]) == whole


@pytest.mark.parametrize(
    ("number", "parameters"), [(0, 1_543_714_304), (1, 7_615_616_512)], ids=["1.5B", "7B"]
)
def test_a_replica_gets_its_own_part_once(number: int, parameters: int) -> None:
    """Parameter counts of the model cards, two bytes each; a rank receives over one link, and each round
    takes a millisecond of calls."""
    found = estimate_push(CASES[number])
    assert found.received == 2 * parameters
    assert found.seconds["100G"] == pytest.approx(2 * parameters / 10e9 + found.rounds * 1e-3, rel=0.01)
    assert found.seconds.keys() == LINKS.keys()
    assert found.sent == pytest.approx(found.received / found.trainer_ranks, rel=0.05)


@pytest.mark.parametrize(("transport", "senders"), [("shm", 8), ("nccl", 2)])
def test_over_nccl_two_of_eight_copies_send(transport: str, senders: int) -> None:
    weights = WeightsSection.model_validate({"transport": transport})
    found = estimate_push(replace(CASES[0], max_senders=weights.max_senders))
    assert found.sent == pytest.approx(found.received / senders, rel=0.05)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""
        [run]
        name = "toy"
        steps = 1
        [model]
        path = "{model}"
        [data]
        train = [{{ path = "unused.jsonl" }}]
        """
    )
    assert main(["plan", "--weights", "--json", str(run_file), "trainer.parallel.data=2"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    # embedding, final norm; per layer q, k, v, o, their norms, gate, up, down, two norms; float32
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["plan", "--weights", str(run_file), "trainer.parallel.data=2"]) == 0
    numbers = [f"{found['sent'] / 1e9:.3g}", *(f"{seconds:.2g}" for seconds in found["seconds"].values())]
    assert set(numbers) <= set(capsys.readouterr().out.split())  # none of them is cut
    layer = 16 * 16 + 2 * 8 * 16 + 16 * 16 + 2 * 4 + 3 * 16 * 24 + 2 * 16
    assert found["received"] == 4 * (256 * 16 + 16 + 2 * layer)
    assert found["trainer"] == "DP2"
    assert found["tp_size"] == 1
    assert found["links"] == ["shm"]  # the local engine's


@pytest.mark.parametrize(
    ("replica", "links"), [("2", ("PCIe5", "NVLink")), ("node1:0", ("100G", "400G"))], ids=["host", "hosts"]
)
def test_the_links_of_a_placement(replica: str, links: tuple[str, ...]) -> None:
    tree = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "m"},
        "data": {"train": [{"path": "x.jsonl"}]},
        "coordinator": {"host": "10.0.0.1"},
        "rollout": {"engine": "sglang"},
        "placement": {"gpus": {"actor": "0", "rollout": [replica]}},
    }
    assert links_of(resolve(validate(tree, "toy"), range(3))) == links


def test_memory_is_planned_for_a_named_run_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory"]) == 2
    assert "name it" in capsys.readouterr().err
