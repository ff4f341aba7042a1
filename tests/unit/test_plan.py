"""`atoll plan --memory`: bytes worked out by hand, who shares a device, what is said where nothing fits."""

import json
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.config.schema import ParallelConfig, TrainerSection
from atoll.runtime.memory import rank_memory
from atoll.runtime.model_spec import read_spec

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# qkv 128 x 64 and its bias, projection 64 x 64, three of 64 x 128, two norms
LAYER = 128 * 64 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64
GIB = 1 << 30
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        [run]
        name = "toy"
        steps = 1
        [model]
        path = "{tmp_path}"
        [data]
        train = [{{ path = "unused.jsonl" }}]
        [algorithm.kl]
        [trainer]
        dtype = "bfloat16"
        """
    )
    return file


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code = main(["plan", "--memory", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def test_bytes_by_hand(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(tmp_path)
    whole = 4 * LAYER + 2 * 1000 * 64 + 64  # embedding, output layer, norm
    memory = rank_memory(spec, TrainerSection(dtype="bfloat16"), 0, "update")
    assert memory.parameters == 2 * whole
    assert memory.gradients == 4 * whole + 2 * 1000 * 64  # and the embedding's own
    assert memory.optimizer == 12 * whole

    staged = TrainerSection(
        dtype="float32", parallel=ParallelConfig(pipeline=2, data=2), optimizer={"distributed": True}
    )
    first, last = (rank_memory(spec, staged, stage, "update") for stage in range(2))
    assert first.parameters == 4 * (2 * LAYER + 1000 * 64)
    assert last.parameters == 4 * (2 * LAYER + 1000 * 64 + 64)
    assert (
        first.optimizer == 8 * (2 * LAYER + 1000 * 64) // 2
    )  # float32 weights need no copy; two ranks share
    # the first stage keeps two micro-batches of two layers, the last one and what its output needs
    extra = 3 * 64 * 4 * 8192
    assert first.activations == 2 * (last.activations - extra)

    full = rank_memory(spec, TrainerSection(dtype="float32", recompute="full"), 0, "update")
    # of 8192 tokens: four layers' inputs, cosines and sines of 16, the final norm's input, output, rows
    assert full.activations == 8192 * 4 * (4 * 64 + 2 * 16 + 3 * 64)


def test_roles_on_one_device_add_up(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = planned(capsys, run_file)
    assert code == 0
    assert plan["warnings"] == []
    assert [(row["role"], row["num_ranks"]) for row in plan["ranks"]] == [("actor", 1), ("reference", 1)]
    actor, reference = plan["ranks"]
    assert reference["update"]["gradients"] == reference["update"]["optimizer"] == 0
    pushed = 2 * 4 * actor["update"]["parameters"] // 2  # two halves in the engine's float32
    # models on one GPU are off-loaded while the other one computes
    assert actor["host"] == pushed + actor["update"]["parameters"] + actor["update"]["optimizer"]

    need = sum(actor["update"].values())
    resting = reference["update"]["framework"]
    asking = sum(actor["forward"].values()) + sum(reference["forward"].values())
    capacity = (max(need + resting, asking) - 1) / GIB
    code, plan = planned(capsys, run_file, "--gpu-memory", capacity)
    assert code == 1
    assert "actor (stage 0) and reference (stage 0)" in plan["warnings"][0]
    assert "lower " in plan["warnings"][0] or "set " in plan["warnings"][0]


def test_offload_takes_a_resting_model_away(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for offload in ("false", "true"):
        _, plan = planned(capsys, run_file, f"reference.offload={offload}", "reference.placement=colocated")
        rows[offload] = plan["ranks"][1]
    assert rows["true"]["forward"] == rows["false"]["forward"]
    assert rows["true"]["host"] == rows["true"]["update"]["parameters"] > rows["false"]["host"] == 0
    assert rows["true"]["update"]["framework"] == 0  # it lives in the actor's processes


def test_the_table_names_every_role(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", str(run_file)]) == 0
    out = capsys.readouterr().out
    assert "GiB per rank" in out
    assert "actor" in out
    assert "reference" in out


def test_a_folder_without_config_is_said(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file.parent / "config.json").unlink()
    assert main(["plan", "--memory", str(run_file)]) == 2
    assert "is not a model folder" in capsys.readouterr().err


QWEN = {"1": (896, 4864, 24, 14, 2, True), "8": (3584, 18944, 28, 28, 4, False)}
QWEN["2_hosts"] = (5120, 27648, 64, 40, 8, False)


@pytest.mark.parametrize(("example", "gib"), [("1", 24), ("8", 80), ("2_hosts", 80)])
def test_gpu_examples_fit(example: str, gib: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models of 0.5B, 7B and 32B by their config.json; replicas have room for 100 sequences and more."""
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    shape = dict(zip(f"{names} tie_word_embeddings".split(), QWEN[example], strict=True))
    config = CONFIG | shape | {"vocab_size": 152064, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = EXAMPLES / f"gpu_{example}.toml"
    code, plan = planned(capsys, file, f"model.path={tmp_path}", "--gpu-memory", gib)
    assert (code, plan["warnings"]) == (0, [])
    head = shape["hidden_size"] // shape["num_attention_heads"]
    tp_size = 4 if example == "2_hosts" else 1
    of_a_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] // tp_size * head * 2
    assert plan["replica"]["keys_and_values"] > 100 * 1024 * of_a_token


def test_a_replica_by_hand(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of a GPU for keys and values, and that colocated models take their context from it."""
    sglang = (
        "rollout={engine='sglang'}",
        "rollout.sglang.mem_fraction_static=0.75",
        "trainer.max_tokens_per_microbatch=64",
    )
    code, plan = planned(capsys, run_file, *sglang, "--gpu-memory", 16)
    assert (code, plan["placement"]["mode"]) == (0, "split")
    weights = 2 * (4 * LAYER + 2 * 1000 * 64 + 64)
    # SGLang pads the vocabulary of 1000 to 1024; a MiB of staging begun, 300 for each of two communicators
    weights += 2 * 2 * 24 * 64
    pushes = (-(-weights // (1 << 20)) + 600) << 20
    kept = {"weights": weights, "pushes": pushes, "reserve": 4 * GIB}
    assert plan["replica"] == kept | {"keys_and_values": 12 * GIB - weights - pushes}
    code, plan = planned(capsys, run_file, *sglang, "--gpu-memory", 2.6, "--gpus", 1)
    assert code == 1
    assert plan["placement"]["gpus"]["rollout"] == ["0"]
    (warning,) = (line for line in plan["warnings"] if line.startswith("rollout beside actor (stage 0)"))
    assert "GiB are left for keys and values, too little for one sequence of 1280 tokens" in warning
    frameworks = [row["update"]["framework"] for row in plan["ranks"]]
    assert frameworks == [GIB + 2 * weights, GIB]  # the actor's segment has two halves


def test_communicators_and_fragmentation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = read_spec(tmp_path)
    alone = rank_memory(spec, TrainerSection(dtype="bfloat16"), 0, "update")
    assert alone.framework == GIB
    assert alone.fragmentation == int(0.1 * (alone.activations + alone.working))
    # of all ranks, of the tensor-parallel ones, of the model's (the same ones), of the copies
    layout = ParallelConfig(tensor=2, data=4)
    ranks = rank_memory(spec, TrainerSection(dtype="bfloat16", parallel=layout), 0, "update")
    assert ranks.framework == GIB + 4 * GIB // 2
