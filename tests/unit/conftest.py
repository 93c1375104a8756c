from tests.helpers.fixtures import folder, nothing_left, peer, publisher, subscriber

__all__ = ["folder", "nothing_left", "peer", "publisher", "subscriber"]
