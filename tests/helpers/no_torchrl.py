"""Importing this hides torchrl from the process and from those that it forks."""

import sys

sys.modules["torchrl"] = None
