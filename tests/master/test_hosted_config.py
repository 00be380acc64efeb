"""The configuration that an agent hands the master it hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from elasticrun.config import Identity, MasterConfig, Tls
from elasticrun.master.main import config_from_json
from elasticrun.wire.messages import CheckSpec
from elasticrun.wire.types import dumps
from tests.simulator.script import DEFAULT_SPEC


@pytest.mark.parametrize("tls", [None, Tls("a", "b", "c")])
def test_it_arrives_as_it_was(tls: Tls | None) -> None:
    """Also what is nested in it: the checks are of their own type again, not a dict."""
    spec = structs.replace(DEFAULT_SPEC, checks=CheckSpec(network=True, slow_ratio=2.5))
    config = MasterConfig(Identity("job", tls=tls), "localhost", 0, spec)
    assert config_from_json(dumps(config)) == config
    assert config_from_json(dumps(replace(config, spec=None))).spec is None


@pytest.mark.parametrize("text", ["", "[]", '{"spec": {"colour": 1}}', '{"spec": 3}', "{}"])
def test_what_is_none_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="this is not a master's configuration: "):
        config_from_json(text)
