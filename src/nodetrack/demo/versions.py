"""The versions of the demo's training step, oldest first, known without torch."""

VERSIONS = ("0.1.0", "0.1.1")
