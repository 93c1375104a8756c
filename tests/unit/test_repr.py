"""How the objects that a user holds show themselves, also when they have ended.

Mutants: no `__repr__`; ask a closed one what it no longer has.
"""

import os

from torch import nn

from shmsync import Publisher, Subscriber


def test_a_publisher_says_where_it_stands() -> None:
    pid = os.getpid()
    with Publisher(nn.Linear(2, 1), name="policy") as publisher:
        assert repr(publisher) == f"Publisher(name='policy', pid={pid}, version=0, closed=False)"
        publisher.publish()
        assert repr(publisher) == f"Publisher(name='policy', pid={pid}, version=1, closed=False)"
    assert repr(publisher) == f"Publisher(name='policy', pid={pid}, version=1, closed=True)"


def test_a_subscriber_and_its_binding_say_whom_they_follow() -> None:
    with Publisher(nn.Linear(2, 1)) as publisher:
        publisher.publish()
        subscriber = Subscriber(publisher.handle, worker_id=3, name="worker")
        followed = f"name='worker', worker_id=3, publisher_pid={os.getpid()}"
        assert repr(subscriber) == f"Subscriber({followed}, version=0, closed=False)"
        module = nn.Linear(2, 1)
        binding = subscriber.bind(module)
        assert repr(binding) == "Binding(modules=[Linear], mode='map', version=1, bound=True)"
        assert repr(subscriber) == f"Subscriber({followed}, version=1, closed=False)"
        subscriber.close()
    assert repr(subscriber) == f"Subscriber({followed}, version=1, closed=True)"
    assert repr(binding).endswith("bound=False)")
