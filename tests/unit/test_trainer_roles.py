"""Which section of the config a role's ranks read."""

import pytest

from atoll.runtime.errors import UserError
from atoll.trainer.roles import section_of
from tests.builders import run_config


def test_a_role_that_the_run_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="this run has no critic: its config needs actor"):
        section_of(run_config(), "critic")


def test_a_reference_beside_the_actor_has_no_process_of_its_own() -> None:
    config = run_config(algorithm={"kl": {}}, reference={"placement": "colocated"})
    with pytest.raises(UserError, match="the actor's processes hold it"):
        section_of(config, "reference")
