"""`python -m nodetrack` is the command `nodetrack`."""

from nodetrack.cli.main import app

app(prog_name="nodetrack")
