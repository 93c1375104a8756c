import sys
from shmsync import slots
from .explorer import Explorer
from .scopes import SCOPES
for s in SCOPES:
    if len(sys.argv)<2 or s.name in sys.argv[1:]:
        print(Explorer(s.build(slots)).run())
