"""Where a converted model comes from, as far as its model card can say it."""

import os

import yaml
from huggingface_hub import hf_hub_download, metadata_load, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers.utils import logging


logger = logging.get_logger(__name__)


def backbone_origin(source: str | os.PathLike | None) -> dict[str, str]:
    """Fields of [`EngramConfig`] that name the backbone: its Hub id, if it came from there, and the licence that its
    model card states. Neither is guessed.

    Args:
        source: where the backbone was loaded from; None or "" if that is not known.
    """
    if not source:
        return {}
    origin = {"backbone_name": str(source)} if _is_from_hub(source) else {}
    try:
        card = hf_hub_download(str(source), "README.md") if origin else os.path.join(source, "README.md")
        licence = (metadata_load(card) or {}).get("license")
    # EntryNotFoundError: no card. OSError: no file, no network, no permission. The rest: metadata that are none.
    except (EntryNotFoundError, OSError, ValueError, yaml.YAMLError) as error:
        logger.info(f"The licence of {source} is not known: {error}")
        return origin
    return origin | ({"backbone_license": licence} if isinstance(licence, str) else {})


def _is_from_hub(source: str | os.PathLike) -> bool:
    """Whether a model was loaded from the Hub: its config is in the cache then. A folder that is gone was not."""
    if os.path.exists(source):
        return False
    try:
        return isinstance(try_to_load_from_cache(str(source), "config.json"), str)
    except HFValidationError:
        return False
