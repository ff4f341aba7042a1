"""Which GPUs serve which role and replica: the default layout, named GPUs, what "auto" becomes, and what the
process of each rank sees. GPUs are those of a fake nvidia-smi."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atoll.cli.launch.launcher import service_groups
from atoll.cli.launch.preflight import examine
from atoll.cli.launch.processes import ServiceGroup
from atoll.config.errors import ConfigError
from atoll.config.gpus import Gpu, describe_gpus, parse_gpus
from atoll.config.load import load, validate
from atoll.config.placement import check_torchrun, other_hosts, replica_environment, trainer_environment
from atoll.config.resolve import resolve, resolve_for_gpus
from atoll.config.schema import ParallelConfig, RolloutSection, RunConfig, section_name
from atoll.runtime.errors import UserError
from atoll.runtime.gpus import installed_gpus, resolve_here, take_gpu
from atoll.trainer.megatron.model import initialize_parallel
from tests import nvidia_smi

VISIBLE = {"use_visible_gpus": True}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
FOUR = {"parallel": {"tensor": 2, "data": 2}}


def a_run(**sections: Any) -> RunConfig:
    """An actor of one rank and one SGLang replica of one rank, not resolved."""
    tree = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "model"},
        "data": {"train": [{"path": "train.jsonl"}]},
        "rollout": {"engine": "sglang"},
    }
    return validate(tree | sections, "toy")


def with_reference(**sections: Any) -> RunConfig:
    """Needs 4 + 2 + 2 x 2 GPUs apart, 4 + 2 x 2 if models share theirs, 4 if replicas do, too."""
    rollout = {"engine": "sglang", "replicas": 2, "sglang": {"tp_size": 2}}
    defaults = {"trainer": FOUR, "reference": {"parallel": {"tensor": 2}}, "rollout": rollout}
    return a_run(**(defaults | {"algorithm": {"kl": {}}} | sections))


@pytest.mark.parametrize(
    ("count", "mode", "expected"),
    [
        (10, "standalone", {"actor": "0-3", "reference": "4-5", "rollout": ("6-7", "8-9")}),
        (8, "split", {"actor": "0-3", "reference": "0-1", "rollout": ("4-5", "6-7")}),
        (4, "colocated", {"actor": "0-3", "reference": "0-1", "rollout": ("0-1", "2-3")}),
    ],
)
def test_auto_takes_the_first_mode_that_fits(count: int, mode: str, expected: Mapping[str, object]) -> None:
    config = resolve(with_reference(), range(count))
    assert config.placement.mode == mode
    assert config.placement.gpus.model_dump(exclude_defaults=True) == expected
    assert resolve(config, range(count)) == config
    shares = mode != "standalone"
    assert (config.trainer.offload, config.reference.offload) == (shares, shares)
    assert config.weights.transport == ("cuda_ipc" if mode == "colocated" else "nccl")
    assert {config.trainer.dtype, config.reference.dtype, config.rollout.dtype} == {"bfloat16"}


def test_the_largest_role_comes_first_and_replicas_last() -> None:
    """Otherwise the tensor-parallel group of four would be on GPUs 1 to 4."""
    config = with_reference(
        trainer={}, reference={"parallel": {"tensor": 4}}, placement={"mode": "standalone"}
    )
    gpus = resolve(config, [7, 6, 5, 4, 3, 2, 1, 0, 8]).placement.gpus
    assert gpus.roles["reference"] == tuple(Gpu("", number) for number in (7, 6, 5, 4))
    assert gpus.roles["actor"] == (Gpu("", 3),)
    assert gpus.replicas == ((Gpu("", 2), Gpu("", 1)), (Gpu("", 0), Gpu("", 8)))


def test_without_gpus_everything_computes_on_the_cpu_in_float32() -> None:
    config = resolve(with_reference(), ())
    assert {config.trainer.device, config.reference.device, config.rollout.device} == {"cpu"}
    assert {config.trainer.dtype, config.reference.dtype, config.rollout.dtype} == {"float32"}
    assert (config.placement.mode, config.weights.transport) == ("standalone", "shm")
    assert not config.placement.gpus.roles
    assert not config.trainer.offload


def test_models_stay_on_the_cpu_with_the_local_engine_unless_their_device_is_set() -> None:
    """So the examples train the same everywhere, also with a torch that cannot use this machine's GPUs."""
    config = resolve(a_run(rollout={"engine": "local"}), [0])
    assert (config.trainer.device, config.trainer.dtype) == ("cpu", "float32")
    assert not config.placement.gpus.roles

    config = resolve(a_run(rollout={"engine": "local", "replicas": 9}, trainer={"device": "cuda"}), [0])
    assert (config.trainer.device, config.rollout.device) == ("cuda", "cpu")
    assert (config.trainer.dtype, config.rollout.dtype) == ("bfloat16", "float32")
    assert config.weights.transport == "shm"
    assert config.placement.gpus.model_dump(exclude_defaults=True) == {"actor": "0"}


def test_every_role_is_offloaded_in_a_colocated_run_on_a_cpu() -> None:
    config = resolve(with_reference(placement={"mode": "colocated"}), ())
    assert (config.trainer.offload, config.reference.offload) == (True, True)


@pytest.mark.parametrize(
    "mode",
    [
        {"run": {"name": "toy", "steps": 1, "mode": "supervised"}, "rollout": {}},
        {"run": {"name": "toy", "steps": 1, "mode": "rollout_only"}},
    ],
)
def test_only_what_a_mode_starts_gets_gpus(mode: Mapping[str, object]) -> None:
    config = resolve(a_run(**mode), [0])
    starts = "rollout" if config.run.mode == "rollout_only" else "actor"
    assert list(config.placement.gpus.model_dump(exclude_defaults=True)) == [starts]
    assert validate(json.loads(config.model_dump_json()), "config.json", is_resolved=True) == config


NAMED = {"actor": "0-3", "reference": "4-5", "rollout": ["6-7", "8-9"]}


@pytest.mark.parametrize(
    ("sections", "count", "message"),
    [
        (
            {"coordinator": {"max_staleness": 1}},
            7,
            "the run (actor 4, reference 2, rollout 2 x 2) needs this many GPUs: 10 with placement.mode = "
            '"standalone", 8 with placement.mode = "split"; this machine has 7: lower trainer.parallel',
        ),
        (
            {"placement": {"mode": "standalone"}},
            8,
            '10 with placement.mode = "standalone"; this machine has 8: set placement.mode = "split"',
        ),
        (
            {"placement": {"mode": "colocated"}, "weights": {"transport": "nccl"}},
            8,
            'weights.transport = "nccl" broadcasts: set it to "cuda_ipc" or "shm"',
        ),
        ({"trainer": FOUR | {"device": "cuda"}}, 0, 'this machine has 0: set device = "cpu" in the tables'),
        (
            {"placement": {"gpus": NAMED | {"actor": "0-2"}}},
            10,
            "placement.gpus.actor names 3 GPUs, expected 4, one for each rank",
        ),
        (
            {"placement": {"gpus": NAMED | {"critic": "0-2"}}},
            10,
            "placement.gpus.critic names 3 GPUs, expected 0",
        ),
        (
            {"placement": {"gpus": NAMED | {"rollout": ["6-7"]}}},
            10,
            "placement.gpus.rollout = ['6-7'], expected 2 entries of 2",
        ),
        (
            {"placement": {"gpus": NAMED | {"rollout": ["6-7", "7-8"]}}},
            10,
            "placement.gpus.rollout: two replicas have GPU 7",
        ),
        (
            {"placement": {"gpus": NAMED | {"rollout": ["6-7", "8,node1:8"]}}},
            10,
            "placement.gpus.rollout: 8,node1:8 are on several hosts, a replica is on one",
        ),
        ({"placement": {"gpus": NAMED}}, 8, "placement.gpus names GPU 8, but this machine has 0, 1, 2, 3,"),
        (
            {"placement": {"mode": "split", "gpus": NAMED | {"rollout": ["0-1", "2-3"]}}},
            10,
            'placement.mode = "split", but the GPUs in placement.gpus are those of "colocated"',
        ),
        (
            {"placement": {"mode": "colocated", "gpus": NAMED}},
            10,
            'placement.mode = "colocated", but the GPUs in placement.gpus are those of "standalone"',
        ),
        (
            {"placement": VISIBLE | {"gpus": NAMED}},
            10,
            "placement.use_visible_gpus = true, but [placement.gpus] names GPUs: remove one of them",
        ),
        (
            {"placement": VISIBLE | {"mode": "colocated"}, "coordinator": {"max_staleness": 0}},
            10,
            'placement.mode = "colocated" needs [placement.gpus], which says what trainers and replicas',
        ),
        (
            {"placement": {"gpus": NAMED | {"rollout": ["node1:6-7", "node1:8-9"]}}},
            10,
            "has GPUs on node1, which cannot reach coordinator.host = 127.0.0.1: set it to an address",
        ),
        (
            {
                "placement": {"gpus": NAMED | {"rollout": ["node1:6-7", "node1:8-9"]}},
                "coordinator": {"host": "10.0.0.1"},
                "weights": {"transport": "cuda_ipc"},
            },
            10,
            'weights.transport = "cuda_ipc" needs the trainer and all replicas on one host',
        ),
    ],
)
def test_what_does_not_fit_is_refused(sections: Mapping[str, Any], count: int, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(with_reference(**sections), range(count))
    (line,) = str(refusal.value).splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"placement": {"gpus": {"actor": "0,0-1"}}}, '"0,0-1" names a GPU twice'),
        ({"placement": {"gpus": {"actor": "gpu0"}}}, 'got "gpu0", expected GPUs such as "0-3"'),
        ({"rollout": {"engine": "local", "device": "cuda"}}, '"local" computes on the CPU, but'),
        (
            {"rollout": {"engine": "sglang", "device": "cuda", "sglang": {"device": "cpu"}}},
            "remove the latter",
        ),
    ],
)
def test_what_a_file_cannot_mean_is_refused(sections: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        a_run(**sections)


def test_this_machines_own_name_is_the_same_as_none() -> None:
    named = {"actor": "node0:0-3", "reference": "node0:4-5", "rollout": ["node0:6-7", "8,node0.lan:9"]}
    config = with_reference(placement={"gpus": named})
    assert resolve(config, range(10), "node0.lan").placement.gpus.model_dump(exclude_defaults=True) == {
        "actor": "0-3",
        "reference": "4-5",
        "rollout": ("6-7", "8-9"),
    }


@pytest.mark.parametrize("text", ["", "0", "0-2,6", "0-1,node1:0-7,9,node2:3", "node1:0,:0-1"])
def test_gpus_are_written_as_they_are_read(text: str) -> None:
    assert describe_gpus(parse_gpus(text)) == text
    assert parse_gpus("node1:0-1,7,:2") == (Gpu("node1", 0), Gpu("node1", 1), Gpu("node1", 7), Gpu("", 2))


def test_the_key_of_earlier_versions_is_read() -> None:
    rollout = RolloutSection.model_validate({"engine": "sglang", "sglang": {"device": "cuda", "tp_size": 2}})
    assert (rollout.device, rollout.sglang.tp_size, rollout.sglang.model_extra) == ("cuda", 2, {})
    every_config = RolloutSection.model_validate({"sglang": {"device": "cuda"}})  # also of the local engine
    assert every_config == RolloutSection()


def seen(group: ServiceGroup) -> list[str]:
    return [service.environment["CUDA_VISIBLE_DEVICES"] for service in group.services]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_gets_the_gpus_of_its_mode(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank of a trainer uses the one GPU that it sees, before it meets the others."""
    monkeypatch.chdir(path.parents[1])
    nvidia_smi.install(monkeypatch, tmp_path, 1 if path.stem == "gpu_1" else 8)
    config = load(path)
    if config.generates_on_cpu:  # then models use GPUs only if they are told to
        assert not resolve_here(config).placement.gpus.roles
        config = load(path, [f"{section_name(role)}.device=cuda" for role in config.started_roles])
    config = resolve_here(config)
    used = dict[str, list[str]]()
    for service in (each for group in service_groups(config, "10.0.0.1:9") for each in group.services):
        kind = service.name.rpartition("-")[0]
        if kind in (*config.roles, "rollout"):
            used[service.name] = service.environment["CUDA_VISIBLE_DEVICES"].split(",")
        if kind in config.roles and used[service.name] != [""]:
            assert [device_of(service.environment, monkeypatch)] == used[service.name]
    if config.rollout.device == "cpu":  # the local engine
        assert all(used.pop(name) == [""] for name in list(used) if name.startswith("rollout"))
    if path.stem == "gpu_1":
        assert (config.placement.mode, used) == ("colocated", {"actor-0": ["0"], "rollout-0": ["0"]})
        return
    hosts = dict.fromkeys(used, "") | {
        f"rollout-{index}": gpus[0].host for index, gpus in enumerate(config.placement.gpus.replicas)
    }
    taken = [(hosts[name], number) for name, numbers in used.items() for number in numbers]
    assert len(taken) == len(set(taken)) > 0
    assert config.placement.mode == ("split" if path.stem.startswith("gpu") else "standalone")


class AboutToMeetError(Exception):
    """In place of the meeting of the ranks."""


def device_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The GPU that a rank computes on, by a torch.cuda whose devices are those that it sees."""
    visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
    chosen = []

    def meet(*_: object, **__: object) -> None:
        raise AboutToMeetError

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "device_count", lambda: len(visible))
        patched.setattr(torch.cuda, "set_device", lambda index: chosen.append(visible[index]))
        patched.setattr(dist, "init_process_group", meet)
        with pytest.raises(AboutToMeetError):
            initialize_parallel(ParallelConfig())
    (device,) = chosen
    return device


def test_ranks_and_replicas_see_their_gpus_and_nobody_elses() -> None:
    config = resolve(with_reference(), range(8))
    actor = [trainer_environment(config, "actor", rank) for rank in range(4)]
    assert actor[3] == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's
        "CUDA_VISIBLE_DEVICES": "3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    assert replica_environment(config, "rollout-1") == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "6,7",
    }
    assert replica_environment(config, "a-friends") == {}  # of its own choice
    alone = resolve(a_run(), range(2))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in trainer_environment(alone, "actor", 0)


def test_a_colocated_replica_has_its_own_gpus_first_and_sees_the_actors_others() -> None:
    config = resolve(with_reference(), range(4))
    assert replica_environment(config, "rollout-1")["CUDA_VISIBLE_DEVICES"] == "2,3,0,1"


def test_replicas_of_a_colocated_run_start_after_the_trainers() -> None:
    config = resolve(with_reference(), range(4))
    groups = {group.names[0]: group for group in service_groups(config, "127.0.0.1:9")}
    assert groups["rollout-1"].after == ("actor-0", "reference-0")
    assert groups["actor-0"].after == groups["reward-0"].after == ()
    apart = service_groups(resolve(with_reference(), range(8)), "127.0.0.1:9")
    assert {group.after for group in apart} == {()}


TWO_HOSTS = {
    "placement": {"gpus": {"actor": "0-1,node1:2-3", "reference": "4-5", "rollout": ["node1:4-5", "6-7"]}},
    "coordinator": {"host": "10.0.0.1"},
}


def test_what_lies_on_other_hosts_is_started_there_by_a_command_that_is_printed() -> None:
    config = resolve(with_reference(**TWO_HOSTS), range(8), "node0")
    assert other_hosts(config) == {"node1"}
    groups = {group.names[0]: group for group in service_groups(config, "10.0.0.1:9")}
    assert {name for name, group in groups.items() if group.elsewhere} == {"actor-0", "rollout-0"}
    token = "ATOLL_TOKEN=$(cat runs/toy/coordinator.token)"
    torchrun = (
        "torchrun --nnodes 2 --node-rank {number} --nproc-per-node 2 --master-addr 10.0.0.1 --master-port "
        "29500 -m atoll.trainer --config runs/toy/config.json --role actor --coordinator 10.0.0.1:9 --host "
    )
    assert groups["actor-0"].elsewhere.splitlines() == [
        f"  on this machine: {token} {torchrun.format(number=0)}10.0.0.1",
        f"  on node1: {token} {torchrun.format(number=1)}node1",
    ]
    assert groups["rollout-0"].elsewhere.startswith(f"  on node1: {token} ")
    assert groups["rollout-0"].elsewhere.endswith("--name rollout-0 --coordinator 10.0.0.1:9 --host node1")
    assert groups["rollout-1"].services[0].command[-2:] == ("--host", "10.0.0.1")
    assert seen(groups["rollout-1"]) == ["6,7"]


@pytest.mark.parametrize(
    ("rank", "host_number", "local_rank", "message"),
    [
        (0, 0, 0, ""),
        (2, 1, 0, ""),
        (2, 0, 2, "rank 2 as local rank 2 of host 0, expected local rank 0 of host 1 for 0-1,node1:2-3"),
        (4, 1, 2, "rank 4, but placement.gpus has 4"),
    ],
)
def test_a_torchrun_that_differs_from_the_file_is_refused(
    rank: int, host_number: int, local_rank: int, message: str
) -> None:
    gpus = parse_gpus("0-1,node1:2-3")
    if not message:
        check_torchrun(gpus, rank, host_number, local_rank)
        return
    with pytest.raises(ConfigError, match=message):
        check_torchrun(gpus, rank, host_number, local_rank)


@pytest.mark.parametrize("mode", ["auto", "standalone", "split"])
def test_services_that_take_what_they_see_have_no_gpus_in_the_file(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the config is the same wherever it is resolved, and needs no address that other hosts reach."""
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    config = resolve_here(with_reference(placement=VISIBLE | {"mode": mode}, coordinator={"host": "0.0.0.0"}))
    assert resolve(config, range(8)) == resolve_for_gpus(config, None) == config
    assert config.placement.mode == ("split" if mode == "split" else "standalone")
    assert config.placement.gpus.model_dump(exclude_defaults=True) == {}
    assert {config.trainer.device, config.reference.device, config.rollout.device} == {"cuda"}
    assert {config.trainer.offload, config.reference.offload} == {mode == "split"}
    assert config.weights.transport == "nccl"
    assert replica_environment(config, "rollout-0") == replica_environment(config, "rollout-3f2a91") == {}
    refusals = [finding.found for finding in examine(config, resume=False) if finding.what == "placement"]
    assert refusals[0].startswith("placement.use_visible_gpus = true is for services that are started one by")


def test_containers_without_gpus_push_their_weights_by_tcp() -> None:
    sections = {"trainer": {"device": "cpu"}, "rollout": {"engine": "sglang", "device": "cpu"}}
    assert resolve(a_run(placement=VISIBLE, **sections), ()).weights.transport == "tcp"


@pytest.mark.parametrize(
    ("rank", "place", "visible", "expected"),
    [
        (1, {}, None, "1"),  # all ranks in one container, started by hand
        (1, {}, "3,GPU-00000002", "2"),
        (5, {"GROUP_RANK": "1", "LOCAL_RANK": "1"}, None, "1"),  # the second of the second container
        (2, {}, "0,1", "rank 2 needs GPU number 3 of those that it sees, but it sees 2"),
    ],
)
def test_a_rank_takes_its_own_of_the_gpus_that_it_sees(
    rank: int,
    place: Mapping[str, str],
    visible: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = resolve(with_reference(placement=VISIBLE), ())
    nvidia_smi.install(monkeypatch, tmp_path, 4)
    for variable, value in place.items():
        monkeypatch.setenv(variable, value)
    for variable in trainer_environment(resolve(with_reference(), range(8)), "actor", 0):
        monkeypatch.setenv(variable, "")  # as they were before, once this test ends
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if expected.startswith("rank"):
        with pytest.raises(UserError, match=expected):
            take_gpu(config, "actor", rank)
        return
    take_gpu(config, "actor", rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-00000001", [1])]
)
def test_gpus_that_the_environment_hides_do_not_count(
    visible: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, 3)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert installed_gpus() == expected


def test_gpus_that_cannot_be_used_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,MIG-7")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES has MIG-7, which nvidia-smi does not list"):
        installed_gpus()
    nvidia_smi.install(monkeypatch, tmp_path, 1, fails="NVIDIA-SMI has failed")
    with pytest.raises(UserError, match="nvidia-smi failed: NVIDIA-SMI has failed: check the driver"):
        resolve_here(a_run())
    on_cpu = a_run(trainer={"device": "cpu"}, rollout={"engine": "local"})
    assert resolve_here(on_cpu).trainer.dtype == "float32"  # it does not depend on the GPUs
