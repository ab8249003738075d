"""`load_hparams`: the layers of a folder as one namespace."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nodetrack.hparams.defaults import Hparams
from nodetrack.hparams.explain import explain_hparams
from nodetrack.hparams.namespace import Namespace, create_namespace

if TYPE_CHECKING:
    from pydantic import BaseModel

_logger = logging.getLogger("nodetrack")


def load_hparams(
    hparams_dir: str | os.PathLike[str] = ".",
    use_local_run_hparams: bool = False,
    overrides: Iterable[str] = (),
    strict: bool = False,
    *,
    defaults: type[BaseModel] = Hparams,
) -> Namespace:
    """Merge the layers, lowest first, and give them as one `Namespace`:

    built-in defaults, `hparams.json`, `<model_size>.json` when `model_size` is set and the file exists,
    `hparams-local-run.json` only with `use_local_run_hparams`, `NODETRACK_HPARAMS__group__key` in the
    environment, and `overrides` such as `"learning_rate=1e-3"`.

    Unknown and repeated keys and empty or missing files are logged as warnings; with `strict` all of them
    are raised together. `defaults` is the model that declares the keys, for projects that subclass
    `Hparams`. Raises `HparamsError` for whatever cannot be read or has the wrong type, naming file, line and
    key. The merge rules are in `nodetrack.hparams.merge` and docs/hparams.md.
    """
    explained = explain_hparams(hparams_dir, use_local_run_hparams, overrides, strict, defaults=defaults)
    for message in explained.messages:
        _logger.warning(message)
    return create_namespace(explained.values)
