"""`BackendContract`: what delivery relies on, as tests that any backend can be put through.

In the tests of the package that brings the backend, with its kind registered as an entry point:

```python
from nodetrack.testing import BackendContract, Point

class TestMine(BackendContract):
    keeps = frozenset({"version", "attempt"})       # what of a point can be read back; see `Point`
    kept_types = frozenset({"text"})                # typed values that the service can show
    repeats_are_harmless = False                    # a batch that is sent twice is there twice

    def config(self, tmp_path):                     # the same place whenever it is called with the same path
        return MineConfig(url=..., project=...)

    def read_back(self, run, tmp_path):             # with the service's own reader, not with the backend
        for metric, step, value, version, attempt in ...:
            yield Point(metric, step, value, version, attempt)
```

Every flag says what the service cannot do; the defaults ask for everything. Each test uses a run id of its
own, so one server can be shared by all. A failing assertion of yours or ours is explained by pytest once
`pytest.register_assert_rewrite("nodetrack.testing")` stands in your `conftest.py`. This module itself does
without pytest.
"""

from __future__ import annotations

from nodetrack.testing.batches import Attempt
from nodetrack.testing.contract import BackendContract
from nodetrack.testing.subject import Point

__all__ = ["Attempt", "BackendContract", "Point"]
