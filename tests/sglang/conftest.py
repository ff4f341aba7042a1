"""The engine's tests run in the environment that has SGLang (`make test-sglang`); those with a trainer in the
main one, and their replicas in the other."""

from importlib.util import find_spec

collect_ignore = (
    ["test_push.py", "test_reward_model.py"]
    if find_spec("sglang.srt")
    else ["test_arguments.py", "test_standing.py", "test_service.py", "test_weights.py"]
)
