"""Speed and memory against the rivals: ``python -m bench run [--quick]``, ``python -m bench compare A B``."""
