from tests.helpers.collector_fixtures import start, start_for_module

__all__ = ["start", "start_for_module"]
