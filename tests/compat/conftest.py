"""What is tested of a torchrl release is what is promised with it: the modules below are left out where there is
nothing to test, and test_offers.py fails if a release lacks what it should have."""

from tests.helpers.releases import OFFERED, offered

# Made-up releases hide the installed one: the newest will do.
_ONCE = {"test_refused.py"} if offered() not in (set(), OFFERED["0.14"]) else set()
_NEEDS = {"test_offers.py": "updater", "test_programs.py": "updater", "test_updater.py": "updater"}
collect_ignore = [name for name, need in {**_NEEDS, "test_schemes.py": "schemes"}.items() if need not in offered()]
collect_ignore += _ONCE

if "updater" in offered():
    from tests.helpers.collector_fixtures import start, start_for_module

    __all__ = ["start", "start_for_module"]
