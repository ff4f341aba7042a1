"""Value models against transformers: values, updates, checkpoints, folders. One launch per layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from atoll.config.schema import OptimizerConfig, ParallelConfig
from atoll.runtime.errors import UserError
from atoll.trainer.checkpoint import Checkpointer
from atoll.trainer.megatron.hf import export_hf
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.megatron.shards import boxes_of
from atoll.trainer.roles import build_roles, join_ranks
from atoll.trainer.step import Learner
from atoll.wire.types import StepKey, ValueBatch
from tests.attention_trees import Tree, draw_tree
from tests.builders import run_config
from tests.conftest import write_tokenizer
from tests.torch_ranks import run_ranks
from tests.trainer_models import critic_learner, policy_forward, policy_learner

ADAMW = OptimizerConfig(learning_rate=1e-3, weight_decay=0.5, max_grad_norm=0.5)
CLIP = 0.2
STEPS = 3


@dataclass(frozen=True)
class Reference:
    batches: list[ValueBatch]
    metrics: list[dict[str, float]]
    first_values: np.ndarray  # [T] of the first batch before any step
    last_values: np.ndarray  # [T] of the first batch after all steps


@pytest.fixture(scope="module")
def value_folder(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_qwen2 with other weights, and a value head."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("value")
    model = AutoModelForSequenceClassification.from_pretrained(tiny_qwen2, num_labels=1, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def classifier(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def token_values(model: Any, tree: Tree) -> Tensor:
    """[T] the score head after each token, from padded rows."""
    hidden = model.model(input_ids=tree.ids_RL, attention_mask=tree.mask_RL).last_hidden_state
    return model.score(hidden)[tree.row_T, tree.column_T, 0]  # type: ignore[no-any-return]


def reference_loop(folder: Path) -> Reference:
    """Padded batches, torch.optim.AdamW, the clipped value loss: nothing of the trainer."""
    model = classifier(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAMW.learning_rate, weight_decay=ADAMW.weight_decay, betas=(0.9, 0.999)
    )
    trees = [draw_tree(seed) for seed in range(STEPS)]
    first_values = token_values(model, trees[0]).detach().numpy()
    batches, reported = [], []
    for step, tree in enumerate(trees):
        rng = np.random.default_rng(step)
        trained = torch.from_numpy(tree.trained)
        before = torch.from_numpy(tree.segments.predecessors)[trained]
        values = token_values(model, tree)[before]  # of the state before each trained token
        old = values.detach() + torch.from_numpy(rng.normal(0, 0.3, len(trained))).float()
        returns = torch.from_numpy(rng.normal(size=len(trained))).float()
        weights = torch.from_numpy(rng.uniform(0.01, 0.05, len(trained))).float()
        free = (values - returns) ** 2
        clipped = (torch.minimum(torch.maximum(values, old - CLIP), old + CLIP) - returns) ** 2
        loss = (weights * 0.5 * torch.maximum(free, clipped)).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.max_grad_norm))
        optimizer.step()
        batches.append(ValueBatch(tree.segments, *(spread(tree, x) for x in (weights, old, returns))))
        reported.append(
            {
                "critic/vf_loss": loss.item(),
                "critic/vf_clipfrac": (clipped > free).float().mean().item(),
                "critic/vpred_mean": values.mean().item(),
                "critic/num_tokens": len(trained),
                "critic/grad_norm": norm,
                "critic/lr": ADAMW.learning_rate,
                "critic/skipped_step": 0,
            }
        )
    return Reference(batches, reported, first_values, token_values(model, trees[0]).detach().numpy())


def spread(tree: Tree, values_N: Tensor) -> np.ndarray:
    """[T] the trained tokens' values, 0 elsewhere."""
    values_T = np.zeros(len(tree.samples), np.float32)
    values_T[tree.trained] = values_N.numpy()
    return values_T


def update(learner: Learner, step: int, batch: ValueBatch) -> dict[str, float]:
    key = StepKey("a3f0", step, 0, "critic")
    return learner.forward_backward(key, batch) | learner.optim_step(key, ADAMW.learning_rate)


def check_layout(
    value_folder: Path,
    policy_folder: Path,
    other: Path,
    target: Path,
    reference: Reference,
    parallel: ParallelConfig,
) -> None:
    initialize_parallel(parallel)
    check_cuts(value_folder, reference.batches[0])
    learner = critic_learner(value_folder, ADAMW, CLIP)
    check_updates(learner, reference)
    check_checkpoint(learner, policy_folder, target / "checkpoint", reference)
    check_foreign_checkpoint(learner, policy_folder, target / "policy")
    check_export(learner, target / "export")
    check_loading(value_folder, policy_folder, other, learner)


def check_updates(learner: Learner, reference: Reference) -> None:
    segments = reference.batches[0].segments
    np.testing.assert_allclose(learner.forward.compute_values(segments), reference.first_values, atol=1e-5)
    for step, batch in enumerate(reference.batches):
        got, expected = update(learner, step, batch), reference.metrics[step]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            tolerance = {"rtol": 1e-4} if name == "critic/grad_norm" else {"rtol": 0, "atol": 1e-5}
            np.testing.assert_allclose(got[name], value, **tolerance, err_msg=f"step {step}: {name}")
    np.testing.assert_allclose(learner.forward.compute_values(segments), reference.last_values, atol=1e-4)


def check_split(folder: Path, reference: Reference, parallel: ParallelConfig) -> None:
    initialize_parallel(parallel)
    settings = ModelSettings(sequence_parallel=parallel.sequence)
    check_updates(critic_learner(folder, ADAMW, CLIP, settings=settings), reference)


def check_cuts(folder: Path, batch: ValueBatch) -> None:
    """Values and gradients do not depend on how the batch is cut."""
    found = []
    for max_tokens, attention in ((100_000, "shared_prefix"), (20, "shared_prefix"), (30, "segments")):
        learner = critic_learner(folder, ADAMW, CLIP, max_tokens, attention)
        loss = learner.forward_backward(StepKey("a3f0", 0, 0, "critic"), batch)["critic/vf_loss"]
        finalize_model_grads(learner.chunks)
        gradient = torch.cat([p.main_grad.flatten() for p in learner.chunks[0].parameters()])
        found.append((loss, gradient, learner.forward.compute_values(batch.segments)))
    for loss, gradient, values in found[1:]:
        np.testing.assert_allclose(loss, found[0][0], atol=1e-5)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(values, found[0][2], atol=1e-5)


def check_checkpoint(learner: Learner, policy_folder: Path, path: Path, reference: Reference) -> None:
    """The head included: a new critic whose head says 0 goes on exactly where the saved one does."""
    checkpointer = Checkpointer()
    checkpointer.save(learner, path).result()
    resumed = critic_learner(policy_folder, ADAMW, CLIP)
    segments = reference.batches[0].segments
    assert not resumed.forward.compute_values(segments).any()
    checkpointer.load(resumed, path)
    for (name, got), expected in zip(
        resumed.model.output.named_parameters(), learner.model.output.parameters(), strict=True
    ):
        assert torch.equal(got, expected), name
    then = [update(each, STEPS, reference.batches[1]) for each in (learner, resumed)]
    assert then[0] == then[1]
    np.testing.assert_array_equal(*(each.forward.compute_values(segments) for each in (learner, resumed)))


def check_foreign_checkpoint(learner: Learner, policy_folder: Path, path: Path) -> None:
    checkpointer = Checkpointer()
    checkpointer.save(policy_learner(policy_forward(policy_folder), ADAMW), path).result()
    with pytest.raises(UserError, match="its head is language, expected value"):
        checkpointer.load(learner, path)


def check_export(learner: Learner, target: Path) -> None:
    """transformers reads bit-equal weights."""
    model = learner.model
    export_hf(model, target)
    dist.barrier()
    theirs = classifier(target)
    weights = theirs.state_dict()
    compared = set()
    for name, box, memory in boxes_of(model):
        rows, columns = (
            slice(box[at], box[at] + box[n]) for at, n in (("row", "rows"), ("column", "columns"))
        )
        assert torch.equal(memory, weights[name].view(len(weights[name]), -1)[rows, columns]), name
        compared.add(name)
    assert compared == weights.keys()


def check_loading(value_folder: Path, policy_folder: Path, other: Path, trained: Learner) -> None:
    """A critic takes a policy's weights and keeps its head, until its first update."""
    critic = critic_learner(value_folder, ADAMW, CLIP)
    head = critic.model.output.output_layer.weight.detach().clone()
    assert head.any()
    critic.load_hf(policy_folder)
    assert torch.equal(critic.model.output.output_layer.weight, head)
    expected = critic_learner(policy_folder, ADAMW, CLIP).model.output
    for (name, got), want in zip(critic.model.output.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want) or name == "output_layer.weight", name
    with pytest.raises(UserError, match="holds another model than the one that it is loaded into: its qkv"):
        critic.load_hf(other)
    with pytest.raises(UserError, match="the critic has made 4 updates"):
        trained.load_hf(policy_folder)


def check_scorer(folder: Path, policy_folder: Path) -> None:
    """A reward model only answers: transformers' own logits at the last tokens, and no gradient buffers."""
    config = run_config(
        model={"path": policy_folder}, reward_model={"path": folder, "max_tokens_per_microbatch": 40}
    )
    join_ranks(config, "reward_model")
    roles = build_roles(config, "reward_model")
    assert roles.learner is None
    assert not any(p.requires_grad for p in roles.forwards["reward_model"].model.output.parameters())
    tree = draw_tree(7)
    values = roles.forwards["reward_model"].compute_values(tree.segments)
    last_tokens = tree.segments.offsets[1:][tree.segments.parents >= 0] - 1
    with torch.no_grad():
        logits = classifier(folder)(input_ids=tree.ids_RL, attention_mask=tree.mask_RL).logits[:, 0]
    assert logits.std() > 0.1
    np.testing.assert_allclose(values[last_tokens], logits, atol=1e-5)


def test_a_reward_model_scores_as_transformers_does(value_folder: Path, tiny_qwen2: Path) -> None:
    """The assertions are in check_scorer, which runs where the ranks are."""
    run_ranks(check_scorer, 1, value_folder, tiny_qwen2)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(), id="one"),
        pytest.param(ParallelConfig(tensor=2), id="tp2", marks=pytest.mark.long),
        pytest.param(ParallelConfig(context=2), id="cp2", marks=pytest.mark.long),
    ],
)
def test_a_critic_equals_a_plain_loop(
    value_folder: Path, tiny_qwen2: Path, tiny_qwen3: Path, tmp_path: Path, parallel: ParallelConfig
) -> None:
    """The assertions are in check_layout, on every rank."""
    args = (value_folder, tiny_qwen2, tiny_qwen3, tmp_path, reference_loop(value_folder), parallel)
    run_ranks(check_layout, parallel.world_size, *args)


@pytest.mark.long
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tensor=2, sequence=True), ParallelConfig(pipeline=2)], ids=["tp2_sp", "pp2"]
)
def test_a_critic_split_by_tokens_or_layers_equals_a_plain_loop(
    value_folder: Path, parallel: ParallelConfig
) -> None:
    """The assertions are in check_updates, on every rank."""
    run_ranks(check_split, 2, value_folder, reference_loop(value_folder), parallel)
