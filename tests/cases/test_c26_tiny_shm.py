"""C26: with 1 MiB on /dev/shm memory works, and file storage says what is missing, without a signal and without a rest.

Mutants: reserve nothing before the copy (SIGBUS); leave the file behind.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IN_A_SMALL_ROOM = """
import json, os, torch
from shmsync import OutOfSharedMemory, Publisher, Subscriber

weights = {"leaf": torch.ones(2 << 20)}  # 8 MiB
said = {"free": os.statvfs("/dev/shm").f_bavail * 4096}
with Publisher(weights) as channel, Subscriber(channel.handle) as follower:
    channel.publish()
    said["memfd"] = bool((follower.lease().weights["leaf"] == 1).all())
small = {"leaf": torch.ones(1000)}
with Publisher(small, storage="file") as channel, Subscriber(channel.handle) as follower:
    channel.publish()
    said["small"] = bool((follower.lease().weights["leaf"] == 1).all())
for number, subscribers in enumerate((256, 4096)):  # room for the channel and not for a slot; not even for the channel
    try:
        with Publisher(weights, storage="file", max_subscribers=subscribers) as channel:
            try:
                channel.publish()
            finally:
                said["version"] = channel.version
    except OutOfSharedMemory as error:
        said[f"error{number}"] = str(error)
room = os.statvfs("/")  # somebody else takes what was free, just then
os.statvfs = lambda _: room
for number, subscribers in enumerate((256, 4096), 2):
    try:
        with Publisher(weights, storage="file", max_subscribers=subscribers) as channel:
            channel.publish()
    except OutOfSharedMemory as error:
        said[f"error{number}"] = str(error)
said["left"] = os.listdir("/dev/shm")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict:
    mount = "mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm"
    command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, IN_A_SMALL_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_does_not_need_it(said) -> None:
    assert said["free"] < 2 << 20
    assert said["memfd"]


def test_what_fits_works(said) -> None:
    assert said["small"]


def test_what_does_not_fit_is_an_error_with_bytes_and_path(said) -> None:
    assert f"needs {8 << 20} bytes in /dev/shm, but " in said["error0"]
    free = int(said["error0"].partition("but ")[2].split()[0])
    assert 0 < free < 1 << 20
    assert said["version"] == 0
    assert "A new channel needs" in said["error1"]


def test_what_was_there_and_is_not_any_more_is_the_same_error(said) -> None:
    """Mutant: rely on having asked."""
    assert f"needs {8 << 20} bytes" in said["error2"]
    assert "A new channel needs" in said["error3"]


def test_nothing_is_left(said) -> None:
    assert said["left"] == []
