"""C03: a partial push writes the adapter and leaves the base alone.

Mutants: complete a partial push from the slot's old content instead of the newest version; count the bytes of all
leaves.
"""

import pytest
import torch
from torch import nn

from shmsync import LayoutMismatch
from tests.helpers import workers
from tests.helpers.models import bits, snapshot

BASE, ADAPTER = (300, 300), (4, 300)
ADAPTER_NBYTES = 2 * 4 * 300 * 4


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(BASE), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(ADAPTER))
        self.lora_B = nn.Parameter(torch.randn(ADAPTER))

    def forward(self) -> torch.Tensor:
        return self.lora_A.sum()


def adapter(module: LoRA) -> dict[str, torch.Tensor]:
    return {"lora_A": module.lora_A, "lora_B": module.lora_B}


def test_a_hundred_adapters_over_one_base(publisher, peer) -> None:
    source = LoRA()
    base = bits(source.base)
    channel = publisher(source)
    channel.publish()
    worker = peer()
    worker.call(workers.attach, str(channel.handle), LoRA)
    spent = []
    for k in range(100):
        with torch.no_grad():
            source.lora_A.fill_(k)
            source.lora_B.fill_(-k)
        made = channel.publish(adapter(source), partial=True)
        spent.append((made.leaves, made.nbytes))
        version, got = worker.call(workers.refreshed)
        assert version == made.version == 2 + k
        assert got == {"base": base, "lora_A": bits(source.lora_A), "lora_B": bits(source.lora_B)}
    assert set(spent[5:]) == {(2, ADAPTER_NBYTES)}, "once all slots hold the base, only the adapter is copied"


def test_the_base_is_frozen_on_both_sides(publisher, subscriber) -> None:
    """requires_grad is nobody's business but the module's."""
    source, worker = LoRA(), LoRA()
    worker.base.requires_grad_(True)
    channel = publisher(source)
    subscriber(channel).bind(worker)
    channel.publish()
    worker()
    assert (source.base.requires_grad, worker.base.requires_grad) == (False, True)


def test_a_partial_push_leaves_steps_of_the_base_unpublished(publisher, subscriber) -> None:
    source = LoRA()
    channel = publisher(source)
    channel.publish()
    published = bits(source.base)
    with torch.no_grad():
        source.base.zero_()
    channel.publish(adapter(source), partial=True)
    with subscriber(channel).lease() as lease:
        assert bits(lease.weights["base"]) == published


@pytest.mark.parametrize("nothing", [{}, {"lora_C": torch.ones(ADAPTER)}], ids=["no key", "another key"])
def test_a_partial_push_that_matches_no_key_is_an_error(publisher, subscriber, nothing) -> None:
    channel = publisher(LoRA())
    channel.publish()
    with pytest.raises(LayoutMismatch, match="key"):
        channel.publish(nothing, partial=True)
    assert channel.version == subscriber(channel).seen == 1


def test_a_partial_push_before_the_first_full_one_is_an_error(publisher) -> None:
    source = LoRA()
    channel = publisher(source)
    with pytest.raises(LayoutMismatch, match="nothing is published"):
        channel.publish(adapter(source), partial=True)
    assert channel.version == 0


def test_a_partial_push_completes_the_newest_version_whomever_it_went_to(publisher, subscriber) -> None:
    source = LoRA()
    channel = publisher(source)
    channel.publish()
    with torch.no_grad():
        source.base.fill_(5)
    channel.publish(worker_ids=1)
    channel.publish(adapter(source), partial=True, worker_ids=0)
    with subscriber(channel, worker_id=0).lease() as lease:
        assert snapshot(lease.weights) == snapshot(source)
