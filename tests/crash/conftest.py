from tests.helpers.fixtures import nothing_left, peer, publisher, subscriber

__all__ = ["nothing_left", "peer", "publisher", "subscriber"]
