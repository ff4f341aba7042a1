"""The configuration's reference is the schema's."""

from pathlib import Path

from pydantic import BaseModel

from atoll.config.reference import document
from atoll.config.schema import FunctionConfig, RunConfig


def test_the_committed_reference_is_current() -> None:
    committed = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert committed == document(), "run `make docs` and commit docs/configuration.md"


def test_a_setting_that_names_a_function_lists_them() -> None:
    lines = document().splitlines()
    (advantage,) = [line for line in lines if line.startswith("| `advantage` |")]
    assert advantage.startswith('| `advantage` | `"grpo"` | `gae` `vapo` `grpo` `dr_grpo` `rloo` ')
    assert "`name` is one of `scores_differ`, or `file.py:function`." in lines
    assert (
        "| `max_refill` | `10` |  | batches of filtered groups, per full batch, before the run fails |"
        in lines
    )


def test_a_setting_has_its_default_its_values_and_its_comment() -> None:
    lines = document().splitlines()
    assert '| `mode` | `"train"` | `train` `rollout_only` `train_only` `supervised` |  |' in lines
    assert "| `max_staleness` | `0` |  | 0: strictly on-policy |" in lines
    assert "## [[data.train]]" in lines
    assert "## [warmup.source]" in lines


def test_nothing_is_printed_twice() -> None:
    lines = document().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    of_a_model = [row for row in rows if row.startswith(("| `recompute`", "| `learning_rate`", "| `rank`"))]
    defaults = [row.split("|")[2].strip(" `") for row in of_a_model]
    assert defaults == ['"none"', "1e-06", "16", "0.05", "0.001"]
    assert "## [critic.parallel]" not in lines
    critic = lines[lines.index("## [cost_critic]") :]
    assert critic[4].startswith("As in [[trainer]](#trainer): `parallel`, `device`, `dtype`, ")
    assert critic[5:7] == ["", "As in [[critic]](#critic): `path`, `clip`, `warmup_steps`."]
    assert lines.count("| setting | default | values | meaning |") == len(
        [line for line in lines if line.startswith("|---")]
    )


def test_a_setting_of_a_validation_set_has_its_own_default() -> None:
    lines = document().splitlines()
    table = lines[lines.index("## [validation.sets.sampling]") :]
    assert "| `temperature` | `0.0` |  | 0: greedy |" in table
    assert table[2] == "As in [[rollout.sampling]](#rolloutsampling): `top_p`, `top_k`, `stop`."


def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    """A table's class and those below it."""
    found = [section]
    for field in section.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += sections(kind)
    return found


def test_a_tables_default_is_its_class() -> None:
    """So the defaults of the rows are those of the settings."""
    for section in sections(RunConfig):
        for field in section.model_fields.values():
            if isinstance(field.default, BaseModel) and not isinstance(field.default, FunctionConfig):
                assert field.default == type(field.default)()
                assert type(field.default) is field.annotation


def test_a_comment_below_a_wrapped_default_is_found() -> None:
    assert '| `on_age` | `"wait"` | `wait` `cut` `weigh` | samples near max_staleness: ' in document()
