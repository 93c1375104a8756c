from tests.helpers.rpc_fixtures import fresh_trainer, trainer

__all__ = ["fresh_trainer", "trainer"]
