"""What Ray is asked to reserve, and what is refused before Ray is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.errors import ConfigError
from splice.client.run_file import load
from splice.cluster.ray_launcher import bundle_of
from splice.cluster.roles import refuse_many_hosts, roles_of
from tests.splice.hosts_file import FILE


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run.toml").write_text(FILE.replace("world_size = 4", "world_size = 2"))
    return tmp_path / "run.toml"


def test_each_role_has_its_gpus_and_keys(path):
    roles = {role.name: role for role in roles_of(load(path), path, is_spread=True)}
    replicas = ["inference-0", "inference-1", "inference-2"]
    assert list(roles) == ["orchestrator", "trainer", *replicas, "router"]
    assert {n for n, role in roles.items() if bundle_of(role) == {"CPU": 1, "GPU": 2}} == {
        "trainer",
        *replicas,
    }
    keys = path.parent / "keys"
    assert roles["inference-1"].keys == keys / "inference-1"
    assert roles["router"].keys == keys / "client" and roles["orchestrator"].keys is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("orchestrator.endpoint=tcp://127.0.0.1:40001", "on loopback"),
        ("trainer.parallel.world_size=4", "several hosts"),
    ],
)
def test_what_cannot_work_is_refused(path, override, said):
    with pytest.raises(ConfigError, match=said):
        refuse_many_hosts(roles_of(load(path, [override]), path, is_spread=True), launcher="ray")


def test_without_ray_the_extra_is_named(path):
    code = (
        "import sys; sys.modules['ray'] = None\n"
        f"sys.argv = ['splice', 'up', {str(path)!r}, '--on', 'ray']\n"
        "import splice.__main__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and '[ray]"' in done.stderr, done.stderr


def test_nothing_but_the_launcher_needs_ray():
    code = "import sys, splice.cli; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
