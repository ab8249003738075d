"""The program of the delivery process. `process` runs this file by its path, without the folder of any script
or the working folder in front: what is imported as nodetrack is what the trainer imported.

Where else the trainer imports from is the first line of standard input. It comes behind what Python itself
has: a `json.py` or `sitecustomize.py` beside the script is not what the standard library means.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"\n", b""):  # without a byte of the next line
        line += byte
    sys.path += [entry for entry in json.loads(line) if entry not in sys.path]
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    import nodetrack  # noqa: F401 - from here on its modules are looked for in its own folder

    sys.path.remove(root)
    from nodetrack.delivery.child import main

    main()
