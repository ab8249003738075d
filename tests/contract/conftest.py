"""The contract's assertions explain themselves as those of a test file do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("nodetrack.testing")
