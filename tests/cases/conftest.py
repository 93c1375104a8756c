from tests.helpers.fixtures import folder, nothing_left, peer, publisher, subscriber
from tests.helpers.rpc_fixtures import fresh_trainer, trainer

__all__ = ["folder", "fresh_trainer", "nothing_left", "peer", "publisher", "subscriber", "trainer"]
