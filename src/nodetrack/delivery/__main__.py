"""The program of the delivery process. `process` runs this file by its path, without the folder of any script
or the working folder in front: what is imported as nodetrack is what the trainer imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    import nodetrack  # noqa: F401 - from here on its modules are looked for in its own folder

    sys.path.remove(root)
    from nodetrack.delivery.child import main

    main()
