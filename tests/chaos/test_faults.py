"""Which faults there are, and who may be hit by them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.chaos.faults import FAULTS, Target, choose, find
from pdserve.errors import ConfigError
from pdserve.messages import Instance, Role


def test_every_target_by_every_kind() -> None:
    assert len({fault.name for fault in FAULTS}) == 15


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("decode-kill", ["decode-kill"]),
        ("etcd-hang, decode-kill", ["etcd-hang", "decode-kill"]),
        ("nats", ["nats-kill", "nats-hang", "nats-cut"]),
        ("nats-kill,nats", ["nats-kill", "nats-hang", "nats-cut"]),
        ("cut", ["prefill-cut", "decode-cut", "nats-cut", "etcd-cut", "frontend-cut"]),
        ("", [fault.name for fault in FAULTS]),
    ],
)
def test_choose(only: str, names: list[str]) -> None:
    assert [fault.name for fault in choose(only)] == names


def test_choose_knows_no_others() -> None:
    with pytest.raises(ConfigError, match="no fault decode-melt; there are: prefill-kill"):
        choose("decode-kill,decode-melt")


@pytest.fixture
def child() -> Iterator[int]:
    """A process of ours that leads a group."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    yield process.pid
    process.communicate()


def test_only_children_of_the_supervisor_are_found(child: int, tmp_path: Path) -> None:
    mine = Instance("decode-0-aa", Role.DECODE, pid=child)
    instances = [mine, Instance("decode-1-bb", Role.DECODE, pid=1), Instance("decode-2-cc", Role.DECODE)]
    assert [find(Target.DECODE, turn, instances, os.getpid(), tmp_path).group for turn in (0, 1)] == [
        child
    ] * 2
    with pytest.raises(LookupError, match="no prefill process of this graph"):
        find(Target.PREFILL, 0, instances, os.getpid(), tmp_path)
    with pytest.raises(LookupError, match="no decode process of this graph"):
        find(Target.DECODE, 0, instances, os.getppid(), tmp_path)


def test_a_server_is_found_by_its_lock(child: int, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="nats is not a server of this graph's own"):
        find(Target.NATS, 0, [], os.getpid(), tmp_path)
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "lock").write_text(str(child))
    assert find(Target.NATS, 0, [], os.getpid(), tmp_path).group == child
