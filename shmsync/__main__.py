"""`python -m shmsync`."""

import sys

from .cli import main

package = sys.modules["shmsync"]
if getattr(package, "__file__", None) is None:
    # Python takes a folder of that name, a clone of the repository, say, for the package, whose modules are found yet.
    folder = next(iter(package.__path__), "a folder")
    sys.exit(f"shmsync: {folder} hides the installed package; start it from another folder")
code = main()
if code:  # else python -i goes on
    sys.exit(code)
