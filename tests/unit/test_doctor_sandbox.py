"""What forbids namespaces, by the files of a fake /proc, and what to do about each."""

import json
from pathlib import Path

import pytest

from atoll.cli import doctor_sandbox
from atoll.cli.doctor_sandbox import refused_calls, remedies
from atoll.reward.sandbox import kernel, seccomp

PROFILE = Path(__file__).parents[2] / "deploy/compose/reward-seccomp.json"


@pytest.mark.parametrize(
    ("refused", "files", "expected"),
    [
        ([], {}, []),
        ([], {"self/attr/current": "unconfined\n", "sys/user/max_user_namespaces": "96365\n"}, []),
        (
            ["unshare", "mount"],
            {},
            [
                "a seccomp profile forbids unshare, mount: for containers of reward services, set "
                'security_opt: ["seccomp=deploy/compose/reward-seccomp.json"]'
            ],
        ),
        (
            [],
            {"self/attr/current": "docker-default (enforce)\n"},
            [
                "the AppArmor profile docker-default may forbid mounts: set security_opt: "
                '["apparmor=PROFILE"] to one with the rules userns, mount, umount and pivot_root, or to '
                "unconfined"
            ],
        ),
        (
            [],
            {"sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
            [
                "kernel.apparmor_restrict_unprivileged_userns = 1: on the host, run sysctl -w "
                "kernel.apparmor_restrict_unprivileged_userns=0, or give reward services an AppArmor profile "
                "with userns"
            ],
        ),
        (
            [],
            {"sys/user/max_user_namespaces": "0\n", "sys/kernel/unprivileged_userns_clone": "0\n"},
            [
                "user.max_user_namespaces = 0: on the host, run sysctl -w user.max_user_namespaces=65536",
                "kernel.unprivileged_userns_clone = 0: on the host, run sysctl -w "
                "kernel.unprivileged_userns_clone=1",
            ],
        ),
    ],
)
def test_each_cause_has_its_remedy(
    refused: list[str], files: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(remedies(refused, tmp_path)) == expected


def test_a_filter_is_told_apart_from_the_kernels_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a filter, the kernel finds the arguments wrong before it asks for permissions."""

    def filtered(name: str, *arguments: object) -> int:
        if name in ("setns", "mount"):
            raise PermissionError(1, "Operation not permitted")
        return kernel.libc(name, *arguments)

    if "Seccomp:\t0" in Path("/proc/self/status").read_text():
        assert refused_calls() == []
    monkeypatch.setattr(doctor_sandbox, "libc", filtered)
    assert refused_calls() == ["setns", "mount"]


def test_the_profile_for_reward_containers_allows_what_the_sandbox_calls() -> None:
    profile = json.loads(PROFILE.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not (rule["args"] or rule["includes"])
        for name in rule["names"]
    }
    assert not {"mount", "pivot_root", "setns", "umount2", "unshare"} - allowed
    assert not {"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self"} - allowed
    assert not {*seccomp.FREE, *seccomp.CHECKED} - allowed - {"clone"}  # without flags for namespaces
    assert not {"bpf", "ptrace", "mount_setattr", "open_tree", "reboot", "chroot", "kexec_load"} & allowed
