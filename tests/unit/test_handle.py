"""The handle: an address that survives text and pickle, and says so when it cannot be reached.

Mutant: leave out the comparison of the pid namespace (another process's descriptor would be opened).
"""

import dataclasses
import os
import pickle

import pytest
import torch

from shmsync import ChannelError, ChannelUnreachable, Handle, PublisherGone, Subscriber


@pytest.fixture
def handle(publisher):
    channel = publisher({"leaf": torch.ones(1)})
    channel.publish()
    return channel.handle


def test_it_survives_text_and_pickle(handle) -> None:
    assert Handle.parse(str(handle)) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert hash(Handle.parse(str(handle))) == hash(handle)
    assert not set(str(handle)) & set(" \n\t'\"$\\"), "one word, also for a shell"


def test_it_is_fixed(handle) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.pid = 1


def test_a_host_name_of_any_shape_survives(handle) -> None:
    for host in ("a-b.example", "fe80__1", "host_1", ""):
        named = dataclasses.replace(handle, host=host)
        assert Handle.parse(str(named)) == named


@pytest.mark.parametrize("text", ["", "shmsync1", "tcp://localhost:80", "shmsync1:x:3:00:1:b:4:h", ":::::::"])
def test_other_text_is_refused_with_the_text(text) -> None:
    with pytest.raises(ChannelError, match="Expected the text of a shmsync handle"):
        Subscriber(text)


def test_damaged_text_is_refused(handle) -> None:
    parts = str(handle).split(":")
    for number in range(len(parts) - 3):
        for damage in ("", "zz", parts[number] + "z"):
            with pytest.raises(ChannelError):
                Handle.parse(":".join([*parts[:number], damage, *parts[number + 1 :]]))
    for text in (str(handle) + ":more", str(handle).rpartition(":")[0]):
        with pytest.raises(ChannelError):
            Handle.parse(text)


def test_another_host_is_named_beside_this_one(handle) -> None:
    away = dataclasses.replace(handle, boot_id="another", host="far-away")
    with pytest.raises(ChannelUnreachable) as raised:
        Subscriber(away)
    for text in ("far-away", handle.host, "another host", str(os.getpid()), str(handle.pid)):
        assert text in str(raised.value)


def test_another_pid_namespace_is_named_beside_this_one(handle) -> None:
    away = dataclasses.replace(handle, pid_namespace="4026000000")
    with pytest.raises(ChannelUnreachable) as raised:
        Subscriber(away)
    for text in ("4026000000", handle.pid_namespace, "another pid namespace"):
        assert text in str(raised.value)


def test_a_channel_that_took_the_place_of_this_one_is_not_taken_for_it(handle) -> None:
    """The descriptor number of a restarted trainer's channel may be the same."""
    with pytest.raises(PublisherGone, match=f"pid {handle.pid}"):
        Subscriber(dataclasses.replace(handle, nonce="00" * 16))


def test_epochs_order_channels_over_restarts(publisher) -> None:
    first, second = publisher().handle, publisher().handle
    assert first.epoch < second.epoch
