"""Configs: what a file may be built on, and which combinations are refused with which words."""

import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import proxy_bypass

import openai
import pytest

from atoll.config.errors import ConfigError
from atoll.config.load import bypass_proxies_on_loopback, load, read_resolved, validate, write_resolved
from atoll.config.schema import CorrectionConfig, SamplingConfig
from tests.http_servers import raw_http, reply

EXAMPLES = Path(__file__).parents[2] / "examples"

TOY = """
[run]
name = "toy"
steps = 2

[model]
path = "model"

[[data.train]]
path = "train.parquet"
"""

SCORER = '{path = "m"}'
SET = '{ name = "%s", path = "v.parquet", num_samples = 4, sampling = { temperature = 1.0 } }'
GREEDY = SET.replace(", sampling = { temperature = 1.0 }", "%s")
SERVER = '{ kind = "reward", name = "%s", url = "http://host:1", protocol = "http" }'


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_can_be_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert load(path).run.name == path.stem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.mode=train_only", "data.train=[]"], "starts no rollout service: set data.replay"),
        (
            ["console.samples=3", "coordinator.dump=none"],
            'console.samples prints what coordinator.dump keeps: set coordinator.dump = "recent"',
        ),
        (["console.every=5"], "console.every applies to console.samples: set that, or remove it"),
        (["tracking.every=5"], "tracking.every applies to tracking.samples: set that, or remove it"),
        (
            ["tracking.samples=3", "coordinator.dump=none"],
            'tracking.samples sends what coordinator.dump keeps: set coordinator.dump = "recent"',
        ),
        (["data.train=[]"], "no training data: add a [[data.train]] table"),
        (
            ["coordinator.samples_per_prompt=1"],
            'algorithm.advantage = "grpo" compares the samples of a prompt: '
            "set coordinator.samples_per_prompt to 2 or more",
        ),
        (
            ["coordinator.server_secrets=['JUDGE TOKEN']"],
            "got 'JUDGE TOKEN', expected an environment variable",
        ),
        (["coordinator.server_secrets=['*']"], "got '*', expected an environment variable"),
        (["coordinator.server_secrets=['ATOLL_*']"], "ATOLL_* would let the run's own tokens be sent"),
        (["coordinator.server_networks=['10.0.0.0/8', '10.0.0.1/8']"], "server_networks.1"),
        (
            ["coordinator.samples_per_prompt=100_000_000"],
            "coordinator.prompts_per_step = 16 with samples_per_prompt = 100000000 are 1600000000 samples "
            "per step, expected at most 131072: lower one of them",
        ),
        (["coordinator.prompts_per_step=100_000"], "are 800000 samples per step, expected at most 131072"),
        (
            ['validation.sets=[{name="v", path="v.parquet", num_samples=100_000_000}]'],
            "num_samples: Input should be less than or equal to 131072",
        ),
        (["algorithm.num_minibatches=17"], "algorithm.num_minibatches = 17 is more than the 16 groups"),
        (
            ["algorithm.advantage=remax"],
            '"remax" compares each sample with a greedy one of the same prompt: '
            "set coordinator.greedy_baseline = true",
        ),
        (
            ["algorithm.advantage=remax", "coordinator.greedy_baseline=true", f"reward_model={SCORER}"],
            'algorithm.advantage = "remax" scores greedy samples by reward.graders only, without '
            "[reward_model]",
        ),
        (
            [
                "algorithm={advantage='remax', constraint={cost='exact_match'}}",
                "coordinator.greedy_baseline=true",
            ],
            "without [algorithm.constraint]",
        ),
        (
            ["algorithm.advantage=gdpo", "algorithm.kl.where=reward"],
            '"gdpo" combines reward.graders individually and would ignore algorithm.kl.where = "reward"',
        ),
        (["algorithm.advantage=gdpo", f"reward_model={SCORER}"], "would ignore [reward_model]"),
        (
            ["coordinator.greedy_baseline=true"],
            'coordinator.greedy_baseline generates a sample per prompt that "grpo" ignores',
        ),
        (["algorithm.advantage=gae"], '"gae" needs a value model: add a [critic] table'),
        (["algorithm.advantage=vapo"], '"vapo" needs a value model: add a [critic] table'),
        (
            ["algorithm.advantage=gae", "critic={}", "algorithm.constraint={cost='exact_match'}"],
            "which needs values of the cost: add a [cost_critic] table",
        ),
        (
            ["critic.warmup_steps=3"],
            '[critic]: algorithm.advantage = "grpo" does not use a critic: remove the table',
        ),
        (
            ["algorithm.advantage=gae", "critic={}", "cost_critic={}"],
            'such as "gae"; this run has no [algorithm.constraint] and "gae": remove the table',
        ),
        (
            ["cost_critic={}", "algorithm.constraint={cost='exact_match'}"],
            'such as "gae"; this run has an [algorithm.constraint] and "grpo": remove the table',
        ),
        (["reference.path=other"], "[reference] is used only by [algorithm.kl]: add that table, or remove"),
        (
            ["coordinator.partial_rollouts=true"],
            "no sequence is running at a push: set coordinator.max_staleness to 1 or more, or remove it",
        ),
        (
            ["coordinator.on_age=weigh"],
            'on_age = "weigh" applies to turns older than the trained version, but with max_staleness = 0 ',
        ),
        (["coordinator.on_age=cut"], "there are none: set coordinator.max_staleness to 1 or more, or remove"),
        (
            ["algorithm.kl.horizon=5"],
            "algorithm.kl.horizon applies to an adaptive coef: set algorithm.kl.targ",
        ),
        (["guards.window=5"], "guards.window applies to guards.reward_drop: set that, or remove it"),
        (["warmup.rows_per_step=5"], "[warmup] has steps = 0, which disables the warm-up: set warmup.steps"),
        (
            ["validation.every=5", "validation.best=sums/avg@1"],
            "validation.every, validation.best: nothing is validated: add [[validation.sets]]",
        ),
        (
            [f"validation.sets=[{SET % 'sums'}]", "validation.best=sums/avg@1"],
            'validation.best = "sums/avg@1" is not measured by any set: set it to one of '
            "sums/avg@4, sums/pass@4",
        ),
        (
            ["run.mode=supervised", 'validation={best="v/avg@1", sets=[{name="v", path="v.parquet"}]}'],
            "set it to one of v/nll",
        ),
        (
            [f"validation.sets=[{SET % 'sums'}, {SET % 'sums'}]"],
            '[[validation.sets]]: "sums" is the name of two sets: rename one',
        ),
        (
            [f"validation.sets=[{SET % 'warmup'}]"],
            '"warmup" is reserved for the metric of warmup.target_reward',
        ),
        (
            [f"validation.sets=[{GREEDY % ('sums', '')}]"],
            "validation set sums: num_samples = 4, but at temperature 0 all samples of a prompt are the same"
            ": set sampling.temperature = 1.0, or num_samples to 1",
        ),
        (
            [f"validation.sets=[{GREEDY % ('sums', ', sampling = { max_new_tokens = 8 }')}]"],
            "num_samples = 4, but at temperature 0",
        ),
        (
            ["run.mode=supervised", 'validation.sets=[{name="v", path="v.parquet", pass_score=0.5}]'],
            "remove num_samples, pass_score and sampling",
        ),
        (["coordinator.port=70000"], "coordinator.port: Input should be less than or equal to 65535"),
        (
            ["rollout.local.max_length=32", "rollout.sampling.max_new_tokens=100"],
            "rollout.sampling.max_new_tokens = 100 is never reached: rollout.local.max_length = 32 holds "
            "prompt and response: lower it, or raise the limit",
        ),
        (
            [
                "rollout={engine='sglang', sglang={context_length=512}}",
                'validation.sets=[{name="v", path="v.parquet", sampling={max_new_tokens=512}}]',
            ],
            "validation set v: sampling.max_new_tokens = 512 is never reached: rollout.sglang.context_length",
        ),
        (["data.replay=dumps"], 'run.mode = "train" generates what it trains on: remove data.replay'),
        (
            [
                "rollout.local.max_length=100",
                "data.max_prompt_tokens=90",
                "rollout.sampling.max_new_tokens=11",
            ],
            "data.max_prompt_tokens = 90 and rollout.sampling.max_new_tokens = 11 together exceed "
            "rollout.local.max_length = 100: lower one of them, or raise the limit",
        ),
        (
            ["rollout={engine='sglang', sglang={context_length=2048}}", "data.max_prompt_tokens=2000"],
            "together exceed rollout.sglang.context_length = 2048",
        ),
        (['rollout.sampling.stop=["a", ""]'], "rollout.sampling.stop.1: String should have at least 1 char"),
        (["run.name=.."], "run.name: String should match pattern"),
        (["run.name=."], "run.name: String should match pattern"),
        (["coordinator.lease_s=0.001"], "coordinator.lease_s: Input should be greater than or equal to 1"),
        (
            ["algorithm.constraint={}"],
            "[algorithm.constraint] needs a cost: set cost to one of reward.graders (exact_match), or add",
        ),
        (
            ["algorithm.constraint={cost='length_cost'}"],
            "algorithm.constraint.cost = 'length_cost' is not among reward.graders (exact_match)",
        ),
        (
            ["rollout.engine=sglang", "rollout.local.slots=4"],
            '[rollout.local] is read by rollout.engine = "local", but this run uses "sglang": remove the',
        ),
        (
            ["rollout.sglang.tp_size=2"],
            '[rollout.sglang] is read by rollout.engine = "sglang", but this run uses',
        ),
        (["rollout.sglang.chunked_prefill_size=64"], "[rollout.sglang] is read by"),
        ([f"cost_model={SCORER}"], "[cost_model] is used only by an [algorithm.constraint]"),
        (
            ["trainer.optimizer.decay_steps=1"],
            'trainer.optimizer.schedule = "constant" never decays: remove decay_steps and '
            "min_learning_rate_share",
        ),
        (["trainer.optimizer.schedule=wsd"], 'schedule = "wsd" needs decay_steps: set it'),
        (
            ["trainer.optimizer={schedule='wsd', warmup_steps=1, decay_steps=2}"],
            "trainer.optimizer: 1 steps of warm-up and 2 of decay are more than run.steps = 2",
        ),
        (
            ["algorithm.advantage=gae", "critic={optimizer={schedule='cosine', warmup_steps=2}}"],
            "critic.optimizer: 2 steps of warm-up and at least 1 of decay are more than run.steps = 2",
        ),
        (
            ["run.mode=supervised", "algorithm.kl.coef=0.1", "coordinator.max_staleness=1"],
            'run.mode = "supervised" learns from the answers in data.train, without rollout, reward and '
            "other models: remove algorithm, coordinator.max_staleness",
        ),
        (
            ["run.mode=supervised", 'validation.sets=[{name="sums", path="v.parquet", num_samples=4}]'],
            'validation set sums: run.mode = "supervised" measures the loss of the given answers',
        ),
        (
            ["data.train=[{path='t.parquet', learn=['assistant', 'tool']}]"],
            "[[data.train]]: learn chooses what is learned of rows with answers, and these are prompts: "
            'remove it, or set run.mode = "supervised"',
        ),
        (
            ["run.mode=supervised", "data.train=[{path='t.parquet', learn=['bot']}]"],
            "data.train.0.learn.0: Input should be 'assistant', 'tool', 'user' or 'system'",
        ),
        (
            [f"cost_model={SCORER}", "algorithm.constraint={cost='exact_match'}"],
            "[cost_model] is used only by an [algorithm.constraint] without cost",
        ),
        (["reward.graders=[]"], "nothing scores responses: name a function in reward.graders, or add"),
        (
            ['reward.graders=["server:judge", "server:judge"]'],
            "reward.graders: server:judge, server:judge: components are identified by name",
        ),
        (
            ['reward.graders=["exact_match", "server:judge"]', f"servers=[{SERVER % 'style'}]"],
            "[[servers]]: no grader uses the reward server style: reward.graders has server:judge: add",
        ),
        (
            ['reward.graders=["server:judge"]', f"servers=[{SERVER % 'judge'}, {SERVER % 'judge'}]"],
            "[[servers]]: reward judge http://host:1 is listed twice: raise its concurrency instead",
        ),
        (
            ['reward.graders=[{ name = "code", timeout_s = 25.0 }]'],
            "set deadline_s = 30.0 to timeout_s + case_timeout_s = 31.0 or more",
        ),
        (
            ['reward.graders=[{ name = "code", case_timeout_s = 0 }]'],
            "reward.graders: code: case_timeout_s = 0, expected more than 0",
        ),
        (
            ['reward.graders=["code"]', "reward.sandbox={ memory_mb = 256 }"],
            "memory_mb = 512 exceeds the limit of a program: set it to reward.sandbox.memory_mb = 256",
        ),
        (
            ['reward.graders=["gsm8k", "gsm8k"]'],
            "gsm8k, gsm8k: components are identified by name: list each function once",
        ),
        (
            ["algorithm.filter=scores_differ", f"reward_model={SCORER}"],
            "algorithm.filter filters groups before [reward_model] has scored them",
        ),
        (["algorithm.kl.estimator=full"], 'algorithm.kl.estimator = "full" needs the logits of both models'),
        (
            ["algorithm.kl={estimator='full', where='reward'}", "reference.placement=colocated"],
            'set algorithm.kl.where = "loss" and reference.placement = "colocated", or use "k3"',
        ),
        (
            ["algorithm.kl={estimator='k3+', where='reward'}"],
            '"k3+" differs from "k3" only in its gradient, and a reward has no gradient',
        ),
        (
            ["algorithm.kl.target=0.1"],
            "algorithm.kl.target adapts the coefficient of a penalty in the reward",
        ),
        (
            ["algorithm.correction={}", "algorithm.old_logprobs=rollout"],
            'which the ratio of the loss already does with algorithm.old_logprobs = "rollout"',
        ),
        (["algorithm.correction.low=0.5"], 'low = 0.5: "truncate" limits weights only from above'),
        (
            ["algorithm.correction={method='mask', low=2, high=2}"],
            "no weight is between low = 2 and high = 2: set low below high",
        ),
        (
            ["algorithm.correction=[{}, { level = 'sequence', high = 3 }]"],
            "algorithm.correction: only the first of 2 may weight advantages, but another has method = "
            '"truncate": set the others to "reject"',
        ),
        (
            ["algorithm.correction=[{}, { level = 'geometric', method = 'reject', low = 2, high = 1 }]"],
            "no weight is between low = 2 and high = 1",
        ),
        (
            ["rollout.sampling.top_p=0.9"],
            "rollout.sampling: top_p = 0.9 and top_k = 0 truncate the sampled distribution, but the "
            "trainer's log-probabilities are of the full one: set top_p to 1 and top_k to 0, or correct",
        ),
        (["rollout.sampling.top_k=50"], "top_p = 1 and top_k = 50 truncate the sampled distribution"),
        (["algorithm.loss=gspo"], '"gspo" is defined as a mean over sequences: set algorithm.aggregation'),
        (["algorithm.loss=gmpo"], '"gmpo" is defined as a mean over sequences'),
        (["algorithm.loss=sapo"], '"sapo" is defined as a mean over sequences'),
        (
            ["algorithm.loss=reinforce", "coordinator.max_staleness=2"],
            "which may be coordinator.max_staleness = 2 versions old: add an [algorithm.correction]",
        ),
        (
            ["algorithm.loss=reinforce", "algorithm.num_minibatches=2", "algorithm.num_epochs=2"],
            "it would be biased after the first of a step's 4 updates",
        ),
        (
            ["trainer.parallel.sequence=true"],
            "trainer.parallel.sequence splits tokens over tensor-parallel ranks",
        ),
        (
            ["algorithm.kl={}", "reference.recompute=full"],
            'reference.recompute = "full" reduces the memory of a backward pass, and a reference has none',
        ),
        (
            ["algorithm.advantage=gae", "critic.lora={}"],
            "critic.lora: a critic is trained in full",
        ),
        (
            ["algorithm.advantage=gae", "critic.router_replay=true"],
            "critic.router_replay: rollout chooses experts for the actor alone",
        ),
        (
            ["run.mode=supervised", "trainer.router_replay=true"],
            'run.mode = "supervised" generates none: remove it',
        ),
        (
            ["trainer.router_replay=true", "rollout={engine='sglang', device='cpu'}"],
            "trainer.router_replay: SGLang records experts on GPUs alone",
        ),
        (
            ["trainer.attention=flash", "trainer.dtype=float32"],
            'trainer.attention = "flash" does not support float32: set trainer.dtype = "bfloat16"',
        ),
        (
            ["trainer.attention=varlen", "trainer.dtype=float32"],
            'trainer.attention = "varlen" does not support float32: set trainer.dtype = "bfloat16"',
        ),
        (
            ["trainer.parallel.virtual_pipeline=2"],
            "trainer.parallel.virtual_pipeline = 2 needs pipeline stages, but pipeline = 1",
        ),
        (
            ["algorithm.kl={}", "reference.parallel={expert=4, tensor=2, sequence=true, pipeline=2}"],
            "reference.parallel.expert = 4 does not divide tensor x context x data = 2 x 1 x 1",
        ),
        (
            ["trainer.parallel={expert=2, tensor=2}"],
            "trainer.parallel: with expert = 2, each of tensor = 2 ranks would send the same tokens to the "
            "experts",
        ),
        (
            [
                "algorithm.kl.estimator=full",
                "reference.placement=colocated",
                "trainer.parallel.pipeline=2",
            ],
            'algorithm.kl.estimator = "full" runs the reference in the last stage of the actor\'s forward '
            "pass",
        ),
        (
            ["algorithm.kl={}", "reference={placement='colocated', parallel={tensor=2}}"],
            "uses the actor's ranks and layout: remove reference.parallel",
        ),
        (
            ["weights.delta=true", "weights.transport=shm"],
            'with weights.transport = "shm" replicas read the trainer\'s',
        ),
        (["weights.transport=nccl"], "requires replicas on GPUs"),
        (
            ["weights.transport=cuda_ipc", "rollout={engine='sglang', sglang={device='cpu'}}"],
            "requires replicas on GPUs",
        ),
        (
            ["rollout={engine='sglang', device='cuda', dtype='float32'}"],
            'rollout.dtype = "float32", but SGLang\'s attention on GPUs computes in 16 bits',
        ),
        (
            ["placement.mode=colocated", "trainer.offload=true", "coordinator.max_staleness=1"],
            "coordinator.max_staleness = 1 generates ahead: set it to 0",
        ),
        (
            ["placement.mode=colocated", "trainer.offload=true", "weights.transport=tcp"],
            'weights.transport = "tcp" broadcasts: set it to "cuda_ipc" or "shm"',
        ),
        (
            ["placement.mode=colocated", "trainer={offload=true, lora={push='adapter'}}"],
            'trainer.lora.push = "adapter" pushes only adapters: set it to "merged"',
        ),
        (["guards={min_entropy=2, max_entropy=1}"], "every entropy is below min_entropy = 2 or above"),
        (["warmup.steps=3"], "warmup.steps > 0 needs [warmup.source] with a path"),
        (
            ["warmup={steps=1, target_reward=0.5, source={path='a'}}"],
            "warmup.target_reward is measured on the first",
        ),
        (["weights.canary_tolerance=nan"], "weights.canary_tolerance: Input should be a finite number"),
        (["algorithm.advantage=gea"], "algorithm.advantage = 'gea': no such function; did you mean gae"),
        (["algorithm.filter={name='scores_differ', max_refil=3}"], "did you mean max_refill?"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(toy: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(toy, overrides)
    (line,) = str(refusal.value).splitlines()  # this, and nothing else
    assert message in line
    assert line.startswith(f"{toy}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage=remax", "coordinator.greedy_baseline=true", "coordinator.samples_per_prompt=1"],
        ["algorithm.advantage=reinforce_pp", "coordinator.samples_per_prompt=1"],
        ["reward.graders=[]", f"reward_model={SCORER}"],
        ['reward.graders=["server:judge"]'],  # it may be registered later
        ['reward.graders=[{ name = "code", timeout_s = 60, deadline_s = 90 }]'],
        [
            'reward.graders=["exact_match", { name = "server:judge", weight = 0.0 }]',
            'algorithm.constraint={ cost = "server:judge" }',
            f"servers=[{SERVER % 'judge'}]",
        ],
        ['reward.graders=["exact_match", "server:judge"]', 'algorithm.advantage="gdpo"'],
        ["algorithm.kl.estimator=full", "reference.placement=colocated"],
        ["algorithm.kl={where='reward', target=0.1, estimator='k1'}"],
        ["algorithm.correction={method='mask', low=0.5}"],
        ["algorithm.constraint={}", f"cost_model={SCORER}"],
        ["algorithm.loss=gspo", "algorithm.aggregation=seq_mean_token_mean"],
        ["algorithm.loss=reinforce", "coordinator.max_staleness=2", "algorithm.correction={}"],
        ["trainer.attention=flash", "trainer.dtype=bfloat16"],
        ["trainer.parallel={tensor=2, sequence=true, pipeline=2, virtual_pipeline=2, expert=4, data=2}"],
        ["algorithm.kl={}", "reference.placement=colocated", "trainer.parallel.pipeline=2"],
        ["weights={transport='tcp', delta=true}"],
        ["weights={transport='nccl', delta=true}", "rollout.engine=sglang"],
        ["rollout={engine='sglang', device='cuda', dtype='float32', sglang={attention_backend='triton'}}"],
        ["rollout={engine='sglang', dtype='float32', sglang={device='cpu'}}"],
        ["placement.mode=colocated", "trainer.offload=true"],
        ["placement.mode=colocated", "run.mode=rollout_only"],
    ],
)
def test_a_combination_that_makes_sense_is_not(toy: Path, overrides: list[str]) -> None:
    """`load` raises if a rule is broken."""
    load(toy, overrides)


def test_all_broken_rules_are_told_at_once(toy: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(toy, ["algorithm.advantage=gae", "algorithm.loss=gspo", "warmup.steps=1"])
    assert [line.partition(": ")[2][:17] for line in str(refusal.value).splitlines()] == [
        "algorithm.advanta",
        "algorithm.loss = ",
        "warmup.steps > 0 ",
    ]


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], {"actor"}),
        (["algorithm.advantage=gae", "critic={}"], {"actor", "critic"}),
        (["algorithm.kl={}"], {"actor", "reference"}),
        (["algorithm.constraint={}", f"cost_model={SCORER}"], {"actor", "cost_model"}),
        ([f"reward_model={SCORER}"], {"actor", "reward_model"}),
    ],
)
def test_a_role_that_is_not_needed_is_not_there(toy: Path, overrides: list[str], roles: set[str]) -> None:
    assert load(toy, overrides).roles.keys() == roles


@pytest.mark.parametrize(
    ("mode", "settings", "unread"),
    [
        (
            "train_only",
            [
                "data.replay=dumps",
                "data.train=[]",
                f"validation.sets=[{SET % 'sums'}]",
                "algorithm.filter=scores_differ",
                "coordinator={max_staleness=1, samples_per_prompt=4, max_dropped_share=0.1}",
                "rollout={replicas=2, sampling={temperature=0.5}}",
                "reward={retries=1, graders=['gsm8k']}",
                "weights.transport=tcp",
            ],
            "algorithm.filter, coordinator.max_dropped_share, coordinator.max_staleness, "
            "coordinator.samples_per_prompt, reward.retries, rollout.replicas, validation, weights",
        ),
        (
            "rollout_only",
            [
                "algorithm={filter='scores_differ', loss='reinforce', kl={}}",
                "checkpoint.every=3",
                "trainer.threads=2",
                "weights.transport=tcp",
                "warmup={steps=3, source={path='a'}}",
                f"reward_model={SCORER}",
                "guards={max_ppo_kl=1.0, reward_drop=1.0}",
                "coordinator={max_staleness=1, samples_per_prompt=4}",
                f"validation={{every=1, best='sums/avg@4', sets=[{SET % 'sums'}]}}",
            ],
            "algorithm.kl, algorithm.loss, checkpoint, guards.max_ppo_kl, reward_model, trainer, "
            "validation.best, warmup, weights",
        ),
    ],
)
def test_what_a_mode_does_not_read_is_refused_by_name(
    toy: Path, mode: str, settings: list[str], unread: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(toy, [f"run.mode={mode}", *settings])
    told = [line for line in str(refusal.value).splitlines() if "run.mode" in line]
    assert [line.partition(": remove ")[2] for line in told] == [unread]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.mode=rollout_only"],
        ["run.mode=supervised"],
        ["run.mode=train_only", "data.replay=dumps", "data.train=[]"],
    ],
)
def test_a_config_is_the_same_when_it_is_read_from_its_run(
    toy: Path, tmp_path: Path, overrides: list[str]
) -> None:
    """It has every default then: none of them counts as a setting without effect."""
    config = load(toy, overrides)
    write_resolved(config, tmp_path / "config.json")
    assert read_resolved(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ([], ("data.max_prompt_tokens", 1024)),
        (["rollout.local.max_length=300"], ("rollout.local.max_length - 1", 299)),
        (
            ["rollout={engine='sglang', sglang={context_length=300}}"],
            ("rollout.sglang.context_length - 1", 299),
        ),
        (["rollout.engine=sglang"], ("data.max_prompt_tokens", 1024)),
    ],
)
def test_a_prompt_has_at_most_what_the_engine_takes(
    toy: Path, overrides: list[str], longest: tuple[str, int]
) -> None:
    assert load(toy, overrides).longest_prompt == longest


@pytest.mark.parametrize(
    ("sampling", "resolved"),
    [
        ("{}", SamplingConfig(max_new_tokens=40, temperature=0.0)),
        ("{ max_new_tokens = 8 }", SamplingConfig(max_new_tokens=8, temperature=0.0)),
        ("{ top_k = 5 }", SamplingConfig(max_new_tokens=40, temperature=0.0, top_k=5)),
        ("{ temperature = 0.5 }", SamplingConfig(max_new_tokens=40, temperature=0.5)),
    ],
)
def test_a_validation_set_is_greedy_and_as_long_as_in_training_unless_it_says_otherwise(
    toy: Path, sampling: str, resolved: SamplingConfig
) -> None:
    table = f'validation.sets=[{{ name = "v", path = "v.parquet", sampling = {sampling} }}]'
    config = load(toy, ["rollout.sampling={ max_new_tokens = 40, temperature = 0.9 }", table])
    assert config.validation_sampling(config.validation.sets[0]) == resolved


@pytest.mark.parametrize(("engine", "lengths"), [("local", (64, 2048)), ("sglang", (64, 40960))])
def test_a_sequence_is_by_default_as_long_as_the_model_takes(
    toy: Path, engine: str, lengths: tuple[int, int]
) -> None:
    config = load(toy, [f"rollout.engine={engine}"])
    assert config.sequence_limit is None
    assert tuple(map(config.rollout.default_length, (64, 40960))) == lengths


def test_a_cut_distribution_is_trained_on_with_weights_or_the_engines_logprobs(toy: Path) -> None:
    for setting in ("algorithm.correction.high=2.0", "algorithm.old_logprobs=rollout"):
        assert load(toy, ["rollout.sampling.top_p=0.9", setting]).rollout.sampling.top_p == 0.9


def test_a_correction_is_a_table_or_a_list_of_them(toy: Path) -> None:
    one, same, none = (
        load(toy, [f"algorithm.correction={text}"] if text else []).algorithm.correction
        for text in ("{ high = 3.0 }", "[{ high = 3.0 }]", "")
    )
    assert one == same == (CorrectionConfig(high=3.0),)
    assert none == ()
    tree = tomllib.loads(TOY) | {"algorithm": {"correction": None}}  # as earlier versions resolved it
    assert validate(tree, "toy").algorithm.correction == ()


def derived(toy: Path, text: str) -> Path:
    path = toy.with_name("derived.toml")
    path.write_text(f'base = "toy.toml"\n{text}')
    return path


def test_a_file_changes_its_base(toy: Path) -> None:
    path = derived(toy, '[run]\nname = "mine"\n[[data.train]]\npath = "a"\n[[data.train]]\npath = "b"')
    config = load(path, ["run.seed=7"])
    assert (config.run.name, config.run.steps, config.run.seed) == ("mine", 2, 7)
    assert [str(source.path) for source in config.data.train] == ["a", "b"]  # a list is replaced
    assert str(config.model.path) == "model"


def test_bases_chain_and_lie_relative_to_their_file(toy: Path) -> None:
    derived(toy, "[run]\nseed = 3")
    (toy.parent / "deep").mkdir()
    path = toy.parent / "deep" / "third.toml"
    path.write_text('base = "../derived.toml"\n[run]\nsteps = 5')
    run = load(path).run
    assert (run.name, run.seed, run.steps) == ("toy", 3, 5)


@pytest.mark.parametrize(
    ("first", "second", "parameters"),
    [
        ('loss = "ppo_clip"', "loss = { clip_low = 0.1 }", ("ppo_clip", {"clip_low": 0.1})),
        (
            'loss = { name = "ppo_clip", clip_low = 0.1 }',
            "loss = { clip_high = 0.3 }",
            ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.3}),
        ),
        ('loss = { name = "ppo_clip", dual_clip = 4.0 }', 'loss = "cispo"', ("cispo", {})),
        (
            'loss = { name = "ppo_clip", dual_clip = 4.0 }',
            'loss = { name = "cispo", clip_high = 2.0 }',
            ("cispo", {"clip_high": 2.0}),
        ),
    ],
)
def test_a_function_over_another(
    toy: Path, first: str, second: str, parameters: tuple[str, dict[str, float]]
) -> None:
    toy.write_text(f"{TOY}\n[algorithm]\n{first}")
    loss = load(derived(toy, f"[algorithm]\n{second}")).algorithm.loss
    assert (loss.name, loss.parameters) == parameters


def test_a_base_that_leads_back_is_refused(toy: Path) -> None:
    path = derived(toy, "")
    toy.write_text('base = "derived.toml"\n' + TOY)
    with pytest.raises(ConfigError, match=r"toy\.toml: base = 'derived\.toml' is circular"):
        load(path)


def test_a_base_that_is_missing_is_named(toy: Path) -> None:
    toy.write_text('base = "absent.toml"\n' + TOY)
    with pytest.raises(ConfigError, match=r"absent\.toml: no such config file"):
        load(toy)


def test_an_override_reaches_into_a_function_that_is_given_by_name(toy: Path) -> None:
    toy.write_text(f'{TOY}\n[algorithm]\nadvantage = "gae"\n[critic]')
    config = load(toy, ["algorithm.advantage.lam=0.9"])
    assert config.algorithm.advantage.parameters == {"lam": 0.9}


def test_the_resolved_config_is_the_same_config(toy: Path, tmp_path: Path) -> None:
    config = load(toy, ["algorithm.loss={name='ppo_clip', clip_high=0.28}", "algorithm.kl={}"])
    write_resolved(config, tmp_path / "config.json")
    assert read_resolved(tmp_path / "config.json") == config
    resolved = json.loads((tmp_path / "config.json").read_text())
    assert resolved["algorithm"]["loss"] == {"name": "ppo_clip", "clip_high": 0.28}


@pytest.mark.parametrize(("before", "now"), [("true", "all"), ("false", "none")])
def test_the_dump_switch_of_earlier_versions_still_says_what_is_kept(
    toy: Path, before: str, now: str
) -> None:
    assert load(toy).coordinator.dump == "recent"
    assert load(toy, [f"coordinator.dump={before}"]).coordinator.dump == now


def test_an_age_that_earlier_versions_replaced_is_waited_for(toy: Path) -> None:
    assert load(toy, ["coordinator.on_age=replace"]).coordinator.on_age == "wait"


@pytest.mark.parametrize(
    ("given", "is_direct"), [("", False), ("localhost", False), ("judge.example", True), ("*", True)]
)
def test_loopback_is_added_to_the_hosts_without_a_proxy(
    given: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", given)
    bypass_proxies_on_loopback()
    assert all(proxy_bypass(host) for host in ("127.0.0.1", "127.0.0.1:8000", "localhost"))
    assert bool(proxy_bypass("judge.example")) == is_direct


async def test_an_agents_own_client_reaches_a_gateway_beside_a_dead_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def models(_request: object) -> AsyncIterator[bytes]:
        yield reply({"object": "list", "data": []})

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    bypass_proxies_on_loopback()
    async with raw_http(models) as gateway:
        client = openai.AsyncOpenAI(api_key="k", base_url=gateway.url, max_retries=0)
        assert (await client.models.list()).data == []
        await client.close()
