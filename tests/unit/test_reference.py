"""The configuration's reference is the schema's."""

from pathlib import Path

from atoll.config.reference import document


def test_the_committed_reference_is_current() -> None:
    committed = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert committed == document(), "run `make docs` and commit docs/configuration.md"


def test_a_setting_that_names_a_function_lists_them() -> None:
    lines = document().splitlines()
    (advantage,) = [line for line in lines if line.startswith("| `advantage` |")]
    assert advantage.startswith('| `advantage` | `"grpo"` | `gae` `vapo` `grpo` `dr_grpo` `rloo` ')
    assert "`name` is one of `scores_differ`, or `file.py:function`." in lines
    assert (
        "| `max_refill` | `10` |  | batches of consecutively filtered groups before the run fails |" in lines
    )


def test_a_setting_has_its_default_its_values_and_its_comment() -> None:
    lines = document().splitlines()
    assert '| `mode` | `"train"` | `train` `rollout_only` `train_only` `supervised` |  |' in lines
    assert "| `max_staleness` | `0` |  | 0: strictly on-policy |" in lines
    assert "## [[data.train]]" in lines
    assert "## [warmup.source]" in lines
